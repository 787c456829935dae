"""Steps that a person gives: read from a form, kept from a turn, and gone on from."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer, ScriptedTurn
from compeer_core.errors import InputError
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import (
    LABELS,
    STEPS,
    EmotionStep,
    Event,
    HistoryStep,
    Part,
    PartFinished,
    PartStarted,
    Reading,
    StrategyStep,
    TurnFinished,
    Unreadable,
    Writer,
    read,
    render_step,
)
from compeer_core.steering import GivenStep, edited_step, kept_steps
from compeer_core.taxonomy import Emotion, Sentiment, Stage
from compeer_core.turn import StepJudged, TurnDone, take_turn
from compeer_core.unifireward import Judge
from tests.core.example import DIALOGUE, TEXT
from tests.core.test_policy import Watched

LABELLED = {
    Part.HISTORY: {"stage": "Comforting"},
    Part.EMOTION: {"sentiment": "Negative", "emotion": "Sadness", "intensity": "2"},
    Part.STRATEGY: {"strategy": "Information"},
}
HISTORY = HistoryStep("Work is too much.", Stage.EXPLORATION)
GRIEF = EmotionStep("There is grief.", Sentiment.NEGATIVE, Emotion.SADNESS, 2)
EDITED = (
    TEXT.replace("Worn out.", "There is grief.").replace("Anxiety", "Sadness").replace("4", "2")
)
EMOTION_EDITED = (GivenStep(HISTORY, Writer.EARLIER), GivenStep(GRIEF))


def events_of(
    backend: ScriptedBackend, *steps: GivenStep, strategy: str | None = None
) -> list[Event]:
    controls = Controls(strategy=strategy, given=steps)
    return list(Policy("p", backend).respond(DIALOGUE, controls, threading.Event()))


def reading_of(events: Sequence[Event]) -> Reading:
    last = events[-1]
    assert isinstance(last, TurnFinished)
    return last.reading


# --- a form --------------------------------------------------------------------------------------


def test_what_a_person_chooses_becomes_a_step() -> None:
    assert edited_step(Part.HISTORY, " A loss.\r\nAt work. ", {"stage": "Action"}) == HistoryStep(
        "A loss.\nAt work.", Stage.ACTION
    )
    assert edited_step(Part.EMOTION, "There is grief.", LABELLED[Part.EMOTION]) == GRIEF
    assert edited_step(Part.STRATEGY, "Tell.", LABELLED[Part.STRATEGY]) == StrategyStep(
        "Tell.", "Information"
    )


@pytest.mark.parametrize("part", STEPS)
@pytest.mark.parametrize("value", ["", "Explore", "9", "0", "</emotion>", "True"])
def test_a_label_outside_its_vocabulary_is_refused_by_name(part: Part, value: str) -> None:
    for name in LABELS[part]:
        with pytest.raises(InputError) as caught:
            edited_step(part, "Words.", LABELLED[part] | {name: value})
        assert caught.value.code == "label_unknown"
        assert caught.value.values == {"name": name, "value": value}


@pytest.mark.parametrize(
    ("part", "text", "code"),
    [
        (Part.REPLY, "Hello.", "step_unknown"),
        (Part.HISTORY, " \n\t", "step_empty"),
        (Part.HISTORY, "a" * 2001, "step_too_long"),
    ],
)
def test_words_that_cannot_be_a_step_are_refused(part: Part, text: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        edited_step(part, text, {"stage": "Action"})

    assert caught.value.code == code


HOSTILE = [
    *(part.opening for part in Part), *(part.closing for part in Part),
    *("Stage: Action", "STAGE：", "\n emotion :", "Intensity: 5", "strategy: Question", "\n", "\r\n"),
    *("<|im_end|>", "[INST]", " ", "words", "<", "</", "\u200b", "\u2028", "::"),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(STEPS), st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=9))
def test_no_words_of_a_person_can_forge_a_tag_or_a_label(part: Part, pieces: list[str]) -> None:
    try:
        step = edited_step(part, "".join(pieces), LABELLED[part])
    except InputError as error:
        assert error.code == "step_empty"
        return
    whole = TEXT.split("\n<")
    inside = f"{part.value}>{render_step(step)}{part.closing}"
    text = "\n<".join(
        inside if piece.lstrip("<").startswith(part.value) else piece.lstrip("<") for piece in whole
    )
    reading = read("<" + text)

    assert reading.is_complete, reading.problems
    assert reading.steps[STEPS.index(part)] == step


def test_steps_are_kept_up_to_a_part() -> None:
    assert kept_steps(read(TEXT), Part.HISTORY) == ()
    assert kept_steps(read(TEXT), Part.EMOTION) == (GivenStep(HISTORY, Writer.EARLIER),)
    assert len(kept_steps(read(TEXT), Part.REPLY)) == 3


def test_steps_behind_a_missing_one_cannot_be_kept() -> None:
    with pytest.raises(InputError) as caught:
        kept_steps(read(TEXT.replace("emotion>", "feeling>")), Part.REPLY)

    assert caught.value.code == "step_missing"


# --- going on behind given steps -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_model_goes_on_behind_an_edited_emotion(size: int) -> None:
    backend = Watched(ScriptedTurn(text=TEXT, chunk_characters=size))
    events = events_of(backend, *EMOTION_EDITED)
    reading = reading_of(events)

    assert reading.raw == EDITED
    assert reading.is_complete
    assert reading.emotion == GRIEF
    assert len(backend.completions) == 1
    assert backend.completions[0].written == (EDITED.partition("Ask first.")[0],)
    assert backend.completions[0].untils == ("</strategy>", "</reply>")


def test_events_say_who_wrote_each_part() -> None:
    events = events_of(Watched(TEXT), *EMOTION_EDITED)
    begun = {event.part: event.writer for event in events if isinstance(event, PartStarted)}
    finished = [event.part for event in events if isinstance(event, PartFinished)]

    assert begun == {
        Part.HISTORY: Writer.EARLIER,
        Part.EMOTION: Writer.PERSON,
        Part.STRATEGY: Writer.MODEL,
        Part.REPLY: Writer.MODEL,
    }
    assert finished == list(Part)


def test_the_judge_judges_given_steps_too_and_the_record_says_what_was_given() -> None:
    judge = Judge("j", ScriptedScorer(["True", "False", "True"]))
    policy = Policy("p", ScriptedBackend([TEXT]))
    controls = Controls(given=EMOTION_EDITED)
    events = list(take_turn(policy, judge, DIALOGUE, controls, threading.Event()))
    judged = [event.part for event in events if isinstance(event, StepJudged)]
    done = events[-1]

    assert judged == list(STEPS)
    assert isinstance(done, TurnDone)
    assert done.record.controls.given == EMOTION_EDITED
    assert done.record.judgement is not None
    assert done.record.judgement.reward().total == 2  # +1 -1 +1 for the steps, +1 for the format


def test_a_strategy_can_be_forced_behind_given_steps() -> None:
    for strategy in ("Ask first.\nStrategy: Question</strategy>", "Ask first.</strategy>"):
        text = f"{TEXT.partition('Ask first.')[0]}{strategy}\n<reply>What happened today?</reply>"
        reading = reading_of(events_of(Watched(text), *EMOTION_EDITED, strategy="Information"))

        assert reading.raw == EDITED.replace("Strategy: Question", "Strategy: Information")


def test_all_three_steps_can_be_given_so_that_only_the_reply_is_written() -> None:
    backend = Watched(TEXT)
    reading = reading_of(events_of(backend, *kept_steps(read(TEXT), Part.REPLY)))

    assert reading == read(TEXT)
    assert backend.completions[0].untils == ("</reply>",)


def test_a_kept_label_that_could_not_be_read_stays_so() -> None:
    odd = TEXT.replace("Stage: Exploration", "Stage: <|im_end|>")
    reading = reading_of(events_of(Watched(odd), *kept_steps(read(odd), Part.EMOTION)))

    assert reading.history is not None
    assert reading.history.stage == Unreadable("‹|im_end|›")


@pytest.mark.parametrize(
    ("steps", "strategy", "code"),
    [
        ((GivenStep(GRIEF),), None, "steps_out_of_order"),
        ((GivenStep(HISTORY), GivenStep(HISTORY)), None, "steps_out_of_order"),
        ((*EMOTION_EDITED, GivenStep(StrategyStep("x", "Magic"))), None, "strategy_unknown"),
        ((*EMOTION_EDITED, GivenStep(StrategyStep("x", "Question"))), "Question", "strategy_given"),
    ],
)
def test_steps_that_cannot_begin_a_turn_are_refused_before_anything_is_asked(
    steps: tuple[GivenStep, ...], strategy: str | None, code: str
) -> None:
    backend = Watched(TEXT)
    with pytest.raises(InputError) as caught:
        events_of(backend, *steps, strategy=strategy)

    assert caught.value.code == code
    assert backend.asked == []


# --- where nothing can be written for the model --------------------------------------------------

REST = EDITED.partition("<strategy>")[2]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        "<strategy>" + REST,
        EDITED,  # repeats what it was given
        TEXT,  # writes the steps as it would have them
        "Gladly!\n<strategy>" + REST,
    ],
)
def test_elsewhere_the_steps_are_stated_and_what_is_repeated_is_left_out(
    answer: str, size: int
) -> None:
    backend = Watched(ScriptedTurn(text=answer, chunk_characters=size), can_write=False)
    events = events_of(backend, *EMOTION_EDITED)
    system = backend.asked[0][0][0]
    begun = [event.writer for event in events if isinstance(event, PartStarted)]

    assert reading_of(events).raw == EDITED
    assert begun[:2] == [Writer.EARLIER, Writer.PERSON]
    assert system.role == "system"
    assert EDITED.partition("\n<strategy>")[0] in system.text
    assert "Begin with <strategy>" in system.text


def test_what_follows_no_form_at_all_is_shown_as_it_is() -> None:
    plain = reading_of(events_of(Watched("I am here.", can_write=False), *EMOTION_EDITED))
    repeated = EDITED.partition("\n<strategy>")[0]
    again = reading_of(events_of(Watched(repeated, can_write=False), *EMOTION_EDITED))

    assert plain.raw.endswith("</emotion>\nI am here.")
    assert again.raw.strip() == repeated
    assert not again.is_complete


def test_both_wishes_are_in_the_prompt() -> None:
    backend = Watched(TEXT, can_write=False)
    events_of(backend, *EMOTION_EDITED, strategy="Information")
    system = backend.asked[0][0][0].text

    assert "Information" in system
    assert "There is grief." in system


# --- a real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> Iterator[Policy]:
    pytest.importorskip("torch")
    from compeer_core.registry import Registry

    registry = Registry.from_toml(Path("assets/models.toml"))
    try:
        yield registry.policy("compeer-small")
    finally:
        registry.close()


GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def free(shipped: Policy) -> Reading:
    """What it writes when nothing is given."""
    controls = Controls(sampling=GREEDY)
    return reading_of(list(shipped.respond(DIALOGUE, controls, threading.Event())))


def test_the_shipped_model_goes_on_behind_an_edited_step(shipped: Policy, free: Reading) -> None:
    joy = EmotionStep("They are proud and glad.", Sentiment.POSITIVE, Emotion.JOY, 5)
    steps = (*kept_steps(free, Part.EMOTION), GivenStep(joy))
    controls = Controls(given=steps, strategy="Providing Suggestions", sampling=GREEDY)
    after = reading_of(list(shipped.respond(DIALOGUE, controls, threading.Event())))

    assert after.history == free.history
    assert after.emotion == joy
    assert after.strategy is not None
    assert after.strategy.strategy == "Providing Suggestions"
    assert after.is_complete, after.problems


def test_keeping_everything_gives_the_greedy_reply_again(shipped: Policy, free: Reading) -> None:
    controls = Controls(given=kept_steps(free, Part.REPLY), sampling=GREEDY)
    after = reading_of(list(shipped.respond(DIALOGUE, controls, threading.Event())))

    assert after == free
