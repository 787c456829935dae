"""Near-duplicates of held-out texts: small cases by hand, then rates on ESConv."""

import random

from hypothesis import given
from hypothesis import strategies as st

from training.cer.corpora.esconv import load_lines
from training.cer.records import Dropped
from training.data.near_duplicates import HeldOut, Rule, plain_words

LONG = (
    "my manager told the whole team on Monday that I had failed with the report again"  # 16 words
)
OTHER = (
    "since then I cannot sleep and cannot eat at all and nobody at home knows about it"  # 17 words
)


def held(*utterances: str, rule: Rule | None = None, language: str = "en") -> HeldOut:
    index = HeldOut(rule)
    index.add("test#0", utterances, language)
    return index


def with_a_word_more(utterances, rng):
    """Insert a word at a random place into each utterance."""
    for text in utterances:
        words = text.split()
        words.insert(rng.randrange(len(words) + 1), "really")
        yield " ".join(words)


def test_turns_case_and_punctuation_make_no_difference():
    assert held(LONG, OTHER).repeated_by([f"{LONG.upper()}! {OTHER}"]) == "test#0"


def test_fifteen_shared_5_grams_are_needed():
    # Together 33 words, so 29 5-grams. LONG alone has 16 - 4 = 12 of them, OTHER 13.
    assert held(LONG, OTHER).repeated_by([LONG]) is None
    assert held(LONG, OTHER, rule=Rule(shared_words=12)).repeated_by([LONG]) == "test#0"
    assert held(LONG, OTHER, rule=Rule(shared_words=13)).repeated_by([LONG, "Hm."]) is None


def test_containment_is_measured_on_the_shorter_text():
    numbers = " ".join(f"word{number}" for number in range(40))
    # Shared: LONG + OTHER, 29 5-grams; the other text has 73 - 4 = 69, of which 29 are 42 %.
    longer = [LONG, OTHER, numbers]
    assert held(LONG, OTHER, rule=Rule(containment=1.0)).repeated_by(longer) == "test#0"
    unlike = [f"other{number}" for number in range(40)]
    assert held(*longer, rule=Rule(containment=0.42)).repeated_by([LONG, OTHER, *unlike])
    assert held(*longer, rule=Rule(containment=0.43)).repeated_by([LONG, OTHER, *unlike]) is None


def test_texts_of_one_source_add_up_and_texts_of_different_sources_do_not():
    one = held(LONG)
    one.add("test#0", [OTHER])
    two = held(LONG)
    two.add("test#1", [OTHER])

    assert one.repeated_by([LONG, "Yes?", OTHER]) == "test#0"
    assert two.repeated_by([LONG, "Yes?", OTHER]) is None


def test_the_most_similar_source_is_named():
    index = held(LONG, OTHER, "and that is where it all began for me last year in May")
    index.add("test#1", [LONG, OTHER])

    assert index.repeated_by([LONG, OTHER]) == "test#0"  # both contain it: the first by name
    assert index.repeated_by([LONG, OTHER, "Why?"]) == "test#1"


def test_chinese_is_compared_by_characters():
    text = "我昨天晚上又一次没有睡着，一直在想考试和以后的事情怎么办。还有我的家人也很担心"

    assert held(text, language="zh").repeated_by([text.replace("考试", "所有考试")], "zh")
    assert held(text, language="zh").repeated_by(["我昨天晚上又一次没有睡着"], "zh") is None


@given(st.lists(st.text(max_size=80), max_size=4), st.lists(st.text(max_size=80), max_size=4))
def test_texts_without_a_common_word_are_no_duplicates(tested, trained):
    if not {w for t in tested for w in plain_words(t)} & {
        w for t in trained for w in plain_words(t)
    }:
        assert held(*tested).repeated_by(trained) is None


def test_copies_of_esconv_with_inserted_words_and_merged_turns_are_found(corpora):
    """All copies are found; no train dialogue is taken for a test dialogue."""
    rng = random.Random(0)
    dialogues = {
        split: {
            source.id: [utterance.text for utterance in source.utterances]
            for source in load_lines(corpora / "esconv" / f"{split}.txt.gz", Dropped(), split)
        }
        for split in ("train", "test")
    }
    index = HeldOut()
    for name, utterances in dialogues["test"].items():
        index.add(name, utterances)

    for name, utterances in dialogues["test"].items():
        inserted = list(with_a_word_more(utterances, rng))
        merged = [" ".join(inserted[at : at + 2]) for at in range(0, len(inserted), 2)]
        assert index.repeated_by(inserted) == name
        assert index.repeated_by(merged) == name
    for utterances in list(dialogues["train"].values())[:300]:
        assert index.repeated_by(utterances) is None
