"""The annotation desk: a blind queue, drafts, answers, and the third person."""

import io
from concurrent.futures import ThreadPoolExecutor

import PIL.Image
import pytest
from sqlalchemy import func, select

from compeer_core.annotation.annotations import AnnotationItem
from compeer_core.annotation.desk import Desk
from compeer_core.cer import Candidate, CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError, InputError, StoreError
from compeer_core.images import read_image
from compeer_core.reasoning import Part
from compeer_core.taxonomy import Preference
from compeer_core.votes.schema import AnnotatorRow, AnswerRow, PassRow
from tests.cases import case_of
from tests.core.votes.made_up import TURN
from training.reward_model.conversations import Kind, conversations

HISTORY = (CaseUtterance(speaker=Speaker.SEEKER, text="I failed."),)
RIGHT = (True, True, True)


def item(number, replies=("Oh no.", "Tell me more.")):
    return AnnotationItem(
        id=f"i{number}", language="en", history=HISTORY, steps=("a", "b", "c"), replies=replies
    )


def row(number):
    """The row of an item: the second reply is the turn that is judged."""
    return CerRecord(
        id=f"d{number}#0@i{number}",
        case=case_of(f"d{number}", history=HISTORY),
        first=Candidate(author="corpus", reply="Oh no."),
        second=Candidate(author="policy", reply="Tell me more.", turn=TURN.format("Tell me more.")),
    )


@pytest.fixture
def desk(store):
    made = Desk(store)
    made.add_items((item(number), row(number)) for number in range(3))
    return made


@pytest.fixture
def people(desk):
    """Two annotators, and one who may decide."""
    names = {"ann": False, "bo": False, "cy": True}
    return [desk.log_in(desk.add_annotator(n, may_adjudicate=may)) for n, may in names.items()]


def answered(desk, person, number=0, *, conflicts=False, in_item_order=None, **answer):
    """Take the next item, which must be that number, and answer it."""
    work = desk.next_item(person, "tab", conflicts=conflicts)
    assert work.item.id == f"i{number}"
    if in_item_order is not None:
        given = Preference(in_item_order)
        answer["preference"] = given if work.shown_first == "first" else given.swapped()
    return desk.answer(person, work.item.id, **answer)


def code_of(call, *arguments, **named):
    with pytest.raises(InputError) as caught:
        call(*arguments, **named)
    return caught.value.code


# --- people -------------------------------------------------------------------------------------


def test_a_token_lets_one_person_in_until_it_is_revoked(desk):
    token = desk.add_annotator("ann", may_adjudicate=True)

    assert (desk.log_in(token).name, desk.log_in(token).may_adjudicate) == ("ann", True)
    for wrong in ("", token[:-1], token + " ", "\ud800\x00"):
        assert desk.log_in(wrong) is None
    desk.revoke("ann")
    assert desk.log_in(token) is None


def test_the_database_has_no_token(desk, store):
    token = desk.add_annotator("ann")

    with store.database.reading() as session:
        kept = session.query(AnnotatorRow).one()
        assert token not in {str(value) for value in vars(kept).values()}


@pytest.mark.parametrize("name", ["ann", " ann ", "", " "])
def test_names_are_single_and_not_empty(desk, name):
    desk.add_annotator("ann")

    with pytest.raises(ConfigError):
        desk.add_annotator(name)
    with pytest.raises(ConfigError, match="no annotator"):
        desk.revoke("nobody")


# --- the queue ----------------------------------------------------------------------------------


def test_an_item_is_given_to_two_people_and_to_nobody_twice(desk, people):
    ann, bo, cy = people
    for number in range(3):
        answered(desk, ann, number, steps=RIGHT)
    assert desk.next_item(ann, "tab") is None

    answered(desk, bo, 0, steps=RIGHT)
    assert desk.next_item(cy, "tab").item.id == "i1"
    assert desk.progress(ann).done == 3


