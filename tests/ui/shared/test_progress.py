"""A progress is folded from events and ends as the record says."""

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer, ScriptedTurn
from compeer_core.dialogue import Dialogue
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import Part, Unreadable
from compeer_core.turn import TurnDone, take_turn
from compeer_core.unifireward import NO_REFERENCE, Judge, StepVerdict
from tests.pages import BROKEN, COMPLETE, REPLY
from ui_components.shared.progress import Progress

DIALOGUE = Dialogue.from_messages([{"role": "user", "content": "I lost my job."}])
JUDGE = Judge("judge", ScriptedScorer(["True", "True", "False"]))


def steps_of(text: str | ScriptedTurn, judge: Judge | None = JUDGE) -> list[Progress]:
    policy = Policy("policy", ScriptedBackend([text]))
    progress = Progress(model="policy", judge=judge.name if judge else None)
    steps = [progress]
    for event in take_turn(policy, judge, DIALOGUE, Controls(), threading.Event()):
        progress = progress.after(event)
        steps.append(progress)
    return steps


def test_the_parts_are_written_one_after_the_other():
    order = []
    for progress in steps_of(COMPLETE):
        if progress.writing is not None and progress.writing not in order:
            order.append(progress.writing)

    assert order == list(Part)


def test_a_step_is_judged_before_the_next_one_begins():
    for progress in steps_of(COMPLETE):
        if progress.writing is Part.EMOTION:
            assert isinstance(progress.parts[Part.HISTORY].verdict, StepVerdict)


def test_the_end_holds_all_that_the_record_holds():
    end = steps_of(COMPLETE)[-1]

    assert end.outcome == "finished"
    assert end.phase == "over"
    assert end.reply == REPLY
    assert end.parts[Part.EMOTION].labels == {
        "sentiment": "Negative",
        "emotion": "Anxiety",
        "intensity": 4,
    }
    assert [end.parts[part].verdict.correct for part in list(Part)[:3]] == [True, True, False]
    assert end.reply_verdict == NO_REFERENCE
    assert end.seed == end.record.seed


def test_a_missing_part_has_no_text():
    end = steps_of(BROKEN)[-1]

    assert end.parts[Part.STRATEGY].state == "missing"
    assert end.parts[Part.HISTORY].labels["stage"] == Unreadable("Explore")
    assert end.outcome == "finished"


def test_text_generated_before_a_failure_stays():
    end = steps_of(ScriptedTurn(text=COMPLETE[:60], ending="failed"))[-1]

    assert (end.outcome, end.failure) == ("failed", "reply")
    assert "lost a job" in end.parts[Part.HISTORY].text


def test_a_progress_does_not_change_when_the_next_is_made():
    first, *_ = steps_of(COMPLETE)

    assert first == Progress(model="policy", judge="judge")


@given(st.text(alphabet="<>/historyemotionstrategyreply: \nStage", max_size=200))
def test_any_completion_ends_in_a_record(text):
    end = steps_of(text, judge=None)[-1]

    assert end.phase == "over"
    assert end.record.raw == text


def test_the_record_overrides_what_was_streamed():
    progress = steps_of(COMPLETE)[-1]
    bent = replace(progress, parts=Progress(model="x").parts)

    assert bent.after(TurnDone(progress.record)).reply == REPLY


@pytest.mark.parametrize("failure", ["model", "line"])
def test_a_failure_outside_the_model_ends_the_progress(failure):
    assert Progress(model="m").failed(failure).outcome == "failed"
