"""The paper's whole route, with an endpoint that fails and a run that is killed now and then."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from compeer_core.backends.openai.policy import KEY_VARIABLES
from compeer_core.cer import SPLITS, CerRecord, Variant
from tests.training.cer.endpoint import HALF_BODY, RESET, Body, Endpoint, Fault, refused
from tests.training.cer.whole_route import annotate, stumbling, write_full_corpora
from training.__main__ import main
from training.cer.steps.annotation import Need
from training.data.records import read_records

SECRET = "sk-nobody-may-ever-read-this"
GENERATORS = ("qwen-72b", "gpt-4o", "qwen-vl")


@pytest.fixture(scope="module")
def corpora(small_corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_corpora(small_corpora, tmp_path_factory.mktemp("full") / "corpora")


def often_failing(number: int, body: Body) -> Fault | None:
    """One request in five fails; a retry of it most likely succeeds."""
    faults = {2: refused(429, Retry_After="0"), 7: refused(500), 12: RESET, 17: HALF_BODY}
    return faults.get(number % 20)


def command(repository: Path, endpoint: Endpoint, corpora: Path, output: Path) -> list[str]:
    changes = [
        f"data_dir={corpora}",
        f"output={output}",
        "leaks.shared_words=1000",  # dialogues of the fixture are alike
        "cases.rounds_per_dialogue=1",
        "personality.clusters.encoder=tfidf",
        "personality.clusters.k_max=4",
        *(
            f"generators.{name}.{key}={value}"
            for name in GENERATORS
            for key, value in (
                ("source", f"openai:{endpoint.url}#{name}"),
                ("backoff_seconds", 0.01),
                ("timeout_seconds", 10),
                ("requests_per_minute", 60000),
            )
        ),
    ]
    config = repository / "training" / "configs" / "cer_full.toml"
    return ["cer", str(config), *(word for change in changes for word in ("--set", change))]


def results(output: Path) -> dict[str, bytes]:
    """Read every file of a run that must not depend on interruptions."""
    skipped = {"config.json", "log.txt", ".lock"}
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in skipped and "answers" not in path.parts
    }


def annotated_by_people(output: Path, start: list[str]) -> None:
    """Follow the route as users would: start, annotate, start, decide, start."""
    assert main(start) == 0
    desk = output / "annotation"
    annotate(desk / "items.jsonl", "ann", desk / "answers" / "ann.csv")
    annotate(desk / "items.jsonl", "bo", desk / "answers" / "bo.jsonl")
    assert main(start) == 0
    needed = {need.item_id for need in read_records(desk / "needs.jsonl", Need)}
    assert needed
    annotate(desk / "items.jsonl", "cy", desk / "answers" / "cy.jsonl", needed)
    assert main(start) == 0


def test_the_whole_route_with_annotators_and_a_failing_endpoint(
    repository, corpora, endpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(KEY_VARIABLES[0], SECRET)
    endpoint.answer = stumbling
    endpoint.fault = often_failing
    output = tmp_path / "run"
    start = command(repository, endpoint, corpora, output)

    annotated_by_people(output, start)

    output_text = capsys.readouterr().out
    assert "holds" in output_text and "items for annotators" in output_text
    assert "still need another annotator" in output_text
    rows = {name: list(read_records(output / f"{name}.jsonl", CerRecord)) for name in SPLITS}
    assert all(rows.values())
    assert {row.case.corpus for row in rows["train"]} >= {"esconv", "soulchat", "avamerg"}
    assert {row.case.language for row in rows["train"]} == {"en", "zh"}
    authors = {each.author for row in rows["train"] for each in row.candidates}
    assert authors == {"corpus", "gpt-4o", "qwen-vl"}
    assert {row.case.source_id for row in rows["train"]}.isdisjoint(
        row.case.source_id for row in rows["test"]
    )
    variants = {
        variant: list(read_records(output / "variants" / f"{variant}.jsonl", CerRecord))
        for variant in (Variant.DUPLICATE, Variant.REWRITE, Variant.PERSONA)
    }
    assert len({tuple(row.rewritten_from for row in variant) for variant in variants.values()}) == 1
    assert variants[Variant.PERSONA]
    report = json.loads((output / "reports" / "filter.json").read_text(encoding="utf-8"))
    assert report["dropped"]["esconv"]["model: artificial"] == 1
    assert (output / "README.md").is_file()
    for path in output.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path

    # the same command again has nothing to do, and sends nothing
    sent = endpoint.requests
    before = {path: path.stat() for path in output.rglob("*.jsonl")}
    assert main(start) == 0
    assert endpoint.requests == sent
    assert {path: path.stat().st_mtime_ns for path in before} == {
        path: stat.st_mtime_ns for path, stat in before.items()
    }
    assert {path: path.stat().st_ino for path in before} == {
        path: stat.st_ino for path, stat in before.items()
    }


def test_faults_change_no_row(repository, corpora, endpoint, tmp_path):
    runs = []
    for name, fault in (("calm", lambda number, body: None), ("rough", often_failing)):
        endpoint.answer, endpoint.fault = stumbling, fault
        output = tmp_path / name
        assert main(command(repository, endpoint, corpora, output)) == 0
        runs.append(results(output))

    assert runs[0] == runs[1]


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_run_killed_anywhere_ends_the_same(repository, corpora, endpoint, tmp_path, kills):
    endpoint.answer, endpoint.fault, endpoint.latency = stumbling, often_failing, 0.01
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start = command(repository, endpoint, corpora, whole)
    again = command(repository, endpoint, corpora, killed)
    chance = random.Random(kills)
    for _ in range(2):  # up to the annotators, and after them
        begun = time.monotonic()
        assert main(start) == 0
        seconds = 1.0 + time.monotonic() - begun  # a second for imports
        for _ in range(kills):
            after = chance.uniform(1.0, seconds)
            assert finished(repository, again, kill_after=after) in {0, -signal.SIGKILL}
        assert main(again) == 0
        for output in (whole, killed):
            for name in ("ann", "bo", "cy"):
                path = output / "annotation" / "answers" / f"{name}.jsonl"
                annotate(output / "annotation" / "items.jsonl", name, path)

    assert results(killed) == results(whole)


def finished(repository: Path, start: Sequence[str], *, kill_after: float) -> int:
    """Run a command in a process that is killed after a time; return its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "training", *start],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return process.returncode
    assert "Traceback" not in errors, errors
    return process.returncode


