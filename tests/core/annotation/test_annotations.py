"""Annotations: files that give back what was written, and whose answer counts."""

import csv
import gzip
import io
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import compeer_core.votes
from compeer_core.annotation.agreement import Consensus, Unsettled
from compeer_core.annotation.annotations import (
    Annotation,
    AnnotationItem,
    agreement,
    opinions,
    placed_annotations,
    read_annotations,
    write_annotations,
    write_csv,
)
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part
from compeer_core.taxonomy import Preference
from tests.cases import case_of

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def said(annotator, at=0, **fields):
    """An annotation of one item; `at` counts hours after noon."""
    return Annotation(
        item_id=fields.pop("item_id", "i1"),
        annotator=annotator,
        date=NOON + timedelta(hours=at),
        **fields,
    )


# --- files --------------------------------------------------------------------------------------

AWKWARD = [
    "=1+1",
    "'=1+1",
    "''=1",
    "'",
    "''",
    "'tis fine",
    "+49 30",
    "-1",
    "@SUM(A1)",
    " =cmd|' /C calc'!A0",
    "＝1",
    "\t=1",
    "\rhidden",
    "two\nlines\r\nand a return\rmore",
    'quotes " and ""',
    "a,b;c\td",
    "עברית ‏ and العربية",
    "😔👩‍👩‍👧",
    "\ufeffbyte order mark",
    "U+2028:\u2028.",
    "zero\u200bwidth \x00 \x1f",
    " space around ",
    "True",
]


@pytest.mark.parametrize("note", AWKWARD)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_awkward_texts_come_back_as_they_were(tmp_path, note, suffix):
    written = [said("ann", note=note), said(note, item_id=note)]

    assert write_annotations(tmp_path / f"a{suffix}", written) == 2
    assert list(read_annotations(tmp_path / f"a{suffix}")) == written
    assert [file.name for file in tmp_path.iterdir()] == [f"a{suffix}"]


TEXTS = st.text() | st.text(alphabet="'=+-@ \t\r\n\",;a", max_size=8) | st.sampled_from(AWKWARD)
NAMES = TEXTS.filter(bool)
ANNOTATIONS = st.builds(
    Annotation,
    item_id=NAMES,
    annotator=NAMES,
    steps=st.tuples(*[st.none() | st.booleans()] * 3),
    preference=st.none() | st.sampled_from(Preference),
    shown_first=st.sampled_from(["first", "second"]),
    confidence=st.none() | st.integers(1, 5),
    note=TEXTS,
    seconds=st.none() | st.floats(0, allow_infinity=False),
    date=st.datetimes(timezones=st.just(UTC)),
)


@given(st.lists(ANNOTATIONS, max_size=4))
def test_a_file_gives_back_what_was_written(tmp_path_factory, annotations):
    for name in ("f.csv", "f.jsonl"):
        path = tmp_path_factory.getbasetemp() / name
        write_annotations(path, annotations)

        assert list(read_annotations(path)) == annotations


def test_gzipped_annotations_can_be_read(tmp_path):
    annotation = Annotation(item_id="a", annotator="b", steps=(True, None, False), date=NOON)
    write_annotations(tmp_path / "a.jsonl", [annotation])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))

    assert list(read_annotations(tmp_path / "a.jsonl.gz")) == [annotation]


@given(st.lists(ANNOTATIONS, min_size=1, max_size=4))
def test_no_cell_of_the_csv_can_run_as_a_formula(annotations):
    file = io.StringIO(newline="")
    write_csv(file, annotations)
    file.seek(0)

    for row in csv.reader(file):
        for cell in row:
            assert not cell.strip().startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠"))
            assert not cell.startswith(("\t", "\r", "\n"))


def test_the_csv_can_be_read_by_eye(tmp_path):
    annotation = said(
        "ann",
        steps=(True, False, None),
        preference="both",
        shown_first="second",
        confidence=4,
        note="=1",
        seconds=12.5,
    )
    write_annotations(tmp_path / "a.csv", [annotation])

    assert (tmp_path / "a.csv").read_bytes().decode("utf-8").split("\r\n") == [
        "\ufeffitem_id,annotator,history,emotion,strategy,preference,shown_first,confidence,note,"
        "seconds,date",
        "i1,ann,True,False,,both,second,4,'=1,12.5,2026-11-21T12:00:00+00:00",
        "",
    ]


def test_what_excel_makes_of_it_is_read(tmp_path):
    # semicolons and decimal commas, TRUE in capitals, an empty row at the end, columns left out
    path = tmp_path / "a.csv"
    path.write_text(
        "item_id;annotator;date;history;emotion;strategy;preference;seconds;note\r\n"
        'i1;ann;2026-11-21T13:00:00+01:00;TRUE;FALSE;;First;12,5;"a; b, c"\r\n'
        ";;;;;;;;\r\n",
        encoding="utf-8-sig",
        newline="",
    )

    assert list(read_annotations(path)) == [
        said(
            "ann",
            steps=(True, False, None),
            preference=Preference.FIRST,
            seconds=12.5,
            note="a; b, c",
        )
    ]


