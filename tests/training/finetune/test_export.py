"""Exports have the weights of their source in bf16."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from compeer_core.backends.transformers_.packed_weights import PACKED, load_model, save_packed
from compeer_core.errors import ConfigError
from tests.checkpoints import build_qwen
from training.finetune.export import Config, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen(tmp_path_factory.mktemp("source") / "model")


def test_exports_a_checkpoint_as_one_bf16_file(source, tmp_path):
    run(Config(source=source, output=tmp_path))

    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path))
    assert set(before) == set(after)
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in before)


def test_a_sharded_checkpoint_becomes_one_file(source, tmp_path):
    whole, shards, output = (tmp_path / name for name in ("whole", "shards", "output"))
    run(Config(source=source, output=whole))
    model = AutoModelForImageTextToText.from_pretrained(source)
    model.save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 1

    run(Config(source=shards, output=output))

    exported, expected = (load_file(each / "model.safetensors") for each in (output, whole))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not (output / "model.safetensors.index.json").exists()


def test_rejects_a_folder_without_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor adapter_model"):
        run(Config(source=tmp_path, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_copies_a_packed_checkpoint_and_keeps_the_model_card(source, tmp_path):
    packed, output = tmp_path / "packed", tmp_path / "output"
    shutil.copytree(source, packed)
    (packed / "model.safetensors").unlink()
    save_packed(packed, load_file(source / "model.safetensors"))
    output.mkdir()
    for name in ("README.md", "old.json"):
        (output / name).write_text("{}", encoding="utf-8")
    run(Config(source=packed, output=output), dry_run=True)
    assert (output / "old.json").is_file()
    run(Config(source=packed, output=output))

    assert (output / PACKED).read_bytes() == (packed / PACKED).read_bytes()
    assert (output / "README.md").is_file()
    assert not (output / "old.json").exists()
    ours, theirs = (load_model(folder, torch.float32) for folder in (output, source))
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
