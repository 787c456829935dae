"""A subset of the corpora: the number of sources of each split, by hand."""

from collections import Counter

import pytest

from compeer_core.row_files import write_rows
from tests.training.cer.source_dialogues import source_dialogue
from training.cer.records import SourceDialogue
from training.cer.steps.subset import draw_sources
from training.data.records import read_records


@pytest.fixture
def dialogues(tmp_path):
    rows = [
        source_dialogue(
            f"{split}-{number}{layout}",
            "Hello",
            source_id=f"{split}-{number}",
            corpus="esconv",
            split=split,
        )
        for split in ("train", "valid", "test")
        for number in range(5)
        for layout in "ab"
    ]
    write_rows(tmp_path / "all.jsonl", rows)
    return tmp_path / "all.jsonl"


@pytest.mark.parametrize(
    ("per_split", "sources"),
    [
        (2, {"train": 2, "valid": 2, "test": 2}),
        (9, {"train": 5, "valid": 5, "test": 5}),
        ({"train": 3, "valid": 1}, {"train": 3, "valid": 1}),
    ],
)
def test_as_many_sources_as_asked_with_all_their_layouts(dialogues, tmp_path, per_split, sources):
    report = draw_sources(dialogues, tmp_path / "subset.jsonl", per_split, seed=0)

    drawn = list(read_records(tmp_path / "subset.jsonl", SourceDialogue))
    by_source = Counter((row.split, row.source_id) for row in drawn)
    assert set(by_source.values()) == {2}
    assert Counter(split for split, _ in by_source) == sources
    assert (report.read, report.written) == (30, len(drawn))
