"""Every model of the list that comes with the project can be chosen and does its work."""

import threading
from dataclasses import replace

import pytest

import app
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.judgement import ResponseVerdict, StepVerdict
from compeer_core.policy import Controls
from compeer_core.reasoning import TurnFinished, read
from compeer_core.registry import ModelEntry, Registry

DIALOGUE = Dialogue((Utterance(Speaker.SEEKER, "I am scared that I will lose my job."),))
TURN = """\
<history>Work is the trouble.
Stage: Exploration</history>
<emotion>The word "scared" points to fear.
Sentiment: Negative
Emotion: Fear
Intensity: 4</emotion>
<strategy>More has to be learnt.
Strategy: Question</strategy>
<reply>What happened at work?</reply>"""


def entries(kind: str) -> list[ModelEntry]:
    return [entry for entry in Registry.from_toml(app.MODELS).entries if entry.kind == kind]


@pytest.fixture(scope="module")
def registry():
    with_cards = Registry.from_toml(app.MODELS)
    with_cards.check()  # files, folders and cards
    yield with_cards
    with_cards.close()


@pytest.mark.parametrize("entry", entries("policy"), ids=lambda entry: entry.name)
def test_a_policy_of_the_list_writes_a_whole_turn(registry, entry):
    policy = registry.policy(entry.name)

    controls = Controls(sampling=replace(policy.sampling, seed=0))
    *_, finished = policy.respond(DIALOGUE, controls, threading.Event())

    assert isinstance(finished, TurnFinished)
    assert finished.reading.is_complete


@pytest.mark.parametrize("entry", entries("judge"), ids=lambda entry: entry.name)
def test_a_judge_of_the_list_judges_steps_and_reply(registry, entry):
    judge = registry.judge(entry.name)

    [judged] = judge.judge(DIALOGUE, [read(TURN)], ["I am sorry to hear that."])

    assert [type(step) for step in judged.steps] == [StepVerdict] * 3
    assert isinstance(judged.response, ResponseVerdict)
