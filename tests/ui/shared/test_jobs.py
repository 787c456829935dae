"""The job runner and the watch loop that Chat and Compare share."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.policy import Controls
from tests.pages import eventually, make_services
from ui_components.server.admission_queue import PlacesTakenError, QueueFullError
from ui_components.server.metrics import Metrics
from ui_components.shared import jobs
from ui_components.shared.jobs import Job, JobRunner, TurnRequest, watch
from ui_components.shared.models import Models
from ui_components.shared.progress import Progress
from ui_components.shared.session_store import SessionKey, SessionStore

KEY = SessionKey("anna", "conversation")


@dataclass(frozen=True)
class Record:
    replies: tuple[Progress, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.replies

    def pictures(self) -> Iterator[Image]:
        return iter(())

    def picture(self, key: str, index: int) -> Image | None:
        return None

    def aged(self, now: float) -> "Record":
        return self


class Runner(JobRunner[Record, Job]):
    """The smallest screen: a record is a list of replies."""

    def __init__(self, models: Models) -> None:
        super().__init__(models, SessionStore(Record()), Metrics(), deadline_seconds=30)

    def begin(self, work: Callable[[Job], None], replies: int = 1) -> Job:
        with self._reserved(KEY):
            progress = tuple(Progress("scripted-policy") for _ in range(replies))
            self.store.update(KEY, lambda _: Record(progress))
            job = Job(KEY, replies, 0.05)
            self._register(job)
        self._start(job, lambda: work(job))
        return job

    def generate(self, job: Job, model: str = "scripted-policy") -> None:
        with self._admitted(job, [model]) as policies:
            request = TurnRequest(policies[model], Controls(sampling=policies[model].sampling))
            dialogue = DIALOGUES[len(job.stop_events)]
            self._generate(job, dialogue, None, [request] * len(job.stop_events))

    @property
    def replies(self) -> tuple[Progress, ...]:
        return self.store.get(KEY).replies

    def _change(self, job, change, number=None):
        def changed(record: Record) -> Record:
            numbers = range(len(record.replies)) if number is None else (number,)
            return Record(
                tuple(
                    change(reply) if place in numbers else reply
                    for place, reply in enumerate(record.replies)
                )
            )

        self.store.update(job.key, changed)

    def _finish(self, job, number, event):
        self._change(job, lambda progress: progress.after(event), number)

    def _fail(self, job, failure, number=None):
        self._change(
            job,
            lambda each: each.failed(failure) if each.outcome == "running" else each,
            number,
        )

    def _abandon(self, job):
        self._change(job, lambda each: replace(each, phase="over", outcome="stopped"))


def _dialogue(text: str) -> Dialogue:
    return Dialogue((Utterance(Speaker.SEEKER, text),))


DIALOGUES = {1: _dialogue("hello"), 2: _dialogue("for ever")}


@pytest.fixture
def models(tmp_path) -> Models:
    return make_services(tmp_path).models


@pytest.fixture
def runner(models: Models) -> Runner:
    return Runner(models)


def test_a_job_generates_its_reply_and_is_gone(runner):
    job = runner.begin(runner.generate)

    assert job.over.wait(30)
    assert [reply.outcome for reply in runner.replies] == ["finished"]
    assert runner.count() == 0
    assert runner.job(KEY) is None


def test_a_conversation_has_one_job_at_a_time(runner):
    release = threading.Event()
    job = runner.begin(lambda _: release.wait(10))

    with pytest.raises(InputError) as refused:
        runner.begin(runner.generate)
    release.set()

    assert refused.value.code == "already_writing"
    assert job.over.wait(10)


@pytest.mark.parametrize(
    ("error", "failure"),
    [(PlacesTakenError(), "places"), (QueueFullError(), "line"), (ValueError("x"), "reply")],
)
def test_an_exception_of_a_job_fails_its_replies(runner, error, failure):
    def work(job: Job) -> None:
        raise error

    job = runner.begin(work)

    assert job.over.wait(10)
    assert [(reply.outcome, reply.failure) for reply in runner.replies] == [("failed", failure)]


def test_a_model_that_cannot_be_loaded_fails_the_replies(runner):
    job = runner.begin(lambda job: runner.generate(job, "wrong"))

    assert job.over.wait(10)
    assert runner.replies[0].failure == "model"


def test_a_job_that_is_stopped_in_the_queue_is_abandoned(runner, models):
    other = SessionKey("ben", "conversation").caller
    with models.queue("scripted-policy").place(other):
        job = runner.begin(runner.generate)
        eventually(lambda: runner.replies[0].place == 1)
        runner.stop(KEY)
        assert job.over.wait(10)

    assert [reply.outcome for reply in runner.replies] == ["stopped"]


def test_one_reply_is_stopped_and_the_other_continues(runner):
    job = runner.begin(runner.generate, replies=2)
    with job.watched():
        eventually(lambda: all(reply.has_words for reply in runner.replies))
        runner.stop(KEY, 0)
        eventually(lambda: runner.replies[0].outcome == "stopped")
        assert runner.replies[1].outcome == "running"
        runner.stop(KEY)
        assert job.over.wait(10)

    assert [reply.outcome for reply in runner.replies] == ["stopped", "stopped"]


def test_an_error_in_one_reply_leaves_the_other_alone(runner, monkeypatch):
    original, calls = jobs.take_turn, []

    def take_turn(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise ValueError("broken")
        return original(*arguments, **options)

    monkeypatch.setattr(jobs, "take_turn", take_turn)
    monkeypatch.setitem(DIALOGUES, 2, DIALOGUES[1])
    job = runner.begin(runner.generate, replies=2)

    assert job.over.wait(30)
    assert sorted(reply.outcome for reply in runner.replies) == ["failed", "finished"]


def test_a_job_stops_when_its_last_watcher_has_left(runner):
    job = runner.begin(lambda job: job.stopped.wait(10))
    with job.watched():
        with job.watched():
            pass
        assert not job.stopped.wait(0.2)

    assert job.stopped.wait(5)
    assert job.over.wait(5)


def test_forgetting_a_visitor_stops_their_jobs_and_deletes_their_records(runner):
    job = runner.begin(lambda job: job.stopped.wait(10))
    runner.forget("ben")
    assert not job.stopped.is_set()
    runner.forget("anna")

    assert job.over.wait(5)
    assert runner.replies == ()


def updates_of(job: Job | None, drawn: list[dict[str, str]]) -> list[dict[str, str]]:
    async def collect() -> list[dict[str, str]]:
        def draw(is_over: bool) -> dict[str, str]:
            if job is not None and not drawn:
                job.over.set()
            return {"end": ""} if is_over else drawn.pop(0) if drawn else {}

        return [update async for update in watch(job, draw, {"heartbeat": ""})]

    return asyncio.run(collect())


def test_the_watch_loop_draws_once_without_a_job():
    assert updates_of(None, [{"a": "1"}]) == [{"end": ""}]


def test_the_watch_loop_yields_changes_until_the_job_is_over():
    updates = updates_of(Job(KEY, 1, 0.05), [{"a": "1"}, {}, {"a": "2"}])

    assert updates == [{"a": "1"}, {"a": "2"}, {"end": ""}]


def test_the_watch_loop_sends_a_heartbeat_while_nothing_changes(monkeypatch):
    monkeypatch.setattr(jobs, "HEARTBEAT_SECONDS", 0.02)

    updates = updates_of(Job(KEY, 1, 0.05), [{"a": "1"}, *({} for _ in range(4)), {"a": "2"}])

    assert {"heartbeat": ""} in updates
    assert [each for each in updates if "heartbeat" not in each] == [
        {"a": "1"},
        {"a": "2"},
        {"end": ""},
    ]
