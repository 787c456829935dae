"""Next-token pre-training of COMPEER-nano: `python -m training pretrain <config.toml>`.

Trains the language model only, in bf16 autocast with fp32 weights; the image tower is trained in
`training.vision.train` and in SFT. The optimisers are those of `training.finetune.optimisation`.

An interrupted run resumes from its last checkpoint with the same data order.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)

from compeer_core.errors import ConfigError
from training.data.corpus import (
    DOCUMENT_END,
    Source,
    check_files,
    mixed_documents,
    read_documents,
    utterances_of,
)
from training.data.near_duplicates import HeldOut
from training.finetune.architecture import ModelShape, build_model
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    open_run,
    run_steps,
)

_log = logging.getLogger(__name__)

Tokens = NDArray[np.uint16]

LEAKS = "left_out.json"
"""Number of training documents removed as near-duplicates of test documents."""


class Config(Schedule):
    """`[pretrain]`: data, shape, optimiser and schedule."""

    data_dir: Path
    """Folder of the corpora."""
    tokenizer: Path
    """Folder of the tokenizer stage."""
    output: Path
    """Run directory; the weights are saved to `output/model`."""
    sources: tuple[Source, ...]
    validation: tuple[Source, ...]
    """Held-out documents for the validation loss."""
    held_out: tuple[Source, ...] = ()
    """Test documents: their near-duplicates in `sources` are removed and counted
    (`training.data.near_duplicates`)."""
    shape: ModelShape = ModelShape()
    batch_size: int = 8
    """Blocks per optimiser step."""
    block_size: int = 512
    """Tokens per block."""
    validation_blocks: int = 48


def tokenise(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return the concatenated token ids of all documents, each followed by `<|endoftext|>`."""
    end = tokenizer.get_vocab()[DOCUMENT_END]
    stream: list[Tokens] = []
    for start in range(0, len(documents), 1000):
        batch = tokenizer(documents[start : start + 1000], verbose=False)["input_ids"]
        stream += [np.array([*ids, end], dtype=np.uint16) for ids in batch]
    return np.concatenate(stream)


def block_order(block_count: int, seed: int) -> Iterator[int]:
    """Yield block numbers endlessly; each epoch has its own order, derived from `seed`."""
    epoch = 0
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(block_count).tolist()
        epoch += 1


