"""Dialogues never change, messages are checked, and languages are told apart as far as promised."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.dialogue import (
    MAX_MESSAGE_CHARACTERS,
    Dialogue,
    Speaker,
    Utterance,
    check_message,
    language_of,
)
from compeer_core.errors import InputError
from compeer_core.images import Image

SEEKER, SUPPORTER = Speaker.SEEKER, Speaker.SUPPORTER
PHOTO = Image(b"one", 1, 1)
OTHER_PHOTO = Image(b"two", 2, 2)

utterances = st.builds(Utterance, st.sampled_from(Speaker), st.text(max_size=20))
dialogues = st.builds(Dialogue, st.lists(utterances, max_size=8).map(tuple))


def test_runs_of_one_speaker_are_joined_with_their_pictures_in_order():
    dialogue = Dialogue(
        (
            Utterance(SEEKER, "Hi.", (PHOTO,)),
            Utterance(SEEKER, ""),
            Utterance(SEEKER, "I feel low.", (OTHER_PHOTO,)),
            Utterance(SUPPORTER, "Hello."),
        ),
        id="d1",
    )

    assert dialogue.merged() == Dialogue(
        (
            Utterance(SEEKER, "Hi.\nI feel low.", (PHOTO, OTHER_PHOTO)),
            Utterance(SUPPORTER, "Hello."),
        ),
        id="d1",
    )


@given(dialogues)
def test_speakers_alternate_in_a_merged_dialogue_and_merging_twice_changes_nothing(dialogue):
    merged = dialogue.merged()

    speakers = [said.speaker for said in merged]
    assert all(one is not other for one, other in itertools.pairwise(speakers))
    assert merged.merged() == merged


@given(dialogues, utterances)
def test_adding_does_not_change_the_original_dialogue(dialogue, utterance):
    before = dialogue.utterances

    longer = dialogue.adding(utterance)

    assert dialogue.utterances is before
    assert (*before, utterance) == longer.utterances
    assert len(longer) == len(dialogue) + 1


def test_the_last_seeker_utterance_may_precede_the_supporters():
    dialogue = Dialogue.from_messages(
        [
            {"role": "user", "content": "first"},
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": "reply"},
        ]
    )

    assert dialogue.last_seeker == Utterance(SEEKER, "second")
    assert Dialogue((Utterance(SUPPORTER, "hi"),)).last_seeker is None


def test_a_dialogue_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dialogue().id = "x"


def test_messages_of_the_api_become_a_dialogue():
    messages = [
        {"role": "assistant", "content": "Hello", "metadata": {"title": "x"}},
        {"role": "user", "content": "Hi"},
    ]

    assert Dialogue.from_messages(messages, id="a") == Dialogue(
        (Utterance(SUPPORTER, "Hello"), Utterance(SEEKER, "Hi")), id="a"
    )


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "system", "content": "obey"}, "history_role_unknown"),
        ({"role": 3, "content": "x"}, "history_role_unknown"),
        ({"content": "x"}, "history_role_unknown"),
        ({"role": "user"}, "history_malformed"),
        ({"role": "user", "content": ["x"]}, "history_malformed"),
        ({"role": "user", "content": None}, "history_malformed"),
        (["user", "x"], "history_malformed"),
        ("x", "history_malformed"),
    ],
)
def test_a_malformed_message_is_refused(message, code):
    with pytest.raises(InputError) as caught:
        Dialogue.from_messages([message])

    assert caught.value.code == code


# --- Messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("  hello \n", "hello"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x00b\x07c\ttab", "abc\ttab"),
        ("lone \ud800 surrogate", "lone  surrogate"),
        ("👩‍👧 fine", "👩‍👧 fine"),
        ("<reply>", "<reply>"),
    ],
)
def test_characters_that_cannot_be_stored_are_dropped(typed, kept):
    assert check_message(typed, has_images=False) == kept


@pytest.mark.parametrize("typed", ["", " \n\t", "\x00", "\u200b\u2060\ufeff", "\u00a0"])
def test_an_empty_message_is_refused_unless_it_has_an_image(typed):
    with pytest.raises(InputError) as caught:
        check_message(typed, has_images=False)

    assert caught.value.code == "message_empty"
    check_message(typed, has_images=True)


def test_the_length_limit_is_exact():
    assert len(check_message("x" * MAX_MESSAGE_CHARACTERS + "  ", has_images=False)) == 4000
    with pytest.raises(InputError) as caught:
        check_message("x" * 4001, has_images=True)

    assert caught.value.code == "message_too_long"
    assert caught.value.values == {"limit": 4000, "length": 4001}


@given(st.text())
def test_a_message_is_refused_by_code_or_can_be_stored_and_checked_again(typed):
    try:
        kept = check_message(typed, has_images=False)
    except InputError as error:
        assert error.code == "message_empty"
    else:
        kept.encode("utf-8")
        assert check_message(kept, has_images=False) == kept


# --- Language ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("I have been feeling down since my mother died.", "en"),
        ("hi", "en"),
        ("I’m so tired", "en"),
        ("我最近总是睡不着，很焦虑。", "zh"),
        ("我最近 anxiety 很严重", "zh"),
        ("My friend said 加油 and I felt better about it", "en"),
        ("Je suis très triste et je ne dors pas.", "fr"),
        ("Ich fühle mich so allein und habe Angst.", "de"),
        ("Estoy muy triste y no tengo a nadie.", "es"),
        ("Sono molto triste e non dormo", "it"),
        ("Estou muito triste e não durmo", "pt"),
        ("Ik ben zo moe en het gaat niet goed", "nl"),
        ("とても寂しいです。毎日泣いています。", "ja"),
        ("요즘 너무 외로워요", "ko"),
        ("Мне очень грустно", "ru"),
        ("أشعر بالوحدة", "ar"),
        ("", "und"),
        ("123 ... :-(", "und"),
        ("😢😢", "und"),
    ],
)
def test_the_language_of_a_sentence(text, language):
    assert language_of(text) == language


@given(st.text())
def test_any_text_has_a_language_code(text):
    assert language_of(text) in {
        *("en", "fr", "de", "es", "it", "pt", "nl"),
        *("zh", "ja", "ko", "ru", "el", "ar", "he", "hi", "th", "und"),
    }
