"""The packed photos: which of them are used, as what, and on which side of the split."""

import csv
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from compeer_core.errors import ConfigError
from compeer_core.images import read_image
from compeer_core.taxonomy import Emotion
from tests.training.corpora_fixture import write_faces
from training.data.faces import FACE_CLASSES, face_class_of, read_faces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_faces(tmp_path / "faces", train=3, valid=2, muxspace=3)


def test_labels_of_both_sources_become_the_seven_classes(folder):
    faces = read_faces(folder)

    of_fer = Counter(face.face_class for face in faces if face.file.startswith("fer2013/"))
    of_mux = Counter(face.face_class for face in faces if face.file.startswith("mux/"))
    assert of_fer == dict.fromkeys(FACE_CLASSES, 5)
    assert of_mux == dict.fromkeys(FACE_CLASSES, 3)  # "happiness" is happy; contempt is no class


def test_a_source_without_a_validation_part_gives_every_tenth_photo(folder):
    faces = read_faces(folder)

    # 22 rows of muxspace: the first, the 11th and the 21st
    assert [face.file for face in faces if face.file[:3] == "mux" and face.split == "valid"] == [
        "mux/00001.jpg",
        "mux/00011.jpg",
        "mux/00021.jpg",
    ]
    assert Counter(f.split for f in faces if f.file[:3] == "fer") == {"train": 21, "valid": 14}
    assert {face.split for face in faces} == {"train", "valid"}


def test_no_photo_is_in_both_splits(folder):
    by_split = {
        split: {face.data for face in read_faces(folder) if face.split == split}
        for split in ("train", "valid")
    }

    assert not by_split["train"] & by_split["valid"]


def test_the_photo_is_the_packed_file(folder):
    face = next(face for face in read_faces(folder) if face.file.endswith("sad/train_001.jpg"))

    with tarfile.open(folder / "fer2013_48.tar.gz") as archive:
        packed = archive.extractfile(face.file)
        assert packed is not None
        assert face.data == packed.read()
    assert (read_image(face.data).width, face.face_class, face.split) == (48, "sad", "train")


def test_a_pack_may_name_its_files_with_a_dot(folder):
    with tarfile.open(folder / "muxspace_112.tar.gz") as archive:
        members = [(m, archive.extractfile(m)) for m in archive.getmembers()]
        with tarfile.open(folder / "dotted.tar.gz", "w:gz") as dotted:
            for member, data in members:
                member.name = f"./{member.name}"
                dotted.addfile(member, data)
    before = read_faces(folder)
    (folder / "dotted.tar.gz").replace(folder / "muxspace_112.tar.gz")

    assert read_faces(folder) == before


def test_every_emotion_has_a_face(folder):
    classes = face_class_of(folder)

    assert classes.keys() == {*Emotion}
    assert {*classes.values()} <= {*FACE_CLASSES}
    assert (classes[Emotion.ANXIETY], classes[Emotion.JOY]) == ("fear", "happy")


def test_where_two_corpora_disagree_the_first_row_counts(folder):
    path = folder / "emotion_map.csv"
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(("sadness", "mesc", "angry"))

    assert face_class_of(folder)[Emotion.SADNESS] == "sad"


def test_an_emotion_that_the_map_leaves_out_is_named(folder):
    path = folder / "emotion_map.csv"
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(row for row in rows if not row.startswith("guilt")), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"emotion_map\.csv: no face class for Guilt"):
        face_class_of(folder)


@pytest.mark.parametrize("name", ["emotion_map.csv", "fer2013_labels.csv", "muxspace_112.tar.gz"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()

    with pytest.raises(ConfigError, match=rf"{name}: no such file"):
        read_faces(folder)


@pytest.mark.corpora
def test_every_photo_of_the_public_folder_has_a_label_and_a_file(corpora):
    faces = read_faces(corpora / "faces")

    # 15,703 of FER2013 and 2,811 of muxspace, less eight of contempt
    assert len(faces) == 15_703 + 2_811 - 8
    assert {face.face_class for face in faces} == {*FACE_CLASSES}
    assert face_class_of(corpora / "faces").keys() == {*Emotion}
