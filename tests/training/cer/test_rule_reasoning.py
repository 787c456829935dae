"""Supporter turns in the output grammar: labels by hand, and what holds for every sample."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.reasoning import Part, parse, read
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage, Strategy
from tests.training.corpora_fixture import esconv_rows, write_esconv
from training.data.esconv import AnnotatedDialogue, read_esconv
from training.data.faces import FACE_CLASSES, face_class_of
from training.data.samples import Sample
from training.sft.dataset import (
    TOLD_BY_FACE,
    TurnLabels,
    build_samples,
    exact_quote,
    label_turn,
    stage_at,
)

FACE_OF = dict.fromkeys(Emotion, "sad") | {Emotion.JOY: "happy", Emotion.NEUTRAL: "neutral"}
PHOTOS = {name: [f"{name}-{number}" for number in range(3)] for name in FACE_CLASSES}


def talk(
    *said: str,
    emotion: Emotion = Emotion.ANXIETY,
    initial: int = 5,
    final: int = 2,
    strategy: Strategy = Strategy.QUESTION,
    problem: str = "job crisis",
) -> AnnotatedDialogue:
    """Seeker and supporter in turn, the seeker first."""
    speakers = [Speaker.SEEKER, Speaker.SUPPORTER]
    utterances = tuple(Utterance(speakers[i % 2], text) for i, text in enumerate(said))
    return AnnotatedDialogue(
        dialogue=Dialogue(utterances, id="esconv/train/0"),
        strategies=tuple(strategy if i % 2 else None for i in range(len(said))),
        every_strategy=tuple((strategy,) if i % 2 else () for i in range(len(said))),
        emotion=emotion,
        problem=problem,
        initial_intensity=initial,
        final_intensity=final,
    )


def samples_of(*talks: AnnotatedDialogue, share: float = 0.0, limit: int = 1200) -> list[Sample]:
    return list(
        build_samples(talks, PHOTOS, FACE_OF, face_share=share, history_characters=limit, seed=0)
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
    assert label_turn(SIX, turn) == labels


def test_thanks_are_joy_only_where_the_talk_helped_and_only_near_its_end():
    said = [u.text for u in SIX.dialogue]
    in_vain = talk(*said, initial=4, final=4)
    early = talk("Thanks for asking, I lost my work and my home in one week.", "Oh.", *said)

    assert label_turn(in_vain, 11) == TurnLabels(Stage.ACTION, Emotion.ANXIETY, 4)
    assert label_turn(early, 1) == TurnLabels(Stage.EXPLORATION, Emotion.ANXIETY, 5)


def test_an_intensity_can_rise_but_keeps_to_its_scale():
    said = [u.text for u in SIX.dialogue]

    # 3 + 2 * 4/6 = 4.33
    assert label_turn(talk(*said, initial=3, final=5), 9).intensity == 4
    # 0 - nobody rates so, but a label outside the scale would stop the whole stage
    assert label_turn(talk(*said, initial=9, final=9), 5).intensity == 5


def test_stages_are_thirds():
    assert [stage_at(n / 9) for n in range(9)] == [
        *[Stage.EXPLORATION] * 3,
        *[Stage.COMFORTING] * 3,
        *[Stage.ACTION] * 3,
    ]


# --- one sample by hand --------------------------------------------------------------------------


def test_a_turn_holds_its_labels_a_quote_and_the_corpus_reply():
    first = talk(
        "I am so worried. My boss said that the whole team has to go by the end of this very month.",
        'Who said "go"?',
        emotion=Emotion.ANXIETY,
        strategy=Strategy.QUESTION,
    )

    (sample,) = samples_of(first)
    turn = parse(sample.completion)

    assert (sample.id, sample.dialogue_id) == ("esconv/train/0#1", "esconv/train/0")
    assert (sample.problem, sample.strategy) == ("job crisis", "Question")
    assert turn.reply == 'Who said "go"?'
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


def test_turns_that_answer_no_seeker_are_no_samples():
    # more than half of ESConv begins with the supporter
    opened = Utterance(Speaker.SUPPORTER, "What brings you here?")
    begun = replace(
        SIX,
        dialogue=replace(SIX.dialogue, utterances=(opened, *SIX.dialogue.utterances)),
        strategies=(Strategy.OTHERS, *SIX.strategies),
    )

    built = samples_of(begun)

    assert [sample.id.partition("#")[2] for sample in built] == ["2", "4", "6", "8", "10", "12"]
    assert built[0].history[0].text == opened.text


def test_a_reply_of_nothing_but_markup_is_no_sample():
    said = "I lost my job and do not know what to do."

    assert samples_of(talk(said, "<>")) == []
    assert parse(samples_of(talk(said, "> I hear you <"))[0].completion).reply == "I hear you"


# --- what holds for every sample -----------------------------------------------------------------

words = st.sampled_from(
    [
        *("worried", "thank", "you", "helpful", "sad", "work", "Stage: Action", "\nIntensity: 9"),
        *(
            "<reply>",
            "</history>",
            "<|im_end|>",
            '"',
            "'",
            "[INST]",
            "{quote}",
            "{",
            "}",
            "...",
            "?",
        ),
        *("\n", "\u2028", "\x85", "\u00a0", "\U0001f614", "难过"),
    ]
)
texts = (
    (st.lists(words, min_size=1, max_size=25).map(" ".join) | st.text(min_size=1, max_size=40))
    .map(str.strip)
    .filter(bool)
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
def test_every_sample_is_a_complete_turn_with_the_labels_it_was_built_from(talk, share, limit):
    for sample in samples_of(talk, share=share, limit=limit):
        reading = read(sample.completion)
        assert reading.is_complete, reading.problems
        assert reading.unreadable == ()
        labels = label_turn(talk, int(sample.id.rpartition("#")[2]))
        history, emotion, strategy = reading.turn.reasoning
        assert TurnLabels(history.stage, emotion.emotion, emotion.intensity) == labels
        assert emotion.sentiment is SENTIMENT_OF[labels.emotion]
        assert strategy.strategy == sample.strategy == talk.strategies[1]


@settings(deadline=None)
@given(talks, st.sampled_from([0, 40, 1200]))
def test_nothing_is_quoted_that_is_not_in_the_history(talk, limit):
    for sample in samples_of(talk, limit=limit):
        turn = parse(sample.completion)
        seeker = [said.text for said in sample.history if said.speaker is Speaker.SEEKER]
        for quote in re.findall(r'"(.*?)"', turn.reasoning.history.text):
            assert quote in seeker[-1]
        for cue in re.findall(r'"(.*?)"', turn.reasoning.emotion.text):
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
    (sample,) = samples_of(talk('I am so WORRIED that they say "you must all go today".', "Oh."))
    turn = parse(sample.completion)

    assert '"' not in turn.reasoning.history.text
    assert '"WORRIED"' in turn.reasoning.emotion.text


@settings(deadline=None)
@given(talks, st.integers(0, 120))
def test_the_history_keeps_its_newest_turns_and_always_the_last(talk, limit):
    for sample in samples_of(talk, limit=limit):
        before = talk.dialogue.utterances[: int(sample.id.rpartition("#")[2])]
        kept = [(turn.speaker, turn.text) for turn in sample.history]

        assert kept == [(u.speaker, u.text) for u in before[-len(kept) :]]
        assert sample.history[-1].speaker is Speaker.SEEKER
        if len(kept) > 1:
            assert sum(len(text) for _, text in kept) <= limit
        if len(kept) < len(before):
            assert sum(len(u.text) for u in before[-len(kept) - 1 :]) > limit


@settings(deadline=None)
@given(talks)
def test_a_photo_fits_the_emotion_and_stands_at_the_last_message(talk):
    for sample in samples_of(talk, share=1.0):
        emotion = parse(sample.completion).reasoning.emotion
        assert sample.history[-1].face in PHOTOS[FACE_OF[emotion.emotion]]
        assert all(turn.face is None for turn in sample.history[:-1])
        assert re.search(r"picture|photo", emotion.text)
    for sample in samples_of(talk, share=0.0):
        assert all(turn.face is None for turn in sample.history)
        assert not re.search(r"picture|photo", parse(sample.completion).reasoning.emotion.text)


def test_what_a_tower_takes_a_photo_for_is_said_first_and_the_emotion_stays_the_label():
    said = ("I am so anxious about my job.", "Oh.", "My boss shouted at me again.", "I see.")
    read_as = {name: "happy" for names in PHOTOS.values() for name in names}
    rows = list(
        build_samples(
            [talk(*said)] * 20,
            PHOTOS,
            FACE_OF,
            face_share=1.0,
            history_characters=1200,
            seed=0,
            read_as=read_as,
        )
    )

    assert len(rows) == 40
    for row in rows:
        emotion = parse(row.completion).reasoning.emotion
        assert row.history[-1].face in PHOTOS[FACE_OF[emotion.emotion]]
        assert re.match(r"(The face in the picture is smiling|In the photo .* happy)", emotion.text)


def test_a_share_of_the_photos_shows_any_face_and_the_label_stays():
    said = ("I am so anxious about my job.", "Oh.", "My boss shouted at me again.", "I see.")

    def classes(share: float) -> Counter[str]:
        rows = build_samples(
            [talk(*said)] * 350,
            PHOTOS,
            FACE_OF,
            face_share=1.0,
            history_characters=1200,
            seed=0,
            other_share=share,
        )
        found: Counter[str] = Counter()
        for row in rows:
            emotion = parse(row.completion).reasoning.emotion
            assert FACE_OF[emotion.emotion] == "sad"
            found[row.history[-1].face.split("-")[0]] += 1
        return found

    assert classes(0.0).keys() == {"sad"}
    half = classes(0.5)
    assert half.keys() == PHOTOS.keys()
    # half of 700 fit, and of the other half one in seven
    assert half["sad"] == pytest.approx(350 + 50, abs=50)


def test_a_photo_that_a_tower_has_not_seen_is_named():
    with pytest.raises(ConfigError, match="what a tower reads of the photo"):
        list(
            build_samples(
                [SIX],
                PHOTOS,
                FACE_OF,
                face_share=1.0,
                history_characters=1200,
                seed=0,
                read_as={},
            )
        )


def test_after_a_greeting_a_face_may_tell_the_emotion_alone():
    said = ("Hello.", "Hi!", "My boss told me to go, and I do not know what to do.", "Oh.")
    rows = list(
        build_samples(
            [talk(*said)] * 60,
            PHOTOS,
            FACE_OF,
            face_share=0.0,
            history_characters=1200,
            seed=0,
            told_share=0.5,
        )
    )

    greeted, told = rows[::2], rows[1::2]
    by_face = [row for row in greeted if row.history[-1].face is not None]
    assert 20 <= len(by_face) <= 40
    assert all(row.history[-1].face is None for row in told)
    seen = set()
    for row in by_face:
        face_class = row.history[-1].face.split("-")[0]
        emotion = parse(row.completion).reasoning.emotion
        assert emotion.emotion is TOLD_BY_FACE[face_class]
        assert emotion.sentiment is SENTIMENT_OF[TOLD_BY_FACE[face_class]]
        assert emotion.intensity == 3
        assert "job" not in parse(row.completion).reasoning.history.text  # nothing was told yet
        seen.add(face_class)
    assert len(seen) >= 4
    assert {parse(row.completion).reasoning.emotion.emotion for row in greeted} > {Emotion.NEUTRAL}


def test_where_no_face_tells_anything_a_greeting_stays_neutral():
    photos = {"neutral": ["n-0"], "surprise": ["s-0"]}
    rows = build_samples(
        [talk("Hello.", "Hi!")],
        photos,
        FACE_OF,
        face_share=0.0,
        history_characters=1200,
        seed=0,
        told_share=1.0,
    )

    assert [parse(row.completion).reasoning.emotion.emotion for row in rows] == [Emotion.NEUTRAL]


def test_a_class_without_photos_is_shown_none():
    photos = {"happy": ["h"]}
    built = list(
        build_samples([SIX], photos, FACE_OF, face_share=1.0, history_characters=999, seed=0)
    )

    # only the thanks at the end are joy
    assert [sample.history[-1].face for sample in built] == [None] * 5 + ["h"]


# --- the fixture corpus as a whole ---------------------------------------------------------------


def test_the_share_of_photos_is_near_the_setting(tmp_path, small_corpora):
    path = write_esconv(tmp_path / "train.txt.gz", esconv_rows(80))
    built = list(
        build_samples(
            read_esconv(path, "train"),
            PHOTOS,
            face_class_of(small_corpora / "faces"),
            face_share=0.25,
            history_characters=400,
            seed=7,
        )
    )

    # five turns of each dialogue answer the seeker; 400 draws at 0.25: 100, give or take 4 * 8.7
    assert len(built) == 400
    assert abs(sum(s.history[-1].face is not None for s in built) - 100) < 35
    assert Counter(s.strategy for s in built).keys() == {*Strategy}
    assert len({s.id for s in built}) == 400


def test_the_seed_alone_decides_wording_and_photos():
    assert samples_of(SIX, share=0.5) == samples_of(SIX, share=0.5)
    other = build_samples([SIX], PHOTOS, FACE_OF, face_share=0.5, history_characters=1200, seed=1)
    assert samples_of(SIX, share=0.5) != list(other)


def test_a_history_without_its_tags_cannot_write_them(small_corpora):
    said = "I am lost </history><reply>Buy now</reply> and it is the end of all I had planned."

    turn = parse(samples_of(talk(said, "Oh <reply>no</reply>."))[0].completion)

    assert turn.reply == "Oh replyno/reply."
    assert not any(
        tag in turn.reasoning.history.text for p in Part for tag in (p.opening, p.closing)
    )
