"""The demo benchmark, on an app and models with known delays."""

import json
import textwrap
from pathlib import Path

import httpx
import pytest

from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer, ScriptedTurn
from compeer_core.errors import BackendError
from compeer_core.policy import Policy
from compeer_core.unifireward import Judge
from training.__main__ import main
from training.benchmark import measure
from training.benchmark.measure import Config
from training.benchmark.publishing import machine, summarise
from training.benchmark.server import chat, running_app, sampled_memory
from training.benchmark.timed_turns import timed_turns, tokens_per_second
from training.common.results import load

TURN = (
    "<history>An exam was failed.\nStage: Exploration</history>\n"
    "<emotion>They are sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>Listen first.\nStrategy: Question</strategy>\n"
    "<reply>What happened then?</reply>"
)

APP = """
import sys, time
import gradio as gr

def chat(message: str, history: list[dict], image: str | None, model: str, strategy: str | None,
         seed: int) -> dict:
    time.sleep(0.2)
    return {"reply": message.upper(), "seed": seed}

time.sleep(0.3)
with gr.Blocks() as demo:
    gr.api(chat, api_name="chat")
demo.launch(server_name=sys.argv[2], server_port=int(sys.argv[4]), quiet=True)
"""

PAGE = """
import http.server, sys

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>")

http.server.HTTPServer((sys.argv[2], int(sys.argv[4])), Page).serve_forever()
"""
"""A page without gradio, which takes seconds to import at each start."""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(textwrap.dedent(APP), encoding="utf-8")
    return tmp_path


def test_app_is_timed_sampled_and_terminated(app):
    with (
        running_app(["app.py"], app) as server,
        sampled_memory(server.process.pid) as memory,
    ):
        seconds = chat(server.url, "hello", seed=3)

    assert server.seconds_until_served > 0.3
    assert seconds > 0.2
    assert max(memory) > 20_000_000  # an interpreter with gradio uses more
    assert server.process.poll() is not None


def test_reports_the_output_of_an_app_that_exits(tmp_path):
    (tmp_path / "app.py").write_text("raise SystemExit('no such model')", encoding="utf-8")

    with (
        pytest.raises(BackendError, match=r"code 1: no such model"),
        running_app(["app.py"], tmp_path),
    ):
        pass


def test_terminates_an_app_that_serves_no_page(tmp_path):
    (tmp_path / "app.py").write_text("import time; time.sleep(60)", encoding="utf-8")

    with (
        pytest.raises(BackendError, match=r"no page within the limit"),
        running_app(["app.py"], tmp_path, timeout_seconds=0.2),
    ):
        pass


def test_turns_are_timed():
    turn = ScriptedTurn(text=TURN, chunk_characters=20, delay_seconds=0.01)
    policy = Policy("slow", ScriptedBackend([turn]))
    judge = Judge("j", ScriptedScorer(["True"], delay_seconds=0.02))

    records = timed_turns(policy, judge, ["one", "two"], count=3, seed=5)

    assert [record.seed for record in records] == [5, 6, 7]
    for record in records:
        assert record.first_token_seconds >= 0.01
        # a chunk takes 0.01 s, so there can be at most 100 per second
        assert 10 < tokens_per_second(record) <= 100


def test_failed_turn_aborts_the_benchmark():
    policy = Policy("broken", ScriptedBackend([ScriptedTurn(text="<history>", ending="failed")]))

    with pytest.raises(BackendError, match=r"a benchmark turn failed"):
        timed_turns(policy, None, ["one"], count=1, seed=0)


def test_summarise_returns_median_and_range():
    metric = summarise("x", [3.0, 1.0, 9.0], "s")

    assert (metric.value, metric.low, metric.high, metric.n) == (3.0, 1.0, 9.0, 3)


def test_summarise_can_return_the_peak():
    assert summarise("x", [1.0, 4.0, 2.0], "GiB", statistic=max).value == 4.0


def test_machine_reports_the_cores():
    assert "cores" in machine()


def test_stage_writes_a_results_file(tmp_path, capsys, monkeypatch):
    asked: list[tuple[str, int]] = []

    def answered(url: str, message: str, seed: int) -> float:
        assert "</html>" in httpx.get(url, trust_env=False).text
        asked.append((message, seed))
        return 0.2

    monkeypatch.setattr(measure, "chat", answered)
    (tmp_path / "app.py").write_text(PAGE, encoding="utf-8")
    (tmp_path / "turns.json").write_text(json.dumps({"turns": [{"text": TURN}]}), encoding="utf-8")
    (tmp_path / "verdicts.toml").write_text('answers = ["True"]\n', encoding="utf-8")
    (tmp_path / "models.toml").write_text(
        textwrap.dedent("""
            [[models]]
            name = "recorded"
            kind = "policy"
            source = "scripted:turns.json"
            [[models]]
            name = "recorded-judge"
            kind = "judge"
            source = "scripted:verdicts.toml"
        """),
        encoding="utf-8",
    )
    (tmp_path / "benchmark.toml").write_text(
        textwrap.dedent(f"""
            name = "benchmark_test"
            root = "{tmp_path.as_posix()}"
            output = "{tmp_path.as_posix()}"
            models = "models.toml"
            starts = 1
            turns = 2
            http_turns = 1
        """),
        encoding="utf-8",
    )

    assert main(["benchmark", str(tmp_path / "benchmark.toml")]) == 0

    result = load(tmp_path / "benchmark_test.json")
    assert asked == [(Config().messages[seed], seed) for seed in range(2)]  # the first warms up
    assert result.model == "recorded judged by recorded-judge"
    assert [metric.unit for metric in result.metrics] == [
        "s", "s", "GiB", "s", "tokens/s", "s", "tokens/s",
    ]  # fmt: skip
    assert all(metric.value > 0 for metric in result.metrics)
    assert "| Measure | Value | Range | n |" in capsys.readouterr().out
