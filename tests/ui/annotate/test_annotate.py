"""The annotation desk without a browser: handlers, HTTP routes, HTML, and what stays hidden."""

import asyncio
import csv
import errno
import io
import json
from types import SimpleNamespace

import httpx
import PIL.Image
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from compeer_core.annotation.annotations import AnnotationItem, read_annotations
from compeer_core.annotation.desk import Desk
from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import InputError, StoreError
from compeer_core.reasoning import Part
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main
from tests.cases import case_of
from tests.pages import COMPLETE, make_services
from training.data.records import read_records
from ui_components.annotate.annotators import ANNOTATOR_COOKIE, Guesses, read_annotator
from ui_components.annotate.routes import (
    MOST_DELAYED,
    TRIES_OF_ADDRESS,
    TRIES_OF_VISITOR,
    add_routes,
)
from ui_components.server.middleware import HeadersMiddleware
from ui_components.server.visitors import COOKIE
from ui_components.shared.texts import load_texts

RIGHT = [True, True, True]
HOSTILE = '<img src=x onerror="stolen()"> ${stolen()} {{ 7 * 7 }} \u202eabc\u200b'


def record(number, reply="Tell me.", text="I failed.", images=()):
    case = case_of(f"d{number}", text, images, corpus="made_up_corpus")
    return CerRecord(
        id=f"d{number}#0",
        case=case,
        first=Candidate(author="corpus", reply="Oh no."),
        second=Candidate(
            author="secret-policy",
            reply=reply,
            turn=COMPLETE.partition("<reply>")[0] + f"<reply>{reply}</reply>",
        ),
    )


