"""The decoding benchmark on a tiny model: the exact passes agree, and the table is complete."""

import json

import pytest

from compeer_core.errors import ConfigError
from tests.checkpoints import build_adapter, build_qwen
from training.benchmark import decoding
from training.benchmark.decoding import Config


def test_compares_three_passes(tmp_path, capsys):
    base = build_qwen(tmp_path / "base", max_position_embeddings=4096)
    adapter = build_adapter(base, tmp_path / "adapter", seed=1)
    config = Config(base=base, adapter=adapter, turns=2, tokens=4, likelihoods=1, output=tmp_path)

    decoding.run(config)

    metrics = {
        metric["name"]: metric
        for metric in json.loads((tmp_path / "decoding_cpu.json").read_text())["metrics"]
    }
    assert metrics["Turns equal to those of generate, fused step"]["value"] == 2
    assert all(metrics[f"Speed, {name}"]["n"] == 2 for name in decoding.PASSES)
    assert abs(metrics["Relative difference of the NLL, compressed"]["value"]) < 5
    assert "Decoding one turn at a time" in capsys.readouterr().out


def test_more_turns_than_the_file_holds_are_refused(tmp_path):
    config = Config(likelihoods=100_000, output=tmp_path)

    with pytest.raises(ConfigError, match="100000 needed"):
        decoding.run(config, dry_run=True)