HEADER = "item_id,annotator,date,history,confidence,preference,note\n"
GOOD = "i1,ann,2026-11-21T12:00:00Z,True,3,first,fine\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "f.csv: has no row of column names"),
        ("item_id,annotator\n", "row 1: has no column date, got item_id, annotator; it is needed"),
        (
            "item_id,annotator,date,prefrence\n",
            "row 1: unknown column 'prefrence' (did you mean preference?), allowed: item_id, ann",
        ),
        ("item_id,annotator,date,note,note\n", "row 1: the column note is there twice"),
        (
            HEADER + GOOD + GOOD.replace("True", "perhaps"),
            "f.csv, row 3, column history: got 'perhaps', allowed: True, False or nothing",
        ),
        (
            HEADER + GOOD.replace("3", "6"),
            "row 2, column confidence: got '6', allowed: a whole number from 1 to 5, or nothing",
        ),
        (
            HEADER + GOOD.replace("first", "third"),
            "column preference: got 'third', allowed: first, second, both, neither or nothing",
        ),
        (
            HEADER + GOOD.replace("2026-11-21T12:00:00Z", "46347.5"),
            "column date: got '46347.5', allowed: a date with time and zone, as in 2026",
        ),
        (
            HEADER + GOOD.replace("12:00:00Z", "12:00:00"),
            "column date: got '2026-11-21T12:00:00', allowed: a date with time and zone",
        ),
        (HEADER + GOOD.replace("ann", ""), "column annotator: got '', allowed: a text that is not"),
        (HEADER + GOOD.replace("fine", "x" * 10_001), "allowed: a text of at most 10000 char"),
        (HEADER + "i1,ann\n", "f.csv, row 2: got 2 cells, allowed: 7, one for each column"),
        (HEADER + GOOD + '"i1,ann', "f.csv, after row 2: is not CSV: unexpected end of data"),
    ],
)
def test_an_error_in_a_csv_is_reported_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "f.csv").write_text(text, encoding="utf-8", newline="")
    with pytest.raises(ConfigError) as failure:
        list(read_annotations(tmp_path / "f.csv"))

    assert sentence in str(failure.value)
    assert "\n" not in str(failure.value)


ROW = '{"item_id":"i1","annotator":"ann","date":"2026-11-21T12:00:00Z"%s}\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n" + ROW % ',"stepz":1', "row 2: unknown column 'stepz' (did you mean steps?), allowed"),
        (ROW % ',"steps":[true,false]', "column steps: got "),
        (ROW % ',"steps":[true,false,"x"]', "got 'x', allowed: a list of three, each true, false"),
        (ROW % ',"confidence":0', "column confidence: got 0, allowed: a whole number from 1 to 5"),
        ('{"item_id":"i1"}', "column annotator: got nothing, allowed: a text that is not empty"),
        ("{", "f.jsonl, row 1: is no annotation: Invalid JSON"),
        ("[]", "f.jsonl, row 1: is no annotation"),
    ],
)
def test_an_error_in_json_lines_is_reported_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "f.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as failure:
        list(read_annotations(tmp_path / "f.jsonl"))

    assert sentence in str(failure.value)
    assert "\n" not in str(failure.value)


