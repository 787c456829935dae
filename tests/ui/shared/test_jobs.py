"""The job runner and the watch loop that Chat and Compare share; their own tests have the rest."""

import asyncio

import pytest

from tests.pages import Visitor, make_services
from ui_components.server.admission_queue import PlacesTakenError, QueueFullError
from ui_components.shared import jobs
from ui_components.shared.jobs import Job, watch
from ui_components.shared.session_store import SessionKey

KEY = SessionKey("anna", "conversation")


@pytest.mark.parametrize(
    ("error", "failure"),
    [(PlacesTakenError(), "places"), (QueueFullError(), "line"), (ValueError("x"), "reply")],
)
def test_an_exception_of_a_job_fails_its_reply(tmp_path, monkeypatch, error, failure):
    def refuse(*_: object) -> None:
        raise error

    services = make_services(tmp_path)
    anna = Visitor(services)
    monkeypatch.setattr(services.models, "queue", refuse)
    asyncio.run(anna.send("hello"))

    progress = anna.session.turns[0].progress
    assert (progress.outcome, progress.failure) == ("failed", failure)


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