def test_what_was_begun_comes_first_and_is_shown_in_the_same_order(desk, people):
    ann, bo, _ = people
    work = desk.next_item(ann, "tab")
    desk.save_draft(ann, work.item.id, "tab", {"note": "half a\x00 word"})
    desk.next_item(bo, "tab")

    again = desk.next_item(ann, "tab")

    assert (again.item, again.shown_first) == (work.item, work.shown_first)
    assert again.draft == {"note": "half a word"}
    assert desk.progress(ann).drafts == 1


def test_an_assigned_item_stays_reserved_for_a_day(desk, people, clock):
    ann, bo, cy = people
    desk.next_item(ann, "tab")
    desk.next_item(bo, "tab")
    assert desk.next_item(cy, "tab").item.id == "i1"

    clock.forward(hours=25)
    desk.save_draft(ann, "i0", "tab", {})
    dee = desk.log_in(desk.add_annotator("dee"))
    assert desk.next_item(dee, "tab").item.id == "i0"


def test_people_who_ask_at_once_are_never_three_on_an_item(desk):
    crowd = [desk.log_in(desk.add_annotator(f"p{number}")) for number in range(6)]

    with ThreadPoolExecutor(6) as pool:
        given = list(pool.map(lambda person: desk.next_item(person, "tab").item.id, crowd))

    assert sorted(given) == ["i0", "i0", "i1", "i1", "i2", "i2"]


def test_items_are_added_once_and_at_the_end(desk, people):
    assert desk.add_items([(item(2), None), (item(9), None), (item(9), None)]) == 1

    assert desk.progress(people[0]).to_do == 4


# --- drafts, answers ----------------------------------------------------------------------------


def test_of_two_tabs_one_may_write_until_it_is_silent(desk, people, clock):
    ann = people[0]
    assert desk.next_item(ann, "one").may_write
    assert not desk.next_item(ann, "two").may_write
    assert code_of(desk.save_draft, ann, "i0", "two", {}) == "item_open_elsewhere"

    clock.forward(seconds=20)
    desk.save_draft(ann, "i0", "one", {"note": "x"})
    clock.forward(seconds=20)
    assert not desk.open_item(ann, "i0", "two").may_write
    clock.forward(seconds=11)
    assert desk.open_item(ann, "i0", "two").may_write
    assert code_of(desk.save_draft, ann, "i0", "one", {}) == "item_open_elsewhere"


def test_an_answer_is_stored_completely(desk, people):
    note = "<script>\u202e" + "我" * 9_990

    said = answered(
        desk,
        people[0],
        steps=(True, None, False),
        in_item_order="second",
        confidence=4,
        note=note,
        seconds=12.5,
    )

    assert list(desk.annotations()) == [said]
    assert (said.annotator, said.steps, said.note) == ("ann", (True, None, False), note)
    assert desk.progress(people[0]).drafts == 0


def test_an_answer_that_is_sent_again_is_one_and_a_second_thought_is_two(desk, people):
    ann = people[0]
    first = answered(desk, ann, steps=RIGHT, token="t")

    assert desk.answer(ann, "i0", steps=(False,) * 3, token="t") == first
    desk.answer(ann, "i0", steps=(False,) * 3, token="u")
    assert [said.steps for said in desk.annotations()] == [RIGHT, (False,) * 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"note": "x" * 10_001},
        {"confidence": 6},
        {"preference": "left"},
        {"steps": (True,)},
        {"seconds": -1.0},
        {"seconds": float("nan")},
    ],
)
def test_invalid_answers_are_rejected(desk, people, wrong):
    desk.next_item(people[0], "tab")

    assert code_of(desk.answer, people[0], "i0", **wrong) == "answer_unusable"
    assert list(desk.annotations()) == []


@pytest.mark.parametrize("item_id", ["i0", "i9", "", "a\x00"])
def test_nobody_answers_what_was_not_given_to_them(desk, people, item_id):
    ann = people[0]

    for call in (desk.answer, desk.conflict):
        assert code_of(call, ann, item_id) == "item_not_yours"
    assert code_of(desk.save_draft, ann, item_id, "tab", {}) == "item_not_yours"
    assert code_of(desk.open_item, ann, item_id, "tab") == "item_not_yours"


