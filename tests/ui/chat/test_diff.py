"""Differences between two texts by words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ui_components.chat.diff import Piece, words_diff


def kinds(before: str, after: str) -> list[tuple[str, str]]:
    return [(piece.kind, piece.text) for piece in words_diff(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("I hear you.", "I hear you.", [("same", "I hear you.")]),
        ("", "Hello", [("added", "Hello")]),
        ("Hello", "", [("removed", "Hello")]),
        # a whole phrase reads as one change, the spaces in it as well
        (
            "You did very well.",
            "You can not sleep.",
            [("same", "You "), ("removed", "did very well"), ("added", "can not sleep"), ("same", ".")],
        ),
        ("don't go", "do go", [("removed", "don't"), ("added", "do"), ("same", " go")]),
        ("你今天很难过。", "你今天很累。", [("same", "你今天很"), ("removed", "难过"), ("added", "累"), ("same", "。")]),
        ("我用 Python 写", "我用 Rust 写", [("same", "我用 "), ("removed", "Python"), ("added", "Rust"), ("same", " 写")]),
    ],
)  # fmt: skip
def test_words_are_told_apart(before, after, expected):
    assert kinds(before, after) == expected


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["you", "feel", " ", "\n", "!", "你", "好", "x"]), max_size=20),
    st.lists(st.sampled_from(["you", "feel", " ", "\n", "!", "你", "好", "x"]), max_size=20),
)
def test_both_texts_can_be_put_together_again(before, after):
    pieces = words_diff("".join(before), "".join(after))

    assert "".join(p.text for p in pieces if p.kind != "added") == "".join(before)
    assert "".join(p.text for p in pieces if p.kind != "removed") == "".join(after)


def test_very_long_texts_are_told_apart_as_a_whole():
    assert words_diff("a b " * 1500, "c") == (Piece("removed", "a b " * 1500), Piece("added", "c"))