class Person:
    """An annotator over plain HTTP requests."""

    def __init__(self, server, token=None, language="en"):
        self.client = TestClient(server, headers={"accept-language": language})
        self.client.get("/")  # the cookie of a visitor
        self.tab = "one"
        if token is not None:
            assert self.post("login", token=token).status_code == 200

    def post(self, path, **body):
        return self.client.post(f"/desk/{path}", json={"tab": self.tab, **body})

    def look(self, **body):
        answer = self.post("view", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["html"]

    def open(self, **body):
        """View the desk; return the open item and which reply is first."""
        html = self.look(**body)
        item = html.partition('data-item="')[2].partition('"')[0]
        return item, html.index("Oh no.") < html.index("Tell me.")

    def answer(self, steps=RIGHT, in_item_order="first", place="work", note="", token="", **form):
        """Answer the next item."""
        item, as_in_item = self.open(place=place)
        given = None if in_item_order is None else Preference(in_item_order)
        if given is not None and not as_in_item:
            given = given.swapped()
        form |= {"steps": steps, "preference": given, "note": note}
        return self.post("answer", item=item, place=place, form=form, token=token)


def small_server(services):
    """The desk without the rest of the page, which takes long to build."""
    app = FastAPI()
    add_routes(app, services)
    app.add_middleware(HeadersMiddleware, services=services)
    return app


@pytest.fixture
def world(tmp_path):
    """A desk with three items, two annotators and an adjudicator."""
    services = make_services(tmp_path)
    desk = Desk(services.votes)
    write_rows(tmp_path / "rows.jsonl", [record(number) for number in range(3)])
    url = f"sqlite:///{tmp_path / 'compeer.sqlite3'}"
    assert main(["items", str(tmp_path / "rows.jsonl"), "--database-url", url]) == 0
    names = {"ann": False, "bo": False, "cy": True}
    tokens = {name: desk.add_annotator(name, may_adjudicate=may) for name, may in names.items()}
    server = small_server(services)
    yield SimpleNamespace(
        services=services,
        desk=desk,
        server=server,
        tokens=tokens,
        url=url,
        enter=lambda name, language="en": Person(server, tokens[name], language),
    )
    services.votes.close()


@pytest.fixture
def _at_once(monkeypatch):
    monkeypatch.setattr("ui_components.annotate.routes.WRONG_DELAY_SECONDS", 0.0)


def test_an_item_without_steps_asks_for_the_preference_only(world):
    case = case_of("d9")
    only = AnnotationItem(
        id="z", language="en", history=case.history, steps=None, replies=("Oh no.", "Tell me.")
    )
    world.desk.add_items([(only, None)])
    ann = world.enter("ann")
    for _ in range(3):
        assert ann.answer().status_code == 200

    html = ann.look()
    assert "data-step=" not in html
    assert "The reasoning behind" not in html
    assert ann.answer(steps=[None] * 3, in_item_order=None).status_code != 200
    assert ann.answer(steps=[None] * 3, in_item_order="second").status_code == 200

    (last,) = [each for each in world.desk.annotations() if each.item_id == "z"]
    assert last.answer(Part.REPLY) is Preference.SECOND
    assert last.steps == (None, None, None)


# --- sign-in ------------------------------------------------------------------------------------


def test_without_a_token_the_desk_says_what_it_is_and_shows_nothing(world):
    html = Person(world.server).look()

    assert "You need a link or a token from the person who runs this page" in html
    assert "I failed" not in html
    assert "compeer_core" not in html


def test_the_token_gives_a_cookie_that_scripts_cannot_read(world):
    person = Person(world.server)
    answer = person.post("login", token=f"  {world.tokens['ann']}\n")

    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{ANNOTATOR_COOKIE}=")
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert world.tokens["ann"] not in cookie
    assert 'data-place="work"' in person.look()
    over_tls = Person(world.server).client.post(
        "https://testserver/desk/login", json={"token": world.tokens["ann"]}
    )
    assert "SameSite=None; Secure; Partitioned" in over_tls.headers["set-cookie"]


def test_signing_out_and_revoking_a_token_end_the_session(world):
    ann, bo = world.enter("ann"), world.enter("bo")
    assert "You are signed out" in ann.post("logout").json()["html"]
    assert 'data-place="outside"' in ann.look()

    world.desk.revoke("bo")
    for path in ("view", "draft", "hold", "answer", "undo"):
        answer = bo.post(path, item="x")
        assert (answer.status_code, answer.json()["code"]) == (401, "logged_out")


def test_signing_out_ends_one_browsers_session_only(world):
    at_work, at_home = world.enter("ann"), world.enter("ann")
    kept = at_work.client.cookies[ANNOTATOR_COOKIE]
    at_work.post("logout")
    at_work.client.cookies.set(ANNOTATOR_COOKIE, kept)

    assert at_work.post("view").status_code == 401
    assert at_work.client.get("/desk/export/cer.jsonl").status_code == 401
    assert 'data-place="work"' in at_home.look()


@pytest.mark.parametrize("cookie", ["", "1.abc.def.ghi", "x", "1.2", "\xff\xfe", "x" * 4000])
def test_a_forged_cookie_is_rejected(world, cookie):
    assert read_annotator(world.desk, {ANNOTATOR_COOKIE: cookie}) is None


def test_a_wrong_token_takes_a_while(world):
    answer = Person(world.server).post("login", token="guess")

    assert answer.status_code == 403
    assert answer.elapsed.total_seconds() >= 1.0
    assert "This token is not valid" in answer.json()["error"]


@pytest.mark.usefixtures("_at_once")
def test_after_many_guesses_only_the_right_token_works(world):
    person = Person(world.server)
    for _ in range(TRIES_OF_VISITOR):
        assert person.post("login", token="guess").status_code == 403

    answer = person.post("login", token="guess")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 60
    assert "Please wait 10 minutes" in answer.json()["error"]
    assert "set-cookie" not in answer.headers
    assert person.post("login", token=world.tokens["ann"]).status_code == 200
    assert 'data-place="work"' in person.look()


@pytest.mark.usefixtures("_at_once")
def test_an_address_from_which_many_guess_lets_the_right_token_in(world):
    for _ in range(TRIES_OF_ADDRESS // TRIES_OF_VISITOR + 1):
        guesser = Person(world.server)
        codes = [guesser.post("login", token="guess").status_code for _ in range(TRIES_OF_VISITOR)]
    assert codes[-1] == 429

    Person(world.server, world.tokens["ann"])


@pytest.mark.usefixtures("_at_once")
def test_right_tokens_are_not_counted(world):
    person = Person(world.server)
    for _ in range(TRIES_OF_VISITOR + 2):
        assert person.post("login", token=world.tokens["ann"]).status_code == 200


def test_guesses_do_not_hold_more_than_so_many_connections(world, monkeypatch):
    """Further guesses are answered at once while the first ones are delayed."""
    waiting, released = [], asyncio.Event()

    async def sleep(seconds):
        waiting.append(seconds)
        await released.wait()

    async def guess(client):
        return await client.post("/desk/login", json={"token": "guess"})

    async def meanwhile():
        transport = httpx.ASGITransport(world.server)
        async with httpx.AsyncClient(transport=transport, base_url="http://desk") as client:
            client.cookies.set(COOKIE, world.services.visitors.new_cookie())
            guesses = [asyncio.create_task(guess(client)) for _ in range(MOST_DELAYED + 5)]
            done, held = await asyncio.wait(guesses, timeout=20, return_when="FIRST_COMPLETED")
            while len(done) < 5:
                more, held = await asyncio.wait(held, timeout=20, return_when="FIRST_COMPLETED")
                assert more
                done |= more
            assert len(held) == MOST_DELAYED
            right = await client.post("/desk/login", json={"token": world.tokens["ann"]})
            released.set()
            await asyncio.wait(held)
            return right

    monkeypatch.setattr("ui_components.annotate.routes.asyncio.sleep", sleep)
    assert asyncio.run(meanwhile()).status_code == 200
    assert len(waiting) == MOST_DELAYED


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"token": 3}', '{"token": "\\ud800"}', "9" * 300_000]
)
def test_malformed_sign_ins_are_rejected(world, body):
    person = Person(world.server)
    answer = person.client.post("/desk/login", content=body)

    assert answer.status_code in {400, 403}
    assert answer.json()["error"]


