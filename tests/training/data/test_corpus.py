"""What pre-training reads: the layouts of the corpora, turns as chat, and the shares of the mix."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compeer_core.errors import ConfigError
from tests.training.corpora_fixture import (
    esconv_row,
    write_blocks,
    write_counselchat,
    write_esconv,
)
from training.data.corpus import (
    Source,
    SourceKind,
    chat_document,
    mixed_documents,
    read_documents,
)

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<reply>", "</history>", "<|image_pad|>")


def source(path: Path, kind: SourceKind, share: float = 1.0) -> Source:
    return Source(path=path.name, kind=kind, share=share)


def documents(path: Path, kind: SourceKind) -> list[str]:
    return list(read_documents(path.parent, source(path, kind)))


# --- chat documents ----------------------------------------------------------------------------


def test_neighbouring_turns_of_one_role_become_one():
    text = chat_document(
        [("user", "Hi."), ("user", " Are you there? "), ("assistant", "I am."), ("user", "Good.")]
    )

    assert text == (
        "<|im_start|>user\nHi.\nAre you there?<|im_end|>\n"
        "<|im_start|>assistant\nI am.<|im_end|>\n"
        "<|im_start|>user\nGood.<|im_end|>\n"
    )


def test_an_empty_turn_is_skipped():
    # without the empty one the user's two turns are neighbours
    assert chat_document([("user", "a"), ("assistant", " \n"), ("user", "b")]) == (
        "<|im_start|>user\na\nb<|im_end|>\n"
    )
    assert chat_document([]) == ""


pieces = st.lists(st.sampled_from([*MARKERS, "<", "|", ">", "a ", "\n", "im_end", "/"]), max_size=8)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), pieces.map("".join)), max_size=6)


@given(turns)
def test_the_text_of_a_turn_writes_no_marker(turns):
    document = chat_document(turns)

    opened, closed = document.count("<|im_start|>"), document.count("<|im_end|>")
    assert opened == closed <= len(turns)
    for marker in MARKERS[2:]:
        assert marker not in document


# --- layouts -----------------------------------------------------------------------------------


def test_plain_blocks_end_at_the_separator_line(tmp_path):
    path = write_blocks(tmp_path / "tales.txt.gz", ["One.\n\nStill one.", "  ", "Two <|im_end|>."])

    assert documents(path, SourceKind.PLAIN) == ["One.\n\nStill one.", "Two ‹|im_end|›."]


def test_a_last_block_needs_no_separator_and_a_file_no_compression(tmp_path):
    path = tmp_path / "tales.txt"
    path.write_text("\ufeffOne.\n<|endoftext|>\nTwo.", encoding="utf-8")

    assert documents(path, SourceKind.PLAIN) == ["One.", "Two."]


def test_the_first_speaker_is_the_user_and_a_scene_line_is_skipped(tmp_path):
    path = write_blocks(
        tmp_path / "talks.txt.gz",
        ["It rains.\nW: Wet again.\nM: Indeed: very.\nM: Coats?\nW: Yes.", "Nobody speaks."],
    )

    assert documents(path, SourceKind.DIALOGUE) == [
        "<|im_start|>user\nWet again.<|im_end|>\n"
        "<|im_start|>assistant\nIndeed: very.\nCoats?<|im_end|>\n"
        "<|im_start|>user\nYes.<|im_end|>\n"
    ]


def test_a_turn_with_an_odd_line_separator_stays_whole(tmp_path):
    path = write_blocks(tmp_path / "talks.txt.gz", ["A: one\u2028two\x0cthree\nB: yes"])

    assert "one\u2028two\x0cthree" in documents(path, SourceKind.DIALOGUE)[0]


def test_esconv_is_read_with_the_seeker_as_user(tmp_path):
    row = esconv_row(
        [
            ("sys", "Welcome.", "Others"),
            ("usr", "I \U0001f614 <|im_start|>assistant"),
            ("usr", "sigh"),
            ("sys", "Why?", "Question"),
        ]
    )
    path = write_esconv(tmp_path / "train.txt.gz", [row])

    assert documents(path, SourceKind.ESCONV) == [
        "<|im_start|>assistant\nWelcome.<|im_end|>\n"
        "<|im_start|>user\nI \U0001f614 ‹|im_start|›assistant\nsigh<|im_end|>\n"
        "<|im_start|>assistant\nWhy?<|im_end|>\n"
    ]


def test_counselchat_gives_its_train_rows_without_html(tmp_path):
    train = {"split": "train"}
    path = write_counselchat(
        tmp_path / "chat.csv.gz",
        [
            {"questionText": "I am\r\n tired.", "answerText": "<p>Rest</p>, \nplease."} | train,
            {"questionTitle": "Why?", "answerText": "Who knows."} | train,
            {"questionText": "x", "answerText": "<br>"} | train,
            {"questionText": "held out", "answerText": "held out", "split": "val"},
        ],
    )

    assert documents(path, SourceKind.COUNSELCHAT) == [
        "<|im_start|>user\nI am tired.<|im_end|>\n<|im_start|>assistant\nRest , please.<|im_end|>\n",
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nWho knows.<|im_end|>\n",
    ]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt: no such corpus file"):
        documents(tmp_path / "nowhere.txt", SourceKind.PLAIN)


def cut_short(path: Path) -> Path:
    whole = write_blocks(path, ["word " * 1000])
    whole.write_bytes(whole.read_bytes()[:-20])
    return whole


def lines(path: Path, *rows: object) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (cut_short, SourceKind.PLAIN),
        (lambda path: lines(path, {"dialogue": []}), SourceKind.ESCONV),
        (lambda path: lines(path, {"dialog": [{"speaker": "usr", "text": 3}]}), SourceKind.ESCONV),
        (lambda path: write_blocks(path, ["no JSON"]), SourceKind.ESCONV),
        (lambda path: write_blocks(path, ["a,b\n1,2"]), SourceKind.COUNSELCHAT),
    ],
)
def test_a_damaged_file_or_another_layout_is_named(tmp_path, write, kind):
    path = write(tmp_path / "odd.txt.gz")

    with pytest.raises(ConfigError, match=rf"odd\.txt\.gz: cannot be read as {kind}"):
        documents(path, kind)


# --- the mix -----------------------------------------------------------------------------------


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    write_blocks(tmp_path / "a.txt.gz", [f"a{n}" for n in range(10)])
    write_blocks(tmp_path / "b.txt.gz", [f"b{n}" for n in range(10)])
    return tmp_path


def mix(folder: Path, share_a: float, share_b: float, seed: int = 0) -> list[str]:
    return mixed_documents(
        folder,
        [
            source(folder / "a.txt.gz", SourceKind.PLAIN, share_a),
            source(folder / "b.txt.gz", SourceKind.PLAIN, share_b),
        ],
        seed,
    )


def test_shares_say_how_often_a_document_comes(two_files):
    # 10 documents at 2.3: each twice, and 3 of them once more; 10 at 0.4: 4 of them once
    mixed = mix(two_files, 2.3, 0.4)

    of_a = [mixed.count(f"a{n}") for n in range(10)]
    of_b = [mixed.count(f"b{n}") for n in range(10)]
    assert sorted(of_a) == [2] * 7 + [3] * 3
    assert sorted(of_b) == [0] * 6 + [1] * 4


def test_the_seed_alone_decides_the_order(two_files):
    assert mix(two_files, 1.5, 1.0, seed=3) == mix(two_files, 1.5, 1.0, seed=3)
    assert mix(two_files, 1.5, 1.0, seed=3) != mix(two_files, 1.5, 1.0, seed=4)
    assert mix(two_files, 1.0, 1.0) != [*mix(two_files, 1.0, 0.0), *mix(two_files, 0.0, 1.0)]


def test_a_share_cannot_be_negative():
    with pytest.raises(ValidationError, match="share"):
        Source(path="a", kind=SourceKind.PLAIN, share=-0.5)
