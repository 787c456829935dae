"""Histories: each once, of the right split, and shortened from the front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core import row_files
from compeer_core.cer import Variant
from compeer_core.errors import ConfigError
from tests.training.grpo.world import record, write_rows
from training.data.histories import first_kept, has_pictures, read_histories, shortened


def test_rows_of_a_split_with_a_reply_are_read(tmp_path):
    rows = [record(1), record(2, "valid"), record(3, original=None)]
    row_files.write_rows(tmp_path / "train.jsonl", rows)

    histories, skipped = read_histories([tmp_path / "train.jsonl"], "train")

    assert histories == [record(1)]
    assert skipped == {"another split": 1, "no reply of the corpus": 1}


def test_a_history_is_read_once_and_its_rewriting_is_another(tmp_path):
    rewritten = record(1)
    first = rewritten.case.history[0].model_copy(update={"text": "My job is gone."})
    case = rewritten.case.model_copy(update={"history": (first, *rewritten.case.history[1:])})
    rewritten = rewritten.model_copy(
        update={"id": "r1p", "case": case, "variant": Variant.PERSONA, "rewritten_from": "r1"}
    )
    row_files.write_rows(
        tmp_path / "train.jsonl", [record(1), record(1).model_copy(update={"id": "x"})]
    )
    row_files.write_rows(tmp_path / "persona.jsonl", [rewritten])

    histories, skipped = read_histories(
        [tmp_path / "train.jsonl", tmp_path / "persona.jsonl"], "train"
    )

    assert [row.id for row in histories] == ["r1", "r1p"]
    assert skipped == {"the same history again": 1}


def test_files_without_a_history_are_named_with_the_reason(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", 2, "test")

    with pytest.raises(
        ConfigError, match=r"train\.jsonl: no history of split 'train'.*2 x another"
    ):
        read_histories([path], "train")
    with pytest.raises(ConfigError, match="no such file"):
        read_histories([tmp_path / "nothing.jsonl"], "train")


def test_a_shortened_history_ends_as_the_whole_one_does():
    whole = record(1, images=("faces/a",))
    texts = [utterance.text for utterance in whole.case.history]
    assert [len(text) for text in texts] == [20, 25, 25]

    def kept(characters: int) -> list[str]:
        return [utterance.text for utterance in shortened(whole, characters).case.history]

    assert shortened(whole, 70) == shortened(whole, None) == whole
    assert kept(69) == texts[1:]
    assert kept(1) == texts[2:]  # never empty
    assert shortened(whole, 1).case.original == whole.case.original
    assert has_pictures(whole) and not has_pictures(record(1))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 120))
def test_the_longest_history_that_fits_is_used(lengths, limit):
    start = first_kept(lengths, limit)

    assert sum(lengths[start:]) <= limit or start == len(lengths) - 1
    assert start == 0 or sum(lengths[start - 1 :]) > limit
