"""Histories: each once, from samples of the SFT stage and from rows of CER, and of the right split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.cer import Variant
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from tests.training.grpo.world import record, turn, write_rows
from training.data.histories import drawn_histories, first_kept, read_histories
from training.data.pictures import Pictures
from training.data.samples import Sample, SampleUtterance, write_records


def sample(number: int, completion: str = turn("Why?"), face: str | None = None) -> Sample:
    return Sample(
        id=f"d{number}#2",
        dialogue_id=f"d{number}",
        problem="job crisis",
        strategy="Question",
        history=(
            SampleUtterance(speaker=Speaker.SEEKER, text=f"Hello {number}", face=face),
            SampleUtterance(speaker=Speaker.SEEKER, text="I am low."),
        ),
        completion=completion,
    )


def test_rows_of_cer_become_histories_of_their_split(tmp_path):
    rows = [record(1), record(2, "valid"), record(3, original=None)]
    write_records(tmp_path / "train.jsonl", rows)

    (found,), left_out = read_histories([tmp_path / "train.jsonl"], "train")

    assert (found.id, found.source, found.language) == ("r1", "s1", "en")
    assert [said.text for said in found.utterances][1] == "That is hard. Since when?"
    assert found.reference == "good: I see."
    assert (found.strategies, found.emotion) == (("Question",), "Sadness")
    assert left_out == {"another split": 1, "no reply of the corpus": 1}


def test_samples_of_the_sft_stage_become_histories(tmp_path):
    write_records(tmp_path / "samples.jsonl", [sample(1, face="a.jpg"), sample(2, "no turn")])

    (found,), left_out = read_histories([tmp_path / "samples.jsonl"], "train")

    assert (found.source, found.reference, found.strategies) == ("d1", "Why?", ("Question",))
    assert found.emotion == "Sadness"
    assert found.utterances[0].images == ("faces/a.jpg",)
    assert found.has_pictures
    assert left_out == {"no reply of the corpus": 1}


def test_a_history_comes_once_and_its_rewriting_is_another(tmp_path):
    rewritten = record(1)
    first = rewritten.case.history[0].model_copy(update={"text": "My job is gone."})
    case = rewritten.case.model_copy(update={"history": (first, *rewritten.case.history[1:])})
    rewritten = rewritten.model_copy(
        update={"id": "r1p", "case": case, "variant": Variant.PERSONA, "rewritten_from": "r1"}
    )
    write_records(tmp_path / "train.jsonl", [record(1), record(1).model_copy(update={"id": "x"})])
    write_records(tmp_path / "persona.jsonl", [rewritten])

    found, left_out = read_histories(
        [tmp_path / "train.jsonl", tmp_path / "persona.jsonl"], "train"
    )

    assert [one.id for one in found] == ["r1", "r1p"]
    assert left_out == {"the same history again": 1}


def test_files_without_a_history_are_named_with_the_reason(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", 2, "test")

    with pytest.raises(
        ConfigError, match=r"train\.jsonl: no history of split 'train'.*2 x another"
    ):
        read_histories([path], "train")
    with pytest.raises(ConfigError, match="no such file"):
        read_histories([tmp_path / "nothing.jsonl"], "train")


def test_so_many_are_drawn_by_the_seed_and_stay_in_order(tmp_path):
    found, _ = read_histories([write_rows(tmp_path / "train.jsonl", 20)], "train")

    drawn = drawn_histories(found, 5, seed=1)

    assert len(drawn) == 5
    assert [found.index(one) for one in drawn] == sorted(found.index(one) for one in drawn)
    assert drawn == drawn_histories(found, 5, seed=1) != drawn_histories(found, 5, seed=2)
    assert drawn_histories(found, None, seed=1) == drawn_histories(found, 99, seed=1) == found


def test_a_history_opens_as_a_dialogue(tmp_path):
    found, _ = read_histories([write_rows(tmp_path / "train.jsonl", 1)], "train")

    dialogue = found[0].dialogue(Pictures())

    assert dialogue.id == "s1"
    assert [said.speaker for said in dialogue.utterances] == [
        Speaker.SEEKER,
        Speaker.SUPPORTER,
        Speaker.SEEKER,
    ]


def test_a_shortened_history_ends_as_the_whole_one_does(tmp_path):
    write_records(tmp_path / "train.jsonl", [record(1)])
    (whole,), _ = read_histories([tmp_path / "train.jsonl"], "train")
    texts = [said.text for said in whole.utterances]
    assert [len(text) for text in texts] == [20, 25, 25]

    assert whole.shortened(70) == whole
    assert [said.text for said in whole.shortened(69).utterances] == texts[1:]
    assert [said.text for said in whole.shortened(1).utterances] == texts[2:]  # never empty
    assert whole.shortened(1).reference == whole.reference


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 120))
def test_as_much_stays_as_there_is_room_for(lengths, limit):
    begin = first_kept(lengths, limit)

    assert sum(lengths[begin:]) <= limit or begin == len(lengths) - 1
    assert begin == 0 or sum(lengths[begin - 1 :]) > limit
