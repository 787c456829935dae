"""Training texts and held-out replies of the encoder."""

import pytest

from compeer_core.errors import ConfigError
from training.data.corpus import SourceKind
from training.encoder.texts import TextSource, replies_of, training_texts

ESCONV = TextSource(path="esconv/train.txt.gz", kind=SourceKind.ESCONV)
STORIES = TextSource(path="english/stories_llm_child.txt.gz", kind=SourceKind.PLAIN)


def test_texts_are_distinct_short_and_ordered_by_the_seed(small_corpora):
    first = training_texts(small_corpora, [ESCONV, STORIES], 12, frozenset(), None, 0)
    again = training_texts(small_corpora, [ESCONV, STORIES], 12, frozenset(), None, 0)
    other = training_texts(small_corpora, [ESCONV, STORIES], 12, frozenset(), None, 1)

    assert first == again
    assert first != other
    assert len(set(first)) == len(first)
    assert max(len(text.split()) for text in first) <= 12
    assert not any("\n" in text or "<|" in text for text in first)


def test_held_out_texts_are_excluded(small_corpora):
    every = training_texts(small_corpora, [ESCONV], 60, frozenset(), None, 0)

    left = training_texts(small_corpora, [ESCONV], 60, frozenset(every[:5]), None, 0)

    assert left == every[5:]


def test_numbers_of_texts_can_be_limited(small_corpora):
    few = ESCONV.model_copy(update={"most": 4})

    assert len(training_texts(small_corpora, [few], 60, frozenset(), None, 0)) == 4
    assert len(training_texts(small_corpora, [few], 60, frozenset(), 3, 0)) == 3
    with pytest.raises(ConfigError, match="no training texts"):
        training_texts(small_corpora, [few], 60, frozenset(), 1, 0)


def test_replies_are_supporter_turns_with_their_dialogues(small_corpora):
    replies = replies_of(small_corpora, "esconv/valid.txt.gz")

    assert len(replies.texts) == len(replies.dialogues)
    assert sorted(set(replies.dialogues)) == list(range(max(replies.dialogues) + 1))
    assert all(replies.texts)
