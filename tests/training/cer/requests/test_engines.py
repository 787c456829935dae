"""Ray Data gives what this process gives, in the same order."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, ConfigError
from tests.training.cer.endpoint import Body, Endpoint, always, asked, echo, refused
from training.cer.requests.asking import Answer, Asker, Budget, BudgetSpentError, Counts, Question
from training.cer.requests.engines import Engine, LocalEngine, RayEngine
from training.cer.requests.generators import GeneratorSettings

# Ray warns of its own settings. Workers import all that they need, on cores that others use too.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(600),
]

KEY = "sk-this-must-not-be-written"


def doubled(items: Iterator[int]) -> Iterator[str]:
    for item in items:
        yield from [f"{item}\u2028难"] * (item % 3)


def refusing(items: Iterator[int]) -> Iterator[int]:
    for item in items:
        if item == 7:
            raise ConfigError("seven is not taken")
        yield item


def usable(key: str, text: str) -> str | None:
    return "wrong language" if "bad" in text else None


def flaky(body: Body) -> str:
    number = int(asked(body)[1:])
    poor = number % 10 == 0 or (number % 3 == 0 and body["seed"] == number)
    return f"bad {number}" if poor else echo(body)


def questions(count: int) -> Iterator[Question]:
    return (Question(f"q{n}", (Message("user", (f"q{n}",)),), n) for n in range(count))


def settings(source: str, **changes: Any) -> GeneratorSettings:
    return GeneratorSettings.model_validate(
        {"source": source, "in_flight": 4, "tries": 3, "backoff_seconds": 0.01, "device": "cpu"}
        | changes
    )


def run(
    chosen: GeneratorSettings, folder: Path, engine: Engine, count: int, budget: int | None = None
) -> tuple[list[Answer], Counts]:
    asker = Asker(chosen, folder, Budget(budget), engine)
    try:
        answers = list(asker.ask(questions(count), usable, label="test"))
    finally:
        asker.close()
    return answers, asker.counts


def tries(folder: Path) -> set[str]:
    """Every try of a journal, however they are spread over its lines."""
    (path,) = folder.glob("*.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")[1:-1]
    return {json.dumps(one) for line in lines for one in json.loads(line)["tries"]}


# --- this process --------------------------------------------------------------------------------


def test_this_process_applies_a_function_to_the_whole_stream() -> None:
    assert list(LocalEngine().map(doubled, range(5))) == [
        "1\u2028难",
        *["2\u2028难"] * 2,
        "4\u2028难",
    ]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)

    with pytest.raises(ConfigError, match=r'pip install "compeer\[ray\]"'):
        list(RayEngine().map(doubled, range(5)))


# --- Ray -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[RayEngine]:
    """A local Ray with one worker at a time; the key is in its environment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
        pytest.importorskip("ray.data", reason="the extra `ray` is not installed")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COMPEER_API_KEY", KEY)
            ray.init(
                num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
            )
            yield RayEngine(workers=2, block=4)
        ray.shutdown()


@pytest.mark.parametrize("count", [0, 1, 30])
def test_ray_gives_the_same_results_in_the_same_order(ray_engine: RayEngine, count: int) -> None:
    assert list(ray_engine.map(doubled, range(count))) == list(
        LocalEngine().map(doubled, range(count))
    )


def test_an_error_in_a_worker_is_raised_as_it_was(ray_engine: RayEngine) -> None:
    with pytest.raises(ConfigError, match="seven is not taken"):
        list(ray_engine.map(refusing, range(20)))


@pytest.mark.slow  # its parts have tests of their own here
def test_an_asker_on_ray_makes_the_same_records(ray_engine: RayEngine, tmp_path: Path) -> None:
    with Endpoint(flaky) as endpoint:
        here = run(settings(endpoint.source), tmp_path / "here", LocalEngine(), 70)
        sent = endpoint.requests
        there = run(settings(endpoint.source), tmp_path / "there", ray_engine, 70)
        assert endpoint.requests == 2 * sent
        assert there == here
        assert tries(tmp_path / "there") == tries(tmp_path / "here")

        # What is in the journal is not asked again, on either engine.
        again = run(settings(endpoint.source), tmp_path / "there", ray_engine, 70)
        assert again[0] == here[0]
        assert endpoint.requests == 2 * sent

        # Workers have the key from their environment; nothing was written.
        assert {headers["authorization"] for headers in endpoint.headers[sent:]} == {
            f"Bearer {KEY}"
        }
        written = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert not [file for file in written if KEY.encode() in file.read_bytes()]


def test_a_budget_on_ray_is_not_passed_and_what_was_answered_is_kept(
    ray_engine: RayEngine, tmp_path: Path
) -> None:
    with Endpoint() as endpoint:
        with pytest.raises(BudgetSpentError, match="the budget is spent"):
            run(settings(endpoint.source), tmp_path, ray_engine, 70, budget=40)
        assert endpoint.requests == 40
        answers, _ = run(settings(endpoint.source), tmp_path, LocalEngine(), 70)
        assert [answer.text for answer in answers] == [f"q{n} / {n}" for n in range(70)]
        assert endpoint.requests == 70


def test_a_wrong_key_ends_a_run_on_ray(ray_engine: RayEngine, tmp_path: Path) -> None:
    with (
        Endpoint(fault=always(refused(401))) as endpoint,
        pytest.raises(BackendError, match="does not accept the key"),
    ):
        run(settings(endpoint.source), tmp_path, ray_engine, 70)


@pytest.mark.slow  # two workers import torch
def test_a_checkpoint_on_ray_writes_the_same_texts(ray_engine: RayEngine, tmp_path: Path) -> None:
    from tests.checkpoints import build_qwen

    folder = str(build_qwen(tmp_path / "qwen"))
    chosen = settings(folder, max_new_tokens=8, in_flight=2)
    here = run(chosen, tmp_path / "here", LocalEngine(), 20)
    there = run(chosen, tmp_path / "there", ray_engine, 20)

    assert there == here
    assert tries(tmp_path / "there") == tries(tmp_path / "here")