def test_the_database_refuses_to_change_an_answer(desk, people, store):
    answered(desk, people[0], steps=RIGHT)

    with pytest.raises(StoreError, match="never changed"), store.database.writing() as session:
        session.query(AnswerRow).update({"note": "forged"})


def test_a_preference_between_one_reply_and_none_is_dropped(desk, people):
    desk.add_items([(item(9, replies=None), None)])
    for number in range(3):
        answered(desk, people[0], number, steps=RIGHT)

    assert answered(desk, people[0], 9, steps=RIGHT, preference="first").preference is None


def test_somebody_can_be_deleted_with_all_answers(desk, people):
    answered(desk, people[0], 0, steps=RIGHT)
    answered(desk, people[1], 0, steps=RIGHT)

    assert desk.delete_annotator("ann") == 1
    assert [said.annotator for said in desk.annotations()] == ["bo"]


# --- the third person ---------------------------------------------------------------------------


def test_a_conflict_waits_for_somebody_else_who_may_decide(desk, people):
    ann, bo, cy = people
    answered(desk, ann, steps=RIGHT, in_item_order="first")
    assert desk.progress(cy).conflicts == 0
    answered(desk, bo, steps=(True, False, True), in_item_order="second")

    assert (desk.progress(cy).conflicts, desk.progress(ann).conflicts) == (1, 0)
    assert desk.next_item(ann, "tab", conflicts=True) is None
    desk.next_item(cy, "tab", conflicts=True)
    one, other = desk.conflict(cy, "i0")
    assert (one.annotator, other.annotator) == ("1", "2")
    assert (one.preference, other.preference) == (Preference.FIRST, Preference.SECOND)
    assert (one.steps, other.steps) == (RIGHT, (True, False, True))
    assert code_of(desk.conflict, ann, "i0") == "not_a_conflict"

    answered(desk, cy, conflicts=True, steps=(True, False, True), in_item_order="both")
    assert desk.progress(cy).conflicts == 0


def test_people_who_agree_need_no_third(desk, people):
    for person in people[:2]:
        answered(desk, person, steps=RIGHT, in_item_order="second")

    assert desk.next_item(people[2], "tab", conflicts=True) is None


def test_settled_answers_become_rows_for_training(desk, people):
    ann, bo, cy = people
    answered(desk, ann, 0, steps=RIGHT, in_item_order="second")
    answered(desk, bo, 0, steps=(True, False, True), in_item_order="second")
    answered(desk, cy, 0, conflicts=True, steps=(None, False, None))
    answered(desk, ann, 1, in_item_order="first")

    [record] = desk.settled()

    assert record.second.steps == (True, False, True)
    assert record.second.steps_by.name == "ann, bo, cy"
    assert record.preference is Preference.SECOND
    assert record.preference_by.name == "ann, bo"
    [unified] = conversations(record, Kind.UNIFIED)
    words = [message.content[0] for message in unified if message.role == "assistant"]
    assert words == ["True", "False", "True", "Second"]


def test_three_different_answers_give_no_row(desk, people):
    for person, said, conflicts in zip(
        people, ("first", "second", "neither"), (False, False, True), strict=True
    ):
        answered(desk, person, conflicts=conflicts, in_item_order=said)

    assert list(desk.settled()) == []
    assert desk.progress(people[2]).conflicts == 0


def test_the_third_person_answers_only_where_two_differ(desk, people):
    ann, bo, cy = people
    dee = desk.log_in(desk.add_annotator("dee"))
    desk.next_item(dee, "tab")  # and never answers
    desk._now.forward(hours=25)
    for person, step in ((ann, True), (bo, False)):
        answered(desk, person, steps=(step, True, True))

    assert code_of(desk.open_item, dee, "i0", "tab") == "item_closed"
    assert code_of(desk.answer, dee, "i0", steps=RIGHT) == "item_closed"
    work = desk.next_item(cy, "tab", conflicts=True)
    assert (work.decides, work.answered) == (True, None)
    desk.answer(cy, "i0", steps=(True, None, None), note="clear")
    again = desk.open_item(cy, "i0", "tab")
    assert (again.decides, again.answered.note) == (True, "clear")


