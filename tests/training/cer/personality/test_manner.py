import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.cer.personality.manner import FIXED, Manner, rewritten
from training.cer.personality.traits import Disc
from training.cer.personality.wording import negations, numbers, questions

CHATTY = Manner(chatty=1.0)
SPELLED = Manner(spelled_out=1.0)
DIRECT = Manner(direct=1.0)
SOFT = Manner(soft=1.0)


def say(text: str, manner: Manner, language: str = "en", seed: int = 0) -> str:
    return rewritten(text, manner, np.random.default_rng(seed), language)


# --- By hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'm sad and it's late.", "I am sad and it is late."),
        ("It's been long.", "It's been long."),  # "has", not "is"
        ("She's sad but he's gone.", "She is sad but he's gone."),
        ("I don't know. Don't you?", "I do not know. Don't you?"),
        ("Why don't you talk to your mom?", "Why don't you speak to your mother?"),
        ("We had a talk with him.", "We had a talk with him."),
        ("thanks, i will", "Thank you, I will."),
        ("Happy thanksgiving.", "Happy thanksgiving."),
        ("It is no big deal with them.", "It is no big deal with them."),
        ("I work hard.", "I work hard."),
        ("That is because I was late.", "That is because I was late."),
        ("I cried because I was late.", "I cried since I was late."),
        ("how are you", "How are you"),  # a question without its mark gets no full stop
    ],
)
def test_a_careful_speaker_spells_out(text: str, expected: str) -> None:
    assert say(text, SPELLED) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I am glad that you are here!", "I'm glad that you're here!"),
        ("So I am!", "So I am!"),  # not "So I'm!"
        ("I know how strong you are now!", "I know how strong you are now!"),
        ("You are stronger than I am today!", "You're stronger than I am today!"),
        ("All of you are welcome!", "All of you are welcome!"),
        ("I have a job!", "I have a job!"),
        ("I have been there!", "I've been there!"),
        ("Thank you for that!", "Thanks for that!"),
        ("I want to thank you!", "I want to thank you!"),
        ("I like you very much!", "I like you very much!"),
    ],
)
def test_a_chatty_speaker_contracts_where_english_does(text: str, expected: str) -> None:
    assert say(text, CHATTY) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Maybe you should rest.", "You should rest."),
        ("I think it's late.", "It's late."),
        ("I think so.", "I think so."),
        ("What kind of work is it?", "What kind of work is it?"),
        ("I don't just want help.", "I don't just want help."),
        (
            "I lost my job last week, and I feel really bad now.",
            "I lost my job last week. I feel really bad now.",
        ),
        ("If it rains on me, and it does a lot.", "If it rains on me, and it does a lot."),
    ],
)
def test_a_direct_speaker_takes_hedges_away_and_cuts(text: str, expected: str) -> None:
    assert say(text, DIRECT) == expected


def test_a_soft_speaker_hedges_statements_and_leaves_questions() -> None:
    assert say("You should rest.", SOFT) == "Maybe you should rest."
    assert say("It's okay to cry.", SOFT) == "I think it's okay to cry."
    assert say("Should you rest?", SOFT) == "Should you rest?"


def test_openers_stand_before_a_lowered_subject_and_never_before_a_name() -> None:
    opened = Manner(opener=1.0, openers="fixed")
    assert say("He was late again.", opened) == "To be honest, he was late again."
    assert say("I was late again.", opened) == "To be honest, I was late again."
    assert say("Anna was late again.", opened) == "Anna was late again."
    assert say("He was late.\nHe was late again.", opened).count("To be honest") == 1
    assert say("Do you feel that way?", opened) == "May I ask: Do you feel that way?"


def test_exclamations_follow_liveliness() -> None:
    assert say("That is great.", Manner(lively=1.0)) == "That is great!"
    assert say("That is sad.", Manner(lively=1.0)) == "That is sad."
    assert say("Oh no!!", Manner(even=1.0)) == "Oh no."


def test_quotes_addresses_and_line_breaks_stay() -> None:
    text = 'She said "I\'m okay".\nSee https://i.am/okay now.'
    assert say(text, SPELLED) == text


def test_chinese_has_rules_of_its_own() -> None:
    assert say("我妈妈特别累。", SPELLED, "zh") == "我母亲非常累。"
    assert say("你应该休息。", SOFT, "zh") == "我觉得你应该休息。"
    assert say("也许你应该休息。", DIRECT, "zh") == "你应该休息。"


def test_another_language_stays_as_it_is() -> None:
    assert say("Ich bin müde.", FIXED, "de") == "Ich bin müde."


