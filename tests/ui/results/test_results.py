"""The results without a browser: caching, HTML, downloads."""

import asyncio
import html
import json
import random
import re
import shlex
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert, text

from compeer_core.errors import InputError
from compeer_core.registry import Registry
from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main as votes_command
from compeer_core.votes.database import default_url
from compeer_core.votes.leaderboard.board import Board, Filters, Settings, Status, bradley_terry
from compeer_core.votes.leaderboard.plot import to_svg
from compeer_core.votes.leaderboard.text import to_csv
from compeer_core.votes.rows import VoteRow, read_votes
from compeer_core.votes.schema import BattleRow, RevisionRow, SideRow, VoteRecord, VoterRow
from compeer_core.votes.store import VoteStore
from tests.databases import database_in
from tests.pages import write_models
from tests.voting import Clock, hold_votes, vote
from ui_components.results.boards import DEMO, KEEP_SECONDS, LOOK_SECONDS, MOST_WAITING, Boards
from ui_components.results.example import MODELS, VOTES, example_board
from ui_components.results.filters import read_filters, write_filters
from ui_components.results.screen import Results
from ui_components.results.view import MEASURED, filters_html, results_html, sentence
from ui_components.server.admission_queue import QueueFullError
from ui_components.server.api import Program
from ui_components.server.app import build_server
from ui_components.shared.models import Models
from ui_components.shared.services import Services
from ui_components.shared.texts import load_texts

EN, ZH = load_texts("en"), load_texts("zh")
SPITEFUL = "<img src=x onerror=alert(1)>"


def services_in(folder, clock=None) -> Services:
    models = Models(Registry.from_toml(write_models(folder)))
    return Services(models, VoteStore(database_in(folder), clock=clock or Clock()))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    """A server with 45 votes of eight people, and an unfinished one."""
    clock = Clock()
    made = services_in(tmp_path_factory.mktemp("votes"), clock)
    hold_votes(made.votes, 45)
    clock.forward(seconds=10)
    return made


@pytest.fixture(scope="module")
def client(services: Services):
    with warnings.catch_warnings(), TestClient(build_server(services)) as client:
        yield client


def board_of(services: Services, **filters: Any) -> Board:
    return services.boards.current(Filters(**filters)).result(60).board