def test_wrong_tokens_are_counted_in_every_way_and_forgotten_in_time():
    now = [0.0]
    guesses = Guesses(lambda: now[0])
    limits = {"visitor": 2, "address": 3}
    assert [guesses.count(limits) for _ in range(2)] == [0, 0]
    now[0] = 60.0
    assert guesses.count(limits) == 540
    assert guesses.count({"other": 2, "address": 3}) == 0
    assert guesses.count({"third": 2, "address": 3}) == 540
    now[0] = 601.0
    assert guesses.count(limits) == 0


@pytest.mark.parametrize(
    "path", ["login", "logout", "view", "draft", "hold", "leave", "answer", "undo"]
)
def test_pages_of_other_sites_change_nothing(world, path):
    ann = world.enter("ann")
    answer = ann.client.post(
        f"/desk/{path}",
        json={"tab": "one", "token": world.tokens["ann"]},
        headers={"sec-fetch-site": "cross-site"},
    )

    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


# --- an item ------------------------------------------------------------------------------------


def test_an_item_shows_neither_names_nor_the_corpus_nor_its_row(world):
    html = world.enter("ann").look()

    for kept_back in ("secret-policy", "made_up_corpus", "d0#0", "cy", "bo<"):
        assert kept_back not in html
    for shown in (
        "I failed.",
        "Oh no.",
        "Tell me.",
        "The seeker lost a job",
        "Reflection of Feelings",
    ):
        assert shown in html
    assert "Stage: Exploration" not in html  # labels stand as labels
    assert "4 of 5" in html


def test_what_was_typed_is_a_draft_and_stands_there_again(world):
    ann = world.enter("ann")
    item, _ = ann.open()
    form = {"steps": [True, False, None], "preference": "both", "confidence": 4, "note": HOSTILE}
    saved = ann.post("draft", item=item, form={**form, "seconds": 12})
    assert saved.json()["saved"].startswith("20")

    html = ann.look()
    assert (
        "&lt;img src=x onerror=&#34;stolen()&#34;&gt; ${stolen()} {{ 7 * 7 }} \u202eabc\u200b</textarea>"
        in html
    )
    assert "<img src=x" not in html
    for checked in (
        'step-1" value="right" checked',
        'step-2" value="wrong" checked',
        'value="both" checked',
        'value="4" checked',
    ):
        assert checked in html
    assert 'name="step-3" value="right" checked' not in html
    assert 'data-seconds="12.0"' in html
    assert "✎" in html