def test_a_spent_budget_stops_the_run_and_the_next_start_resumes(
    repository, corpora, endpoint, tmp_path, capsys
):
    start = command(repository, endpoint, corpora, tmp_path / "run")

    codes = []
    for _ in range(20):
        before = endpoint.requests
        codes.append(main([*start, "--max-requests", "30"]))
        assert endpoint.requests - before <= 30
        if codes[-1] == 0:
            break

    assert codes[:-1] == [130] * (len(codes) - 1)
    assert len(codes) > 2
    assert codes[-1] == 0
    assert "budget of 30 requests is spent" in capsys.readouterr().err
    keys = [json.dumps(body, sort_keys=True) for body in endpoint.bodies]
    assert len(keys) == len(set(keys))  # no request was sent twice


def test_ctrl_c_keeps_the_answers_of_requests_in_flight(repository, corpora, endpoint, tmp_path):
    endpoint.latency = 0.1
    start = command(repository, endpoint, corpora, tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "training", *start],
        cwd=repository,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while endpoint.requests < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    sent = endpoint.requests
    endpoint.latency = 0.0
    assert main(start) == 0
    keys = [json.dumps(body, sort_keys=True) for body in endpoint.bodies]
    assert sent >= 10
    assert len(keys) == len(set(keys))


def test_a_wrong_key_ends_the_run_at_once_with_one_sentence(
    repository, corpora, endpoint, tmp_path, capsys
):
    endpoint.fault = lambda number, body: refused(401)

    code = main(command(repository, endpoint, corpora, tmp_path / "run"))

    assert code in {1, 2}
    assert "rejects the key" in capsys.readouterr().err
    assert endpoint.requests <= 64


def test_a_dry_run_estimates_and_sends_nothing(repository, corpora, endpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    output = tmp_path / "run"

    assert main([*command(repository, endpoint, corpora, output), "--dry-run"]) == 0

    assert endpoint.requests == 0
    assert not output.exists()
    log = "\n".join(record.message for record in caplog.records)
    assert "filter, qwen-72b: " in log
    assert "turns, gpt-4o: " in log
    assert "together at most " in log
