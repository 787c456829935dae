"""The owner's part of the desk without a browser: sign-in, annotators, imports, assignment, agreement."""

import gzip
import json
import re

import pytest

from compeer_core.annotation.annotations import Annotation, AnnotationItem
from compeer_core.annotation.items import CHECK, SAMPLES
from compeer_core.annotation.owner import DeskOwner
from compeer_core.reasoning import STEPS, Part, read
from compeer_core.row_files import read_rows, write_rows
from compeer_core.taxonomy import Preference
from tests.pages import COMPLETE, make_services
from tests.ui.annotate.test_annotate import HOSTILE, RIGHT, Person, record, small_server
from training.cer.steps.annotation import items
from ui_components.annotate import owner_routes
from ui_components.annotate.annotators import ANNOTATOR_COOKIE
from ui_components.annotate.owner_handlers import SAMPLE_ITEMS
from ui_components.annotate.routes import TRIES_OF_VISITOR
from ui_components.shared.texts import load_texts

ACTIONS = ("person", "link", "revoke", "samples", "assign", "remove", "import")
FORM = {"name": "dee", "batch": SAMPLES, "overlap": "0", "share": "100"}


class Owner(Person):
    """The owner over plain HTTP requests."""

    def do(self, action, files=None, **fields):
        # Without a file httpx would send no multipart form, which is what the page sends.
        return self.client.post(
            f"/desk/owner/{action}", data=fields, files=files or {"nothing": (None, b"")}
        )

    def done(self, action, **fields):
        answer = self.do(action, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


class World:
    def __init__(self, folder):
        self.services = make_services(folder)
        self.owner = DeskOwner(self.services.votes)
        self.server = small_server(self.services)

    def enter(self, language="en"):
        return Owner(self.server, self.owner.token(), language)

    def invited(self, html):
        """Sign in with the link that the owner was shown."""
        return Person(self.server, re.search(r'data-link="([\w-]+)"', html)[1])


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr("ui_components.annotate.routes.WRONG_DELAY_SECONDS", 0.0)
    made = World(tmp_path)
    yield made
    made.services.votes.close()


def file(name, *rows):
    return name, "\n".join(row if isinstance(row, str) else row.model_dump_json() for row in rows)


# --- sign-in and who may do what ------------------------------------------------------------------


def test_the_owners_token_opens_the_owners_desk(world):
    owner = world.enter()
    html = owner.look()

    assert 'data-place="people"' in html
    assert 'data-place="items"' in owner.look(place="items")
    assert 'data-place="agreement"' in owner.look(place="agreement")
    assert world.owner.token() not in html
    assert world.owner.token() not in owner.client.cookies[ANNOTATOR_COOKIE]
    kept = owner.client.cookies[ANNOTATOR_COOKIE]
    owner.post("logout")
    owner.client.cookies.set(ANNOTATOR_COOKIE, kept)
    assert owner.do("samples").status_code == 401


def test_guesses_of_the_owners_token_are_counted_with_all_others(world):
    person = Person(world.server)
    wrong = world.owner.token()[:-1] + "_"
    codes = [person.post("login", token=wrong).status_code for _ in range(TRIES_OF_VISITOR + 1)]

    assert codes == [403] * TRIES_OF_VISITOR + [429]


def test_the_owner_is_no_annotator_and_annotators_get_no_file_of_the_owner(world):
    owner = world.enter()
    cy = world.invited(owner.done("person", name="cy", may_adjudicate="1")["html"])
    owner.done("samples")

    for path in ("draft", "hold", "answer", "undo"):
        assert owner.post(path, item="sample-01").status_code == 401
    for name in ("readings.jsonl", "reader_agreement.json"):
        assert cy.client.get(f"/desk/export/{name}").status_code == 404
        assert owner.client.get(f"/desk/export/{name}").status_code == 200
    assert 'data-go="people"' not in cy.look(place="people")
    assert 'data-place="people"' not in cy.look(place="items")


# --- annotators -----------------------------------------------------------------------------------


def test_an_annotators_link_is_shown_once_renewed_and_revoked(world):
    owner = world.enter()
    shown = owner.done("person", name=" ann ")
    assert shown["said"] == "ann was added."
    ann = world.invited(shown["html"])
    assert 'data-link="' not in owner.look()

    renewed = world.invited(owner.done("link", name="ann")["html"])
    assert ann.post("view").status_code == 401
    assert 'data-place="work"' in renewed.look()
    html = owner.done("revoke", name="ann")["html"]
    assert renewed.post("view").status_code == 401
    assert "revoked" in html
    assert 'data-action="revoke"' not in html


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("action", "fields", "code"),
    [
        ("person", {"name": "  "}, "name_missing"),
        ("person", {"name": "ann"}, "person_exists"),
        ("link", {"name": "dee"}, "person_unknown"),
        ("revoke", {}, "person_unknown"),
        ("assign", {"batch": "x", "overlap": "0"}, "batch_unknown"),
        ("assign", {"batch": SAMPLES, "overlap": "0", "people": "dee"}, "person_unknown"),
        ("assign", {"batch": SAMPLES, "overlap": "50", "people": "ann"}, "overlap_needs_two"),
        ("assign", {"batch": SAMPLES, "overlap": "half"}, "overlap_unusable"),
        ("assign", {"batch": SAMPLES, "overlap": "101"}, "overlap_unusable"),
        ("remove", {"batch": "x"}, "batch_unknown"),
        ("import", {"share": "100"}, "file_missing"),
    ],
)
def test_what_cannot_be_done_is_said_in_the_owners_language(world, language, action, fields, code):
    owner = world.enter(language)
    owner.done("person", name="ann")
    owner.done("samples")
    answer = owner.do(action, **fields)

    assert (answer.status_code, answer.json()["code"]) == (409, code)
    chinese = bool(re.match(r"[\u4e00-\u9fff]", answer.json()["error"]))
    assert chinese == (language == "zh")