def language_loss(model: Qwen2_5_VLForConditionalGeneration, block: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token of blocks, shape (batch, block + 1)."""
    hidden = model.model.language_model(input_ids=block[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    return functional.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())


def _block_count(name: str, tokens: Tokens, config: Config) -> int:
    """Return the number of blocks, each with the token that follows it.

    Raises:
        ConfigError: There are too few tokens for one block.
    """
    count = len(tokens) // config.block_size - 1
    if count < 1:
        raise ConfigError(
            f"{name}: {len(tokens)} tokens, at least {2 * config.block_size} are needed "
            f"(block_size is {config.block_size})"
        )
    return count


class DecontaminationFilter:
    """Removes near-duplicates of test documents from the training documents."""

    def __init__(self, folder: Path, sources: Sequence[Source]) -> None:
        self._held_out = HeldOut()
        self.tested = self.seen = self.left_out = 0
        for source in sources:
            for number, document in enumerate(read_documents(folder, source)):
                self.tested += 1
                self._held_out.add(f"{source.path}#{number}", utterances_of(document))

    def keeps(self, document: str) -> bool:
        """Whether a document is not a near-duplicate of a test document. Updates the counts."""
        self.seen += 1
        if not self.tested:
            return True
        duplicate = self._held_out.repeated_by(utterances_of(document))
        self.left_out += duplicate is not None
        return duplicate is None


class _Batches:
    """Batches of blocks in a fixed order, starting after `skip` batches."""

    def __init__(self, tokens: Tokens, config: Config, skip: int) -> None:
        self._blocks = _block_count("sources", tokens, config)
        self._tokens = tokens
        self._config = config
        self._order = block_order(self._blocks, config.seed)
        for _ in range(skip * config.batch_size):
            next(self._order)

    def next(self) -> Tensor:
        size = self._config.block_size
        starts = [next(self._order) * size for _ in range(self._config.batch_size)]
        rows = np.stack([self._tokens[s : s + size + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(rows).to(self._config.device)


def _validation_loss(
    model: Qwen2_5_VLForConditionalGeneration, tokens: Tokens, config: Config
) -> float:
    size = config.block_size
    count = min(config.validation_blocks, _block_count("validation", tokens, config))
    losses = []
    model.eval()
    with torch.no_grad(), torch.autocast(config.device_type, dtype=torch.bfloat16):
        for i in range(count):
            row = torch.from_numpy(tokens[i * size : (i + 1) * size + 1].astype(np.int64))
            losses.append(language_loss(model, row[None].to(config.device)).item())
    model.train()
    return math.fsum(losses) / len(losses)


def _prepare_tokens(
    run_dir: Path,
    name: str,
    sources: tuple[Source, ...],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
) -> Tokens:
    """Return the tokenised sources, which are cached in the run directory."""
    path = run_dir / f"{name}.uint16.npy"
    if not path.exists():
        duplicates = DecontaminationFilter(
            config.data_dir, config.held_out if name == "train" else ()
        )
        documents = mixed_documents(config.data_dir, sources, config.seed, duplicates.keeps)
        tokens = tokenise(documents, tokenizer)
        if duplicates.tested:
            counts = {key: getattr(duplicates, key) for key in ("tested", "seen", "left_out")}
            (run_dir / LEAKS).write_text(json.dumps(counts) + "\n", encoding="utf-8")
        temporary = path.with_suffix(".new.npy")
        np.save(temporary, tokens)
        temporary.replace(path)
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def _clear_cache(run_dir: Path) -> None:
    """Remove the caches of an earlier run without metrics, whose config may have differed."""
    for name in ("train.uint16.npy", "validation.uint16.npy", LEAKS):
        (run_dir / name).unlink(missing_ok=True)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Pre-train for `config.steps` steps, or resume a run; Ctrl-C saves first."""
    if not (config.tokenizer / "tokenizer.json").is_file():
        raise ConfigError(
            f"{config.tokenizer}: contains no tokenizer (the tokenizer stage writes it)"
        )
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    model = build_model(config.shape, tokenizer, config.seed)
    nn.Module.to(model, config.device)
    parameters = sum(p.numel() for p in model.parameters())
    if dry_run:
        check_files(config.data_dir, (*config.sources, *config.validation, *config.held_out))
        _log.info("%d parameters", parameters)
        return
    directory = open_run(config.output, config, resume)
    if resume is None:
        _clear_cache(directory.path)
    tokens = _prepare_tokens(directory.path, "train", config.sources, config, tokenizer)
    held_out = _prepare_tokens(directory.path, "validation", config.validation, config, tokenizer)
    _block_count("validation", held_out, config)  # fail now rather than at the first evaluation
    directory.log("%d parameters, %d tokens per epoch", parameters, len(tokens))
    if (directory.path / LEAKS).exists():
        counts = json.loads((directory.path / LEAKS).read_text(encoding="utf-8"))
        directory.log(
            "%d of %d documents removed as near-duplicates of %d test documents",
            *(counts[key] for key in ("left_out", "seen", "tested")),
        )
    optimisers = Optimisers.of_model(model, config)
    step = load_checkpoint(directory.path / CHECKPOINT, model, optimisers.all)
    directory.rewind(step)
    batches = _Batches(tokens, config, skip=step)
    loss_of = torch.compile(language_loss) if config.compile else language_loss

    def learn() -> tuple[float, int]:
        with torch.autocast(config.device_type, dtype=torch.bfloat16):
            loss = loss_of(model, batches.next())
        loss.backward()
        return loss.item(), config.batch_size * config.block_size

    step = run_steps(
        model,
        optimisers,
        config,
        directory,
        step,
        learn,
        lambda: _validation_loss(model, held_out, config),
    )
    model.save_pretrained(directory.path / "model")
    tokenizer.save_pretrained(directory.path / "model")
    (directory.path / "model" / "pretraining.json").write_text(
        json.dumps({"steps": step, "tokens": step * config.batch_size * config.block_size}),
        encoding="utf-8",
    )
