"""The command line: errors are one sentence, with exit code 2."""

import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import app
from compeer_core.errors import StoreError
from compeer_core.registry import Registry
from tests.pages import write_models
from ui_components.server.listening import listen, upload_folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return write_models(tmp_path)


def run(*flags: object) -> int:
    return app.main([str(flag) for flag in flags])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--policy", "compeer-nan0"], "unknown model 'compeer-nan0'"),
        (["--policy", "hff:x"], "unknown source 'hff:'"),
        (["--policy", "openai:http://localhost:1/v1"], "name of the model is missing"),
        (["--reward", "nobody"], "unknown model 'nobody'"),
        (["--reward", "openai:http://localhost:1/v1"], "name of the model is missing"),
        (["--port", "99999"], "a port is a number from 0 to 65535, got 99999"),
        (["--port", "-1"], "a port is a number from 0 to 65535, got -1"),
    ],
)
def test_a_wrong_model_or_port_is_one_sentence_and_exit_code_2(models, capsys, flags, sentence):
    assert run("--models", models, *flags) == 2

    written = capsys.readouterr().err
    assert sentence in written
    assert "Traceback" not in written
    assert len(written.strip().splitlines()) == 1


def test_a_missing_list_or_file_is_exit_code_2(models, tmp_path, capsys):
    assert run("--models", tmp_path / "none.toml") == 2
    (tmp_path / "turns.toml").unlink()
    assert run("--models", models) == 2

    assert "turns.toml" in capsys.readouterr().err


def test_a_taken_port_is_exit_code_2_if_it_was_asked_for(models, capsys):
    with listen("127.0.0.1", 0) as taken:
        assert run("--models", models, "--port", taken.getsockname()[1]) == 2

    assert "is taken by another program" in capsys.readouterr().err


def test_a_taken_port_is_passed_over_if_none_was_asked_for():
    with listen("127.0.0.1", 0) as taken, listen("127.0.0.1", taken.getsockname()[1], 50) as bound:
        assert bound.getsockname()[1] > taken.getsockname()[1]


def test_an_answer_is_sent_at_once_and_not_held_back_for_the_next_piece():
    """With protocol 0, asyncio leaves Nagle's algorithm on: 40 ms per response."""
    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    "flags",
    [["--port", "x"], ["--quantize", "3bit"], ["--language", "fr"], ["--metrics", "x"], ["--x"]],
)
def test_a_wrong_flag_is_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*flags)

    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit):
        run("--help")

    text = capsys.readouterr().out
    for flag in (
        "host", "port", "models", "policy", "reward", "quantize", "device", "data-dir", "metrics",
    ):  # fmt: skip
        assert re.search(rf"--{flag}\b[^\n]*\n?\s+\S+", text), flag