def test_who_answered_first_never_sees_the_others(desk, people):
    cy, ann, bo = people[2], *people[:2]
    answered(desk, cy, steps=RIGHT)
    answered(desk, ann, steps=(False, True, True))
    dee = desk.log_in(desk.add_annotator("dee", may_adjudicate=True))
    answered(desk, dee, conflicts=True, steps=(True, None, None))

    assert code_of(desk.conflict, cy, "i0") == "not_a_conflict"
    assert not desk.open_item(cy, "i0", "tab").decides
    assert desk.conflict(dee, "i0")[0].steps == RIGHT
    assert code_of(desk.conflict, bo, "i0") == "item_not_yours"


# --- second thoughts ----------------------------------------------------------------------------


def test_the_last_answer_can_be_taken_back_and_is_the_draft_again(desk, people):
    ann, bo, cy = people
    answered(desk, ann, 0, steps=RIGHT, in_item_order="both", confidence=4, note="n", seconds=3.0)
    answered(desk, bo, 0, steps=(False, True, True), in_item_order="both")
    answered(desk, ann, 1, steps=RIGHT)
    assert desk.take_back(ann) == "i1"
    assert desk.take_back(ann) == "i0"
    assert code_of(desk.take_back, ann) == "nothing_to_take_back"

    assert (desk.progress(ann).done, desk.progress(cy).conflicts) == (0, 0)
    work = desk.next_item(ann, "tab")
    assert (work.item.id, work.answered) == ("i0", None)
    assert work.draft == {
        "steps": [True, True, True],
        "preference": "both",
        "confidence": 4,
        "note": "n",
        "seconds": 3.0,
    }
    answered(desk, ann, 0, steps=(False, True, True), in_item_order="both")
    assert [record.second.steps for record in desk.settled()] == [(False, True, True)]


def test_nothing_is_changed_once_a_third_person_has_the_item(desk, people):
    ann, bo, cy = people
    answered(desk, ann, steps=RIGHT)
    answered(desk, bo, steps=(False, True, True))
    desk.next_item(cy, "tab", conflicts=True)

    assert code_of(desk.take_back, bo) == "item_decided"
    assert code_of(desk.answer, ann, "i0", steps=(False, True, True)) == "item_decided"
    assert len(list(desk.annotations())) == 2


def test_one_sees_what_one_has_begun_and_nobody_elses(desk, people, clock):
    ann, bo, _ = people
    answered(desk, ann, 0, steps=RIGHT)
    clock.forward(minutes=1)
    answered(desk, ann, 1, steps=RIGHT)
    answered(desk, bo, 0, steps=RIGHT)
    work = desk.next_item(ann, "tab")
    desk.save_draft(ann, work.item.id, "tab", {"note": "x"})

    begun = [(each.item_id, each.number, each.state) for each in desk.begun(ann)]
    assert begun == [("i2", 3, "draft"), ("i1", 2, "done"), ("i0", 1, "done")]


# --- tabs and passes ----------------------------------------------------------------------------


def test_a_tab_that_is_silent_does_not_keep_the_next_one_out_when_the_clock_is_set_back(
    desk, people, clock
):
    ann = people[0]
    desk.next_item(ann, "one")
    clock.forward(hours=-1)

    assert desk.hold(ann, "i0", "two")


def test_a_pass_is_good_as_long_as_the_token(desk, people):
    ann = people[0]
    given = desk.new_pass(ann)

    assert desk.let_in(given) == ann
    for wrong in ("", given[:-1], given + "x", "1", ".", "٣.x", "9" * 30, "\ud800.x", "x" * 5000):
        assert desk.let_in(wrong) is None
    desk.revoke("ann")
    assert desk.let_in(given) is None