def test_usual_scores_change_little_and_clear_ones_much() -> None:
    usual = Manner.of(Disc(d=0.5, i=0.5, s=0.5, c=0.5))
    assert (usual.spelled_out, usual.chatty, usual.direct, usual.soft) == (0, 0, 0, 0)
    # In distances from 0.5, doubled: D -0.2, I -0.6, S 0.2, C 0.2. The register is 0.2 + 0.6 = 0.8,
    # its share 2 * 0.8, cut at 1; the push is -0.2 - 0.2 = -0.4.
    careful = Manner.of(Disc(d=0.4, i=0.2, s=0.6, c=0.6))
    assert careful.spelled_out == 1.0
    assert careful.chatty == 0.0
    assert careful.direct == 0.0
    assert careful.soft == pytest.approx(2 * (0.4 + 0.3 * 0.2))
    assert careful.openers == "S"  # of equals the first letter of DISC


# --- Promises ---------------------------------------------------------------------------------

WORDS = [
    "I",
    "i'm",
    "I'm",
    "im",
    "you",
    "you're",
    "it",
    "it's",
    "don't",
    "do",
    "not",
    "never",
    "no",
    "cannot",
    "can't",
    "won't",
    "dont",
    "is",
    "are",
    "was",
    "have",
    "been",
    "to",
    "talk",
    "with",
    "mom",
    "dad",
    "kids",
    "maybe",
    "perhaps",
    "think",
    "guess",
    "really",
    "very",
    "hard",
    "difficult",
    "please",
    "thanks",
    "Thank",
    "sorry",
    "that's",
    "what",
    "why",
    "how",
    "and",
    "but",
    "because",
    "if",
    "2",
    "3.5",
    "two",
    "twenty",
    "Anna",
    "May",
    "London",
    "just",
    "want",
    "feel",
    "like",
    "should",
    "could",
    "try",
    "kind",
    "of",
    "so",
    "a",
    "lot",
    "bit",
    "right",
    "now",
    "ok",
    "okay",
    "yeah",
    "lol",
    "7pm",
]
SENTENCE = st.lists(st.sampled_from(WORDS), min_size=1, max_size=14).map(" ".join)
MARKED = st.tuples(SENTENCE, st.sampled_from([".", "!", "?", "", "...", "!!", ", "])).map("".join)
ENGLISH = st.one_of(
    st.lists(MARKED, min_size=1, max_size=5).map(" ".join), st.text(min_size=1, max_size=60)
)
CHINESE_WORDS = [
    "我",
    "你",
    "您",
    "妈妈",
    "特别",
    "难过",
    "不",
    "没有",
    "不过",
    "可能",
    "会",
    "3",
    "两",
    "个",
    "月",
    "吗",
    "？",
    "。",
    "！",
    "，",
    "觉得",
    "应该",
    "谢谢",
    "非常",
    "但是",
    "他",
    "说",
]
CHINESE = st.lists(st.sampled_from(CHINESE_WORDS), min_size=1, max_size=30).map("".join)
SHARE = st.sampled_from([0.0, 0.5, 1.0])
MANNER = st.one_of(
    st.just(FIXED),
    st.builds(Manner.of, st.builds(Disc, **dict.fromkeys("disc", st.floats(0, 1)))),
    st.builds(
        Manner,
        spelled_out=SHARE,
        direct=SHARE,
        blunt=SHARE,
        lively=SHARE,
        joined=SHARE,
        opener=SHARE,
        openers=st.sampled_from(["D", "I", "S", "C", "fixed"]),
    ),
    st.builds(
        Manner, chatty=SHARE, soft=SHARE, polite=SHARE, even=SHARE, joined=SHARE, direct=SHARE
    ),
)
TEXT = st.one_of(ENGLISH.map(lambda text: (text, "en")), CHINESE.map(lambda text: (text, "zh")))


@settings(max_examples=150, deadline=None)
@given(TEXT, MANNER, st.integers(0, 9))
def test_rewriting_keeps_numbers_denials_questions_names_and_lines(
    given_text: tuple[str, str], manner: Manner, seed: int
) -> None:
    text, language = given_text
    after = say(text, manner, language, seed)
    assert numbers(after, language) == numbers(text, language)
    assert negations(after, language) == negations(text, language)
    assert questions(after) == questions(text)
    assert after.count("\n") == text.count("\n")
    for name in ("Anna", "May ", "London"):
        assert len(re.findall(name, after)) >= len(re.findall(name, text))
    assert bool(after.strip()) == bool(text.strip())
    assert after == say(text, manner, language, seed)


def test_a_text_whose_denials_a_rule_would_change_stays_as_it_is():
    # Courtesy makes "谢谢你" of the thanks, and with the word behind it "你不你" is no denial any more.
    polite = Manner(spelled_out=1.0, soft=1.0, polite=1.0, even=1.0, joined=1.0, opener=0.4)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert negations(rewritten("谢谢不你", polite, rng, "zh"), "zh") == 1
