"""Extracting an adapter from two checkpoints: exact at full rank, the best approximation below."""

from pathlib import Path

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from compeer_core.backends.protocol import LabelScorer, Message
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import ModelPool, load_label_scorer
from tests.checkpoints import build_llava, build_qwen
from training.finetune import extract, merge
from training.finetune.extract import Config, extract_adapter, low_rank_factors

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    # raised by peft's own loading
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

TOKENS = torch.arange(40, 60)[None]
FULL = 256
"""The largest dimension of a layer of the tiny model."""


def tuned_from(base: Path, folder: Path, *, seed: int, only: str = "") -> Path:
    """Write a copy of `base` with perturbed matrices, as full fine-tuning would produce."""
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and only in name:
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    for file in base.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    base = build_qwen(tmp_path / "base")
    tuned = tuned_from(base, tmp_path / "tuned", seed=1)
    return Config(base=base, tuned=tuned, output=tmp_path / "adapter", rank=FULL)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_low_rank_factors_by_hand():
    matrix = torch.tensor([[4.0, 0.0], [0.0, 9.0], [0.0, 0.0]])

    left, right = low_rank_factors(matrix, 1)

    assert torch.allclose(left @ right, torch.tensor([[0.0, 0.0], [0.0, 9.0], [0.0, 0.0]]))
    assert left.abs().max() == pytest.approx(3) == right.abs().max()
    wide = low_rank_factors(matrix, 5)
    assert [part.shape for part in wide] == [(3, 5), (5, 2)]
    assert torch.allclose(wide[0] @ wide[1], matrix, atol=1e-6)


@given(
    arrays.arrays(np.float64, (5, 4), elements=st.floats(-9, 9)),
    arrays.arrays(np.float64, (5, 2), elements=st.floats(-9, 9)),
    arrays.arrays(np.float64, (2, 4), elements=st.floats(-9, 9)),
)
def test_low_rank_factors_are_the_best_approximation(matrix, other_left, other_right):
    matrix = torch.from_numpy(matrix)
    left, right = low_rank_factors(matrix, 2)

    ours = (matrix - left @ right).norm()
    other = (matrix - torch.from_numpy(other_left @ other_right)).norm()
    assert ours <= other + 1e-9


def test_full_rank_adapter_reproduces_the_tuned_model(config):
    extract.run(config)

    base = AutoModelForImageTextToText.from_pretrained(config.base, dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, config.output)(input_ids=TOKENS).logits
    wanted = logits(config.tuned)
    assert torch.allclose(found, wanted, atol=2e-3)
    assert not torch.allclose(logits(config.base), wanted, atol=0.5)


def test_merge_rejects_an_adapter_on_tied_embeddings(config, tmp_path):
    extract.run(config)

    merging = merge.Config(base=config.base, adapter=config.output, output=tmp_path / "merged")
    with pytest.raises(ConfigError, match="merging would change the shared matrix twice"):
        merge.run(merging)
    assert not merging.output.exists()


def test_judges_on_embedding_adapters_match_the_tuned_models(config, tmp_path):
    other = tuned_from(config.base, tmp_path / "other", seed=2)
    extract.run(config)
    extract.run(config.model_copy(update={"tuned": other, "output": tmp_path / "second"}))
    pool = ModelPool()
    first, second, first_tuned, second_tuned = scorers = [
        load_label_scorer(str(source), adapter=adapter, device="cpu", pool=pool)
        for source, adapter in (
            (config.base, config.output),
            (config.base, tmp_path / "second"),
            (config.tuned, None),
            (other, None),
        )
    ]

    def probability(scorer: LabelScorer) -> float:
        session = scorer.open([Message("user", ("I feel sad.",))])
        true_probability = session.ask("Is the step right?", ("True", "False"))[0]
        session.close()
        return true_probability

    # alternate between the two adapters of one base: they must not interfere
    actual = [probability(scorer) for scorer in (first, second, first, second)]
    expected = [probability(first_tuned), probability(second_tuned)]
    for scorer in scorers:
        scorer.close()
    assert expected[0] != pytest.approx(expected[1], rel=0.3)
    assert actual == pytest.approx(expected * 2, rel=1e-2)


def test_explained_share_falls_with_the_rank(config):
    base, tuned = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        for folder in (config.base, config.tuned)
    )
    shares = [extract_adapter(base, tuned, FULL)[1]]
    for rank in (16, 4):
        again = AutoModelForImageTextToText.from_pretrained(config.base, dtype=torch.float32)
        shares.append(extract_adapter(again, tuned, rank)[1])

    assert shares[0] == pytest.approx(1, abs=1e-4)
    assert 1 > shares[1] > shares[2] > 0


def test_adapter_contains_only_layers_that_differ(tmp_path):
    base = build_llava(tmp_path / "base")
    tuned = tuned_from(base, tmp_path / "tuned", seed=1, only="lm_head")

    extract.run(Config(base=base, tuned=tuned, output=tmp_path / "adapter", rank=8))

    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(names) == 2
    assert all("lm_head" in name for name in names)


def test_rejects_invalid_input(config, tmp_path):
    def run(**changes) -> None:
        extract.run(config.model_copy(update=changes))

    with pytest.raises(CheckpointError, match="no such folder"):
        run(tuned="no/where/at-all")
    with pytest.raises(CheckpointError, match=r"another architecture .* the first is "):
        run(tuned=build_llava(tmp_path / "llava"))
    with pytest.raises(ConfigError, match="nothing to extract"):
        run(tuned=config.base)
    with pytest.raises(ConfigError, match="cannot be resumed"):
        extract.run(config, resume=tmp_path)
    extract.run(config, dry_run=True)
    assert not config.output.exists()
    run()
    with pytest.raises(ConfigError, match="folder is not empty"):
        run()
