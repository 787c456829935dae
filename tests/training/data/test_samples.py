"""Training rows on disk: nothing is lost, photos are opened, and a bad line is named."""

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from tests.training.corpora_fixture import jpeg
from training.data.samples import Sample, SampleUtterance, drawn, read_records, write_records

SAMPLE = Sample(
    id="esconv/train/0#2",
    dialogue_id="esconv/train/0",
    problem="job crisis",
    strategy="Question",
    history=(
        SampleUtterance(speaker=Speaker.SUPPORTER, text="Welcome."),
        SampleUtterance(speaker=Speaker.SEEKER, text="Hi,\nme \u2028 \u5922 \U0001f614", face="a"),
    ),
    completion="<history>x\nStage: Action</history>",
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"

    assert write_records(path, [SAMPLE, SAMPLE]) == 2
    assert list(read_records(path, Sample)) == [SAMPLE, SAMPLE]


def test_a_broken_off_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_records(path, [SAMPLE])

    def breaking():
        yield SAMPLE.history[0]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_records(path, breaking())
    assert list(read_records(path, Sample)) == [SAMPLE]


def test_a_photo_stands_at_its_turn():
    dialogue = SAMPLE.dialogue({"a": jpeg(48, "sad", 1)})

    assert [len(u.images) for u in dialogue] == [0, 1]
    assert dialogue.utterances[1].images[0].width == 48
    assert dialogue.id == "esconv/train/0"


def test_a_photo_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="sample esconv/train/0#2: photo a is not in the folder"):
        SAMPLE.dialogue({"b": b""})


def test_a_row_of_another_kind_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_records(path, [SAMPLE, SAMPLE.history[0]])

    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: no Sample: "):
        list(read_records(path, Sample))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="an earlier stage writes it"):
        list(read_records(tmp_path / "rows.jsonl", Sample))


def test_records_are_drawn_once_each_in_their_order_and_again_the_same():
    records = list(range(20))

    chosen = drawn(records, 7, seed=3)

    assert len({*chosen}) == 7
    assert chosen == sorted(chosen)
    assert chosen == drawn(records, 7, seed=3) != drawn(records, 7, seed=4)
    assert drawn(records, 50, seed=3) == records
