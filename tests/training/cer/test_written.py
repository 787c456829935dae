"""Written dialogues as rows: by hand, what a line may not be, and how photos are drawn."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compeer_core.cer import CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from training.cer import written
from training.cer.written import Config, read_written, split_of, written_rows
from training.data.faces import read_faces
from training.data.pictures import Pictures
from training.data.records import read_records
from training.sft.cer import turns_to_learn

SHIPPED = Path(__file__).resolve().parents[3] / "assets" / "cer" / "plain.jsonl.gz"


def seeker(text: str, face: str | None = None) -> dict[str, Any]:
    return {"role": "user", "text": text} | ({"face": face} if face else {})


def supporter(reply: str, **changes: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "history": "The seeker lost the cat.",
        "stage": "Exploration",
        "emotion_text": "They feel sad.",
        "sentiment": "Negative",
        "emotion": "Sadness",
        "intensity": 3,
        "strategy_text": "A question shows interest.",
        "strategy": "Question",
        "reply": reply,
    } | changes


def dialogue(name: str, *turns: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "situation": "a lost cat", "turns": list(turns)}


def named(split: str, count: int = 1) -> list[str]:
    """Ids that belong to a split."""
    names = (f"cat-{number}" for number in range(10_000))
    return [name for name in names if split_of(name) == split][:count]


def pack(path: Path, *dialogues: dict[str, Any]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in dialogues)
    path.write_bytes(gzip.compress(text.encode("utf-8")))
    return path


def photo_dialogue(name: str) -> dict[str, Any]:
    return dialogue(
        name,
        seeker("my cat is gone"),
        supporter("Since when?"),
        seeker("look at me", "sad"),
        supporter("You look sad."),
        seeker("she is back", "happy"),
        supporter("I am glad."),
    )


def rows_of(tmp_path: Path, *dialogues: dict[str, Any], **settings: Any) -> list[CerRecord]:
    path = pack(tmp_path / "written.jsonl.gz", *dialogues)
    return list(written_rows(Config(written=path, output=tmp_path / "out", **settings)))


def test_a_dialogue_becomes_a_row_for_each_supporter_turn_by_hand(tmp_path):
    (name,) = named("train")
    line = dialogue(
        name,
        seeker("My cat is gone"),
        supporter("Since when?", history='They say "my cat is gone".'),
        seeker("two days"),
        supporter("That is long.", intensity=4, stage="Comforting"),
    )

    first, second = rows_of(tmp_path, line)

    case = second.case
    assert (second.id, case.id, case.dialogue_id, case.source_id) == (
        *(f"{name}#1", f"{name}#1"),
        *(name, name),
    )
    assert (case.corpus, case.language, case.licence) == ("written", "en", "CC BY 4.0")
    assert (first.case.round, case.round, case.rounds, case.split) == (0, 1, 2, "train")
    assert case.history == (
        CaseUtterance(speaker=Speaker.SEEKER, text="My cat is gone"),
        CaseUtterance(speaker=Speaker.SUPPORTER, text="Since when?"),
        CaseUtterance(speaker=Speaker.SEEKER, text="two days"),
    )
    assert (second.first.author, second.first.reply, case.original) == (
        "llm",
        *["That is long."] * 2,
    )
    assert second.first.steps is None and second.second is None
    turn = parse(second.first.turn)
    assert turn.reply == "That is long."
    assert turn.reasoning.history.stage is Stage.COMFORTING
    assert turn.reasoning.emotion.sentiment is Sentiment.NEGATIVE
    assert (turn.reasoning.emotion.emotion, turn.reasoning.emotion.intensity) == (
        Emotion.SADNESS,
        4,
    )
    assert turn.reasoning.strategy.strategy == Strategy.QUESTION.value
    assert list(turns_to_learn(second, unjudged=True)) == [turn]


def test_one_dialogue_in_twelve_is_for_validation_and_one_for_the_test():
    counts = Counter(split_of(f"d-{number}") for number in range(12_000))

    # 1,000 expected, standard deviation 30
    assert counts["valid"] == pytest.approx(1000, abs=120)
    assert counts["test"] == pytest.approx(1000, abs=120)


def test_without_faces_a_dialogue_ends_before_its_first_photo(tmp_path, caplog):
    caplog.set_level("INFO")
    (name,) = named("train")

    (row,) = rows_of(tmp_path, photo_dialogue(name), photo_draws=4)

    assert (row.id, row.case.rounds) == (f"{name}#0", 3)
    assert "2 turns of train, 0 turns of valid, 0 turns of test" in caplog.text


def test_a_photo_is_of_the_class_and_the_split_and_stays_throughout_the_dialogue(
    tmp_path, small_corpora
):
    faces = small_corpora / "faces"
    by_file = {f"faces/{face.file}": face for face in read_faces(faces)}
    names = [*named("train", 5), *named("valid", 3), *named("test", 3)]

    rows = rows_of(tmp_path, *map(photo_dialogue, names), faces=faces)

    assert len(rows) == 33
    for name in names:
        third = next(row for row in rows if row.id == f"{name}#2")
        second = next(row for row in rows if row.id == f"{name}#1")
        assert [len(said.images) for said in third.case.history] == [0, 0, 1, 0, 1]
        assert second.case.history == third.case.history[:3]
        part = "train" if split_of(name) == "train" else "valid"
        for place, face_class in ((2, "sad"), (4, "happy")):
            (image,) = third.case.history[place].images
            assert (by_file[image].face_class, by_file[image].split) == (face_class, part)
        shown = Pictures(faces=faces).shown(third.case.history)
        assert [len(images) for images in shown] == [0, 0, 1, 0, 1]


def test_train_dialogues_with_photos_are_drawn_again_with_others(tmp_path, small_corpora):
    (train,), (valid,) = named("train"), named("valid")
    lines = [photo_dialogue(train), photo_dialogue(valid)]
    settings = {"faces": small_corpora / "faces", "photo_draws": 3}

    rows = rows_of(tmp_path, *lines, **settings)

    dialogues = dict.fromkeys(row.case.dialogue_id for row in rows)
    assert list(dialogues) == [train, f"{train}~2", f"{train}~3", valid]
    assert {row.case.source_id for row in rows} == {train, valid}
    assert len({row.id for row in rows}) == len(rows) == 12
    of_train = [row for row in rows if row.case.split == "train" and row.case.round == 2]
    assert len({row.case.history[2].images for row in of_train}) == 3
    # a draw depends on the seed and the dialogue, not on what stands before it
    assert rows_of(tmp_path, lines[1], **settings) == rows[9:]
    seeds = [rows_of(tmp_path, *lines, **settings, seed=seed) for seed in range(4)]
    assert seeds[0] == rows and any(other != rows for other in seeds[1:])


def test_a_dialogue_without_photos_is_written_once(tmp_path, small_corpora):
    (name,) = named("train")
    line = dialogue(name, seeker("my cat is gone"), supporter("Since when?"))

    rows = rows_of(tmp_path, line, faces=small_corpora / "faces", photo_draws=4)

    assert [row.id for row in rows] == [f"{name}#0"]


def test_only_photos_that_the_tower_reads_correctly_are_drawn(tmp_path, small_corpora):
    faces = small_corpora / "faces"
    files = {
        name: [f.file for f in read_faces(faces) if (f.split, f.face_class) == ("train", name)]
        for name in ("sad", "happy")
    }
    # one sad face is taken for sad, the others are not or were not read
    readings = tmp_path / "readings.json"
    read_as = {files["sad"][0]: "sad", files["sad"][1]: "angry"} | dict.fromkeys(
        files["happy"], "happy"
    )
    readings.write_text(json.dumps(read_as), encoding="utf-8")
    lines = [photo_dialogue(name) for name in named("train", 6)]

    rows = rows_of(tmp_path, *lines, faces=faces, readings=readings, photo_draws=2)

    shown = {row.case.history[2].images for row in rows if row.case.round == 2}
    assert shown == {(f"faces/{files['sad'][0]}",)}
    readings.write_text(json.dumps(dict.fromkeys(files["sad"], "angry")), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no train photo of class sad; use"):
        rows_of(tmp_path, *lines, faces=faces, readings=readings)


def test_readings_without_faces_are_rejected(tmp_path):
    with pytest.raises(ValidationError, match="set `faces`"):
        Config(written=SHIPPED, output=tmp_path, readings=tmp_path / "readings.json")


GOOD = (seeker("My cat is gone"), supporter("Since when?"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (dialogue("b", GOOD[0], supporter("Oh.", stage="Later")), "stage: Input should be 'Expl"),
        (dialogue("b", GOOD[0], supporter("Oh.", emotion="Glee")), "emotion: Input should be"),
        (dialogue("b", GOOD[0], supporter("Oh.", intensity=6)), "must lie between 1 and 5, got 6"),
        (dialogue("b", GOOD[0], supporter(" ")), "the text of <reply> must not be empty"),
        (dialogue("b", GOOD[0], supporter("<reply>")), "must not contain the tag <reply>"),
        (dialogue("b", seeker("hi", "glad"), GOOD[1]), "not a class of faces; known: angry, "),
        (dialogue("b", *GOOD, GOOD[0]), "turns must alternate between user and assistant"),
        (dialogue("b", *GOOD[::-1]), "turns must alternate between user and assistant"),
        (dialogue("b~2", *GOOD), "id: String should match pattern"),
        (dialogue("a", *GOOD), "id a is already used in line 1; choose another"),
        (
            dialogue("b", GOOD[0], supporter("Oh.", emotion_text='"my Cat" is the word.')),
            '"my Cat" is quoted, but no earlier message contains it',
        ),
        (  # said later, or by the supporter
            dialogue(
                *("b", GOOD[0], supporter("Oh dear.", history='They say "two days".')),
                *(seeker("two days"), supporter("Long.")),
            ),
            '"two days" is quoted',
        ),
        ({"id": "b"}, "situation: Field required"),
    ],
)
def test_an_invalid_line_is_reported_with_its_error(tmp_path, line, told):
    path = pack(tmp_path / "written.jsonl.gz", dialogue("a", *GOOD), line)

    with pytest.raises(ConfigError) as raised:
        list(read_written(path))

    assert str(raised.value).startswith(f"{path}, line 2: ")
    assert told in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "written.jsonl.gz"
    with pytest.raises(ConfigError, match=r"written\.jsonl\.gz: no such file"):
        list(read_written(path))
    whole = SHIPPED.read_bytes()
    for broken in (b"{}", whole[:1000], whole[:600] + b"\0" * 99, gzip.compress(b"\xff")):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"cannot be read|is not UTF-8"):
            list(read_written(path))
    path.write_bytes(gzip.compress(b"\n[1]\n"))
    with pytest.raises(ConfigError, match="line 2: Input should be"):
        list(read_written(path))


def test_the_stage_writes_its_rows_unless_it_is_a_dry_run(tmp_path, caplog):
    caplog.set_level("INFO")
    path = pack(tmp_path / "w.jsonl.gz", *(dialogue(name, *GOOD) for name in named("train", 3)))
    config = Config(written=path, output=tmp_path / "out")

    written.run(config, dry_run=True)
    assert not config.output.exists()
    assert "train: 3 turns of 3 dialogues" in caplog.text
    with pytest.raises(ConfigError, match="leave out --resume"):
        written.run(config, resume=tmp_path)

    written.run(config)

    rows = list(read_records(config.output / "rows.jsonl", CerRecord))
    assert rows == list(written_rows(config))
    assert [path.name for path in config.output.iterdir()] == ["rows.jsonl"]


def test_the_shipped_dialogues_are_read_whole():
    dialogues = list(read_written(SHIPPED))

    assert len(dialogues) == 4406
    assert sum(len(line.turns) // 2 for line in dialogues) == 8125
    assert sum(len(line.faces) for line in dialogues) == 503
    # a twelfth is 367; the split depends on the id alone, so these never change
    assert Counter(split_of(line.id) for line in dialogues) == {
        "train": 3697,
        "valid": 341,
        "test": 368,
    }


@pytest.mark.corpora
def test_the_shipped_dialogues_with_the_public_photos(corpora, tmp_path):
    config = Config(
        written=SHIPPED, output=tmp_path, faces=corpora / "faces", photo_draws=4, seed=1
    )

    rows = list(written_rows(config))

    assert Counter(row.case.split for row in rows) == {"train": 9250, "valid": 590, "test": 658}
    assert len({row.id for row in rows}) == len(rows)
    splits: dict[str, set[str]] = {}
    for row in rows:
        splits.setdefault(row.case.source_id, set()).add(row.case.split)
    assert all(len(result) == 1 for result in splits.values())
