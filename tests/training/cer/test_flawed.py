"""Flawed variants as judged rows: by hand, the filter, and what a line may not be."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from tests.training.cer.test_mirror import case, contexts, pack, turn
from training.cer import flawed
from training.cer.flawed import PARTS, Config, FlawedTurn, filtered, flawed_rows
from training.data.records import read_records

SHIPPED = Path(__file__).resolve().parents[3] / "assets" / "cer" / "flawed.jsonl.gz"


def variant(context, wrong=None, reworded=(), **changes):
    wrong = wrong or {}
    why = "history invents a dog" if wrong else ""
    return turn(context, **changes) | {
        "original_reply": "The cat is gone, and that hurts.",
        "wrong": wrong,
        "reworded": list(reworded),
        "why": why,
    }


def rows(folder, *variants, **settings):
    known = contexts(folder, *(case(v["context"], "the cat is gone") for v in variants))
    config = Config(
        variants=(pack(folder, *variants),), contexts=(known,), output=folder / "out", **settings
    )
    return config, list(flawed_rows(config))


def test_labels_follow_the_writer_by_hand(tmp_path):
    config, (worse, equal, none) = rows(
        tmp_path,
        variant("a#0", {"history": "invent", "reply": "generic"}, ["strategy"]),
        variant("b#0", reworded=["reply"]),
        variant("c#0", {"emotion": "other"}),
        drop_share=0,
    )

    def judged(row):
        return next(c for c in row.candidates if c.steps is not None)

    assert judged(worse).steps == (False, True, True)
    assert judged(worse).reason == "history invents a dog"
    assert judged(equal).steps == (True, True, True) and judged(equal).reason == ""
    assert judged(none).steps == (True, False, True)
    assert {c.steps_by.kind for row in (worse, equal, none) for c in [judged(row)]} == {"model"}
    better = worse.first if worse.preference is Preference.FIRST else worse.second
    assert better.reply == "The cat is gone, and that hurts." and better.steps is None
    assert equal.preference is Preference.BOTH
    assert none.second is None and none.preference is None

    flawed.run(config)
    assert [row.id for row in read_records(tmp_path / "out" / "rows.jsonl", CerRecord)] == [
        *("a#0/flawed", "b#0/flawed", "c#0/flawed")
    ]


def test_both_orders_of_the_replies_occur(tmp_path):
    _, judged = rows(tmp_path, *(variant(f"d{n}#0", {"reply": "wave"}) for n in range(30)))

    counts = Counter(row.preference for row in judged)
    assert min(counts[Preference.FIRST], counts[Preference.SECOND]) >= 5


def test_variants_that_a_word_gives_away_are_dropped():
    def made(number, wrong, telling):
        word = "never" if wrong and telling else "today"
        changes = {"reply": f"So the cat is gone {word}, friend {number}."}
        return FlawedTurn.model_validate(
            variant(f"e{number}#0", {"reply": "wave"} if wrong else {}, [] if wrong else ["reply"])
            | changes
        )

    variants = [made(n, n % 2 == 0, n < 60) for n in range(120)]
    kept = filtered(variants, 0.25)

    assert sum(kept) == 90
    dropped = [n for n, keep in enumerate(kept) if not keep]
    assert sum(n < 60 for n in dropped) >= 25  # "never" tells
    assert all(filtered(variants, 0))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.floats(0, 0.9))
def test_the_filter_drops_the_stated_share(parts, share):
    variants = [
        FlawedTurn.model_validate(variant(f"f{n}#0", {part: "kind"}))
        for n, part in enumerate(parts)
    ]

    assert sum(filtered(variants, share)) == len(variants) - int(share * len(variants))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([variant("x#0", {"reply": "wave"}, ["reply"])], "reply is both wrong and reworded"),
        ([variant("x#0")], "no part was changed"),
        ([variant("x#0", {"reply": "wave"}) | {"why": ""}], "`why` must name the mistakes"),
        ([variant("x#0", {"tone": "wave"})], "line 1: wrong.tone"),
        (
            [variant("x#0", {"reply": "wave"})] * 2,
            "line 2: context x#0 already has a turn, in .*line 1",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, *lines)


def test_contexts_must_be_known_and_a_resume_is_refused(tmp_path):
    config = Config(
        variants=(pack(tmp_path, variant("y#0", {"reply": "wave"})),),
        contexts=(contexts(tmp_path, case("z#0", "hello")),),
        output=tmp_path / "out",
    )
    with pytest.raises(ConfigError, match="the context of none of 1 turns"):
        list(flawed_rows(config))
    with pytest.raises(ConfigError, match="leave out --resume"):
        flawed.run(config, resume=tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        list(flawed_rows(config.model_copy(update={"variants": (tmp_path / "none.gz",)})))


def test_the_shipped_variants_are_readable_and_of_every_kind():
    with gzip.open(SHIPPED, "rt", encoding="utf-8") as file:
        variants = [FlawedTurn.model_validate(json.loads(line)) for line in file]

    kinds = Counter((part, kind) for v in variants for part, kind in v.wrong.items())
    assert len({v.context for v in variants}) == len(variants)
    assert len(kinds) == 30 and min(kinds.values()) >= 40
    assert sum(not v.wrong for v in variants) > len(variants) / 5