def test_everything_that_is_shown_is_text(world, tmp_path):
    write_rows(tmp_path / "more.jsonl", [record(9, reply=HOSTILE, text=HOSTILE)])
    world.desk.add_annotator("<b>dee</b>\u202e")
    token = world.desk.add_annotator("<i>")
    ann = Person(world.server, token)
    for _ in range(3):
        assert ann.answer().status_code == 200
    assert main(["items", str(tmp_path / "more.jsonl"), "--database-url", world.url]) == 0

    html = ann.look()
    assert html.count("&lt;img src=x onerror=") == 2
    assert "<img src=x" not in html
    assert "You are &lt;i&gt;" in html


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({}, "answer_incomplete"),
        ({"steps": [True, True, None], "preference": "both"}, "answer_incomplete"),
        ({"steps": RIGHT}, "answer_incomplete"),
        ({"steps": RIGHT, "preference": "both", "note": "x" * 10_001}, "note_too_long"),
        ({"steps": RIGHT, "preference": "left"}, "request_unusable"),
        ({"steps": [1, True, True], "preference": "both"}, "request_unusable"),
        ({"steps": RIGHT, "preference": "both", "confidence": 6}, "request_unusable"),
        ({"steps": RIGHT, "preference": "both", "seconds": -1}, "request_unusable"),
        ({"steps": RIGHT, "preference": "both", "more": 1}, "request_unusable"),
    ],
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_invalid_answer_is_rejected_with_a_sentence(world, form, code, language):
    ann = world.enter("ann", language)
    item = ann.look().partition('data-item="')[2].partition('"')[0]
    answer = ann.post("answer", item=item, form=form)

    assert answer.status_code in {400, 409}
    assert answer.json()["code"] == code
    assert ("\u4e00" <= answer.json()["error"][0] <= "\u9fff") == (language == "zh")
    assert list(world.desk.annotations()) == []


def test_an_answer_is_saved_once_and_the_next_item_comes(world):
    ann = world.enter("ann")
    item, as_in_item = ann.open()
    body = {
        "item": item,
        "token": "t1",
        "form": {
            "steps": [True, False, True],
            "preference": "first",
            "confidence": 5,
            "seconds": 7.5,
        },
    }
    shown = ann.post("answer", **body).json()
    assert shown["said"] == "Item 1 is saved."
    assert "Item 2" in shown["html"]
    assert ann.post("answer", **body).status_code == 200  # sent again

    [said] = world.desk.annotations()
    assert (said.annotator, said.steps, said.confidence, said.seconds) == (
        "ann",
        (True, False, True),
        5,
        7.5,
    )
    assert said.answer(Part.REPLY) == ("first" if as_in_item else "second")


def test_annotators_cannot_reach_items_of_others(world):
    ann, bo = world.enter("ann"), world.enter("bo")
    for _ in range(3):
        item, _ = ann.open()
        ann.answer()
    for path in ("view", "draft", "hold", "leave", "answer"):
        answer = bo.post(path, item=item, form={"steps": RIGHT, "preference": "both"})
        assert answer.json()["code"] == "item_not_yours", path
    for path in ("draft", "hold", "answer"):
        assert bo.post(path).json()["code"] == "request_unusable"


def test_the_second_tab_only_reads_until_the_first_one_is_left(world):
    ann = world.enter("ann")
    item, _ = ann.open()
    ann.tab = "two"
    html = ann.look()
    assert 'data-writes="no"' in html
    assert '<fieldset class="all" disabled>' in html
    assert ann.post("draft", item=item).json()["code"] == "item_open_elsewhere"
    refused = ann.post("answer", item=item, form={"steps": RIGHT, "preference": "both"})
    assert refused.json()["code"] == "item_open_elsewhere"
    assert ann.post("hold", item=item).json() == {"may_write": False}

    ann.tab = "one"
    ann.post("leave", item=item)
    ann.tab = "two"
    assert ann.post("hold", item=item).json() == {"may_write": True}
    assert 'data-writes="yes"' in ann.look()


