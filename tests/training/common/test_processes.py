"""Training in several processes: the same rows per step and losses, one run directory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compeer_core.row_files import write_rows
from tests.training.reward_model.test_train import record
from tests.training.runs import run_in_processes
from training.common import processes
from training.common.run_directory import RunDirectory
from training.sft.cer import Config as SftConfig


def train(
    repository: Path, folder: Path, name: str, count: int, *changes: str
) -> dict[str, torch.Tensor]:
    """Run the reward stage in new processes; return the resulting weights."""
    run_in_processes(
        repository,
        count,
        *("reward", str(folder / "reward.toml"), "--set", f"output={folder / name}"),
        *(part for change in changes for part in ("--set", change)),
    )
    (weights,) = (folder / name).glob("*/*.safetensors")
    return load_file(weights)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("held", ["whole", "adapter"])
def test_two_processes_give_the_result_of_one(
    repository: Path, small_corpora: Path, tiny_base: Path, tmp_path: Path, held: str
) -> None:
    from training.data.faces import read_faces

    faces = small_corpora / "faces"
    face = f"faces/{read_faces(faces)[0].file}"
    # in some steps only one of the processes has an image
    rows = [record(number, images=(face,) if number % 3 == 0 else ()) for number in range(10)]
    write_rows(tmp_path / "train.jsonl", rows)
    lora = "\n[training.lora]\nrank = 4\nalpha = 8\n" if held == "adapter" else ""
    (tmp_path / "reward.toml").write_text(
        f'records = ["{tmp_path / "train.jsonl"}"]\nfaces = "{faces}"\nbase = "{tiny_base}"\n'
        'output = "set"\n[training]\nmax_steps = 4\nlr = 1e-2\nwarmup_share = 0.0\nlog_steps = 1\n'
        f'precision = "fp32"\n{lora}',
        encoding="utf-8",
    )

    one = train(repository, tmp_path, "one", 1, "training.batch_size=4")
    two = train(repository, tmp_path, "two", 2, "training.batch_size=2")

    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert len(losses(tmp_path / "two")) == 4
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)
    log = (tmp_path / "two" / "log.txt").read_text(encoding="utf-8")
    assert log.count("4 rows per step: batch 2 x accumulation 1 x processes 2") == 1


def test_only_rank_0_writes_the_run_directory(tmp_path, monkeypatch):
    config = SftConfig(records=[tmp_path], base=tmp_path, output=tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    directory = RunDirectory.open(tmp_path / "run", config)
    directory.metrics(step=1, loss=0.5)
    directory.log("said")
    directory.rewind(0)

    assert not processes.is_first() and processes.process_count() == 2
    assert not (tmp_path / "run").exists()


def test_collectives_work_in_a_single_process():
    assert processes.is_first() and processes.process_count() == 1
    assert processes.in_any_process(True)
    assert not processes.in_any_process(False)
