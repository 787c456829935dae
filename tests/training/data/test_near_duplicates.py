"""Texts that repeat a held-out one: by hand, then that a text repeats itself and no stranger."""

from hypothesis import given
from hypothesis import strategies as st

from training.near_duplicates import HeldOut, Rule, plain_words

LONG = "my manager told the whole team that I had failed again"  # 11 words
OTHER = "since then I cannot sleep and cannot eat at all"  # 10 words


def held(*utterances: str, rule: Rule | None = None, language: str = "en") -> HeldOut:
    found = HeldOut(rule)
    found.add("test#0", utterances, language)
    return found


def test_two_long_utterances_are_enough_and_one_is_not():
    assert held(LONG, OTHER).repeated_by([OTHER.upper(), "Hm.", f"  {LONG}!"]) == "test#0"
    assert held(LONG, OTHER).repeated_by([LONG, "Hm."]) is None  # 11 words of 15
    assert held(LONG, OTHER, rule=Rule(shared_words=11)).repeated_by([LONG]) == "test#0"


def test_short_utterances_are_no_sign():
    greeting = "Hello, how are you doing today"  # 6 words
    assert held(greeting, greeting + " then").repeated_by([greeting, greeting + " then"]) is None


def test_what_many_sources_say_is_a_phrase():
    found = HeldOut(Rule(phrase_sources=2))
    for number in range(3):
        found.add(f"test#{number}", [LONG, OTHER])
    assert found.repeated_by([LONG, OTHER]) is None

    found = HeldOut(Rule(phrase_sources=3))
    for number in range(3):
        found.add(f"test#{number}", [LONG, OTHER])
    assert found.repeated_by([LONG, OTHER]) == "test#0"  # the first of those that are equally near


def test_chinese_is_counted_by_letters():
    said = "我昨天晚上又一次没有睡着，一直在想考试和以后的事情怎么办。还有我的家人也很担心"
    assert len("".join(plain_words(said))) / 2.5 >= 14

    assert held(said, language="zh", rule=Rule(shared_words=12)).repeated_by([said], "zh")
    assert held(said, language="zh").repeated_by(["我昨天晚上又一次没有睡着"], "zh") is None


@given(st.lists(st.text(max_size=80), max_size=4), st.lists(st.text(max_size=80), max_size=4))
def test_what_shares_no_long_utterance_repeats_nothing(tested, trained):
    if {" ".join(plain_words(one)) for one in tested} & {
        " ".join(plain_words(one)) for one in trained
    }:
        return
    assert held(*tested).repeated_by(trained) is None
