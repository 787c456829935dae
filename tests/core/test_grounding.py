"""What a step quotes or sees, checked against the conversation."""

import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.grounding import Ground, StepChecker, invented_quotations
from compeer_core.images import Image

PHOTO = Image(b"", 48, 48)


def talk(*texts: str, image: Image | None = None) -> Dialogue:
    speakers = (Speaker.SEEKER, Speaker.SUPPORTER)
    images = () if image is None else (image,)
    return Dialogue(
        tuple(
            Utterance(speakers[n % 2], text, images if n == 0 else ())
            for n, text in enumerate(texts)
        )
    )


def check_step(text: str, dialogue: Dialogue):
    return StepChecker(dialogue).check(text)


def test_a_quotation_is_linked_to_the_words_in_the_message():
    dialogue = talk("My boss shouted at me.", "When?", "Today, in front of ALL.")

    (evidence,) = check_step('They say "in front of all" twice.', dialogue)

    assert evidence.ground is Ground.FOUND
    assert (evidence.start, evidence.end) == (10, 25)
    assert evidence.message == 2
    # "Today, in": the quotation begins at character 7 and has 15 characters
    assert (evidence.message_start, evidence.message_end) == (7, 22)


def test_words_that_nobody_wrote_are_not_said():
    dialogue = talk("My boss shouted at me.")

    grounds = [e.ground for e in check_step('"my boss", "my job", “shouted at me”', dialogue)]

    assert grounds == [Ground.FOUND, Ground.NOT_SAID, Ground.FOUND]


@pytest.mark.parametrize(
    ("step", "message", "ground"),
    [
        ('"Don’t go."', "don't go", Ground.FOUND),  # apostrophe, case, full stop
        ('"at  me"', "shouted at\nme", Ground.FOUND),  # spaces
        ('"bos"', "my boss", Ground.NOT_SAID),  # cuts a word
        ('"art"', "smart, art", Ground.FOUND),  # a later place stands alone
        ("「睡不着」", "我昨晚睡不着觉", Ground.FOUND),  # no spaces between words
        ("“不想活了”", "我很累", Ground.NOT_SAID),
        ('"..."', "well ...", Ground.NOT_SAID),  # nothing is left to look for
    ],
)
def test_what_counts_as_the_same_words(step, message, ground):
    assert [e.ground for e in check_step(step, talk(message))] == [ground]


def test_a_quotation_that_is_still_open_is_left_out():
    assert check_step('They say "my bo', talk("My boss shouted.")) == ()


@pytest.mark.parametrize(
    "sentence",
    [
        "In the photo they look sad.",
        "The picture shows a tired person.",
        "The face in the picture looks surprised.",
        "Their face looks angry.",
        "照片里他看起来很难过。",
    ],
)
def test_photo_talk_needs_a_photo(sentence):
    (evidence,) = check_step(f"They are alone. {sentence}", talk("I am alone."))

    assert evidence.ground is Ground.NO_PHOTO
    assert (evidence.start, evidence.end) == (16, 16 + len(sentence))
    assert check_step(sentence, talk("I am alone.", image=PHOTO)) == ()


@pytest.mark.parametrize(
    "sentence",
    [
        "They picture a better life.",
        "They cannot face the day.",
        "The image of the boss haunts them.",
    ],
)
def test_other_uses_of_the_words_are_no_photo_talk(sentence):
    assert check_step(sentence, talk("I am alone.")) == ()


def test_one_checker_checks_a_growing_step_as_if_it_were_new():
    dialogue = talk("  My BOSS\n shouted; “so unfair”, Straße.", "When did your boss shout?")
    step = 'They say "my boss shouted", "unfair", "STRASSE" and "your boss". In the photo "x".'
    checker = StepChecker(dialogue)

    for end in range(len(step) + 1):
        assert checker.check(step[:end]) == check_step(step[:end], dialogue)
    cited = [
        dialogue.utterances[e.message].text[e.message_start : e.message_end]
        for e in checker.check(step)
        if e.message is not None
    ]
    assert cited == ["My BOSS\n shouted", "unfair", "Straße", "your boss"]


def test_a_token_costs_under_two_milliseconds_in_the_longest_conversation():
    dialogue = talk(*["I really do not know what to say to my boss. " * 80] * 199)
    sentence = 'They say "my boss" and "I quit". In the photo they look sad. '
    step = "".join(sentence.replace("quit", f"quit {number}") for number in range(30))
    checker = StepChecker(dialogue)

    seconds = []
    for end in range(5, len(step), 5):
        start = time.perf_counter()
        checker.check(step[:end])
        seconds.append(time.perf_counter() - start)

    assert statistics.median(seconds) < 0.002


def test_invented_quotations_are_listed_as_they_stand():
    assert invented_quotations('"my boss" and "My Job"', ["My boss shouted."]) == ("My Job",)


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_any_part_of_a_message_is_found_and_its_place_holds_the_same_words(before, middle, after):
    message = f"{before} word {middle} end {after}"
    quotation = f"word {middle} end"
    if any(mark in quotation for mark in '"“”「」『』\n'):
        return
    step = f'She says "{quotation}".'
    found = [e for e in check_step(step, talk(message)) if e.ground is not Ground.NO_PHOTO]

    assert [e.ground for e in found] == [Ground.FOUND]
    (evidence,) = found
    assert step[evidence.start : evidence.end] == quotation
    assert evidence.message_start is not None and evidence.message_end is not None
    cited = message[evidence.message_start : evidence.message_end]
    assert " ".join(cited.lower().split()) == " ".join(quotation.lower().split())


@given(st.text(max_size=300), st.lists(st.text(max_size=100), max_size=4))
def test_evidence_lies_inside_the_text_and_never_overlaps_backwards(text, messages):
    evidence = check_step(text, talk(*messages))

    assert all(0 <= e.start < e.end <= len(text) for e in evidence)
    assert [e.start for e in evidence] == sorted(e.start for e in evidence)
    invented = [text[e.start : e.end] for e in evidence if e.ground is Ground.NOT_SAID]
    assert list(invented_quotations(text, messages)) == invented