def test_a_data_folder_that_cannot_be_written_is_exit_code_2(models, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")

    assert run("--models", models, "--data-dir", blocked) == 2
    assert "--data-dir" in capsys.readouterr().err


def test_a_database_that_takes_no_secret_is_exit_code_2(models, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise StoreError("the database of votes failed: database or disk is full")

    monkeypatch.setattr("compeer_core.votes.store.VoteStore.secret", fail)
    monkeypatch.setattr(app, "_prepare_environment", lambda _: None)  # other tests run here too

    assert run("--models", models, "--data-dir", tmp_path) == 2
    assert capsys.readouterr().err.strip().endswith("disk is full")


@pytest.mark.parametrize(("flags", "is_public"), [([], False), (["--metrics", "public"], True)])
def test_the_counters_are_public_where_the_flag_says_so(
    models, tmp_path, monkeypatch, flags, is_public
):
    class BuiltError(Exception):
        """Raised once the server is built."""

    def build(*_, public_metrics, **__):
        assert public_metrics is is_public
        raise BuiltError

    monkeypatch.setattr("ui_components.server.app.build_server", build)
    monkeypatch.setattr(app, "_prepare_environment", lambda _: None)
    with pytest.raises(BuiltError):
        run("--models", models, "--data-dir", tmp_path, "--port", 0, *flags)


def test_the_folder_for_uploads_is_private_and_gone_in_the_end(tmp_path):
    with upload_folder(tmp_path / "data") as name:
        assert Path(name).stat().st_mode & 0o077 == 0
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, [], ("127.0.0.1", None)),
        ({"SPACE_ID": "someone/compeer"}, [], ("0.0.0.0", 7860)),
        ({"GRADIO_SERVER_NAME": "::1", "GRADIO_SERVER_PORT": "80"}, [], ("::1", 80)),
        ({"SPACE_ID": "a/b", "GRADIO_SERVER_PORT": "80"}, [], ("0.0.0.0", 80)),
        ({"GRADIO_SERVER_NAME": "", "GRADIO_SERVER_PORT": ""}, [], ("127.0.0.1", None)),
        ({"GRADIO_SERVER_NAME": "::1"}, ["--host", "10.0.0.1"], ("10.0.0.1", None)),
        ({"SPACE_ID": "a/b"}, ["--port", "81"], ("0.0.0.0", 81)),
    ],
)
def test_where_to_listen_is_said_by_flags_then_the_environment_then_a_space(
    monkeypatch, environment, flags, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    read = app._flags().parse_args(flags)

    assert (read.host, read.port) == expected


def test_a_port_of_the_environment_that_is_no_number_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv("GRADIO_SERVER_PORT", "http")

    with pytest.raises(SystemExit) as stopped:
        run()

    assert stopped.value.code == 2
    assert "'http'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "flags", "lost"),
    [
        ({}, [], False),
        ({"SPACE_ID": "a/b"}, [], True),
        ({"SPACE_ID": "a/b", "COMPEER_DATABASE_URL": "postgresql://h/n"}, [], False),
        ({"SPACE_ID": "a/b", "COMPEER_DATABASE_URL": ""}, [], True),
        ({"SPACE_ID": "a/b", "COMPEER_DATA_DIR": "kept"}, [], False),
        ({"SPACE_ID": "a/b"}, ["--data-dir", "kept"], False),
        ({"SPACE_ID": "a/b"}, ["--database-url", "postgresql://h/n"], False),
    ],
)
def test_votes_are_temporary_in_a_space_unless_a_place_is_named(
    monkeypatch, environment, flags, lost
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert app._votes_are_temporary(app._flags().parse_args(flags)) is lost


def test_a_password_of_the_environment_is_not_shown_by_help(monkeypatch, capsys):
    monkeypatch.setenv("COMPEER_DATABASE_URL", "postgresql://user:hush@host/name")
    with pytest.raises(SystemExit):
        run("--help")

    assert "hush" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (None, None)),
        (["--policy", "other"], ("other", None)),
        (["--policy", "openai:http://h/v1#a/b"], ("b", None)),
        (["--reward", "none"], (None, "")),
        (["--reward", "openai:http://h/v1#a/b"], (None, "b-judge")),
        (
            ["--policy", "openai:http://h/v1#a/b", "--reward", "openai:http://h/v1#a/b"],
            ("b", "b-judge"),
        ),
    ],
)
def test_a_model_can_be_named_or_brought_along(models, flags, expected):
    registry, policy, judge = app._read_models(
        app._flags().parse_args(["--models", str(models), *flags])
    )

    assert isinstance(registry, Registry)
    assert (policy, judge) == expected
    for kind, name in (("policy", policy), ("judge", judge)):
        assert not name or registry.entry(name, kind).kind == kind


def test_the_app_prints_its_address_when_the_page_is_served(models, tmp_path):
    command = [sys.executable, "app.py", "--models", models, "--data-dir", tmp_path / "data"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.search(r"http://\S+", line)[0]
            with urllib.request.urlopen(f"{address}/healthz", timeout=30) as answer:
                assert answer.status == 200
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert b"gradio-app" in answer.read()
        finally:
            process.terminate()
        process.wait(30)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["compeer.sqlite3"]


def test_a_checkpoint_that_turns_out_broken_ends_the_app_with_exit_code_2(models, tmp_path):
    # The files are all there, so it shows only when the model is loaded.
    command = [sys.executable, "app.py", "--models", models, "--policy", "wrong"]
    ended = subprocess.run(
        [*command, "--port", "0", "--data-dir", tmp_path / "data"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 2
    assert "wrong.toml" in ended.stderr.splitlines()[-1]
