"""Ray Data yields the results of this process, in the same order."""

import contextlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from compeer_core.errors import BackendError, ConfigError
from tests.training.cer.endpoint import Endpoint, always, refused
from tests.training.cer.requests.asking_helpers import (
    KEY,
    answers_of,
    flaky,
    settings,
    stored_attempts,
)
from training.cer.requests.asking import Answer, Asker, Budget, BudgetSpentError, Counts
from training.cer.requests.engines import (
    Engine,
    In,
    LocalEngine,
    Out,
    RayEngine,
    SharedAllowance,
    cut,
)
from training.cer.requests.generators import GeneratorSettings

# Ray warns about its own settings. Workers import everything anew, on cores that others use too.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(600),
]


def repeated(items: Iterator[int]) -> Iterator[str]:
    for item in items:
        yield from [f"{item}\u2028难"] * (item % 3)


def refusing(items: Iterator[int]) -> Iterator[int]:
    for item in items:
        if item == 7:
            raise ConfigError("seven is not accepted")
        yield item


def run(
    chosen: GeneratorSettings, folder: Path, engine: Engine, count: int, budget: int | None = None
) -> tuple[list[Answer], Counts]:
    asker = Asker(chosen, folder, Budget(budget), engine)
    return answers_of(asker, count), asker.counts


# --- this process ---------------------------------------------------------------------------------


def test_this_process_applies_a_function_to_the_whole_stream() -> None:
    expected = ["1\u2028难", *["2\u2028难"] * 2, "4\u2028难"]

    assert list(LocalEngine().map(repeated, range(5))) == expected


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)

    with pytest.raises(ConfigError, match=r'pip install "compeer\[ray\]"'):
        list(RayEngine().map(repeated, range(5)))


# --- blocks, without Ray --------------------------------------------------------------------------


class InProcessBlocks(RayEngine):
    """Pickles as Ray does, but runs here: the asker's part of the work is tested without Ray."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        for block in [pickle.dumps(block) for block in cut(items, self.block)]:
            yield from pickle.loads(pickle.dumps(list(function(iter(pickle.loads(block))))))

    @contextlib.contextmanager
    def allowance(self, limit: int | None) -> Iterator[SharedAllowance]:
        LocalAllowance.sent = 0
        yield LocalAllowance(None, limit)


class LocalAllowance(SharedAllowance):
    """Counts in this process, whichever copy is asked."""

    sent = 0

    def take(self, count: int = 1) -> None:
        if self.limit is not None and LocalAllowance.sent + count > self.limit:
            raise BudgetSpentError("the budget is spent")
        LocalAllowance.sent += count

    def close(self) -> None:
        LocalAllowance.sent = 1 << 60


def test_blocks_store_the_attempts_of_a_local_run_within_a_budget(tmp_path: Path) -> None:
    with Endpoint(flaky) as endpoint:
        chosen = settings(endpoint.source, tries=3)
        local = run(chosen, tmp_path / "local", LocalEngine(), 70)
        sent = endpoint.requests
        with pytest.raises(BudgetSpentError):
            run(chosen, tmp_path / "blocks", InProcessBlocks(), 70, budget=40)
        assert endpoint.requests == sent + 40
        resumed = run(chosen, tmp_path / "blocks", InProcessBlocks(), 70)

    assert endpoint.requests == 2 * sent
    assert resumed[0] == local[0]
    assert stored_attempts(tmp_path / "blocks") == stored_attempts(tmp_path / "local")


def test_a_wrong_key_in_a_block_ends_the_run(tmp_path: Path) -> None:
    with (
        Endpoint(fault=always(refused(401))) as endpoint,
        pytest.raises(BackendError, match="rejects the key"),
    ):
        run(settings(endpoint.source), tmp_path, InProcessBlocks(), 70)


# --- Ray ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[RayEngine]:
    """A local Ray with two workers, and the key in its environment."""
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
def test_ray_yields_the_same_results_in_the_same_order(ray_engine: RayEngine, count: int) -> None:
    expected = list(LocalEngine().map(repeated, range(count)))

    assert list(ray_engine.map(repeated, range(count))) == expected


def test_an_error_in_a_worker_is_raised_unchanged(ray_engine: RayEngine) -> None:
    with pytest.raises(ConfigError, match="seven is not accepted"):
        list(ray_engine.map(refusing, range(20)))


def test_a_budget_on_ray_is_not_exceeded_and_answers_are_stored(
    ray_engine: RayEngine, tmp_path: Path
) -> None:
    with Endpoint() as endpoint:
        chosen = settings(endpoint.source)
        with pytest.raises(BudgetSpentError, match="the budget is spent"):
            run(chosen, tmp_path, ray_engine, 70, budget=40)
        # Ray ends the other worker, whose last requests may be cancelled before they are sent.
        assert 40 - chosen.in_flight <= endpoint.requests <= 40
        answers, _ = run(chosen, tmp_path, LocalEngine(), 70)
        assert [answer.text for answer in answers] == [f"q{n} / {n}" for n in range(70)]
        assert endpoint.requests == 70


@pytest.mark.slow  # two workers import torch
def test_a_checkpoint_on_ray_writes_the_same_texts(ray_engine: RayEngine, tmp_path: Path) -> None:
    from tests.checkpoints import build_qwen

    folder = str(build_qwen(tmp_path / "qwen"))
    chosen = settings(folder, max_new_tokens=8, in_flight=2, device="cpu")
    local = run(chosen, tmp_path / "local", LocalEngine(), 20)
    on_ray = run(chosen, tmp_path / "ray", ray_engine, 20)

    assert on_ray == local
    assert stored_attempts(tmp_path / "ray") == stored_attempts(tmp_path / "local")