def test_names_are_text(world):
    owner = world.enter()
    html = owner.done("person", name=HOSTILE)["html"]
    name = world.owner.people()[0].name
    owner.done("samples")
    html += owner.done("assign", batch=SAMPLES, people=name, overlap="0")["html"]

    assert "<img src=x" not in html
    assert html.count("&lt;img src=x") >= 3


# --- items ----------------------------------------------------------------------------------------


def test_the_samples_are_ten_whole_turns_that_are_marked_and_label_nothing(world):
    samples = list(read_rows(SAMPLE_ITEMS, AnnotationItem))
    assert [each.id for each in samples] == [f"sample-{number:02}" for number in range(1, 11)]
    for sample in samples:
        steps = zip(STEPS, sample.steps, strict=True)
        turn = "\n".join(f"<{part}>{text}</{part}>" for part, text in steps)
        for reply in sample.replies:
            parsed = read(f"{turn}\n<reply>{reply}</reply>")
            assert parsed.is_complete
            assert "Unreadable" not in repr(parsed.turn)
        assert sample.history[-1].speaker == "seeker"

    owner = world.enter()
    ann = world.invited(owner.done("person", name="ann")["html"])
    assert owner.done("samples")["said"] == "10 items were imported."
    assert 'data-action="samples"' not in owner.look(place="items")
    assert "Item 1 · sample" in ann.look()
    answer = ann.post("answer", item="sample-01", form={"steps": RIGHT, "preference": "both"})
    assert answer.status_code == 200
    assert owner.client.get("/desk/export/cer.jsonl").text == ""


def test_commands_name_the_database_of_the_server(world, tmp_path):
    owner = world.enter()

    for place in ("people", "items"):
        assert f"--database-url sqlite:///{tmp_path}/compeer.sqlite3" in owner.look(place=place)
    for somebody in (Person(world.server), world.invited(owner.done("person", name="a")["html"])):
        assert str(tmp_path) not in somebody.look()
    assert str(tmp_path) not in owner.look(place="agreement")


def test_a_file_of_rows_becomes_a_batch(world):
    owner = world.enter()
    rows = [record(number) for number in range(3)]
    told = owner.done("import", files={"items": file("../a rows.jsonl", *rows)}, share="100")

    assert told["said"] == "3 items were imported."
    assert [(each.name, each.items) for each in world.owner.batches()] == [("a_rows", 3)]
    again = owner.done("import", files={"items": file("b.jsonl", *rows)}, share="100", batch="b")
    assert again["said"] == "0 items were imported. 3 are already there."
    assert owner.done("remove", batch="a_rows")["said"] == "The batch was deleted, with 0 answers."
    assert world.owner.batches() == []


def test_a_picture_that_was_not_imported_is_named(world):
    owner = world.enter()
    ann = world.invited(owner.done("person", name="ann")["html"])
    rows = file("rows.jsonl", record(1, images=("a.png",)))
    owner.done("import", files={"items": rows}, share="100")

    html = ann.look()
    assert "Image 1 from the seeker (not shown)" in html
    assert "desk/picture" not in html


@pytest.fixture
def written(tmp_path):
    """Eight items of the pipeline, their key, and a reader's answers."""
    shown, key = tmp_path / "items.jsonl", tmp_path / "key.jsonl"
    cases = [record(number).case for number in range(8)]
    items([(case, "policy", COMPLETE) for case in cases], shown, key, seed=1)
    ids = [json.loads(line)["id"] for line in shown.read_text().splitlines()]
    answers = [
        json.dumps(
            {
                "item_id": item,
                "annotator": "reader-1",
                "steps": [True, False, True],
                "preference": "first",
                "date": "2026-11-24T12:00:00Z",
            }
        )
        for item in ids
    ]
    return shown.read_text(), key.read_text(), answers


