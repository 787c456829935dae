"""A tiny sentence-transformers model for tests."""

from collections.abc import Sequence
from pathlib import Path


def build_sentence_bert(folder: Path, words: Sequence[str], width: int) -> Path:
    """Write a one-layer BERT with mean pooling and return its folder.

    Args:
        folder: Output folder.
        words: The WordPiece vocabulary, special tokens included.
        width: Hidden size and embedding dimension; even.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    base = folder / "bert"
    base.mkdir(parents=True)
    (base / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizerFast(str(base / "vocab.txt")).save_pretrained(base)
    shape = BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=width,
    )
    BertModel(shape).save_pretrained(base)
    modules = [Transformer(str(base)), Pooling(width)]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"))
    return folder / "model"
