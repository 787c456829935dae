"""Rows of CER: what they may say, and what they must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compeer_core.cer import (
    SPLITS,
    Candidate,
    Case,
    CaseUtterance,
    CerRecord,
    DecidedBy,
    HumanLabels,
    Variant,
)
from compeer_core.dialogue import Speaker, Utterance
from compeer_core.images import Image
from compeer_core.taxonomy import Emotion, Preference, Strategy

SAID = CaseUtterance(speaker=Speaker.SEEKER, text="I lost my job.", images=("faces/a.jpg",))
ANSWER = CaseUtterance(speaker=Speaker.SUPPORTER, text="Tell me more.")
RULE = DecidedBy(kind="rule", name="r1")
PEOPLE = DecidedBy(kind="people", name="ann, bo")


def case(**fields):
    values = {
        "id": "d1#0",
        "dialogue_id": "d1",
        "source_id": "s1",
        "corpus": "esconv",
        "language": "en",
        "split": "train",
        "licence": "CC BY-NC 4.0",
        "round": 0,
        "rounds": 1,
        "history": (SAID,),
        "original": "I see.",
    }
    return Case(**{**values, **fields})


ORIGINAL = Candidate(author="corpus", reply="I see.")
WRITTEN = Candidate(
    author="m", reply="Why?", turn="<reply>Why?</reply>", steps=(True, None, False), steps_by=RULE
)


def record(**fields):
    return CerRecord(**{"id": "r1", "case": case(), "first": ORIGINAL, **fields})


# --- cases ---------------------------------------------------------------------------------------


def test_a_history_ends_with_the_seeker():
    assert case(history=(SAID, ANSWER, SAID)).history[-1] == SAID
    with pytest.raises(ValidationError, match="case d1#0: its history does not end with the seek"):
        case(history=(SAID, ANSWER))
    with pytest.raises(ValidationError):
        case(history=())


@pytest.mark.parametrize(
    "wrong", [{"split": "dev"}, {"round": -1}, {"rounds": 0}, {"persona": "p1"}]
)
def test_a_case_with_an_invalid_value_is_refused(wrong):
    with pytest.raises(ValidationError):
        case(**wrong)


@pytest.mark.parametrize("name", ["intensity_before", "intensity_after", "feedback"])
def test_human_ratings_are_one_to_five(name):
    assert getattr(HumanLabels(**{name: 5}), name) == 5
    for outside in (0, 6):
        with pytest.raises(ValidationError):
            HumanLabels(**{name: outside})


def test_a_case_becomes_a_dialogue_with_or_without_its_pictures():
    picture = Image(b"png", 1, 1)

    bare = case(history=(SAID, ANSWER, SAID)).dialogue()
    shown = case().dialogue([[picture]])

    assert [said.text for said in bare.utterances] == [SAID.text, ANSWER.text, SAID.text]
    assert all(said.images == () for said in bare.utterances)
    assert bare.id == "d1"
    assert shown.utterances == (Utterance(Speaker.SEEKER, SAID.text, (picture,)),)
    with pytest.raises(ValueError, match="zip"):
        case().dialogue([[], []])


# --- candidates and records ----------------------------------------------------------------------


def test_step_labels_need_a_turn_and_a_source():
    with pytest.raises(ValidationError, match="3 step labels, but the turn has no steps"):
        Candidate(author="m", reply="Why?", steps=(True, True, True), steps_by=RULE)
    for alone in ({"steps": (True, True, True)}, {"steps_by": RULE}):
        with pytest.raises(ValidationError, match="who decided them belong together"):
            Candidate(author="m", reply="Why?", turn="t", **alone)
    with pytest.raises(ValidationError):
        Candidate(author="m", reply="Why?", turn="t", steps=(True, True), steps_by=RULE)


def test_a_preference_needs_two_replies_and_a_source():
    two = record(second=WRITTEN, preference=Preference.BOTH, preference_by=PEOPLE)

    assert two.candidates == (ORIGINAL, WRITTEN)
    assert record().candidates == (ORIGINAL,)
    assert record(second=WRITTEN).preference is None
    with pytest.raises(ValidationError, match="a preference needs two replies"):
        record(preference=Preference.BOTH, preference_by=PEOPLE)
    for alone in ({"preference": Preference.BOTH}, {"preference_by": PEOPLE}):
        with pytest.raises(ValidationError, match="who decided it belong together"):
            record(second=WRITTEN, **alone)


def test_rows_are_immutable_and_forbid_unknown_keys():
    with pytest.raises(ValidationError, match="frozen"):
        record().preference = Preference.BOTH
    with pytest.raises(ValidationError, match="Extra inputs"):
        record(note="x")
    with pytest.raises(ValidationError):
        DecidedBy(kind="committee", name="x")


def test_variants_have_the_papers_names():
    assert [variant.value for variant in Variant] == ["original", "duplicate", "rewrite", "persona"]
    assert record().variant is Variant.ORIGINAL


# --- on disk -------------------------------------------------------------------------------------

TEXTS = st.text(max_size=20)
NUMBERS = st.none() | st.integers(1, 5)
LABELS = st.builds(
    HumanLabels,
    strategies=st.lists(st.sampled_from(Strategy), unique=True, max_size=3).map(tuple),
    emotion=st.none() | st.sampled_from(Emotion),
    emotion_of=st.none() | st.sampled_from(["utterance", "dialogue"]),
    problem=st.none() | TEXTS,
    intensity_before=NUMBERS,
    intensity_after=NUMBERS,
    feedback=NUMBERS,
)
HISTORIES = st.lists(
    st.builds(
        CaseUtterance,
        speaker=st.sampled_from(Speaker),
        text=TEXTS,
        images=st.lists(TEXTS, max_size=2).map(tuple),
    ),
    max_size=4,
).map(lambda said: (*said, SAID))
CASES = st.builds(
    case,
    id=TEXTS,
    split=st.sampled_from(SPLITS),
    history=HISTORIES,
    original=st.none() | TEXTS,
    labels=LABELS,
)


@st.composite
def candidates(draw):
    turn = draw(st.none() | TEXTS)
    steps = draw(st.none() | st.tuples(*[st.none() | st.booleans()] * 3)) if turn else None
    return Candidate(
        author=draw(TEXTS),
        reply=draw(TEXTS),
        turn=turn,
        steps=steps,
        steps_by=RULE if steps else None,
        reason=draw(TEXTS),
    )


@st.composite
def records(draw):
    second = draw(st.none() | candidates())
    preference = draw(st.none() | st.sampled_from(Preference)) if second else None
    return CerRecord(
        id=draw(TEXTS),
        case=draw(CASES),
        first=draw(candidates()),
        second=second,
        preference=preference,
        preference_by=PEOPLE if preference else None,
        variant=draw(st.sampled_from(Variant)),
        persona=draw(st.none() | TEXTS),
        rewritten_from=draw(st.none() | TEXTS),
    )


@given(records())
def test_rows_round_trip_through_json(row):
    line = row.model_dump_json()

    assert "\n" not in line
    assert CerRecord.model_validate_json(line) == row
