"""A tiny policy, rows of CER, and a stage that needs no judge of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build_qwen
from tests.training.corpora_fixture import write_corpora
from tests.training.grpo import world


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Qwen2.5-VL with two layers; nobody may write into it."""
    return build_qwen(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder of faces."""
    return write_corpora(tmp_path_factory.mktemp("faces")) / "faces"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge, encoder and reward go by words and letters; see `world`."""
    world.install(monkeypatch.setattr)


@pytest.fixture
def config(policy: Path, faces: Path, tmp_path: Path) -> Callable[..., Any]:
    """Makes the config of a run of a few steps of two groups of two."""
    from training.data.faces import read_faces

    face = f"faces/{read_faces(faces)[0].file}"
    rows = tmp_path / "train.jsonl"
    if not rows.exists():
        world.write_mixed_rows(rows, 8, face)
        world.write_rows(tmp_path / "valid.jsonl", 4, "valid", source_id="v")

    def made(**changes: Any) -> Any:
        return world.small_config(policy, faces, tmp_path, **changes)

    return made


@pytest.fixture
def trainer(config: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Makes a trainer that is ready to begin."""
    from training.common.interrupts import StopRequest
    from training.common.run_directory import RunDirectory
    from training.grpo import train

    def built(**changes: Any) -> Any:
        settings = config(**changes)
        directory = RunDirectory.open(tmp_path / "made", settings)
        ready = train.Preparation.of(settings)
        return train.build_trainer(settings, ready, directory, StopRequest())

    return built