def test_a_pass_that_is_ended_lets_nobody_in_and_the_others_stay(desk, people):
    ann = people[0]
    left, kept = desk.new_pass(ann), desk.new_pass(ann)
    desk.end_pass(left)
    desk.end_pass("made up")

    assert desk.let_in(left) is None
    assert desk.let_in(kept) == ann


@pytest.mark.parametrize(
    ("hours", "is_let_in"),
    [(1, True), (7 * 24 - 1, True), (7 * 24 + 1, False), (-1, True), (-23, True), (-1000, False)],
)
def test_a_pass_is_good_for_a_week_also_when_the_clock_was_set_back(
    desk, people, clock, hours, is_let_in
):
    given = desk.new_pass(people[0])
    clock.forward(hours=hours)

    assert (desk.let_in(given) == people[0]) is is_let_in


def test_old_passes_do_not_pile_up(desk, people, clock):
    for _ in range(3):
        desk.new_pass(people[0])
        clock.forward(days=8)
    desk.new_pass(people[1])

    with desk._database.reading() as session:
        assert session.scalar(select(func.count()).select_from(PassRow)) == 1


def test_a_pass_of_somebody_deleted_is_not_the_next_persons(desk):
    old = desk.new_pass(desk.log_in(desk.add_annotator("ann")))
    desk.delete_annotator("ann")
    bo = desk.log_in(desk.add_annotator("bo"))

    assert desk.let_in(old) is None
    assert desk.let_in(desk.new_pass(bo)) == bo


# --- pictures -----------------------------------------------------------------------------------


def test_a_picture_is_shown_to_whom_the_item_was_given(desk, people):
    picture = read_image(png())
    said = CaseUtterance(speaker=Speaker.SEEKER, text="Look.", images=("a/b.png",))
    pictured = item(8).model_copy(update={"history": (said,)})
    opened = []
    desk.add_items([(pictured, None)], lambda name: opened.append(name) or picture)
    desk.add_items([(pictured, None)], lambda name: opened.append(name) or picture)
    ann = people[0]

    assert code_of(desk.picture, ann, "i8", 0) == "item_not_yours"
    for number in range(3):
        answered(desk, ann, number, steps=RIGHT)
    assert desk.next_item(ann, "tab").item.id == "i8"
    assert desk.picture(ann, "i8", 0).data == picture.data
    assert [desk.picture(ann, "i8", index) for index in (1, -1)] == [None, None]
    assert opened == ["a/b.png"]


def png():
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 3), "teal").save(buffer, "PNG")
    return buffer.getvalue()


# --- what all said ------------------------------------------------------------------------------


def test_agreement_is_reported_only_for_items_with_two_answers(desk, people):
    ann, bo, cy = people
    answered(desk, ann, 0, steps=RIGHT, in_item_order="first")
    answered(desk, bo, 0, steps=RIGHT, in_item_order="second")
    answered(desk, ann, 1, steps=RIGHT, in_item_order="first")

    assert [said.item_id for said in desk.annotations(closed=True)] == ["i0", "i0"]
    found = desk.report()
    assert (found.items, found.answered) == (3, 1)
    assert found.questions[Part.REPLY].waiting == 1
    assert found.questions[Part.HISTORY].settled == 1
    assert found.questions[Part.HISTORY].agreement.n_items == 1
    assert [pair.names for pair in found.pairs] == [("ann", "bo")]
    assert not desk.progress(cy).is_over

    answered(desk, cy, 0, conflicts=True, in_item_order="neither")
    [dropped] = desk.report().dropped
    assert (dropped.number, dropped.question) == (1, Part.REPLY)
    assert dropped.answers == ("first", "second", "neither")
    assert desk.report().questions[Part.REPLY].agreement.n_ratings == 2


def test_a_question_that_all_answer_alike_is_called_skewed(desk, people):
    for number in range(3):
        for person in people[:2]:
            answered(desk, person, number, steps=(True, number < 2, True))

    questions = desk.report().questions
    assert (questions[Part.HISTORY].skewed, questions[Part.EMOTION].skewed) == ("True", None)
    assert desk.progress(people[0]).is_over
