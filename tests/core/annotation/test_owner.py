"""The owner of the desk: sign-in, who gets a batch, the share that two answer, progress."""

import pytest

from compeer_core.annotation.annotations import AnnotationItem
from compeer_core.annotation.desk import PASS_SECONDS, Desk
from compeer_core.annotation.owner import DeskOwner
from compeer_core.cer import CaseUtterance
from compeer_core.dialogue import Speaker
from compeer_core.errors import InputError
from compeer_core.reasoning import STEPS
from compeer_core.votes.__main__ import main
from compeer_core.votes.store import VoteStore

RIGHT = (True, True, True)


def item(number):
    said = CaseUtterance(speaker=Speaker.SEEKER, text=f"I failed {number}.")
    steps = tuple(f"{part}." for part in STEPS)
    return AnnotationItem(
        id=f"i{number}", language="en", history=(said,), steps=steps, replies=None
    )


@pytest.fixture
def desk(store):
    """A desk with ten items in batch a, two in batch b, and two annotators."""
    made = Desk(store)
    made.add_items([(item(number), None) for number in range(10)], batch="a")
    made.add_items([(item(number), None) for number in (10, 11)], batch="b")
    made.tokens = {name: made.add_annotator(name) for name in ("ann", "bo")}
    made.tokens["cy"] = made.add_annotator("cy", may_adjudicate=True)
    made.people = {name: made.log_in(token) for name, token in made.tokens.items()}
    return made


@pytest.fixture
def owner(store):
    return DeskOwner(store)


def worked(desk, name, steps=RIGHT):
    """Let somebody answer everything there is for them; return the items."""
    done = []
    while work := desk.next_item(desk.people[name], "tab"):
        desk.answer(desk.people[name], work.item.id, steps=steps)
        done.append(work.item.id)
    return done


# --- sign-in ------------------------------------------------------------------------------------


def test_only_the_owners_token_is_the_owners(store, owner, desk):
    token = owner.token()

    assert len(token) == 43
    assert DeskOwner(store).token() == token
    assert owner.knows(token)
    for other in ("", token[:-1], token + "x", desk.tokens["cy"], "\ud800"):
        assert not owner.knows(other)
    assert desk.log_in(token) is None


def test_passes_of_annotators_and_of_the_owner_do_not_open_each_others_door(desk, clock):
    owners, anns = desk.new_pass(None), desk.new_pass(desk.people["ann"])

    assert desk.lets_owner_in(owners)
    assert desk.let_in(owners) is None
    assert not desk.lets_owner_in(anns)
    assert desk.let_in(anns).name == "ann"
    assert not desk.lets_owner_in("guess")
    clock.forward(seconds=PASS_SECONDS + 1)
    assert not desk.lets_owner_in(owners)


def test_a_renewed_token_ends_the_owners_sessions_and_no_others(url, store, owner, desk, capsys):
    old, session, anns = owner.token(), desk.new_pass(None), desk.new_pass(desk.people["ann"])
    assert main(["owner", "--database-url", url]) == 0
    assert capsys.readouterr().out.strip() == old
    assert main(["owner", "--renew", "--database-url", url]) == 0

    assert owner.token() == capsys.readouterr().out.strip() != old
    assert not owner.knows(old)
    assert not desk.lets_owner_in(session)
    assert desk.let_in(anns).name == "ann"


def test_a_renewed_link_replaces_the_old_one_and_revives_a_revoked_annotator(desk):
    session = desk.new_pass(desk.people["ann"])
    desk.revoke("ann")
    new = desk.renew_token("ann")

    assert desk.log_in(desk.tokens["ann"]) is None
    assert desk.let_in(session) is None
    assert desk.log_in(new).id == desk.people["ann"].id


# --- assignment ---------------------------------------------------------------------------------


def test_a_batch_goes_to_those_who_were_chosen_and_a_share_of_it_to_two(desk, owner):
    owner.assign("a", ["ann", "bo"], 0.3)
    anns, bos = worked(desk, "ann"), worked(desk, "bo")

    both = set(anns) & set(bos)
    assert set(anns) | set(bos) >= {f"i{number}" for number in range(10)}
    assert len([each for each in both if each not in {"i10", "i11"}]) == 3
    assert worked(desk, "cy") == []
    [a, b] = owner.batches()
    assert (a.name, a.items, a.twice, a.closed, a.people) == ("a", 10, 3, 10, ("ann", "bo"))
    assert (b.twice, b.closed, b.people) == (2, 2, ())
    assert desk.report(batch="a").answered == 3
    assert desk.report(batch="b").answered == 2


def test_a_batch_of_one_person_is_given_to_nobody_else(desk, owner):
    owner.assign("a", ["bo"], 0)

    assert worked(desk, "ann") == ["i10", "i11"]
    assert len(worked(desk, "bo")) == 12
    assert [each.to_do for each in owner.people()] == [0, 0, 0]


def test_who_decides_conflicts_does_so_in_every_batch(desk, owner):
    owner.assign("a", ["ann", "bo"], 0.1)
    worked(desk, "ann")
    worked(desk, "bo", steps=(True, False, True))

    people = {each.name: each for each in owner.people()}
    assert people["cy"].conflicts == 3
    assert [each.conflicts for each in owner.batches()] == [1, 2]
    assert people["bo"].conflicts == 0
    assert desk.next_item(desk.people["cy"], "tab", conflicts=True).decides


def test_the_overlap_can_be_changed_and_answers_stay(desk, owner):
    owner.assign("b", [], 0)
    assert set(worked(desk, "ann")) >= {"i10", "i11"}
    assert owner.batches()[1].closed == 2

    owner.assign("b", [], 1)
    assert owner.batches()[1].closed == 0
    assert set(worked(desk, "bo")) >= {"i10", "i11"}
    assert owner.batches()[1].closed == 2
    assert len(list(desk.annotations(batch="b"))) == 4


# --- removing -----------------------------------------------------------------------------------


def test_a_removed_batch_takes_its_answers_along_and_leaves_the_others(desk, owner):
    worked(desk, "ann")
    owner.assign("a", ["ann"], 0)

    assert owner.remove("a") == 10
    assert [each.name for each in owner.batches()] == ["b"]
    assert {each.item_id for each in desk.annotations()} == {"i10", "i11"}
    with pytest.raises(InputError, match="no such batch"):
        owner.remove("a")


def test_removed_words_are_gone_from_the_file(sqlite_url, tmp_path):
    with VoteStore(sqlite_url) as store:
        Desk(store).add_items([(item(7), None)], batch="a")
        DeskOwner(store).remove("a")
        store.database.erased.result(30)

    for file in tmp_path.iterdir():
        assert b"I failed 7." not in file.read_bytes()
