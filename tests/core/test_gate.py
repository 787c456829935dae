"""The gate: which turns may not be shown, English and Chinese."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.dialogue import Dialogue
from compeer_core.gate import (
    GRAM_TIMES,
    MOST_WORDS,
    UNFINISHED_FAULTS,
    Fault,
    faults_of,
    previous_reply,
)
from compeer_core.reasoning import TAGS, Reading, read
from tests.core.example import TEXT

REPLY = "What happened today?"
LOOP = "I am here for you. I am here for you. I am here for you."


def turn(reply: str) -> Reading:
    """A complete turn with another reply."""
    return read(TEXT.replace(REPLY, reply))


@pytest.mark.parametrize(
    "reply",
    [
        REPLY,
        "I'm here.",
        "我在听。",
        "It hurts < 3 months later, and 2 > 1 friends is a start.",
        "It's okay to feel sad. It's okay to feel angry.",
        "The strategy: one step at a time. Is that all right?",
        "听起来，明天的场面已经在你脑子里一遍遍上演，而且每次都是最糟的结局。还没开始，就已经让人很累了吧。",
        "我在这里。慢慢说，慢慢来，不着急。",
        "That sounds hard — really, really hard. What's the worst of it?",
        "word " * 4 + "and then " + " ".join(f"w{number}" for number in range(200)),
    ],
)
def test_a_plain_reply_passes(reply: str) -> None:
    assert faults_of(turn(reply)) == ()


@pytest.mark.parametrize(
    "text",
    ["", "plain words", TEXT.replace("</reply>", ""), TEXT.replace("<emotion>", ""), TEXT + "x"],
)
def test_a_turn_that_breaks_the_format_is_rejected(text: str) -> None:
    assert Fault.FORMAT in faults_of(read(text))


@pytest.mark.parametrize(
    "reply", ["...", "?!", "。。。", "Yes.", "嗯", "好。", "🙂 🙂 🙂", "__ __ __", "— … —"]
)
def test_a_reply_that_says_nothing_is_rejected(reply: str) -> None:
    assert faults_of(turn(reply)) == (Fault.SAYS_NOTHING,)


@pytest.mark.parametrize(
    "reply",
    [
        "I hear you. <b>Rest</b> a little.",
        "I hear you.<br>What now?",
        "I hear you. </rep",
        "I hear you. <|im_end|>",
        "[INST] I hear you.",
        "```\nI hear you.\n```",
        "I hear {{name}} well.",
        "I hear you.\nStrategy: Question",
        "Stage: Exploration\nI hear you.",
        "**Emotion:** Anxiety, I hear you.",
        "Supporter: I hear you well.",
        "我听到了。\n策略：提问",
        "支持者：我在听你说话。",
        "<img src=x onerror='stolen(5)'> I hear you.",
    ],
)
def test_a_reply_with_markup_is_rejected(reply: str) -> None:
    assert faults_of(turn(reply)) == (Fault.MARKUP,)


def test_a_reply_that_is_too_long_is_rejected() -> None:
    english = " ".join(f"w{number}" for number in range(MOST_WORDS + 1))
    chinese = "".join(chr(0x4E00 + number) for number in range(2 * MOST_WORDS))

    assert faults_of(turn(english)) == faults_of(turn(chinese)) == (Fault.TOO_LONG,)
    assert faults_of(turn(english.rpartition(" ")[0])) == ()


@pytest.mark.parametrize(
    "reply",
    [
        LOOP,
        LOOP.upper().replace(".", "!"),
        "You don’t have to rush. You don't have to rush, and YOU DON'T HAVE TO rush.",
        "no no no no no no",
        "我一直都在这里陪你。我一直都在这里陪你。我一直都在这里陪你。",
    ],
)
def test_a_reply_that_repeats_itself_is_rejected(reply: str) -> None:
    assert faults_of(turn(reply)) == (Fault.REPEATS_ITSELF,)


def test_the_same_words_twice_are_not_a_loop() -> None:
    assert faults_of(turn("I am here for you. I am here for you.")) == ()


@pytest.mark.parametrize(
    ("reply", "previous"),
    [
        ("I'm here.", "I’m here!"),
        (
            "What is the hardest part of the day for you?",
            "What is the hardest part of the day for you",
        ),
        (
            "It sounds as if the nights are the hardest part of all this for you.",
            "Thank you. It sounds as if the nights are the hardest part of all this for you, my friend.",
        ),
        ("听起来这些天你一直很难过。", "听起来这些天你一直很难过！"),
    ],
)
def test_a_reply_that_repeats_the_previous_one_is_rejected(reply: str, previous: str) -> None:
    assert faults_of(turn(reply), previous) == (Fault.REPEATS_PREVIOUS,)


@pytest.mark.parametrize(
    ("reply", "previous"),
    [
        ("What happened today?", "What happened at school today, and who was there?"),
        ("It sounds as if you miss her a lot. What do you miss?", "It sounds as if you are tired."),
        ("我在听。", "我在听你说。你慢慢讲。"),
        (REPLY, ""),
    ],
)
def test_a_reply_that_shares_some_words_with_the_previous_one_passes(
    reply: str, previous: str
) -> None:
    assert faults_of(turn(reply), previous) == ()


def test_an_interrupted_turn_is_not_blamed_for_what_it_lacks() -> None:
    assert faults_of(read("<history>Wor"), is_finished=False) == ()
    assert faults_of(read(f"<reply>{LOOP}"), is_finished=False) == (Fault.REPEATS_ITSELF,)


def test_the_previous_reply_is_the_latest_of_the_supporter() -> None:
    messages = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    dialogue = Dialogue.from_messages([{"role": role, "content": text} for role, text in messages])

    assert previous_reply(dialogue) == "d"
    assert previous_reply(Dialogue()) == ""


# --- properties ----------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from([*TAGS, "Strategy: ", "I am ", "here ", "\n", "<", "你好", "。", "策略："])
).map("".join)
texts = st.text() | PIECES
plain_words = st.lists(
    st.text(st.sampled_from("abcdefgh你我他说听"), min_size=1, max_size=8), max_size=40
).map(" ".join)


@given(texts, texts)
def test_no_text_makes_it_fail_and_the_order_is_that_of_the_faults(
    text: str, previous: str
) -> None:
    faults = faults_of(read(text), previous)

    assert list(faults) == [fault for fault in Fault if fault in faults]


@given(texts, texts)
def test_an_unfinished_turn_has_no_fault_that_it_would_not_have_if_finished(
    text: str, previous: str
) -> None:
    finished, unfinished = (
        {*faults_of(read(text), previous, is_finished=each)} for each in (True, False)
    )

    assert unfinished == finished & UNFINISHED_FAULTS


@given(texts)
def test_a_turn_that_passes_is_complete_and_has_no_tag(text: str) -> None:
    reading = read(text)
    if not faults_of(reading):
        assert reading.is_complete
        assert not any(tag in reading.turn.reply for tag in TAGS)


@given(plain_words.filter(lambda words: len(words) > 9))
def test_whatever_is_written_three_times_repeats_itself(words: str) -> None:
    if Fault.SAYS_NOTHING in faults_of(turn(words)) or len(words.replace(" ", "")) < 9:
        return
    assert Fault.REPEATS_ITSELF in faults_of(turn(f"{words} {words} " * GRAM_TIMES))


@given(plain_words)
def test_case_and_punctuation_do_not_hide_a_repetition(words: str) -> None:
    changed = f"{words.upper().replace(' ', ', ')}!"
    before, after = ({*faults_of(turn(text))} & {Fault.REPEATS_ITSELF} for text in (words, changed))

    assert before == after
    assert Fault.REPEATS_PREVIOUS in faults_of(turn(changed), words) or not words.strip()


@pytest.mark.parametrize(
    "piece", ["a ", "<", "<a", "{{", "你", "Stage", "- ", "[INST", "<|", "don't "]
)
def test_a_long_text_costs_little_time(piece: str) -> None:
    reading = turn((piece * 20_000)[:20_000].strip() or "x")
    started = time.process_time()
    faults_of(reading, piece * 5_000)

    assert time.process_time() - started < 2
