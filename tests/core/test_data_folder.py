"""Where data are kept when nobody says, and what the environment says."""

from pathlib import Path

import pytest

from compeer_core.data_folder import default_data_folder
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))


def test_the_environment_can_set_the_data_folder(monkeypatch, tmp_path):
    assert tmp_path / "home" in default_data_folder().parents

    monkeypatch.setenv("COMPEER_DATA_DIR", str(tmp_path / "named"))

    assert default_data_folder() == tmp_path / "named"
    with VoteStore():
        assert (tmp_path / "named" / "compeer.sqlite3").is_file()
    assert not (tmp_path / "home").exists()


def test_the_environment_sets_the_default_database(monkeypatch, tmp_path):
    url = f"sqlite:///{tmp_path / 'votes.sqlite3'}"
    monkeypatch.setenv("COMPEER_DATABASE_URL", url)

    assert default_url() == url
    assert default_url(tmp_path / "a folder").endswith("a folder/compeer.sqlite3")
    with VoteStore():
        assert (tmp_path / "votes.sqlite3").is_file()


@pytest.mark.parametrize("name", ["COMPEER_DATA_DIR", "COMPEER_DATABASE_URL"])
def test_an_empty_variable_is_ignored(monkeypatch, name):
    before = default_url()

    monkeypatch.setenv(name, "")

    assert default_url() == before