def test_other_files_are_rejected_by_name(tmp_path):
    (tmp_path / "latin.csv").write_bytes("item_id,annotator,date\nä,b,c".encode("latin-1"))

    for name, problem in [
        ("a.xlsx", "not .xlsx"),
        ("none.csv", "No such file"),
        ("latin.csv", "UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            list(read_annotations(tmp_path / name))


def test_a_text_that_cannot_be_stored_is_rejected():
    with pytest.raises(ValidationError):
        said("ann", note="\ud800")


def test_dates_are_converted_to_utc_and_extreme_ones_are_rejected():
    east = timezone(timedelta(hours=2))

    assert said("a").date.isoformat() == "2026-11-21T12:00:00+00:00"
    assert Annotation(item_id="i", annotator="a", date=NOON.astimezone(east)).date.tzinfo == UTC
    with pytest.raises(ValidationError, match="too far"):
        Annotation(item_id="i", annotator="a", date=datetime(1, 1, 1, tzinfo=east))


# --- whose answer counts -------------------------------------------------------------------------


def test_a_preference_is_turned_into_the_order_of_the_item():
    assert said("a", preference="first").answer(Part.REPLY) is Preference.FIRST
    assert (
        said("a", preference="first", shown_first="second").answer(Part.REPLY) is Preference.SECOND
    )
    assert said("a", preference="both", shown_first="second").answer(Part.REPLY) is Preference.BOTH
    assert said("a", shown_first="second").answer(Part.REPLY) is None


def test_of_each_person_the_latest_annotation_counts_in_the_order_in_which_they_began():
    rows = [
        said("bo", 1, steps=(False, None, None)),
        said("ann", 5, steps=(False, None, None)),
        said("ann", 0, steps=(True, None, None)),
    ]

    found = opinions(rows, Part.HISTORY)

    assert list(found.latest.items()) == [("ann", False), ("bo", False)]
    assert found.independent == {"ann": False, "bo": False}
    assert found.outcome == Consensus(False, adjudicated=False)


def test_later_changes_do_not_alter_the_independent_answers():
    rows = [
        said("ann", 0, preference="first"),
        said("bo", 1, preference="second"),
        said("cy", 2, preference="second"),
        said("ann", 3, preference="second"),
        said("cy", 4, preference="second", confidence=5),
    ]

    before, after = opinions(rows[:3], Part.REPLY), opinions(rows, Part.REPLY)

    assert before.outcome == Consensus(Preference.SECOND, adjudicated=True)
    assert after.outcome == Consensus(Preference.SECOND, adjudicated=False)
    assert before.independent == after.independent == {"ann": "first", "bo": "second"}


def test_a_fourth_annotator_does_not_settle_a_question():
    rows = [
        said(name, hour, preference=preference)
        for hour, (name, preference) in enumerate(
            [("ann", "first"), ("bo", "second"), ("cy", "both"), ("di", "first")]
        )
    ]

    assert opinions(rows, Part.REPLY).outcome is Unsettled.NO_CONSENSUS
    assert list(opinions(rows, Part.REPLY).latest) == ["ann", "bo", "cy", "di"]


def test_an_answer_that_is_withdrawn_leaves_the_question_open():
    rows = [said("ann", 0, preference="first"), said("bo", 1, preference="first"), said("bo", 2)]

    assert opinions(rows, Part.REPLY).outcome is Unsettled.NEEDS_SECOND
    assert opinions(rows, Part.REPLY).latest == {"ann": "first"}
    assert opinions([], Part.REPLY).outcome is Unsettled.NEEDS_SECOND


def test_agreement_is_measured_question_by_question_on_the_first_two():
    # 4 items: the history step agreed on in 3, the preference in 2 of the 3 that both answered
    rows = []
    for number, (ann, bo) in enumerate([(True, True), (True, True), (False, False), (True, False)]):
        rows += [
            said("ann", 0, item_id=f"i{number}", steps=(ann, None, None), preference="first"),
            said(
                "bo",
                1,
                item_id=f"i{number}",
                steps=(bo, None, None),
                preference=["first", "first", "second", None][number],
            ),
        ]
    rows.append(said("cy", 2, item_id="i3", steps=(False, None, None)))

    found = agreement(rows)

    assert found[Part.HISTORY].raw.value == 0.75
    assert (found[Part.HISTORY].n_items, found[Part.HISTORY].n_ratings) == (4, 8)
    assert found[Part.REPLY].raw.value == pytest.approx(2 / 3)
    assert found[Part.EMOTION].raw is None
    assert compeer_core.votes.agreement is agreement


@given(st.data())
def test_the_order_of_rows_with_different_dates_does_not_matter(data):
    rows = [
        said(
            data.draw(st.sampled_from("abc")),
            hour,
            steps=data.draw(st.tuples(*[st.none() | st.booleans()] * 3)),
            preference=data.draw(st.none() | st.sampled_from(Preference)),
        )
        for hour in range(data.draw(st.integers(0, 7)))
    ]
    shuffled = data.draw(st.permutations(rows))

    for question in (*STEPS, Part.REPLY):
        one, other = opinions(rows, question), opinions(shuffled, question)
        assert list(one.latest.items()) == list(other.latest.items())
        assert one.independent == other.independent
        assert one.outcome == other.outcome


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_each_annotation_comes_with_its_place(tmp_path, name):
    path = tmp_path / name
    write_annotations(path, [said("ann"), said("bo", note="two\nlines")])

    places = [where for where, _ in placed_annotations(path)]

    begin = 2 if name.endswith("csv") else 1  # a CSV begins with the names of its columns
    assert places == [f"{path}, row {row}" for row in (begin, begin + 1)]


def test_an_item_asks_about_its_steps_and_its_replies():
    common = {"id": "i", "language": "en", "history": case_of("d").history}
    both = AnnotationItem(**common, steps=("a", "b", "c"), replies=("x", "y"))
    only = AnnotationItem(**common, steps=None, replies=("x", "y"))

    assert both.questions == (*STEPS, Part.REPLY)
    assert only.questions == (Part.REPLY,)
    with pytest.raises(ValueError, match="neither steps nor replies"):
        AnnotationItem(**common, steps=None, replies=None)
