"""Two processes over gloo learn what one learns, one writes, and if one breaks both end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

LAUNCHED = Path(__file__).with_name("launched.py")


def start(path: Path, count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run(
        [
            *(sys.executable, *(launcher if count > 1 else [])),
            *(str(LAUNCHED), str(path), *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )


@pytest.fixture
def config_file(config: Any, tmp_path: Path) -> Path:
    made = config()
    path = tmp_path / "grpo.toml"
    path.write_text(
        f'prompts = ["{tmp_path / "train.jsonl"}"]\nbase = "{made.base}"\n'
        f'faces = "{made.faces}"\noutput = "{tmp_path / "set"}"\n[judge]\nsource = "words"\n'
        "[training]\nmax_steps = 2\nlr = 1e-5\nmax_new_tokens = 12\nsave_steps = 1\n"
        'precision = "fp32"\nfreeze_vision = false\naccumulation = 1\nrollouts_kept = 9\n',
        encoding="utf-8",
    )
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs, each of which has to load the libraries once or twice
@pytest.mark.parametrize("group_size", [2, 4], ids=["groups whole", "a group spread"])
def test_two_processes_learn_what_one_learns(config_file, policy, tmp_path, group_size):
    runs = {}
    for count in (1, 2):
        run = tmp_path / str(count)
        done = start(
            config_file,
            count,
            *(f"output={run}", f"training.batch_size={4 // count}"),
            f"training.group_size={group_size}",
        )
        assert done.returncode == 0, done.stderr[-4000:]
        runs[count] = run

    one, two = (
        [row for row in rows_of(runs[n] / "metrics.jsonl") if "loss" in row] for n in (1, 2)
    )
    names = [name for name in one[0] if name.startswith(("reward", "redundancy", "text", "groups"))]
    assert len(names) > 12
    for alone, together in zip(one, two, strict=True):
        assert [together[n] for n in names] == pytest.approx([alone[n] for n in names], rel=1e-5)
        for name in ("loss", "grad_norm", "entropy"):
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6)
    # the first process keeps its own half: the same completions, the same advantages
    alone, together = (rows_of(runs[n] / "rollouts.jsonl") for n in (1, 2))
    halves = [row for step in (0, 4) for row in alone[step : step + 2]]
    assert [row["text"] for row in together] == [row["text"] for row in halves]
    assert [row["advantage"] for row in together] == pytest.approx(
        [row["advantage"] for row in halves]
    )
    assert any(row["advantage"] for row in alone)
    begun, *weights = (
        torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder).items())])
        for folder in (
            policy / "model.safetensors",
            *(runs[n] / "model" / "model.safetensors" for n in (1, 2)),
        )
    )
    # AdamW takes steps of one size: where a gradient is rounding alone, its sign is chance
    apart = (weights[0] - weights[1]).abs()
    moved = (weights[0] - begun).abs()
    assert moved.max() > 1e-5
    assert (apart > 1e-6).float().mean() < 0.01
    log = (runs[2] / "log.txt").read_text(encoding="utf-8")
    assert log.count("in 2 processes") == 1
    assert len(two) == len(rows_of(runs[2] / "metrics.jsonl")) - 1  # and the line at the end


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_process_breaks_all_end_within_a_minute(config_file, tmp_path, rank):
    told = tmp_path / "broke"

    done = start(
        config_file,
        2,
        *("--fail-at", "2", str(rank), str(told)),
        *(f"output={tmp_path / 'run'}", "training.batch_size=2", "training.group_size=2"),
    )

    assert done.returncode != 0
    assert time.time() - float(told.read_text(encoding="utf-8")) < 60
    assert "this process broke" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-1" / "trainer_state.json").is_file()