def words(drawn: str) -> str:
    """Return the visible text of HTML."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", drawn)))


def made_board(*votes: tuple[str, str, Preference, int], raters: int = 6) -> Board:
    rows = []
    for left, right, preference, times in votes:
        for _ in range(times):
            number = len(rows)
            rows.append(
                VoteRow(
                    battle_id=f"b{number}",
                    voter=f"r{number % raters}",
                    left=left,
                    right=right,
                    preference=preference,
                    blind=True,
                    language="en",
                    at=Clock().time,
                )
            )
    return bradley_terry(rows, settings=Settings(fits=60), as_of=Clock().time)


FIRST, SECOND, BOTH, NEITHER = Preference


# --- filters in a query string --------------------------------------------------------------------


def test_filters_survive_the_way_through_an_address():
    filters = Filters(
        kind="any",
        languages=("en", "zh"),
        topics=("A & B=1",),
        has_image=False,
        with_reasoning=True,
        admit=("leaked", "too_fast"),
    )

    assert read_filters(write_filters(filters)) == filters
    assert write_filters(Filters()) == ""
    assert read_filters("screen=results&language=&image=") == Filters()


# --- the example and the demo board --------------------------------------------------------------


def test_a_board_without_votes_comes_with_a_marked_example(tmp_path):
    services = services_in(tmp_path)
    standing = services.boards.current(Filters()).result(60)
    assert standing.board.votes == 0
    assert standing.example is example_board()
    for texts in (EN, ZH):
        drawn = results_html(standing.board, texts, services.models, standing.example)
        real, example = drawn.split('<section class="example"')
        assert texts("results.example_means", votes=VOTES, models=len(MODELS)) in words(example)
        assert texts("results.example") in words(example)
        assert "data-state" not in example
        assert texts("results.example_model", name="A") not in real.split("<svg")[0]
        for entry in services.models.entries("policy"):
            assert entry.name not in example
    downloads = TestClient(build_server(services)).get("/results/board.json")
    assert downloads.json()["votes"] == 0


def test_the_example_board_is_ranked_and_the_same_everywhere():
    board = example_board()
    example_board.cache_clear()

    assert board.status is Status.RANKED
    assert [row.model for row in board.models] == list(MODELS)
    assert example_board() == board


def test_the_example_disappears_once_models_are_ranked(services):
    standing = services.boards.current(Filters()).result(60)

    assert standing.board.status is Status.RANKED
    assert standing.example is None
    assert 'class="example"' not in results_html(standing.board, EN, services.models, None)


def test_the_measured_comparison_has_the_figures_of_its_result(tmp_path):
    services = services_in(tmp_path)
    drawn = words(results_html(board_of(services), EN, services.models, example_board()))
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    (metric,) = (each for each in result["metrics"] if each["name"].startswith("preferred over "))

    assert f"the replies to {metric['n']} messages" in drawn
    assert f"{round(metric['value'])} % of them (95 % CI {round(metric['low'])}" in drawn
    assert "No people took part" in drawn
    assert result["command"] in drawn


def test_a_presenter_alone_makes_a_demo_board_count(tmp_path):
    clock = Clock()
    services = replace(services_in(tmp_path, clock), demo_board=True)
    vote(services.votes, "presenter", "scripted-policy", "other")
    clock.forward(seconds=10)
    standing = services.boards.current(Filters()).result(60)
    board = standing.board

    assert board.status is Status.RANKED
    assert standing.example is None
    assert [(row.rank_low, row.rank_high) for row in board.models] == [(1, 2), (1, 2)]
    assert board.effects.left_share is None
    drawn = words(results_html(board, EN, services.models))
    assert "Demo board: it ranks models although 20 votes by 5 raters would be needed." in drawn
    assert "scores have no CI" in drawn
    assert "--min-votes 1 --min-raters 1" in drawn
    vote(services.votes, "guest", "scripted-policy", "other")
    clock.forward(seconds=10)
    rows = bradley_terry(services.votes.votes(), settings=DEMO).models
    assert all(row.score.low < row.score.value < row.score.high for row in rows)


def test_the_demo_note_tells_who_ranks_and_ends_with_enough_votes(tmp_path):
    clock = Clock()
    services = replace(services_in(tmp_path, clock), demo_board=True)

    def drawn() -> str:
        clock.forward(seconds=10)
        votes = services.votes.votes()
        board = bradley_terry(votes, settings=DEMO, as_of=services.votes.now())
        return words(results_html(board, EN, services.models))

    for preference in (Preference.FIRST, Preference.SECOND):
        vote(services.votes, "presenter", "scripted-policy", "other", preference)
    vote(services.votes, "guest", "scripted-policy", "other", Preference.NEITHER)
    alone = drawn()
    assert "scores have no CI" in alone
    assert "leaving one out" not in alone  # without the only rater nothing is left
    for number in range(20):
        vote(services.votes, f"guest-{number % 5}", "scripted-policy", "other")
    assert "Demo board" not in drawn()


# --- cached boards -------------------------------------------------------------------------------


def test_a_board_is_cached_until_votes_change(tmp_path):
    clock, ticks = Clock(), [0.0]
    with VoteStore(default_url(tmp_path), clock=clock) as store:
        boards = Boards(store, Settings(fits=50), clock=lambda: ticks[0])

        def board():
            ticks[0] += 2 * LOOK_SECONDS
            return boards.current(Filters()).result(60).board

        assert boards.kept(Filters()) is None
        empty = board()
        assert boards.kept(Filters()).board is empty
        clock.forward(minutes=1)
        assert board() is empty  # nothing has changed, so it still holds
        vote(store, "ann", "a", "b")
        assert board() is empty  # the vote is too young
        clock.forward(seconds=3)
        assert board().votes == 1
        ticks[0] += KEEP_SECONDS
        assert board().votes == 1
        assert boards.current(Filters(kind="any")).result(60).board.votes == 1
        store.delete_voter("ann")
        assert board().votes == 0
        assert boards.kept(Filters(kind="any")) is None  # what was deleted is shown to nobody


def test_the_database_is_not_asked_for_a_moment(tmp_path, monkeypatch):
    ticks = [0.0]
    with VoteStore(default_url(tmp_path), clock=Clock()) as store:
        boards = Boards(store, clock=lambda: ticks[0])
        first = boards.current(Filters()).result(60)
        monkeypatch.setattr(store, "stamp", lambda *_: pytest.fail("asked"))
        monkeypatch.setattr(store, "votes", lambda *_: pytest.fail("read"))

        ticks[0] += LOOK_SECONDS / 2
        assert boards.current(Filters()).result(60).board is first.board
        assert boards.current(Filters(kind="any")).result(60).board.votes == 0


def test_concurrent_requests_for_a_board_compute_it_once(tmp_path, monkeypatch):
    with VoteStore(default_url(tmp_path), clock=Clock()) as store:
        boards = Boards(store)
        gate, reads = threading.Event(), []
        votes = store.votes

        def slow(as_of):
            reads.append(as_of)
            gate.wait(30)
            return votes(as_of)

        monkeypatch.setattr(store, "votes", slow)
        asked = [boards.current(Filters()) for _ in range(50)]
        others = [boards.current(Filters(topics=(f"t{n}",))) for n in range(MOST_WAITING - 1)]
        with pytest.raises(QueueFullError):
            boards.current(Filters(topics=("one too many",)))
        gate.set()

        assert len({id(each.result(60)) for each in asked}) == 1
        assert len(reads) == 1
        assert all(each.result(60).board.votes == 0 for each in others)
        assert boards.current(Filters(topics=("one too many",))).result(60)


def test_a_future_moment_is_refused(services):
    with pytest.raises(InputError, match="in the future"):
        services.boards.at(Filters(), services.votes.now()).result(60)


def test_ten_thousand_battles_are_read_and_counted_in_less_than_five_seconds(tmp_path):
    with VoteStore(default_url(tmp_path), clock=Clock()) as store:
        write_many(store, battles=10_000, voters=200)
        boards = Boards(store)

        begun = time.process_time()  # of all threads; other programs do not count
        board = boards.current(Filters()).result(300).board
        taken = time.process_time() - begun

        assert (board.status, board.settings.fits) == (Status.RANKED, 300)
        assert (board.votes, board.raters, len(board.models)) == (10_000, 200, 10)
        assert taken < 5

        begun = time.process_time()
        assert boards.current(Filters()).result(60).board is board
        assert time.process_time() - begun < 0.05


def write_many(store: VoteStore, battles: int, voters: int) -> None:
    drawn = random.Random(1)
    at = Clock().time.replace(hour=1)
    reward = {"steps": [1.0, 1.0, 1.0], "response": None, "format": 1.0, "total": 1.0}
    people = [{"id": f"p{n}", "pseudonym": f"v{n}", "created_at": at} for n in range(voters)]
    tables: dict[Any, list[dict[str, Any]]] = {
        VoterRow: people, BattleRow: [], SideRow: [], VoteRecord: [], RevisionRow: [],
    }  # fmt: skip
    for n in range(battles):
        voter, battle = f"p{n % voters}", f"b{n}"
        tables[BattleRow].append(
            {
                "id": battle, "voter_id": voter, "opened_at": at, "expires_at": at, "seed": n,
                "blind": True, "with_reasoning": False, "language": "en", "topic": "",
                "dialogue_id": "d", "imported": False, "verdict": drawn.choice(list(Preference)),
            }
        )  # fmt: skip
        left, right = drawn.sample(range(10), 2)
        for side, model in enumerate((left, right)):
            tables[SideRow].append(
                {
                    "battle_id": battle, "side": side, "model": f"m{model}", "seed": n,
                    "status": "finished", "reply_length": drawn.randrange(200), "reward": reward,
                    "leaked": False,
                }
            )  # fmt: skip
        tables[VoteRecord].append({"id": n + 1, "battle_id": battle, "voter_id": voter})
        preference = FIRST if drawn.random() < 0.5 + 0.04 * (right - left) else SECOND
        tables[RevisionRow].append(
            {
                "vote_id": n + 1, "voter_id": voter, "number": 1, "at": at, "preference": preference,
                "tags": [], "note": "", "rate_limited": False, "after_reveal": False,
            }
        )  # fmt: skip
    with store.database.writing() as session:
        for table, rows in tables.items():
            session.execute(insert(table), rows)


# --- rendering -----------------------------------------------------------------------------------


def test_the_headline_states_the_preference_with_its_interval():
    board = made_board(("urp", "base", FIRST, 60), ("base", "urp", FIRST, 6), raters=12)
    headline = sentence(board, EN, str.upper)

    assert headline == (
        f"URP is preferred to BASE in 91 % of decisive votes (95 % CI "
        f"{round(board.headline.win_share.low * 100)}–{round(board.headline.win_share.high * 100)}, "
        "66 votes, 12 raters)."
    )
    assert "urp 比 base 更受欢迎：在分出胜负的投票中赢得 91%" in sentence(board, ZH, str)
    even = made_board(("urp", "base", FIRST, 13), ("base", "urp", FIRST, 12))
    assert sentence(even, EN, str).endswith("This may be chance: the CI contains 50 %.")
    ties = made_board(("urp", "base", BOTH, 25))
    assert "urp" not in sentence(ties, EN, str) or ties.headline is not None


@pytest.mark.parametrize(
    ("votes", "raters", "expected"),
    [
        ([], 6, "0 of 20 needed"),
        ([("a", "b", FIRST, 7), ("a", "b", NEITHER, 30)], 6, "7 of 20 needed"),
        ([("a", "b", FIRST, 25)], 3, "3 of 5 needed, with 25 votes"),
        ([("a", "b", FIRST, 20), ("c", "d", FIRST, 20)], 6, "(a, b; c, d)"),
    ],
)
def test_without_enough_votes_there_are_no_ranks_and_the_reason_is_named(
    services, votes, raters, expected
):
    board = made_board(*votes, raters=raters)
    drawn = results_html(board, EN, services.models)

    assert expected in words(drawn)
    assert "not ranked" in drawn
    assert 'data-screen="compare"' in drawn
    assert EN("results.ranks") not in drawn
    assert "is-grey" in drawn
    if not votes:  # who could be compared is named
        assert "Scripted policy" in drawn


def test_plot_and_table_hold_the_same_numbers(services):
    board = board_of(services)
    drawn = results_html(board, EN, services.models)
    plot, table = drawn[: drawn.index("</svg>")], drawn[drawn.index('data-table="models"') :]

    assert board.status is Status.RANKED
    for row in board.models:
        numbers = f"{row.score.low:.0f}–{row.score.high:.0f}"
        assert f"{row.score.value:.0f} ({numbers})" in plot
        assert f"<td>{row.score.value:.0f}</td><td>{numbers}</td>" in table
        assert f"<td>{row.wins}</td><td>{row.losses}</td><td>{row.ties}</td>" in table
    assert "Scripted policy" in words(table)  # by its title


def test_pairs_judge_effects_and_what_is_left_out_are_shown(services):
    board = board_of(services)
    seen = words(results_html(board, EN, services.models))

    pair = board.pairs[0]
    assert f"{pair.wins} : {pair.losses}" in seen
    assert f"{pair.losses} : {pair.wins}" in seen  # the mirror image
    assert f"ties {pair.ties}, neither {pair.neither}" in seen
    assert f"kappa {board.judge.kappa.value:.2f}" in seen
    assert "Between two equal replies, the left one" in seen
    assert "The longer reply won" in seen
    assert board.influence is not None
    assert f"{board.influence.largest_shift} points" in seen
    assert board.left_out.flagged == board.flags["too_fast"] == 5
    assert "too fast to have read both replies 5" in seen
    unacceptable = board.models[0].unacceptable_share
    assert (
        f"{round(unacceptable.value * 100)} % (" in seen[seen.index("Neither reply acceptable") :]
    )
    assert board.vote_set[:12] in seen
    assert board.code in seen


def test_names_from_elsewhere_are_text(services):
    board = made_board((SPITEFUL, "b", FIRST, 30), ("b", SPITEFUL, FIRST, 5))

    for texts in (EN, ZH):
        drawn = results_html(board, texts, services.models)
        assert "<img" not in drawn
        assert SPITEFUL in words(drawn.replace("&lt;", "\0").replace("&gt;", "\1")).replace(
            "\0", "<"
        ).replace("\1", ">")


def test_the_form_offers_what_there_is_and_nothing_else(services):
    choices = services.boards.current(Filters()).result(60).choices
    drawn = filters_html(choices, read_filters("topic=exam&admit=too_fast"), EN)

    assert re.findall(r'name="(\w+)"', drawn) == [
        "language", "image", "topic", "reasoning", "kind", "admit",
    ]  # fmt: skip
    assert '<option value="exam" selected>' in drawn
    assert re.search(r'value="too_fast" checked>.*<b>5</b>', drawn)
    assert "<details open>" in drawn


# --- the handler ---------------------------------------------------------------------------------


def looked(services: Services, query: str = "", form: str = "") -> list[dict[str, str]]:
    results = Results(services, SimpleNamespace(form="form", board="board"))  # type: ignore[arg-type]
    request: Any = SimpleNamespace(cookies={}, headers={"accept-language": "en"})
    event = gr.EventData(None, {"query": query, "form": form})

    async def updates():
        return [update async for update in results.look(request, event)]

    return asyncio.run(updates())


def test_the_first_visitor_sees_a_placeholder_then_the_board(tmp_path):
    services = services_in(tmp_path)

    counting, shown = looked(services)
    assert "Counting votes" in counting["board"]
    assert "0 of 20 needed" in shown["board"]
    key = html.unescape(re.search(r'data-key="([^"]*)"', shown["form"])[1])
    # who comes later sees it at once, and a form that is there already is left alone
    assert [list(update) for update in looked(services, form=key)] == [["board"]]


def test_a_database_that_fails_is_told_in_words(tmp_path):
    services = services_in(tmp_path)
    with services.votes.database.writing() as session:
        session.execute(text("ALTER TABLE vote_revisions RENAME TO lost"))

    drawn = looked(services)[-1]["board"]
    assert "could not be read" in drawn
    assert "data-again" in drawn


@pytest.mark.parametrize("query", ["image=maybe", "admit=nobody"])
def test_invalid_filters_give_one_sentence(services, query):
    assert "cannot be used" in looked(services, query)[-1]["board"]


# --- downloads -----------------------------------------------------------------------------------


def test_the_command_on_the_page_writes_the_bytes_of_the_download(
    services, client, tmp_path, repository
):
    def run_module(arguments):
        module = [sys.executable, "-m", "compeer_core.votes"]
        subprocess.run([*module, *arguments], check=True, cwd=repository)

    runs = {"": run_module, "language=zh&admit=too_fast&topic=exam": votes_command}
    for query, run in runs.items():
        page = looked(services, query)[-1]["board"]
        command = html.unescape(re.search(r"<code>(.*?)</code>", page)[1])
        link = html.unescape(re.search(r'href="(results/board.json[^"]*)"', page)[1])
        written = tmp_path / "board.json"
        words = shlex.split(command.replace("board.json", str(written)))
        assert words[:4] == ["python", "-m", "compeer_core.votes", "board"]

        where = ["--database-url", services.votes.database.name]
        run([*words[3:], *where])

        answer = client.get(f"/{link}")
        assert answer.content == written.read_bytes()
        assert answer.headers["content-type"] == "application/json"
        assert "attachment" in answer.headers["content-disposition"]
        board = Board.model_validate_json(answer.content)
        assert board.filters == read_filters(query)
        assert board.vote_set in page


def test_a_link_to_an_earlier_moment_reproduces_its_board(tmp_path):
    clock = Clock()
    services = services_in(tmp_path, clock)
    vote(services.votes, "ann", "a", "b")
    clock.forward(seconds=10)
    then = board_of(services)
    vote(services.votes, "bob", "a", "b")
    clock.forward(seconds=10)
    later = Boards(services.votes)  # a server that was started since

    assert later.current(Filters()).result(60).board.votes == 2
    assert later.at(Filters(), then.as_of).result(60) == then


def test_tables_and_plot_can_be_downloaded(services, client):
    board = board_of(services, languages=("en",))
    for table in ("models", "pairs", "judge"):
        answer = client.get(f"/results/{table}.csv?language=en")
        assert answer.text == to_csv(board, table)
        assert answer.headers["content-type"].startswith("text/csv")
    answer = client.get("/results/board.svg?language=en")
    assert answer.text == to_svg(board)
    assert answer.headers["content-type"] == "image/svg+xml"


def test_the_file_of_votes_gives_the_same_numbers_and_names_nobody(services, client, tmp_path):
    board = board_of(services)
    answer = client.get("/results/votes.jsonl")
    (tmp_path / "votes.jsonl").write_bytes(answer.content)
    rows = list(read_votes(tmp_path / "votes.jsonl"))

    again = bradley_terry(rows, as_of=board.as_of)
    assert again.model_dump(exclude={"vote_set"}) == board.model_dump(exclude={"vote_set"})
    assert len(rows) == 45
    secret = [each.voter for each in services.votes.votes()]
    secret += [each.battle_id for each in services.votes.votes()]
    assert not [name for name in secret if name in answer.text]
    assert "12:34" not in answer.text


def test_programs_get_the_rows_with_their_intervals(services):
    rows = Program(services).leaderboard()

    assert [row["model"] for row in rows] == ["scripted-policy", "other"]
    assert rows == json.loads(json.dumps(rows))
    assert rows[0]["score"]["low"] < rows[0]["score"]["value"] < rows[0]["score"]["high"]
    assert (rows[0]["rank"], rows[0]["rank_low"]) == (1, 1)
