"""Pictures are found by name, never outside their folder, and read only when wanted."""

import io
import json
import os
import threading

import numpy as np
import PIL.Image
import pytest

from compeer_core.cer import CaseUtterance
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion
from tests.training.corpora_fixture import write_faces
from training.data import pictures as module
from training.data.faces import read_faces
from training.data.pictures import Pictures, read_photos


def png(width=3, height=2):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


def said(*images):
    return CaseUtterance(speaker=Speaker.SEEKER, text="Look.", images=images)


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "corpora"
    (folder / "scenes").mkdir(parents=True)
    (folder / "scenes" / "one.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    return folder


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return write_faces(tmp_path_factory.mktemp("faces"), train=3, valid=2)


def test_a_file_below_the_folder_is_opened(data_dir):
    image = Pictures(data_dir).open("scenes/one.png")

    assert (image.width, image.height) == (3, 2)


def test_each_utterance_has_its_own_pictures(data_dir):
    shown = Pictures(data_dir).shown([said(), said("scenes/one.png", "scenes/one.png")])

    assert [len(images) for images in shown] == [0, 2]


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "scenes/../../secret.png",
        "scenes/../scenes/one.png",
        "{root}/secret.png",
        "..\\secret.png",
        "link.png",
        "linked/secret.png",
        "scenes/one.png\0.txt",
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_a_name_outside_the_folder_is_always_rejected(data_dir, tmp_path, name, skip):
    (data_dir / "link.png").symlink_to(tmp_path / "secret.png")
    (data_dir / "linked").symlink_to(tmp_path, target_is_directory=True)
    pictures = Pictures(data_dir, skip_unreadable=skip)

    with pytest.raises(ConfigError, match="leads out of the folder of corpora"):
        pictures.shown([said(name.format(root=tmp_path))])


def test_a_folder_of_corpora_may_itself_be_a_link(data_dir, tmp_path):
    (tmp_path / "short").symlink_to(data_dir, target_is_directory=True)

    assert Pictures(tmp_path / "short").open("scenes/one.png").width == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"not a picture", "the file is not an image"),
        (png()[:-24], "the image cannot be read"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_named_or_noted(data_dir, content, problem):
    if content is not None:
        (data_dir / "bad.png").write_bytes(content)

    with pytest.raises(ConfigError, match=rf"picture bad\.png: {problem}"):
        Pictures(data_dir).shown([said("bad.png")])
    lenient = Pictures(data_dir, skip_unreadable=True)
    assert [len(images) for images in lenient.shown([said("bad.png", "scenes/one.png")])] == [1]
    assert list(lenient.unreadable) == ["bad.png"]
    assert problem in lenient.unreadable["bad.png"]


@pytest.mark.timeout(10)
def test_a_pipe_is_rejected(data_dir):
    os.mkfifo(data_dir / "pipe.png")

    with pytest.raises(ConfigError, match="no such file"):
        Pictures(data_dir).open("pipe.png")


def test_a_huge_file_is_not_read(data_dir, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_FILE", 10)

    with pytest.raises(ConfigError, match="larger than"):
        Pictures(data_dir).open("scenes/one.png")


def test_a_missing_folder_setting_is_named():
    with pytest.raises(ConfigError, match="name the folder of corpora"):
        Pictures().open("scenes/one.png")
    with pytest.raises(ConfigError, match="name the folder of packed faces"):
        Pictures(skip_unreadable=True).shown([said("faces/a.jpg")])


def test_pictures_are_read_lazily(tmp_path):
    Pictures(tmp_path / "nowhere", tmp_path / "nowhere")


def test_a_face_is_found_in_its_pack(faces, data_dir):
    pictures = Pictures(data_dir, faces)

    assert pictures.open("faces/fer2013/train/sad/train_000.jpg").width == 48
    with pytest.raises(ConfigError, match=r"faces/\.\./secret\.png: not in the folder of faces"):
        pictures.open("faces/../secret.png")


def test_a_photo_fits_the_emotion_and_keeps_to_its_split(faces):
    pictures = Pictures(faces=faces)
    rng = np.random.default_rng(0)

    train = {pictures.photo_for(Emotion.GUILT, "train", rng) for _ in range(200)}
    valid = {pictures.photo_for(Emotion.GUILT, "valid", rng) for _ in range(200)}
    test = {pictures.photo_for(Emotion.GUILT, "test", rng) for _ in range(200)}

    # guilt is shown as "sad"; three of FER2013's to train with, two kept, and muxspace's two
    assert {f"faces/fer2013/train/sad/train_{n:03}.jpg" for n in range(3)} < train
    assert valid == test
    assert not train & valid
    assert len(train | valid) == 7
    assert pictures.open(sorted(valid)[0]).width in (48, 112)


def test_a_class_without_photos_gives_none(tmp_path):
    pictures = Pictures(faces=write_faces(tmp_path, train=1, valid=0, muxspace=0))

    assert pictures.photo_for(Emotion.JOY, "test", np.random.default_rng(0)) is None


def test_the_size_of_the_cache_is_limited(data_dir):
    for number in range(6):
        (data_dir / f"{number}.png").write_bytes(png(40 + number))
    one = len(Pictures(data_dir).open("0.png").data)
    pictures = Pictures(data_dir, kept_bytes=one * 3)

    for number in range(6):
        pictures.open(f"{number}.png")
    again = pictures.open("5.png")

    assert again is pictures.open("5.png")
    assert pictures.kept_bytes <= one * 3
    (data_dir / "0.png").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        pictures.open("0.png")  # no longer kept, so looked for


def test_a_picture_larger_than_the_limit_is_shown_all_the_same(data_dir):
    pictures = Pictures(data_dir, kept_bytes=1)

    assert pictures.open("scenes/one.png").width == 3
    assert pictures.kept_bytes == 0


def test_threads_may_share_one(data_dir):
    for number in range(20):
        (data_dir / f"{number}.png").write_bytes(png(40 + number))
    pictures = Pictures(data_dir, kept_bytes=1000)
    widths: list[int] = []

    def look(first):
        widths.extend(pictures.open(f"{(first + n) % 20}.png").width for n in range(40))

    threads = [threading.Thread(target=look, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(widths) == sorted(40 + n for n in range(20) for _ in range(8))


def test_photos_that_a_tower_misclassifies_are_not_drawn(faces, tmp_path):
    photos = read_photos(faces)
    assert sum(map(len, photos.values())) == len(read_faces(faces))

    readings = {face.file: "happy" for face in read_faces(faces)}
    (tmp_path / "readings.json").write_text(json.dumps(readings), encoding="utf-8")

    happy = {key: names for key, names in photos.items() if key[1] == "happy"}
    assert read_photos(faces, tmp_path / "readings.json") == happy