def test_an_image_is_served_to_the_items_annotator(world, tmp_path):
    PIL.Image.new("RGB", (4, 3), "teal").save(tmp_path / "a.png")
    write_rows(tmp_path / "more.jsonl", [record(9, images=("a.png",))])
    assert main(["items", str(tmp_path / "more.jsonl"), "--database-url", world.url]) == 0
    ann, bo = world.enter("ann"), world.enter("bo")
    for _ in range(3):
        ann.answer()
    html = ann.look()
    address = html.partition('<img src="')[2].partition('"')[0].replace("&amp;", "&")

    answer = ann.client.get(f"/{address}")
    assert answer.headers["content-type"] == "image/png"
    assert "no-store" in answer.headers["cache-control"]
    for somebody in (bo, Person(world.server)):
        assert somebody.client.get(f"/{address}").status_code == 404
    assert ann.client.get(f"/{address[:-1]}1").status_code == 404


# --- two people differ --------------------------------------------------------------------------


def test_only_adjudicators_see_both_answers_and_without_names(world):
    ann, bo, cy = map(world.enter, ("ann", "bo", "cy"))
    ann.answer(note="ann's own words", confidence=2, seconds=3)
    assert "ann's own words" not in bo.look()
    bo.answer(steps=[True, False, True], in_item_order="second", note=HOSTILE)
    assert 'data-go="conflicts"' not in ann.look()
    assert 'data-nothing="no_conflicts"' not in ann.look(place="conflicts")

    html = cy.look(place="conflicts")
    assert 'data-decides="yes"' in html
    assert html.count('class="two-said differ"') == 2
    assert html.count("≠") == 2
    assert html.count("Both answered: Correct") == 2
    assert "ann&#39;s own words" in html
    assert "very fast" in html
    assert "<img src=x" not in html
    assert ">ann<" not in html
    assert ">bo<" not in html
    assert 'name="step-1"' not in html  # nothing is asked where they agree
    assert 'name="step-2"' in html


def test_the_third_person_gives_a_reason_and_decides_only_where_two_differ(world):
    ann, bo, cy = map(world.enter, ("ann", "bo", "cy"))
    ann.answer()
    bo.answer(steps=[True, False, True])
    decision = {"steps": [False, False, None], "place": "conflicts", "in_item_order": "neither"}
    refused = cy.answer(**decision)
    assert refused.json()["code"] == "reason_missing"
    shown = cy.answer(**decision, note="the picture shows it").json()
    assert 'data-nothing="no_conflicts"' in shown["html"]

    last = list(world.desk.annotations())[-1]
    assert (last.steps, last.preference, last.note) == (
        (None, False, None),
        None,
        "the picture shows it",
    )
    assert ann.post("undo").json()["code"] == "item_decided"


# --- agreement and files ------------------------------------------------------------------------


def finish(world):
    """Answer everything as two annotators who differ in one step and one preference."""
    ann, bo, cy = map(world.enter, ("ann", "bo", "cy"))
    for number in range(3):
        assert ann.answer(seconds=20).status_code == 200
        steps = [True, number != 1, True]
        assert (
            bo.answer(steps=steps, in_item_order="second" if number == 2 else "first").status_code
            == 200
        )
    return ann, bo, cy


def test_the_agreement_is_hidden_until_everything_is_done(world):
    ann, bo, cy = finish(world)
    assert "Not available yet" in ann.look(place="agreement")
    assert "3 of 3" in cy.look(place="agreement")

    while (
        cy.answer(
            steps=[None, True, None], in_item_order="neither", place="conflicts", note="x"
        ).status_code
        == 200
    ):
        if 'data-nothing="no_conflicts"' in cy.look(place="conflicts"):
            break
    html = bo.look(place="agreement")
    assert "Dropped: no consensus" in html
    assert "Item 3" in html
    assert "100 % of all answers are “Correct”" in html
    assert "<bdi>ann</bdi>" not in html  # only adjudicators see pairs
    assert "desk/export" not in html
    assert "<bdi>ann</bdi> · <bdi>bo</bdi>" in cy.look(place="agreement")
    assert 'data-nothing="over"' in ann.look()


