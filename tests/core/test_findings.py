"""What a rule tells a judge about a step: counts by hand, both languages, any text, and time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.findings import StepFindings
from compeer_core.reasoning import EmotionStep, HistoryStep, StrategyStep
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from compeer_core.unifireward import Judge, ask_about_step
from tests.core.example import DIALOGUE, TEXT
from tests.core.test_unifireward import FIRST, Recorder

TALK = Dialogue(
    (
        Utterance(Speaker.SEEKER, "My scholarship is failing."),
        Utterance(Speaker.SUPPORTER, "Have you asked your teacher?"),
        Utterance(Speaker.SEEKER, "No. I can't focus at home, there are distractions."),
    )
)


def history(text: str) -> HistoryStep:
    return HistoryStep(text, Stage.EXPLORATION)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        # focus, home; scholarship, failed; teacher; landlord, angry: 7 words
        (
            history('The scholarship failed; at "home" no focus. The teacher, an angry landlord.'),
            "Words: last message 3, earlier 3, supporter 1, nobody 3 (angry, landlord). "
            "Quotations: 1 said, 0 not said.",
        ),
        (
            EmotionStep('They fear "failed exams".', Sentiment.NEGATIVE, Emotion.FEAR, 4),
            "Words: last message 0, earlier 3, supporter 0, nobody 7 (fear, exams). "
            "Quotations: 0 said, 1 not said.",
        ),
        (
            StrategyStep("It is for them.", Strategy.QUESTION),
            "Words: last message 0, earlier 0, supporter 0, nobody 0. "
            "Quotations: 0 said, 0 not said.",
        ),
        (
            history("Aa bb cc dd ee ff."),
            "Words: last message 0, earlier 0, supporter 0, nobody 10 (aa, bb, cc, dd). "
            "Quotations: 0 said, 0 not said.",
        ),
    ],
)
def test_words_and_quotations_by_hand(step, line) -> None:
    assert StepFindings(TALK).of(step) == line


def test_the_line_is_in_the_language_of_the_judge() -> None:
    dialogue = Dialogue((Utterance(Speaker.SEEKER, "我很累"),))
    line = StepFindings(dialogue, "zh").of(history("“我很累”"))
    assert line == (
        "词语：最后一条消息 10，更早的消息 0，倾听者 0，没有人说过 0。引文：1 处是原话，0 处不是。"
    )


def test_the_line_stands_below_the_step_and_only_if_the_judge_is_told() -> None:
    told, other = Recorder("True", FIRST), Recorder("True", FIRST)
    Judge("told", told, findings=True).judge(DIALOGUE, [TEXT], ["x"])
    Judge("other", other).judge(DIALOGUE, [TEXT], ["x"])

    asked, plain = told.sessions[0].asked, other.sessions[0].asked
    assert len(asked) == len(plain)
    for with_line, without in zip(asked[:3], plain[:3], strict=True):
        assert with_line.startswith(f"{without}\nWords: last message ")
    assert asked[3:] == plain[3:]


TEXTS = st.text(st.characters(exclude_characters="<>"), max_size=80).map(lambda t: t.strip() or "x")


@given(TEXTS, st.from_regex(r"\w[\w .,'\"]{0,60}\w", fullmatch=True))
def test_any_text_gives_one_line_whose_tenths_add_up(said: str, text: str) -> None:
    dialogue = Dialogue((Utterance(Speaker.SEEKER, said),))
    line = StepFindings(dialogue).of(history(text))
    assert "\n" not in line
    numbers = [
        int(part.split()[-1]) for part in line.partition(" (")[0].partition(". ")[0].split(",")
    ]
    assert sum(numbers) == 0 or 8 <= sum(numbers) <= 12  # four rounded numbers
    assert ask_about_step(history("y"), findings=line).text.endswith(line)


def test_a_long_conversation_takes_little_time() -> None:
    dialogue = Dialogue(tuple(Utterance(Speaker.SEEKER, f"word{n} " * 200) for n in range(100)))
    findings = StepFindings(dialogue)
    begin = time.perf_counter()
    for _ in range(20):
        findings.of(history("word1 and word99 and other words. " * 10 + "End."))
    assert time.perf_counter() - begin < 1
