"""A run directory records what was run, and refuses to mix two runs."""

import json

import pytest

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from training.common.run_directory import RunDirectory, git_commit, versions


class Optimizer(FrozenModel):
    rate: float = 0.1


class Config(FrozenModel):
    seed: int = 7
    steps: int = 10
    optimizer: Optimizer = Optimizer()


def test_the_config_is_written_before_the_first_step(tmp_path):
    run = RunDirectory.open(tmp_path / "new" / "run", Config(steps=3))

    record = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    assert record["config"] == {"seed": 7, "steps": 3, "optimizer": {"rate": 0.1}}
    assert record["seed"] == 7
    assert record["versions"]["python"]
    assert record["command"]
    assert record["date"].endswith("+00:00")
    assert record["git_commit"] == git_commit()


def test_a_run_that_continues_by_itself_keeps_how_it_began(tmp_path):
    RunDirectory.continued(tmp_path / "run", Config(steps=3))
    first = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    RunDirectory.continued(tmp_path / "run", Config(steps=4))

    record = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert first["resumed"] == []
    assert record["config"]["steps"] == 4
    assert (record["date"], record["command"]) == (first["date"], first["command"])
    assert [each["command"] for each in record["resumed"]] == [first["command"]]


def test_metrics_are_appended_row_by_row(tmp_path):
    run = RunDirectory.open(tmp_path, Config())

    run.metrics(step=1, loss=2.5)
    run.metrics(step=2, loss=2.25, note="warm")

    rows = list(run.rows())
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] == 2.25
    assert rows[1]["note"] == "warm"


def test_nan_is_written_as_null_and_logged(tmp_path):
    run = RunDirectory.open(tmp_path, Config())

    run.metrics(step=4, loss=float("nan"), lr=0.1)

    assert next(run.rows())["loss"] is None
    assert "step 4: loss is nan" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_truncated_row_is_ignored(tmp_path):
    run = RunDirectory.open(tmp_path, Config())
    run.metrics(step=1, loss=2.5)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')

    assert [row["step"] for row in run.rows()] == [1]


def test_second_run_does_not_overwrite_the_first(tmp_path):
    RunDirectory.open(tmp_path, Config()).metrics(step=1, loss=2.5)

    with pytest.raises(ConfigError, match=r"resume it with --resume"):
        RunDirectory.open(tmp_path, Config())


def test_run_without_metrics_can_be_restarted(tmp_path):
    RunDirectory.open(tmp_path, Config(steps=1))
    RunDirectory.open(tmp_path, Config(steps=2))

    record = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert record["config"]["steps"] == 2


def test_resume_with_the_same_config_appends(tmp_path):
    RunDirectory.open(tmp_path, Config()).metrics(step=1, loss=2.5)

    run = RunDirectory.open(tmp_path, Config(), resume=True)
    run.metrics(step=2, loss=2.0)

    assert [row["step"] for row in run.rows()] == [1, 2]


def test_resume_with_another_config_names_the_keys(tmp_path):
    RunDirectory.open(tmp_path, Config())

    other = Config(seed=8, optimizer=Optimizer(rate=0.2))
    with pytest.raises(ConfigError) as failure:
        RunDirectory.open(tmp_path, other, resume=True)

    assert "optimizer.rate (was 0.1, now 0.2)" in str(failure.value)
    assert "seed (was 7, now 8)" in str(failure.value)
    assert "steps" not in str(failure.value)


def test_resume_records_allowed_changes(tmp_path):
    RunDirectory.open(tmp_path, Config(steps=10))

    RunDirectory.open(tmp_path, Config(steps=20), resume=True, may_change={"steps"})

    record = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert record["config"]["steps"] == 20
    assert len(record["resumed"]) == 1


def test_rewind_drops_later_rows(tmp_path):
    run = RunDirectory.open(tmp_path, Config())
    for step in (1, 2, 3, 4):
        run.metrics(step=step, loss=0.5 * step)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')  # power was lost here

    run.rewind(2)
    run.metrics(step=3, loss=7.0)

    assert [(row["step"], row["loss"]) for row in run.rows()] == [(1, 0.5), (2, 1.0), (3, 7.0)]


def test_rewind_without_rows(tmp_path):
    run = RunDirectory.open(tmp_path, Config())
    run.rewind(0)

    assert list(run.rows()) == []
    assert not (tmp_path / "metrics.jsonl").exists()


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"no run to resume"):
        RunDirectory.open(tmp_path / "nothing", Config(), resume=True)


def test_versions_skip_missing_libraries():
    assert set(versions(["pydantic", "no-such-library"])) == {"python", "pydantic"}