def test_who_decides_takes_files_that_training_reads(world, tmp_path):
    ann, _, cy = finish(world)
    for name in ("cer.jsonl", "annotations.csv", "annotations.jsonl", "agreement.json"):
        assert Person(world.server).client.get(f"/desk/export/{name}").status_code == 401
        assert ann.client.get(f"/desk/export/{name}").status_code == 403
    assert cy.client.get("/desk/export/other").status_code == 404

    answer = cy.client.get("/desk/export/cer.jsonl")
    assert answer.headers["content-disposition"] == 'attachment; filename="cer.jsonl"'
    (tmp_path / "cer.jsonl").write_bytes(answer.content)
    rows = list(read_records(tmp_path / "cer.jsonl", CerRecord))
    assert [row.second.steps for row in rows] == [
        (True, True, True),
        (True, None, True),
        (True, True, True),
    ]
    assert [row.preference for row in rows] == ["first", "first", None]
    assert rows[0].preference_by.name == "ann, bo"

    as_csv = cy.client.get("/desk/export/annotations.csv")
    assert as_csv.content.startswith("\ufeff".encode())
    assert len(list(csv.reader(io.StringIO(as_csv.text)))) == 7
    (tmp_path / "x.csv").write_bytes(as_csv.content)
    (tmp_path / "x.jsonl").write_bytes(cy.client.get("/desk/export/annotations.jsonl").content)
    in_csv, in_lines = (list(read_annotations(tmp_path / f"x.{kind}")) for kind in ("csv", "jsonl"))
    assert in_csv == in_lines
    report = json.loads(cy.client.get("/desk/export/agreement.json").text)
    assert report["questions"]["emotion"]["agreement"]["raw"]["value"] == pytest.approx(2 / 3)
    assert report["pairs"][0]["names"] == ["ann", "bo"]


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_failing_database_gives_one_sentence(world, monkeypatch, language):
    ann, cy = world.enter("ann", language), world.enter("cy", language)

    def fail(*_, **__):
        raise StoreError("disk I/O error in secret_table")

    sentence = load_texts(language)("annotate.error_store")
    for name in ("next_item", "report", "settled"):
        monkeypatch.setattr(Desk, name, fail)
    answer = ann.post("view")
    assert answer.status_code == 503
    assert answer.json()["error"] == sentence
    file = cy.client.get("/desk/export/cer.jsonl")
    assert (file.status_code, file.text) == (503, sentence)
    monkeypatch.setattr(Desk, "let_in", fail)
    for path in ("/desk/export/cer.jsonl", "/desk/picture?item=d0%230&number=0"):
        file = cy.client.get(path)
        assert (file.status_code, file.text) == (503, sentence)


def test_a_full_disk_during_export_gives_one_sentence(world, monkeypatch):
    cy = world.enter("cy")

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    file = cy.client.get("/desk/export/cer.jsonl")
    assert (file.status_code, file.text) == (503, load_texts("en")("annotate.error_store"))


def test_every_refusal_of_the_desk_has_a_sentence(repository):
    source = "".join(
        (repository / path).read_text(encoding="utf-8")
        for path in ("compeer_core/annotation/desk.py", "ui_components/annotate/handlers.py")
    )
    codes = {
        "item_not_yours", "item_open_elsewhere", "item_closed", "item_decided",
        "nothing_to_take_back", "answer_incomplete", "reason_missing", "note_too_long",
    }  # fmt: skip
    for code in codes:
        assert f'"{code}"' in source
        for language in ("en", "zh"):
            assert load_texts(language).words[f"annotate.error_{code}"]


def test_an_empty_desk_says_so(tmp_path):
    services = make_services(tmp_path)
    token = Desk(services.votes).add_annotator("ann")
    server = small_server(services)

    html = Person(server, token).look()
    assert 'data-nothing="empty"' in html
    assert "The person who runs this page has imported no items yet." in html
    services.votes.close()


def test_an_unknown_request_is_an_input_error():
    from ui_components.annotate.handlers import read_request

    for body in (
        {},
        {"tab": ""},
        {"tab": "x" * 101},
        {"tab": "t", "place": "x"},
        {"tab": "t", "x": 1},
    ):
        with pytest.raises(InputError):
            read_request(body)
