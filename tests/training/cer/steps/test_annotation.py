"""From turns to items and from answers to rows: the paper's rule in every branch, by hand first."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compeer_core.annotation.agreement import Unsettled
from compeer_core.annotation.annotations import (
    Annotation,
    AnnotationItem,
    ItemKey,
    write_annotations,
)
from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import Part
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.cases import case_of
from training.cer.steps.annotation import DroppedAnswer, Need, items, settle
from training.data.records import read_records

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TURN = """\
<history>They lost work.
Stage: Exploration</history>
<emotion>They are afraid.
Sentiment: Negative
Emotion: Fear
Intensity: 4</emotion>
<strategy>Ask first.
Strategy: Question</strategy>
<reply>{}</reply>"""


def case(number=0, original="I see."):
    return case_of(f"d{number}", "I lost my job.", corpus="esconv", original=original)


def lay_out(folder, turns, seed=0):
    report = items(turns, folder / "items.jsonl", folder / "key.jsonl", seed=seed)
    keys = list(read_records(folder / "key.jsonl", ItemKey))
    return report, list(read_records(folder / "items.jsonl", AnnotationItem)), keys


# --- what annotators see -------------------------------------------------------------------------


def test_an_item_shows_the_steps_and_both_replies_but_not_who_wrote_them(tmp_path):
    turn = TURN.format("What happened?")

    report, (item,), (key,) = lay_out(tmp_path, [(case(), "secret-model", turn)])

    assert item.steps == (
        "They lost work.\nStage: Exploration",
        "They are afraid.\nSentiment: Negative\nEmotion: Fear\nIntensity: 4",
        "Ask first.\nStrategy: Question",
    )
    assert set(item.replies) == {"What happened?", "I see."}
    assert item.replies[0 if key.original == "first" else 1] == "I see."
    assert (report.read, report.written) == (1, 1)
    shown = (tmp_path / "items.jsonl").read_text(encoding="utf-8")
    assert not any(word in shown for word in ("secret", "corpus", "esconv", "d0", "original"))
    assert (key.author, key.turn, key.case) == ("secret-model", turn, case())


def test_the_order_is_drawn_item_by_item_and_about_even(tmp_path):
    turns = [(case(number), "m", TURN.format("What happened?")) for number in range(400)]

    report, shown, keys = lay_out(tmp_path, turns)
    _, _, backwards = lay_out(tmp_path, turns[::-1])
    _, _, other = lay_out(tmp_path, turns, seed=1)

    first = sum(key.original == "first" for key in keys)
    assert 180 < first < 220  # a deviation is 10; the seed is fixed
    for item, key in zip(shown, keys, strict=True):
        assert item.replies[0 if key.original == "first" else 1] == "I see."
    assert report.figures["original first"] == first
    assert backwards[::-1] == keys
    assert [key.item_id for key in other] == [item.id for item in shown]
    assert 140 < sum(a.original != b.original for a, b in zip(keys, other, strict=True)) < 260


def test_incomplete_and_repeated_turns_are_counted(tmp_path):
    turns = [
        (case(), "m", TURN.format("What happened?")),
        (case(), "m", TURN.format("What happened?")),
        (case(), "m", "<reply>Only this.</reply>"),
        (case(1, original=None), "m", TURN.format("Go on.")),
        (case(2, original="Go on. "), "m", TURN.format("Go on.")),
    ]

    report, shown, keys = lay_out(tmp_path, turns)

    assert report.dropped == {
        "esconv": {
            "repeated turn for the same case": 1,
            "incomplete turn": 1,
        }
    }
    assert [item.replies is None for item in shown] == [False, True, True]
    assert [key.original is None for key in keys] == [False, True, True]


# --- what they answered --------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path):
    """Three items with keys written by hand: original first, original second, no original."""
    orders = ("first", "second", None)
    keys = [
        ItemKey(
            item_id=f"i{n}",
            case=case(n, original=None if order is None else "I see."),
            author="m",
            turn=TURN.format("What happened?"),
            original=order,
        )
        for n, order in enumerate(orders)
    ]
    write_rows(tmp_path / "key.jsonl", keys)
    return tmp_path


def said(item, annotator, hour, steps="", preference=None, shown_first="first", **more):
    """`steps` is written as TF-, `-` for a question left open."""
    marks = {"T": True, "F": False, "-": None}
    return Annotation(
        item_id=item,
        annotator=annotator,
        date=NOON + timedelta(hours=hour),
        steps=tuple(marks[mark] for mark in steps or "---"),
        preference=preference,
        shown_first=shown_first,
        **more,
    )


def settled(folder, *files):
    outputs = [folder / f"{name}.jsonl" for name in ("cer", "needs", "dropped")]
    report = settle(folder / "key.jsonl", files, *outputs)
    kinds = (CerRecord, Need, DroppedAnswer)
    rows = [list(read_records(path, kind)) for path, kind in zip(outputs, kinds, strict=True)]
    return report, *rows


def settle_rows(folder, rows):
    write_annotations(folder / "a.jsonl", rows)
    return settled(folder, folder / "a.jsonl")


def test_every_branch_of_the_rule_by_hand(desk):
    # item  question    ann  bo   cy        outcome
    # i0    history     T    T    -         True
    #       emotion     T    F    F         False, adjudicated
    #       strategy    T    F    -         needs a third
    #       reply       1st  2nd  both      dropped
    # i1    history     F    F              False
    #       emotion     T    (open)         needs a second
    #       strategy    F    F              False
    #       reply       1st  2nd, swapped   first
    # i2    nobody      ---                 needs two
    report, records, needs, dropped = settle_rows(
        desk,
        [
            said("i0", "ann", 0, "TTT", "first"),
            said("i0", "bo", 1, "TFF", "second"),
            said("i0", "cy", 2, "-F-", "both"),
            said("i1", "ann", 3, "FTF", "first"),
            said("i1", "bo", 4, "F-F", "second", shown_first="second"),
        ],
    )

    one, two = records
    # the original stands first in i0
    assert (one.first.author, one.second.author) == ("corpus", "m")
    assert one.second.steps == (True, False, None)
    assert (one.second.steps_by.kind, one.second.steps_by.name) == ("people", "ann, bo, cy")
    assert one.first.steps is None
    assert (one.preference, one.preference_by) == (None, None)
    assert (two.first.author, two.second.author) == ("m", "corpus")
    assert two.first.steps == (False, None, False)
    assert two.first.steps_by.name == "ann, bo"
    assert two.preference is Preference.FIRST
    assert two.preference_by.name == "ann, bo"

    assert needs == [
        Need(
            item_id="i0",
            questions={Part.STRATEGY: Unsettled.NEEDS_THIRD},
            annotators=("ann", "bo", "cy"),
        ),
        Need(
            item_id="i1", questions={Part.EMOTION: Unsettled.NEEDS_SECOND}, annotators=("ann", "bo")
        ),
        Need(
            item_id="i2",
            questions=dict.fromkeys(
                (Part.HISTORY, Part.EMOTION, Part.STRATEGY), Unsettled.NEEDS_SECOND
            ),
            annotators=(),
        ),
    ]
    assert dropped == [
        DroppedAnswer(
            item_id="i0",
            case_id="d0#0",
            question=Part.REPLY,
            answers={"ann": "first", "bo": "second", "cy": "both"},
        )
    ]

    assert (report.read, report.written) == (3, 2)
    assert report.dropped == {"esconv": {"reply: no two annotators agree": 1}}
    figures = report.figures
    assert (figures["history: settled"], figures["history: adjudicated"]) == (2, 0)
    assert (figures["emotion: settled"], figures["emotion: adjudicated"]) == (1, 1)
    assert (figures["strategy: needs_third"], figures["emotion: needs_second"]) == (1, 2)
    # before adjudication: history 2 of 2 agree, emotion 0 of 1, strategy 1 of 2, reply 1 of 2
    raw = [figures[f"{part}: raw"] for part in Part]
    assert raw == [1.0, 0.0, 0.5, 0.5]
    assert figures["reply: items with two answers"] == 2


def test_agreement_ignores_third_annotators_and_revisions(desk):
    rows = [
        said("i0", "ann", 0, "T--"),
        said("i0", "bo", 1, "F--"),
        said("i0", "cy", 2, "T--"),
        said("i0", "bo", 3, "T--"),
    ]

    report, (record,), _, _ = settle_rows(desk, rows)

    assert record.second.steps[0] is True
    assert report.figures["history: raw"] == 0.0
    assert report.figures["annotations revised"] == 1


def test_a_row_names_its_annotators(desk):
    rows = [
        said("i0", "di", 0, "T--", "first"),
        said("i0", "bo", 1, "F--", "second"),
        said("i0", "ann", 2, "T--", "first"),
        said("i0", "cy", 3, "T--", "first"),  # after the third, nobody is asked
    ]

    _, (record,), _, _ = settle_rows(desk, rows)

    assert record.preference_by.name == "ann, di"
    assert record.second.steps_by.name == "ann, di"


def test_files_may_be_mixed_repeat_each_other_and_hold_other_items(desk, caplog):
    first = [said("i0", "ann", 0, "TTT", "first", note="=1"), said("zz", "ann", 0, "TTT")]
    second = [said("i0", "bo", 1, "TTT", "first"), said("i0", "ann", 0, "TTT", "first", note="=1")]
    write_annotations(desk / "a.csv", first)
    write_annotations(desk / "b.jsonl", second)

    report, (record,), _, _ = settled(desk, desk / "a.csv", desk / "b.jsonl")
    again, same, _, _ = settled(desk, desk / "b.jsonl", desk / "a.csv", desk / "a.csv")

    assert record.preference is Preference.FIRST
    assert report.figures["annotations"] == 4
    assert report.figures["annotations repeated"] == 1
    assert report.figures["annotations of other items"] == 1
    assert "1 annotations belong to items that are not in the key" in caplog.text
    assert same == [record]
    assert again.figures["annotations repeated"] == 3


def test_a_preference_for_a_single_reply_is_ignored(desk):
    rows = [said("i2", name, 0, "TTT", "first") for name in ("ann", "bo")]

    report, (record,), _, _ = settle_rows(desk, rows)

    assert record.second is None
    assert record.preference is None
    assert record.first.steps == (True, True, True)
    assert report.figures["reply: items with two answers"] == 0


def test_a_bad_file_ends_the_step_and_leaves_no_output(desk):
    (desk / "a.csv").write_text(
        "item_id,annotator,date,history\ni0,ann,2026-11-21T12:00:00Z,perhaps\n", encoding="utf-8"
    )

    with pytest.raises(ConfigError, match=r"a.csv, row 2, column history: got 'perhaps'"):
        settled(desk, desk / "a.csv")
    assert not (desk / "cer.jsonl").exists()


ROWS = st.lists(
    st.builds(
        said,
        st.sampled_from(["i0", "i1", "i2"]),
        st.sampled_from(["ann", "bo", "cy", "di"]),
        st.integers(0, 40),
        st.text(alphabet="TF-", min_size=3, max_size=3),
        st.none() | st.sampled_from(Preference),
        st.sampled_from(["first", "second"]),
    ),
    max_size=24,
    unique_by=lambda row: row.date,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ROWS)
def test_every_question_is_settled_open_or_dropped(desk, rows):
    report, records, needs, dropped = settle_rows(desk, rows)

    for question in Part:
        figures = report.figures
        settled_count = figures.get(f"{question}: settled", 0)
        open_count = sum(question in need.questions for need in needs)
        lost = sum(row.question is question for row in dropped)
        assert settled_count + open_count + lost == (2 if question is Part.REPLY else 3)
        assert lost == 0 or question is Part.REPLY
    for record in records:
        assert record.preference is not None or any(c.steps for c in record.candidates)
        for by in (record.preference_by, *(c.steps_by for c in record.candidates)):
            assert by is None or (by.kind == "people" and by.name.count(",") >= 1)


# --- models as annotators ------------------------------------------------------------------------


def test_one_model_is_enough_and_two_that_differ_give_no_label(desk):
    # item  question    first  again  outcome
    # i0    history     T      T      True
    #       emotion     F             False
    #       strategy    T      F      dropped
    #       reply       2nd           second
    # i1    nobody                    needs a first
    write_annotations(
        desk / "a.jsonl",
        [
            said("i0", "reader-1", 0, "TFT", "second"),
            said("i0", "reader-2", 1, "T-F"),
        ],
    )
    outputs = [desk / f"{name}.jsonl" for name in ("cer", "needs", "dropped")]

    report = settle(desk / "key.jsonl", [desk / "a.jsonl"], *outputs, by_models=True)

    (record,) = read_records(outputs[0], CerRecord)
    assert record.second.steps == (True, False, None)
    assert record.second.steps_by.kind == "model"
    assert record.preference is Preference.SECOND
    assert (record.preference_by.kind, record.preference_by.name) == ("model", "reader-1")
    needs = list(read_records(outputs[1], Need))
    assert {need.item_id for need in needs} == {"i1", "i2"}
    assert {outcome for need in needs for outcome in need.questions.values()} == {
        Unsettled.NEEDS_FIRST
    }
    (dropped,) = read_records(outputs[2], DroppedAnswer)
    assert (dropped.question, dropped.item_id) == (Part.STRATEGY, "i0")
    assert [report.figures[f"{part}: raw"] for part in (Part.HISTORY, Part.STRATEGY)] == [1.0, 0.0]
