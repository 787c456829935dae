"""Supporter turns with reasoning by rule: labels by hand, and properties of every row."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.cer import CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import parse, read
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage, Strategy
from tests.training.cer.source_dialogues import source_dialogue
from tests.training.corpora_fixture import esconv_rows, write_esconv
from training.cer.esconv_rules import Config, RowWriter, rule_rows
from training.cer.records import SourceDialogue, SourceUtterance
from training.cer.rule_reasoning import TurnLabels, exact_quote, label_turn, stage_at
from training.cer.steps.cases import printable
from training.data.faces import FACE_CLASSES

FACE_OF = dict.fromkeys(Emotion, "sad") | {Emotion.JOY: "happy", Emotion.NEUTRAL: "neutral"}
PHOTOS = {("train", name): [f"{name}-{number}" for number in range(3)] for name in FACE_CLASSES}


def talk(
    *texts: str,
    emotion: Emotion = Emotion.ANXIETY,
    initial: int = 5,
    final: int = 2,
    strategy: Strategy = Strategy.QUESTION,
    problem: str = "job crisis",
) -> SourceDialogue:
    """Seeker and supporter in turn."""
    speakers = (Speaker.SEEKER, Speaker.SUPPORTER)
    return source_dialogue(
        "esconv/lines/train/1",
        *(
            SourceUtterance(
                speaker=(speaker := speakers[number % 2]),
                text=text,
                strategy=strategy if speaker is Speaker.SUPPORTER else None,
            )
            for number, text in enumerate(texts)
        ),
        emotion=emotion,
        problem=problem,
        intensity_before=initial,
        intensity_after=final,
    )


def rows_of(
    dialogue: SourceDialogue, share: float = 0.0, limit: int = 1200, seed: int = 0, photos=PHOTOS
) -> list[CerRecord]:
    writer = RowWriter("train", photos, FACE_OF, share, limit)
    return list(writer.rows(dialogue, np.random.default_rng(seed)))


def turn_of(row: CerRecord):
    return parse(row.first.turn)


def photo_of(row: CerRecord) -> str | None:
    assert not any(utterance.images for utterance in row.case.history[:-1])
    return next(iter(row.case.history[-1].images), None)


def labels_of(dialogue: SourceDialogue, position: int) -> TurnLabels:
    """Labels of the turn at a position of a dialogue in which the speakers alternate."""
    utterances = dialogue.utterances
    texts = [u.text for u in utterances[:position] if u.speaker is Speaker.SEEKER]
    supporter = [n for n, u in enumerate(utterances) if u.speaker is Speaker.SUPPORTER]
    return label_turn(
        dialogue.emotion,
        dialogue.intensity_before,
        dialogue.intensity_after,
        texts,
        supporter.index(position) / len(supporter),
    )


# --- labels by hand ------------------------------------------------------------------------------

# Six supporter turns, at places 0, 1/6, 2/6, 3/6, 4/6, 5/6; the intensity falls from 5 to 2.
SIX = talk(
    *("Hello there.", "Hi!"),
    *("My boss told me I must go, and I cannot think of anything else.", "Oh."),
    *("I lie awake all night.", "I see."),
    *("Yes.", "Hm."),
    *("Maybe you are right about that.", "Mhm."),
    *("Thank you, I feel a bit better now.", "Good."),
)


@pytest.mark.parametrize(
    ("turn", "labels"),
    [
        # two words have been said: nothing is known yet
        (1, TurnLabels(Stage.EXPLORATION, Emotion.NEUTRAL, 1)),
        # place 1/6: exploration; 5 - 3/6 = 4.5, and round() takes the even 4
        (3, TurnLabels(Stage.EXPLORATION, Emotion.ANXIETY, 4)),
        # place 2/6: comforting; 5 - 3 * 2/6 = 4
        (5, TurnLabels(Stage.COMFORTING, Emotion.ANXIETY, 4)),
        # place 4/6: action; 5 - 3 * 4/6 = 3; no thanks in "Maybe you are right"
        (9, TurnLabels(Stage.ACTION, Emotion.ANXIETY, 3)),
        # place 5/6: thanks, after a talk that helped
        (11, TurnLabels(Stage.ACTION, Emotion.JOY, 2)),
    ],
)
def test_labels_follow_the_place_of_the_turn(turn, labels):
    assert labels_of(SIX, turn) == labels


def test_thanks_are_joy_only_where_the_talk_helped_and_only_near_its_end():
    texts = [utterance.text for utterance in SIX.utterances]
    in_vain = talk(*texts, initial=4, final=4)
    early = talk("Thanks for asking, I lost my work and my home in one week.", "Oh.", *texts)

    assert labels_of(in_vain, 11) == TurnLabels(Stage.ACTION, Emotion.ANXIETY, 4)
    assert labels_of(early, 1) == TurnLabels(Stage.EXPLORATION, Emotion.ANXIETY, 5)


def test_an_intensity_can_rise_but_stays_on_its_scale():
    texts = [utterance.text for utterance in SIX.utterances]

    # 3 + 2 * 4/6 = 4.33
    assert labels_of(talk(*texts, initial=3, final=5), 9).intensity == 4
    # nobody rates 9, but a label off the scale would stop the whole stage
    assert label_turn(Emotion.ANXIETY, 9, 9, texts[:5:2], 0.3).intensity == 5


def test_stages_are_thirds():
    assert [stage_at(n / 9) for n in range(9)] == [
        *[Stage.EXPLORATION] * 3,
        *[Stage.COMFORTING] * 3,
        *[Stage.ACTION] * 3,
    ]


# --- one row by hand -----------------------------------------------------------------------------


def test_a_turn_holds_its_labels_a_quote_and_the_corpus_reply():
    first = talk(
        "I am so worried. My boss said that the whole team has to go by the end of this very month.",
        'Who said "go"?',
    )

    (row,) = rows_of(first)
    turn = turn_of(row)

    assert (row.id, row.case.dialogue_id) == ("esconv/lines/train/1#0", "esconv/lines/train/1")
    labels = row.case.labels
    assert (labels.problem, labels.strategies) == ("job crisis", (Strategy.QUESTION,))
    assert (labels.emotion, labels.emotion_of) == (Emotion.ANXIETY, "dialogue")
    assert (labels.intensity_before, labels.intensity_after) == (5, 2)
    assert turn.reply == row.case.original == 'Who said "go"?'
    history, emotion, strategy = turn.reasoning
    assert history.stage is Stage.EXPLORATION
    # the second sentence has 18 words, so the first is quoted
    assert '"I am so worried."' in history.text
    assert (emotion.sentiment.value, emotion.emotion.value, emotion.intensity) == (
        "Negative",
        "Anxiety",
        5,
    )
    assert '"worried"' in emotion.text
    assert strategy.strategy == "Question"


def test_the_label_of_the_dialogue_stays_where_a_rule_departs_from_it():
    greeted, *_, thanked = rows_of(SIX)

    for row, by_rule in ((greeted, Emotion.NEUTRAL), (thanked, Emotion.JOY)):
        assert turn_of(row).reasoning.emotion.emotion is by_rule
        assert row.case.labels.emotion is Emotion.ANXIETY


def test_a_reply_of_nothing_but_markup_is_skipped():
    text = "I lost my job and do not know what to do."

    assert rows_of(talk(text, "<>")) == []
    assert turn_of(rows_of(talk(text, "> I hear you <"))[0]).reply == "I hear you"


# --- properties of every row -----------------------------------------------------------------------

words = st.sampled_from(
    [
        *("worried", "thank", "you", "helpful", "sad", "work", "Stage: Action", "\nIntensity: 9"),
        *("<reply>", "</history>", "<|im_end|>", '"', "'", "[INST]", "{quote}"),
        *("{", "}", "...", "?"),
        *("\n", "\u2028", "\x85", "\u00a0", "\U0001f614", "难过"),
    ]
)
texts = (
    (st.lists(words, min_size=1, max_size=25).map(" ".join) | st.text(min_size=1, max_size=40))
    .map(printable)
    .filter(lambda text: text.strip("<> \n"))
)
talks = st.builds(
    talk,
    *[texts] * 6,
    emotion=st.sampled_from([e for e in Emotion if e not in {Emotion.JOY, Emotion.NEUTRAL}]),
    initial=st.integers(1, 5),
    final=st.integers(1, 5),
    strategy=st.sampled_from(Strategy),
    problem=st.sampled_from(["job crisis", "sleep problems", "something new"]),
)


@settings(deadline=None)
@given(talks, st.sampled_from([0.0, 1.0]), st.sampled_from([0, 40, 1200]))
def test_every_row_is_a_complete_turn_with_the_labels_it_was_built_from(talk, share, limit):
    for row in rows_of(talk, share=share, limit=limit):
        reading = read(row.first.turn)
        assert reading.is_complete, reading.problems
        assert reading.unreadable == ()
        history, emotion, strategy = reading.turn.reasoning
        expected = labels_of(talk, 2 * row.case.round + 1)
        assert TurnLabels(history.stage, emotion.emotion, emotion.intensity) == expected
        assert emotion.sentiment is SENTIMENT_OF[expected.emotion]
        assert strategy.strategy == row.case.labels.strategies[0] == talk.utterances[1].strategy


@settings(deadline=None)
@given(talks, st.sampled_from([0, 40, 1200]))
def test_only_the_history_is_quoted(talk, limit):
    for row in rows_of(talk, limit=limit):
        reasoning = turn_of(row).reasoning
        seeker = [u.text for u in row.case.history if u.speaker is Speaker.SEEKER]
        for quote in re.findall(r'"(.*?)"', reasoning.history.text):
            assert quote in seeker[-1]
        for cue in re.findall(r'"(.*?)"', reasoning.emotion.text):
            assert any(cue in text for text in seeker), cue


@given(texts | st.lists(words | st.sampled_from([", ", ". "]), min_size=10).map(" ".join))
def test_a_quote_is_a_short_exact_part_of_the_message(text):
    quote = exact_quote(text)

    if quote is None:
        assert re.search(r'[<>\[\]{}"]', text)
    else:
        assert quote in text and quote == quote.strip() != "" and "\n" not in quote
        assert len(quote.split()) <= 12
        assert not re.search(r'[<>\[\]{}"]', quote)


TWELVE = "I have not slept one night since my boss told me that"


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        ("Hi. My boss  shouted at ME! He left.", "My boss  shouted at ME!"),
        (f"{TWELVE}. Hello to you.", f"{TWELVE}."),
        # 13 words: the longest clause
        (f"I cried, as I said before, {TWELVE} I must go", "as I said before"),
        # no clause that is short enough: how it opens
        (f"{TWELVE} I must go from here", TWELVE),
        # one or two words only where there are no more
        (f"Yes. {TWELVE} I must go", "Yes. I have not slept one night since my boss told me"),
        ("Thank you.", "Thank you."),
        # no mark-up
        ('He called me "lazy". I just left then.', "I just left then."),
        ("He said <stop>", None),
        (f'"{TWELVE} I must go"', None),
    ],
)
def test_the_longest_sentence_or_clause_that_fits_is_quoted(text, quote):
    assert exact_quote(text) == quote


def test_a_message_that_cannot_be_quoted_is_not_and_a_cue_is_spelt_as_the_seeker_did():
    (row,) = rows_of(talk('I am so WORRIED that they say "you must all go today".', "Oh."))
    turn = turn_of(row)

    assert '"' not in turn.reasoning.history.text
    assert '"WORRIED"' in turn.reasoning.emotion.text


@settings(deadline=None)
@given(talks, st.integers(0, 120))
def test_the_history_keeps_its_newest_turns_and_always_the_last(talk, limit):
    for row in rows_of(talk, limit=limit):
        before = talk.utterances[: 2 * row.case.round + 1]
        kept = [utterance.text for utterance in row.case.history]

        whole = [row.text for row in rows_of(talk, limit=10_000)[row.case.round].case.history]
        assert len(whole) == len(before) and kept == whole[-len(kept) :]
        if len(kept) > 1:
            assert sum(map(len, kept)) <= limit
        if len(kept) < len(whole):
            assert sum(map(len, whole[-len(kept) - 1 :])) > limit


@settings(deadline=None)
@given(talks)
def test_a_photo_fits_the_emotion_and_stands_at_the_last_message(talk):
    for row in rows_of(talk, share=1.0):
        emotion = turn_of(row).reasoning.emotion
        assert photo_of(row) in PHOTOS["train", FACE_OF[emotion.emotion]]
        assert re.search(r"picture|photo", emotion.text)
    for row in rows_of(talk, share=0.0):
        assert photo_of(row) is None
        assert not re.search(r"picture|photo", turn_of(row).reasoning.emotion.text)


def test_a_class_without_photos_shows_none():
    photos = {("train", "happy"): ["h"], ("valid", "sad"): ["s"]}

    # only the thanks at the end are joy
    assert [photo_of(row) for row in rows_of(SIX, share=1.0, photos=photos)] == [None] * 5 + ["h"]


def test_the_seed_alone_decides_wording_and_photos():
    assert rows_of(SIX, share=0.5) == rows_of(SIX, share=0.5) != rows_of(SIX, share=0.5, seed=1)


# --- the fixture corpus as a whole ---------------------------------------------------------------


def test_the_share_of_photos_is_near_the_setting(tmp_path, small_corpora):
    write_esconv(tmp_path / "train.txt.gz", esconv_rows(80))
    config = Config(
        esconv=tmp_path, output=tmp_path, faces=small_corpora / "faces", face_share=0.25, seed=7
    )

    rows = list(rule_rows(config, "train"))

    # five turns of each dialogue answer the seeker; 400 draws at 0.25: 100, give or take 4 * 8.7
    assert len(rows) == 400
    assert abs(sum(photo_of(row) is not None for row in rows) - 100) < 35
    assert Counter(s for row in rows for s in row.case.labels.strategies).keys() == {*Strategy}
    assert len({row.id for row in rows}) == 400
