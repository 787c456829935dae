"""The picture of a board: where dots stand, and what no name can do to it."""

from xml.etree import ElementTree

import pytest

from compeer_core.stats import Estimate
from compeer_core.votes.leaderboard.board import Settings, bradley_terry
from compeer_core.votes.leaderboard.plot import PlotWords, to_svg
from tests.core.votes.leaderboard.test_board import (
    FIRST,
    NEITHER,
    SPITEFUL,
    drawn_votes,
    vote,
    votes_of,
)

SVG = "{http://www.w3.org/2000/svg}"


def with_scores(*scores):
    """A board whose models have these scores."""
    board = bradley_terry(drawn_votes(100), settings=Settings(fits=50))
    rows = [
        row.model_copy(update={"score": Estimate(value=value, low=low, high=high)})
        for row, (value, low, high) in zip(board.models, scores, strict=False)
    ]
    return board.model_copy(update={"models": tuple(rows)})


def test_dots_and_lines_stand_where_the_scores_are():
    # From 910 to 1090 in steps of 50 is 900 to 1100, over 328 units from 16 on: 1.64 a point
    drawn = ElementTree.fromstring(to_svg(with_scores((1050, 1010, 1090), (950, 910, 1000))))

    dots = [float(dot.get("cx")) for dot in drawn.iter(f"{SVG}circle")]
    assert dots == pytest.approx([16 + 150 * 1.64, 16 + 50 * 1.64], abs=0.1)
    lines = [line for line in drawn.iter(f"{SVG}line") if line.get("stroke-width") == "3"]
    assert [float(line.get("x1")) for line in lines] == pytest.approx([196.4, 32.4], abs=0.1)
    assert [float(line.get("x2")) for line in lines] == pytest.approx([327.6, 180.0], abs=0.1)
    texts = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert [text for text in texts if text.isdigit()] == ["900", "950", "1000", "1050", "1100"]
    assert "1050 (1010–1090)" in texts


@pytest.mark.parametrize("spread", [0.0, 0.4, 30, 700, 90_000])
def test_everything_is_inside_the_picture(spread):
    board = with_scores((1000, 1000 - spread, 1000 + spread), (1000, 1000, 1000))
    drawn = ElementTree.fromstring(to_svg(board))

    _, _, width, height = map(float, drawn.get("viewBox").split())
    for name in ("x", "x1", "x2", "cx"):
        places = [float(part.get(name)) for part in drawn.iter() if part.get(name)]
        assert all(16 <= place <= width - 16 for place in places)
    for name in ("y", "y1", "y2", "cy"):
        places = [float(part.get(name)) for part in drawn.iter() if part.get(name)]
        assert all(0 < place < height for place in places)
    ticks = [line for line in drawn.iter(f"{SVG}line") if line.get("stroke-width") != "3"]
    assert 2 <= len(ticks) <= 7


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("COMPEER-small (second edition)", "COMPEER-small (second edition)"),
        ("o" * 38, "o" * 36 + "…"),  # 46 columns without "1. (1–2) " and the dots
        ("模" * 30, "模" * 18 + "…"),  # two columns each
    ],
)
def test_a_name_has_a_line_and_is_shortened_to_it(name, shown):
    votes = votes_of((name, "b", FIRST, 30), ("b", name, FIRST, 5))
    drawn = ElementTree.fromstring(to_svg(bradley_terry(votes)))

    lines = [text for text in drawn.iter(f"{SVG}text") if text.find(f"{SVG}tspan") is not None]
    assert "".join(lines[0].itertext()) == f"1. (1–2) {shown}"
    # nothing else stands in the line
    beside = [text for text in drawn.iter(f"{SVG}text") if text.get("y") == lines[0].get("y")]
    assert len(beside) == 1


def test_names_stay_text():
    name = SPITEFUL + "\"'&\x00\ufffe<script>"
    drawn = to_svg(
        bradley_terry(votes_of((name, "b", FIRST, 30), ("b", name, FIRST, 5))),
    )

    parsed = ElementTree.fromstring(drawn)
    assert {part.tag for part in parsed.iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "text", "tspan", "line", "circle")
    }
    assert "\x00" not in drawn


def test_without_ranks_it_says_why_in_the_words_given():
    board = bradley_terry([vote(1), vote(2, "c", "a", NEITHER)])

    drawn = ElementTree.fromstring(
        to_svg(board, PlotWords(title="得分", not_ranked="未排名"), description="还需要 18 票。")
    )

    texts = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert texts == ["得分", "a", "未排名", "b", "未排名", "c", "未排名"]
    assert "还需要 18 票。" in "".join(drawn.itertext())
    assert drawn.get("aria-label") == "得分. 还需要 18 票。"
    assert drawn.get("role") == "img"
    assert not list(drawn.iter(f"{SVG}circle"))


def test_an_empty_board_is_a_picture_too():
    drawn = ElementTree.fromstring(to_svg(bradley_terry([])))

    assert "0 of 20 needed" in "".join(drawn.itertext())


def test_a_model_without_a_vote_that_compares_stands_below_without_a_dot():
    votes = [*votes_of(("a", "b", FIRST, 20), ("b", "a", FIRST, 9)), vote(90, "c", "a", NEITHER)]
    drawn = ElementTree.fromstring(to_svg(bradley_terry(votes)))

    texts = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert texts[-2:] == ["c", "not ranked"]
    assert len(list(drawn.iter(f"{SVG}circle"))) == 2
