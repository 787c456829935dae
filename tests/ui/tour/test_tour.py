"""The tour as rendered by the server: both languages, data-dependent parts, routes."""

import re
import warnings
from dataclasses import replace
from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.reasoning import STEPS, Part
from compeer_core.taxonomy import Preference
from compeer_core.tour.contents import Tour, load_tour
from compeer_core.tour.plan import ASSETS
from compeer_core.tour.recordings import Recording
from compeer_core.votes.battles import BattlePlan, SidePlan, SideResult, SideStatus
from tests.pages import make_services
from ui_components.server.app import build_server
from ui_components.shared.services import Services
from ui_components.shared.templating import render
from ui_components.shared.texts import LANGUAGES, load_texts
from ui_components.tour.routes import SERVED, print_html
from ui_components.tour.screen import steps_in, tour_html
from ui_components.tour.view import tour_view

HOSTILE = "<script>window.stolen(1)</script> ${window.stolen(2)} {{ 7 * 7 }}"


@pytest.fixture
def tour() -> Tour:
    return load_tour()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return make_services(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(services: Services):
    with warnings.catch_warnings(), TestClient(build_server(services)) as client:
        yield client


def words(html: str) -> str:
    """The visible text."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def step(number: int, tour: Tour, language: str = "en", *, printed: bool = False) -> str:
    values = steps_in(tour, load_texts(language), files="tour/files/", printed=printed)
    return render(f"tour_{number}.html", **values)


def with_recording(tour: Tour, recording: Recording, **changes: object) -> Tour:
    changed = recording.model_copy(update=changes)
    return replace(tour, recordings={**tour.recordings, (changed.case, changed.stage): changed})


# --- rendering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_all_six_steps_are_there_in_every_language(language):
    texts = load_texts(language)
    html = tour_html(texts)

    for number in range(1, 7):
        assert f'data-step="{number}"' in html
        assert texts(f"tour.head_{number}") in unescape(html)
        assert texts(f"tour.try_{number}") in unescape(html)
        assert texts(f"tour.speaker_{number}") in unescape(html)
    assert html.count("<h2") == 7  # six steps and the list of keys
    assert len(re.findall(r'class="t-slide"[^>]*hidden', html)) == 5


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_opens_with_a_success_its_rule_and_its_origin(language, tour):
    html = unescape(step(1, tour, language))
    good = tour.successes()
    shown, texts = good[0], load_texts(language)
    turn = shown.reading.turn

    for text in (turn.reply, *(getattr(turn.reasoning, part.value).text for part in STEPS)):
        assert text in html
    counted = texts("tour.rule_success", good=len(good), count=len(tour.plan.cases))
    assert counted in html
    assert texts("tour.chosen", seed=tour.plan.seed) in html
    assert shown.model.short_hash in html
    assert shown.date.isoformat() in html
    marks = (("✓", "tour.judge_right"), ("?", "inspector.unsure"), ("✗", "tour.judge_wrong"))
    shares = [verdict.probability_correct for verdict in shown.judged.steps]
    assert [html.count(f"{sign}</span> {texts(key)}</span>") for sign, key in marks] == [
        sum(share > 0.65 for share in shares),
        sum(0.35 <= share <= 0.65 for share in shares),
        sum(share < 0.35 for share in shares),
    ]
    assert 'lang="en"' in html
    assert (load_texts("zh")("tour.english") in html) == (language == "zh")
    assert (tour.plan.case(shown.case).said.zh in html) == (language == "zh")


def test_without_a_success_the_first_situation_is_shown_and_called_that(tour):
    seen = words(step(1, replace(tour, notes={})))

    assert tour.newest()[0].reading.turn.reply in seen
    assert "found none of the 6 free of mistakes" in seen
    assert "In plain words" not in seen


def with_verdict(tour: Tour, *, correct: bool, probability: float) -> Tour:
    """The same tour with another verdict on the explained step."""
    recording, chosen = tour.failures()[0]
    assert recording.judged is not None
    update = {"correct": correct, "probability_correct": probability}
    steps = tuple(
        one.model_copy(update=update) if one.part is chosen else one
        for one in recording.judged.steps
    )
    return with_recording(
        tour, recording, judged=recording.judged.model_copy(update={"steps": steps})
    )


def test_the_wrong_step_stands_beside_what_the_reader_and_the_judge_say(tour):
    missed = with_verdict(tour, correct=True, probability=0.78)
    recording, part = tour.failures()[0]
    opinion = tour.opinion(recording, part)
    seen = words(step(2, missed))
    counted = missed.tally()

    assert opinion is not None
    assert opinion.why.en in seen
    assert "78 % confident" in seen
    assert "The judge missed the error." in seen
    assert f"calls {counted.wrong} of the {counted.steps} steps" in seen
    assert f"found {counted.noticed} of those" in seen


def test_a_judge_that_finds_the_error_gets_credit(tour):
    seen = words(step(2, with_verdict(tour, correct=False, probability=0.1)))

    assert "The judge found the error." in seen
    assert "90 % confident" in seen
    assert "The judge missed the error." not in seen


def test_a_verdict_that_is_hardly_likelier_than_the_other_is_unsure_as_on_the_page(tour):
    seen = words(step(2, with_verdict(tour, correct=True, probability=0.59)))

    assert "? unsure 59 % likely correct" in seen
    assert "The judge missed the error." in seen


def test_where_only_a_reply_is_wrong_it_is_shown_and_the_judge_has_no_verdict(tour):
    notes = {
        key: note.model_copy(
            update={
                "parts": tuple(
                    one.model_copy(update={"right": one.part is not Part.REPLY})
                    for one in note.parts
                )
            }
        )
        for key, note in tour.notes.items()
    }
    seen = words(step(2, replace(tour, notes=notes)))

    assert tour.newest()[0].reading.turn.reply in seen
    assert "a single reply gets no verdict" in seen


def test_unread_turns_have_no_failure(tour):
    assert "has not read them yet" in words(step(2, replace(tour, notes={})))


@pytest.mark.parametrize(
    ("low", "said", "not_said"),
    [
        (45.0, "near chance", "better than chance"),
        (55.0, "better than chance", "near chance"),
    ],
)
def test_whether_the_judge_is_a_guess_comes_from_the_numbers(tour, low, said, not_said):
    figures = {
        name: replace(figure, value=60.0, low=low, high=65.0)
        if name.startswith("judge_order")
        else figure
        for name, figure in tour.figures.items()
    }
    changed = replace(tour, figures=figures)
    seen = words(step(2, changed))

    assert said in seen
    assert not_said not in seen
    assert f"60.0 % ({low}–65.0)" in seen


def test_the_last_two_stages_are_compared_once_all_their_turns_are_recorded(tour):
    before, after = (stage.name for stage in tour.stages()[-2:])

    def recorded(cases: list[str]) -> Tour:
        stages = [one for one in tour.plan.stages if one.name in {before, after}]
        plan = tour.plan.model_copy(
            update={"stages": (*stages, stages[-1].model_copy(update={"name": "new"}))}
        )
        made = {
            (case, "new"): tour.recordings[case, after].model_copy(update={"stage": "new"})
            for case in cases
        }
        return replace(tour, plan=plan, recordings={**tour.recordings, **made})

    some, every = recorded(["job"]), recorded([case.name for case in tour.plan.cases])

    assert step(3, tour).count('class="t-box t-stage"') == 12
    assert f"job.{before}.json" in step(3, some)
    assert "job.new.json" not in step(3, some)
    assert f"job.{before}.json" not in step(3, every)
    assert "job.new.json" in step(3, every)


def test_the_place_of_a_blind_reply_says_nothing_about_its_model(tour):
    first = [case["blind"][0]["title"] for case in tour_view(tour, load_texts("en"))["cases"]]

    assert len(set(first)) == 2
    assert first[0] != first[1]


def test_weights_that_are_gone_are_said_to_be_gone(tour):
    recording = tour.newest()[0]
    gone = with_recording(
        tour, recording, model=recording.model.model_copy(update={"shipped": False})
    )

    assert "no longer shipped" not in words(step(3, tour))
    assert words(step(3, gone)).count("Its weights are no longer shipped.") == 1


def test_the_papers_numbers_and_ours_share_no_table(tour):
    everything = "".join(step(number, tour) for number in range(1, 7))
    tables = re.findall(r"<table>.*?</table>", everything, re.DOTALL)

    assert len(tables) == 2
    for figure in tour.paper.values():
        assert all(figure.value not in words(table).split() for table in tables)
    for name in ("found_history", "labels"):
        value = tour.paper[name].value
        asides = re.findall(r'<aside class="t-paper">.*?</aside>', everything, re.DOTALL)
        assert any(value in words(aside) and "From the paper" in words(aside) for aside in asides)


def test_hostile_words_of_a_model_stay_words(tour):
    for number in (3, 4):
        html = step(number, with_recording(tour, tour.newest()[0], raw=HOSTILE))

        assert "<script>" not in html
        assert HOSTILE in unescape(html)


def test_without_its_files_the_tour_says_so(monkeypatch):
    def broken() -> Tour:
        return load_tour(Path("nowhere"))

    monkeypatch.setattr("ui_components.tour.screen.the_tour", broken)

    assert "The tour cannot be shown" in tour_html(load_texts("en"))


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_claim_leads_to_a_file_that_is_served(client, language):
    html = tour_html(load_texts(language))
    named = set(re.findall(r'href="(tour/files/[^"]+)"', html))
    assert len(named) >= 10

    for address in named:
        answer = client.get(f"/{address}")
        path = ASSETS / address.removeprefix("tour/files/")
        assert answer.status_code == 200, address
        assert answer.content == path.read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/compeer-small/adapter_model.safetensors",
        "../app.py",
        "%2e%2e/app.py",
        "results/../../app.py",
        "texts/en/tour.toml",
        "",
        "/etc/passwd",
    ],
)
def test_no_other_file_is_served(client, name):
    answer = client.get(f"/tour/files/{name}")

    assert answer.status_code == 404 or "gradio" in answer.text  # the page, for a path that left us
    assert "import argparse" not in answer.text
    assert not any("safetensors" in pattern for pattern in SERVED)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_to_print_needs_nothing_else(client, language):
    answer = client.get("/tour/print", params={"lang": language})
    html = answer.text
    texts = load_texts(language)

    assert answer.status_code == 200
    assert f'<html lang="{"zh-CN" if language == "zh" else "en"}"' in html
    assert all(texts(f"tour.head_{number}") in unescape(html) for number in range(1, 7))
    assert "<script" not in html
    assert "<button" not in html
    assert not re.search(r"(src=|url\(|@import|<link)", html)
    for address in re.findall(r'href="(files/[^"]+)"', html):
        assert client.get(f"/tour/{address}").status_code == 200


def test_the_page_to_print_speaks_the_visitors_language_where_none_is_asked_for(client):
    client.cookies.clear()
    chinese = client.get("/tour/print", headers={"accept-language": "zh-CN"}).text
    odd = client.get("/tour/print", params={"lang": "xx"}, headers={"accept-language": "en"}).text

    assert '<html lang="zh-CN"' in chinese
    assert '<html lang="en"' in odd


def test_without_votes_the_count_invites_to_the_first(client):
    assert "No votes yet" in client.get("/tour/votes?lang=en").text
    assert "还没有投票" in client.get("/tour/votes?lang=zh").text


def test_votes_are_counted_as_they_stand(tmp_path):
    fresh = make_services(tmp_path)
    with warnings.catch_warnings(), TestClient(build_server(fresh)) as client:
        for voter in ("anna", "ben"):
            battle = fresh.votes.open_battle(
                BattlePlan(
                    voter=voter,
                    dialogue=Dialogue((Utterance(Speaker.SEEKER, "I am sad."),)),
                    sides=(SidePlan("a", 1), SidePlan("b", 2)),
                    seed=0,
                )
            )
            for side in (0, 1):
                fresh.votes.finish_side(
                    battle.id, side, SideResult(SideStatus.FINISHED, "x", "Hello.")
                )
            fresh.votes.cast(battle.id, voter, Preference.FIRST, dwell_ms=9000, both_seen=True)
        later = fresh.votes.now() + timedelta(minutes=1)  # a board is made of settled votes
        fresh.votes.now = lambda: later
        seen = words(client.get("/tour/votes?lang=en").text)
        printed = words(client.get("/tour/print?lang=en").text)

    for text in (seen, printed):
        assert re.search(r"votes 2 of them counted 2 raters \(counted votes only\) 2", text)
        assert "2 of 20" in text  # too few to rank anybody


def test_a_failing_database_costs_only_the_count(tmp_path, monkeypatch):
    from compeer_core.errors import StoreError

    fresh = make_services(tmp_path)

    def fail(*_: object) -> None:
        raise StoreError("locked")

    monkeypatch.setattr(fresh.votes, "votes", fail)
    with warnings.catch_warnings(), TestClient(build_server(fresh)) as client:
        assert client.get("/tour/votes").status_code == 503
        assert client.get("/tour/print").status_code == 200


def test_the_printed_count_is_our_own_html(tour):
    html = print_html(load_texts("en"), "<p>three</p>")

    assert "<p>three</p>" in html