def test_people_check_a_share_of_the_readers_answers_blind(world, written):
    shown, key, answers = written
    owner = world.enter()
    ann = world.invited(owner.done("person", name="ann")["html"])
    told = owner.done(
        "import",
        files={
            "items": ("items.jsonl", shown),
            "key": ("key.jsonl", key),
            "answers": ("answers.jsonl.gz", gzip.compress("\n".join(answers).encode())),
        },
        share="50",
    )
    assert told["said"] == "4 items were imported. 4 are not in the random share."
    assert "Check the reader" in told["html"]

    for _ in range(4):
        html = ann.look()
        assert "reader" not in html.lower()
        item = html.partition('data-item="')[2].partition('"')[0]
        form = {"steps": RIGHT, "preference": "both"}
        assert ann.post("answer", item=item, form=form).status_code == 200
    html = owner.look(place="agreement")
    assert "4 of 4 items are done" in html
    measured = owner.client.get(f"/desk/export/reader_agreement.json?batch={CHECK}").json()
    raw = {part: each["raw"]["value"] for part, each in measured["questions"].items()}
    assert raw == {Part.HISTORY: 1, Part.EMOTION: 0, Part.STRATEGY: 1, Part.REPLY: 0}
    assert (measured["milder"]["emotion"], measured["stricter"]["emotion"]) == (4, 0)

    lines = owner.client.get("/desk/export/annotations.jsonl").text.splitlines()
    said = list(map(Annotation.model_validate_json, lines))
    assert {(each.annotator, each.preference) for each in said} == {("ann", Preference.BOTH)}
    lines = owner.client.get(f"/desk/export/readings.jsonl?batch={CHECK}").text.splitlines()
    assert {Annotation.model_validate_json(line).annotator for line in lines} == {"reader-1"}
    assert owner.client.get("/desk/export/annotations.jsonl?batch=other").text == ""


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (["{}"], "rows.jsonl, line 1: id: Field required"),
        ([record(1), '{"case": 1}'], "rows.jsonl, line 2: id: Field required"),
        ([record(1), "nothing"], "rows.jsonl, line 2: Invalid JSON"),
        (
            [record(1), record(2).model_dump_json().replace('"source_id":"d2",', "")],
            "rows.jsonl, line 2: case.source_id: Field required",
        ),
        ([], "rows.jsonl: is empty"),
        (["\udcff"], "rows.jsonl: is not UTF-8"),
    ],
)
def test_a_wrong_file_of_items_imports_nothing_and_is_named(world, rows, problem):
    owner = world.enter()
    name, content = file("rows.jsonl", *rows)
    sent = {"items": (name, content.encode("utf-8", "surrogateescape"))}
    answer = owner.do("import", files=sent, share="100")

    assert answer.json()["error"].startswith(f"Nothing was imported. {problem}")
    assert world.owner.batches() == []


def test_an_import_has_a_limit(world, monkeypatch):
    monkeypatch.setattr(owner_routes, "MAX_IMPORT", 2**20)
    owner = world.enter()
    answer = owner.do("import", files={"items": ("a.jsonl", b" " * 2**20)}, share="100")

    assert answer.json()["error"] == "Nothing was imported. at most 1 MiB"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"{}", "application/json"), (b"x", "multipart/form-data")],
)
def test_what_is_no_form_is_refused(world, action, body, kind):
    answer = world.enter().client.post(
        f"/desk/owner/{action}", content=body, headers={"content-type": kind}
    )

    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]


def test_progress_and_agreement_are_shown_by_batch(world, tmp_path):
    owner = world.enter()
    ann = world.invited(owner.done("person", name="ann")["html"])
    bo = world.invited(owner.done("person", name="bo")["html"])
    rows = [record(number) for number in range(2)]
    write_rows(tmp_path / "r.jsonl", rows)
    owner.done("import", files={"items": file("rows.jsonl", *rows)}, share="100", batch="real")
    for person, steps in ((ann, RIGHT), (bo, [True, False, True])):
        for _ in range(2):
            assert person.answer(steps=steps).status_code == 200

    assert "2 done · 0 drafts · 0 to do" in owner.look()
    assert "2 of 2 items done · 2 are answered by two people · 2 to decide" in owner.look(
        place="items"
    )
    html = owner.look(place="agreement")
    assert "<b>100 %</b>" in html
    assert "<b>0 %</b>" in html
    assert "desk/export/cer.jsonl?batch=real" in html


def test_both_languages_have_every_word_of_the_owner():
    english, chinese = (load_texts(language).words for language in ("en", "zh"))

    assert {key for key in english if key.startswith("owner.")} == {
        key for key in chinese if key.startswith("owner.")
    }
