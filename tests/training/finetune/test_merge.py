"""A merged checkpoint computes what base and adapter compute together."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.processing import load_processor
from tests.checkpoints import build_adapter, build_qwen
from training.finetune import merge
from training.finetune.merge import Config

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    base = build_qwen(tmp_path / "base")
    adapter = build_adapter(base, tmp_path / "adapter")
    return Config(base=base, adapter=adapter, output=tmp_path / "merged", weights="fp32")


def test_merged_logits_equal_those_of_base_and_adapter(config):
    tokens = torch.arange(40, 60)[None]
    base = AutoModelForImageTextToText.from_pretrained(config.base, dtype=torch.float32)
    with torch.no_grad():
        alone = base(input_ids=tokens).logits
        together = PeftModel.from_pretrained(base, config.adapter)(input_ids=tokens).logits

    merge.run(config)

    merged = AutoModelForImageTextToText.from_pretrained(config.output, dtype=torch.float32)
    with torch.no_grad():
        found = merged(input_ids=tokens).logits
    assert torch.allclose(found, together, atol=1e-4)
    assert not torch.allclose(found, alone, atol=1e-2)
    assert load_processor(config.output).tokenizer.get_vocab() == (
        load_processor(config.base).tokenizer.get_vocab()
    )
    assert [path.name for path in config.output.parent.glob("tmp*")] == []


def test_weights_are_stored_in_the_requested_precision(config):
    merge.run(config.model_copy(update={"weights": "bf16"}))

    stored = load_file(config.output / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


def test_rejects_invalid_input(config, tmp_path):
    def run(**changes) -> None:
        merge.run(config.model_copy(update=changes))

    with pytest.raises(ConfigError, match=r"contains no adapter_config\.json"):
        run(adapter=tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        run(base="no/where/at-all")
    with pytest.raises(ConfigError, match="cannot be resumed"):
        merge.run(config, resume=tmp_path)
    merge.run(config, dry_run=True)
    assert not config.output.exists()
    run()
    with pytest.raises(ConfigError, match="folder is not empty"):
        run()


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_rejects_an_adapter_of_another_base(config):
    path = config.adapter / "adapter_model.safetensors"
    weights = load_file(path)
    first, *_ = sorted(weights)
    save_file({name: weight for name, weight in weights.items() if name != first}, path)
    with pytest.raises(CheckpointError, match=r"does not fit .*1 weights differ"):
        merge.run(config)

    save_file({name: weight[:, :-1].contiguous() for name, weight in weights.items()}, path)
    with pytest.raises(CheckpointError, match=r"does not fit .*set `base` to the model"):
        merge.run(config)
    assert not config.output.exists()
