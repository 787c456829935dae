"""Compare without a browser: the handlers, their threads, and what the screen shows."""

import asyncio
import html
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from sqlalchemy import select

from compeer_core.backends.protocol import Message
from compeer_core.backends.scripted import ScriptedBackend, ScriptedTurn
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import CheckpointError, InputError, StoreError, VoteRefusedError
from compeer_core.judgement import Reward
from compeer_core.policy import Controls, Policy
from compeer_core.taxonomy import Preference
from compeer_core.turn import TurnDone, TurnRecord, draw_seed, take_turn
from compeer_core.unifireward import PREFERENCES, Judge
from compeer_core.votes.battles import Agreement, Flag, SideStatus
from compeer_core.votes.schema import BattleRow, RevisionRow
from tests.comparisons import LONG, MODELS, SECOND_LONG, make
from tests.databases import rows
from tests.draws import Draws
from tests.pages import (
    COMPLETE,
    LOOP,
    REPLY,
    SECOND,
    SECOND_REPLY,
    Visitor,
    eventually,
)
from ui_components.compare.comparison import Round
from ui_components.compare.identity import says_who_wrote_it
from ui_components.compare.jobs import chances_between
from ui_components.compare.screen import Compare, refusal_html
from ui_components.compare.view import totals_explained
from ui_components.server.visitors import COOKIE
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey
from ui_components.shared.texts import LANGUAGES, load_texts

SECRETS = ("maple", "cedar", "willow", "tokens", "+1", "−1", "verdict")

PARTS = SimpleNamespace(
    **{
        name: name
        for name in (
            "talk", "ballot", "error", "message", "alt", "mode", "models", "with_reasoning",
            "keep_words", "conversation_id",
        )
    }
)  # fmt: skip


class Guest:
    """A visitor of Compare without a browser."""

    def __init__(self, services: Services, language: str = "en", cookie: str | None = None) -> None:
        self.services = services
        self.compare = Compare(services, PARTS)  # type: ignore[arg-type]
        self.conversation_id = "comparison-" + "x" * 16
        self.cookie = services.visitors.new_cookie() if cookie is None else cookie
        self.request: Any = SimpleNamespace(
            cookies={COOKIE: self.cookie},
            headers={"accept-language": language},
            client=SimpleNamespace(host="192.0.2.7"),
        )
        self.screen: dict[str, Any] = {}
        self.screens: list[str] = []

    @property
    def key(self) -> SessionKey:
        return self.services.key(self.request, self.conversation_id)

    @property
    def round(self) -> Round:
        last = self.services.compare_jobs.store.get(self.key).last
        assert last is not None
        return last

    @property
    def battle(self) -> str:
        return self.round.pairs[0].battle

    def send(
        self,
        text: str,
        mode: str = "blind",
        models: Sequence[str] = (),
        *,
        reasoning: bool = False,
        keep: bool = False,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Send a message and watch until everything has ended."""
        message = {"text": text, "files": []}
        wish = (mode, models, reasoning, keep, self.conversation_id, self.request)
        asyncio.run(self._watch(self.compare.send(message, "", *wish), look))

    def draw_again(self) -> None:
        wish = ("blind", (), False, False, self.conversation_id, self.request)
        asyncio.run(self._watch(self.compare.draw_again(*wish), lambda: None))

    async def _watch(
        self, updates: AsyncIterator[dict[Any, Any]], look: Callable[[], object]
    ) -> None:
        async for update in updates:
            self.see(update)
            look()

    def see(self, update: dict[Any, Any]) -> None:
        self.screen |= update
        self.screens.append(f"{self.screen.get('talk', '')}{self.screen.get('ballot', '')}")

    def act(self, name: str, **data: Any) -> None:
        """Fire an event that is answered at once."""
        handler = getattr(self.compare, name)
        self.see(handler(self.conversation_id, self.request, gr.EventData(None, data)))

    def vote(self, preference: str = "first", battle: str = "", **data: Any) -> None:
        revision = self.round.pairs[0].ballot.revision
        details = {"revision": revision, "dwell_ms": 5000, "both_seen": True} | data
        self.act("vote", battle=battle or self.battle, preference=preference, **details)

    def reveal(self) -> None:
        self.act("reveal", battle=self.battle)

    @property
    def talk(self) -> str:
        return str(self.screen["talk"])

    @property
    def ballot(self) -> str:
        return str(self.screen["ballot"])

    @property
    def error(self) -> str:
        return str(self.screen.get("error", ""))

    def left(self, name: str) -> int:
        """The number of a model's side."""
        return [side.plan.model for side in self.round.sides].index(name)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make(tmp_path)


@pytest.fixture
def anna(services: Services) -> Guest:
    return Guest(services)


def aged(guest: Guest) -> None:
    """Pretend that the replies have been on screen for a while."""
    comparing = guest.services.compare_jobs
    ended = comparing.store.now() - 60
    comparing.store.update(
        guest.key,
        lambda now: now.with_round(replace(guest.round, ended_at=ended)),
    )


# --- a round --------------------------------------------------------------------------------------


def test_the_battle_is_in_the_database_before_anything_is_written(anna, services):
    seen: list[Any] = []

    def look() -> None:
        if not seen:
            battle = services.votes.battle(anna.battle, anna.key.visitor)
            seen.append((battle, [side.words for side in anna.round.sides]))

    anna.send("Slowly, please.", look=look)
    battle, words = seen[0]

    assert words == ["", ""]
    assert {side.model for side in battle.sides} == {"maple-1", "cedar-2"}
    assert battle.statuses == (SideStatus.WRITING, SideStatus.WRITING)
    assert battle.blind
    assert not battle.with_reasoning
    assert battle.sides == tuple(side.plan for side in anna.round.sides)
    written = [side.progress.record.seed for side in anna.round.sides]
    assert written == [side.seed for side in battle.sides]


def test_both_sides_are_written_at_the_same_time(anna):
    anna.send("Slowly, please.")
    both = [
        screen
        for screen in anna.screens
        if screen.count("data-reply") == 2 and screen.count('data-state="running"') == 2
    ]

    assert both
    assert anna.talk.count('data-state="done"') == 2


def test_a_judge_that_cannot_be_loaded_is_named_at_the_reveal(anna, services, monkeypatch):
    def fail(name: str) -> Judge:
        raise CheckpointError(f"{name}: damaged")

    monkeypatch.setattr(services.models, "judge", fail)
    anna.send("hello")
    aged(anna)
    anna.vote("both")
    anna.reveal()

    assert "The judge could not be loaded." in anna.ballot


def test_nothing_reveals_the_models_before_the_vote(anna, services):
    anna.send("Slowly, please.")
    assert anna.screens
    services.compare_jobs.stop(anna.key)
    with pytest.raises(VoteRefusedError, match="names are shown after the vote"):
        services.votes.reveal(anna.battle, anna.key.visitor)
    aged(anna)
    anna.vote("both")
    before = "".join(anna.screens).casefold()

    assert [secret for secret in SECRETS if secret in before] == []
    anna.reveal()
    for name, title in MODELS.items():
        assert (title in anna.ballot) is (name != "willow-3" or title == "")
    assert "s verdict: Both are good." in anna.ballot
    assert "You and the judge agree." in anna.ballot
    assert "tokens" in anna.ballot
    assert anna.ballot.count("✗ −1") == 2  # the third step of each side
    assert anna.talk.count("the First") == 1  # a name stands at its side


def test_a_vote_counts_with_the_time_that_the_server_knows(anna, services):
    anna.send("hello")
    anna.vote("second", dwell_ms=3_600_000)
    (row,) = services.votes.votes()

    assert row.dwell_ms is not None
    assert row.dwell_ms < 600_000
    assert "stored" in anna.ballot
    assert row.preference is Preference.SECOND
    assert row.verdict is Preference.BOTH
    assert row.rewards == (2.0, 2.0)


def test_an_unflagged_vote_counts_and_others_say_why_not(anna):
    anna.send("hello")
    aged(anna)
    anna.vote("first")
    assert "Your vote is stored and counts." in anna.ballot
    anna.act("undo", battle=anna.battle, revision=1)
    anna.vote("first", dwell_ms=3, both_seen=False)

    assert "does not count" in anna.ballot
    assert "it came too soon for you to have read both" in anna.ballot
    assert "part of a reply was never on screen" in anna.ballot


def test_a_vote_can_be_taken_back_and_cast_again(anna, services):
    anna.send("hello")
    aged(anna)
    anna.vote("first")
    assert "Your vote: A is better." in anna.ballot
    assert 'data-act="undo"' in anna.ballot
    anna.act("undo", battle=anna.battle, revision=1)
    assert 'data-state="open"' in anna.ballot
    anna.vote("neither")

    (row,) = services.votes.votes()
    assert row.preference is Preference.NEITHER


def test_a_vote_is_final_once_the_names_are_shown(anna, services):
    anna.send("hello")
    aged(anna)
    anna.vote("first")
    anna.reveal()
    assert 'data-act="undo"' not in anna.ballot
    battle = anna.battle
    anna.act("undo", battle=battle, revision=1)
    assert "The names were revealed" in anna.error
    assert "Maple the First" in anna.ballot
    anna.see(anna.compare.clear(anna.conversation_id, anna.request))
    anna.act("undo", battle=battle, revision=1)
    assert "The names were revealed" in anna.error
    anna.act("explain", battle=battle, tags=[], note="late", token="t")
    assert "no longer exists" in anna.error

    (row,) = services.votes.votes()
    assert (row.preference, row.flags) == (Preference.FIRST, ())


def test_reasons_come_after_the_vote_and_before_the_names(anna, services):
    anna.send("hello")
    aged(anna)
    anna.act("explain", battle=anna.battle, tags=[], note="early", token="t0")
    assert "You have no vote here." in anna.error
    anna.vote("first")
    anna.act("explain", battle=anna.battle, tags=["empathy"], note="warm", token="t1")
    assert "Your vote is stored and counts." in anna.ballot
    anna.act("reveal", battle=anna.battle, tags=["human"], note="warm indeed", token="t2")
    assert "sounds human" in anna.ballot
    assert "warm indeed" in anna.ballot
    (row,) = services.votes.votes()
    assert row.flags == ()
    anna.act("explain", battle=anna.battle, tags=[], note="late", token="t3")

    assert "reasons can no longer be added" in anna.error
    assert next(services.votes.votes()).flags == ()


# --- what is refused ------------------------------------------------------------------------------


def test_a_battle_is_not_voted_on_while_a_side_is_written(anna):
    said: list[str] = []

    def look() -> None:
        if not said and anna.round.sides[0].words:
            anna.vote("first")
            said.append(anna.error)
            assert "still writing" in anna.ballot
            assert anna.ballot.count("disabled") == 4

    anna.send("Slowly, please.", look=look)

    assert "A reply is still being generated." in said[0]
    assert anna.ballot.count("disabled") == 0


def test_comparing_without_a_cookie_is_rejected(services):
    guest = Guest(services, cookie="forged.cookie")
    guest.send("hello")

    assert "needs a cookie" in guest.error


@pytest.mark.parametrize(
    ("mode", "models", "words"),
    [
        ("blind", ["maple-1"], "two to four models, or none"),
        ("named", ["maple-1"], "two to four models that should reply"),
        ("blind", ["maple-1", "nobody"], "no model with that name"),
        ("sideways", [], "could not be read"),
    ],
)
def test_invalid_settings_are_rejected_with_a_sentence(anna, mode, models, words):
    anna.send("hello", mode, models)

    assert words in anna.error


def test_the_next_message_waits_for_a_vote(anna):
    anna.send("hello")
    anna.send("and more")

    assert "Please vote first" in anna.error


def test_every_refusal_has_words_in_every_language():
    documented = re.findall(r"``(\w+)``", VoteRefusedError.__doc__ or "")
    codes = [code for code in documented if code not in {"code", "values"}]
    assert len(codes) >= 10
    values = {"limit": 1, "length": 2, "seconds": 3, "preference": "first"}
    for language in LANGUAGES:
        texts = load_texts(language)
        for code in codes:
            shown = refusal_html(VoteRefusedError("x", code=code, values=values), texts)
            assert texts("compare.refused.compare_form") not in shown, code
        assert texts("compare.refused.store") in refusal_html(StoreError("x"), texts)
    assert "could not be read" in refusal_html(InputError("x", code="odd"), load_texts("en"))


# --- sides that fail or never end ----------------------------------------------------------------


def test_one_side_is_stopped_and_the_other_goes_on(anna, services):
    stopped: list[int] = []

    def look() -> None:
        if not stopped and all(side.words for side in anna.round.sides):
            stopped.append(anna.left("maple-1"))
            anna.compare.stop_side(
                anna.conversation_id, anna.request, gr.EventData(None, {"number": stopped[0]})
            )

    anna.send("Slowly, please.", look=look)
    side, other = anna.round.sides[stopped[0]], anna.round.sides[1 - stopped[0]]

    assert side.progress.outcome == "stopped"
    assert side.reply
    assert side.reply != LONG
    assert other.reply == SECOND_LONG
    aged(anna)
    anna.vote("first")
    assert "a reply was stopped early" in anna.ballot
    (row,) = services.votes.votes()
    assert Flag.STOPPED in row.flags


def test_stop_and_vote_ends_an_endless_generation(anna):
    def look() -> None:
        if 'data-act="stop_all"' in anna.screen.get("ballot", ""):
            anna.compare.stop_all(anna.conversation_id, anna.request)

    anna.send("for ever", look=look)

    assert all(side.progress.outcome == "stopped" for side in anna.round.sides)
    anna.vote("both")
    assert "Your vote: Both are good." in anna.ballot


def test_a_side_that_fails_leaves_no_vote_and_is_drawn_again(anna, services):
    anna.send("break, please")
    failed, battle = anna.left("maple-1"), anna.battle
    letter = "AB"[failed]

    assert f"Reply {letter} could not be generated." in anna.talk
    assert SECOND_REPLY in anna.talk
    assert 'data-act="draw_again"' in anna.talk
    assert anna.ballot == ""
    anna.vote("first")
    assert "A reply failed" in anna.error
    anna.draw_again()
    assert anna.battle != battle
    assert services.votes.battle(battle, anna.key.visitor).statuses[failed] is SideStatus.FAILED
    assert rows(services.votes, BattleRow) == 2


def test_a_model_that_cannot_be_loaded_is_named_to_nobody_and_not_drawn_again(tmp_path):
    anna = Guest(make(tmp_path, ("maple-1", "broken-9", "cedar-2")))
    anna.send("hello", models=("maple-1", "broken-9"))
    assert "One of the models could not be loaded" in anna.talk
    assert "broken-9" not in "".join(anna.screens)
    for _ in range(3):
        anna.draw_again()
        names = {side.plan.model for side in anna.round.sides}
        assert names == {"maple-1", "cedar-2"}


def test_a_page_that_was_closed_stops_the_round_after_a_moment(anna, services):
    async def leave() -> None:
        wish = ("blind", (), False, False, anna.conversation_id, anna.request)
        updates = anna.compare.send({"text": "for ever", "files": []}, "", *wish)
        async for update in updates:
            anna.see(update)
            if any(side.words for side in anna.round.sides):
                break
        await updates.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    eventually(lambda: services.compare_jobs.job(anna.key) is None)

    assert anna.round.is_over


def test_a_page_that_comes_back_finds_the_round_and_the_vote(anna, services):
    anna.send("hello")
    anna.vote("first")
    again = Guest(services, cookie=anna.cookie)

    async def load() -> None:
        async for update in again.compare.load(again.conversation_id, again.request):
            again.see(update)

    asyncio.run(load())
    assert REPLY in again.talk
    assert "Your vote: A is better." in again.ballot
    stranger = Guest(services)
    stranger.see(stranger.compare.clear(stranger.conversation_id, stranger.request))
    assert REPLY not in stranger.talk
    assert stranger.ballot == ""


def test_a_comparison_takes_one_place_in_the_line(anna, services):
    ben = Guest(services)
    waiting: list[int] = []

    def look() -> None:
        waiting.append(services.models.queue_length())

    running = threading.Thread(target=anna.send, args=("for ever",))
    running.start()
    eventually(lambda: services.compare_jobs.job(anna.key) and anna.round.sides[0].words)

    def look_at_ben() -> None:
        look()
        if "You are number 1 in the queue" in str(ben.screen.get("talk")):
            services.compare_jobs.stop(anna.key)

    ben.send("hello", look=look_at_ben)
    running.join(20)

    assert not running.is_alive()
    assert max(waiting) == 1
    assert {side.reply for side in ben.round.sides} == {REPLY, SECOND_REPLY}


# --- identity -------------------------------------------------------------------------------------


def test_a_reply_that_says_who_wrote_it_is_flagged_and_can_be_drawn_again(anna, services):
    anna.send("who are you?")
    letter = "AB"[anna.left("maple-1")]

    assert f"{letter} reveals its model. Your vote is stored but will not count." in anna.talk
    assert 'data-act="draw_again"' in anna.talk
    aged(anna)
    anna.vote("first")
    assert "does not count: a reply reveals its model." in anna.ballot
    assert Flag.LEAKED in next(services.votes.votes()).flags
    anna.draw_again()
    assert "This round already has a vote" in anna.error


@pytest.mark.parametrize(
    "text",
    [
        "I'm Qwen, made by Alibaba Cloud.",
        "I am COMPEER, your supporter.",
        "As a large language model trained by OpenAI, I cannot feel.",
        "Hi, maple-1 here.",
        "I'm Chat\u200bGPT.",
        "My name is Base.",
        "I am an AI assistant based on Llama 3.",
        "我是通义千问，很高兴认识你。",
        "作为由阿里云开发的模型，我在听。",
    ],
)
def test_a_writer_that_introduces_itself_is_found(text):
    assert says_who_wrote_it(text, ["maple-1", "base"])


@pytest.mark.parametrize(
    "text",
    [
        "So you asked ChatGPT before you came here.",
        "I am sorry that ChatGPT was of no help. Google it?",
        "I am here with you; the base of it all is trust.",
        "As you said, the intern programme ended.",
        "我是说，你可以先休息一下，再百度一下也行。",
    ],
)
def test_a_reply_that_only_speaks_of_a_model_is_left_alone(text):
    assert not says_who_wrote_it(text, ["maple-1", "base"])
    assert not says_who_wrote_it(
        "Your vote maple-1 was kind.", ["maple-1"], message="maple-1 is kind"
    )


# --- the gate ------------------------------------------------------------------------------------


def play(monkeypatch: pytest.MonkeyPatch, services: Services, *texts: str) -> None:
    """Let cedar-2 play these texts, one after the other."""
    load, backend = services.models.policy, Draws(*texts)

    def policy(name: str) -> Policy:
        return Policy(name, backend) if name == "cedar-2" else load(name)

    monkeypatch.setattr(services.models, "policy", policy)


def test_a_side_is_drawn_again_and_only_the_reveal_says_so(anna, services, monkeypatch):
    play(monkeypatch, services, LOOP, SECOND)
    anna.send("hello")
    number = anna.left("cedar-2")
    side = anna.round.sides[number]
    assert side.reply == SECOND_REPLY
    stored = services.votes.battle(anna.battle, anna.key.visitor).sides[number]
    assert stored.seed == draw_seed(side.plan.seed, 1)
    aged(anna)
    anna.vote("both")
    assert not any("rejected" in screen for screen in anna.screens)

    anna.reveal()
    row = re.search(r"Draws rejected before the reply</th>(.*?)</tr>", anna.ballot)
    assert row is not None
    cells = re.findall(r">(\d+)</td>", row[1])
    assert cells == (["1", "0"] if number == 0 else ["0", "1"])


def test_a_side_without_a_usable_reply_leaves_no_vote(anna, services, monkeypatch):
    play(monkeypatch, services, LOOP)
    anna.send("hello")
    number = anna.left("cedar-2")

    assert f"The model of {'AB'[number]} did not produce a usable reply." in anna.talk
    assert anna.round.sides[number].has_failed
    assert anna.round.active is None
    assert "I am here for you, always" not in anna.talk


# --- several rounds, several models ---------------------------------------------------------------


def test_the_conversation_goes_on_from_the_preferred_reply(anna, services):
    anna.send("hello", keep=True)
    first_battle = anna.battle
    side = anna.left("cedar-2")
    aged(anna)
    anna.vote("first" if side == 0 else "second")
    assert f"continues from {'AB'[side]}, the reply you preferred" in anna.talk
    anna.send("and now?", keep=True)

    with services.votes.database.reading() as session:
        rows = {row.id: row for row in session.scalars(select(BattleRow))}
        history = rows[anna.battle].history
        assert history is not None
        assert [said["text"] for said in history] == ["hello", SECOND_REPLY, "and now?"]
        assert rows[anna.battle].dialogue_id == rows[first_battle].dialogue_id
    assert SECOND_REPLY in anna.talk


def test_without_a_preference_a_reply_is_drawn_and_can_be_changed(anna):
    anna.send("hello")
    anna.vote("both")
    assert "You found both good, so one was drawn at random" in anna.talk
    number = 1 - (anna.round.goes_on or 0)
    anna.act("choose_side", number=number)

    assert f"continues from {'AB'[number]}, as you chose" in anna.talk
    anna.act("choose_side", number=7)
    assert "no longer exists" in anna.error


def test_named_comparisons_show_the_names_and_do_not_count(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    anna.send("hello", "named", list(MODELS))
    assert len(anna.round.sides) == 3
    assert len({pair.battle for pair in anna.round.pairs}) == 3
    assert "Maple the First" in anna.talk
    assert "willow-3" in anna.talk
    assert anna.ballot.count('data-state="open"') == 1
    assert "Pair 1 of 3" in anna.ballot
    aged(anna)
    anna.vote("first")
    assert "does not count, because you knew the names" in anna.ballot
    anna.reveal()
    assert "Pair 2 of 3" in anna.ballot
    (row,) = anna.services.votes.votes()

    assert not row.blind


def test_a_named_comparison_speaks_of_no_hidden_names(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    anna.send("who are you?", "named", ["maple-1", "cedar-2"])
    aged(anna)
    anna.vote("first")
    assert "Show reasoning and verdicts" in anna.ballot
    anna.reveal()
    shown = anna.talk + anna.ballot

    for leftover in ("Reveal the models", "names appear", "reveals its model", "new pair"):
        assert leftover not in "".join(anna.screens)
    assert "Same message, new replies" in shown
    assert "blind votes" not in shown
    anna.act("undo", battle=anna.battle, revision=1)
    assert 'data-state="open"' in anna.ballot


def test_if_one_of_three_fails_the_others_are_voted_on(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    anna.send("break, please", "named", list(MODELS))
    able = [n for n in range(3) if n != anna.left("maple-1")]

    assert "One reply is missing." in anna.talk
    active = anna.round.active
    assert active is not None
    assert list(active.sides) == able
    anna.vote("both", battle=active.battle)
    assert anna.error == ""
    assert "Your vote: Both are good." in anna.ballot
    assert anna.round.goes_on in able


def test_blind_draws_two_of_those_that_were_ticked(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    drawn = set()
    for _ in range(24):
        anna.compare.clear(anna.conversation_id, anna.request)
        anna.send("hello", models=["maple-1", "willow-3"])
        drawn.add(tuple(side.plan.model for side in anna.round.sides))
        if len(drawn) == 2:
            break

    assert drawn <= {("maple-1", "willow-3"), ("willow-3", "maple-1")}
    assert len(drawn) == 2  # 1 in 8 million that chance gives one order only


def test_texts_are_stored_only_with_consent(anna, services):
    anna.send("my secret")
    with services.votes.database.reading() as session:
        (row,) = session.scalars(select(BattleRow))
        assert row.history is None
        assert all(side.reply is None and side.turn is None for side in row.sides)


def test_the_reasoning_is_shown_only_on_request(anna, services):
    anna.send("hello", reasoning=True)
    assert "The seeker lost a job and told nobody." in anna.talk
    assert "Exploration" in anna.talk
    assert services.votes.battle(anna.battle, anna.key.visitor).with_reasoning
    anna.compare.clear(anna.conversation_id, anna.request)
    anna.send("hello")

    assert "The seeker lost a job" not in anna.talk


def test_a_fast_side_is_shown_at_the_speed_of_the_slow_one(anna, services, monkeypatch):
    turns: dict[str, ScriptedTurn | str] = {
        "maple-1": ScriptedTurn(text=COMPLETE, delay_seconds=0.03, chunk_characters=4),
        "cedar-2": SECOND,
    }
    monkeypatch.setattr(
        services.models, "policy", lambda name: Policy(name, ScriptedBackend([turns[name]]))
    )
    lengths: list[list[int]] = []

    def look() -> None:
        talk = str(anna.screen.get("talk", ""))
        slow, quick = (anna.round.sides[anna.left(name)] for name in turns)
        shown = [html.unescape(text) for text in re.findall(r"data-reply>([^<]*)<", talk)]
        if quick.is_over and not slow.is_over and talk.count('data-act="stop_side"') == 2:
            assert talk.count('data-state="running"') == 2
            assert "are still writing" in anna.ballot
            lengths.append([len(text) for text in shown])

    anna.send("hello", look=look)

    assert [] in lengths  # neither is shown while one of them has nothing to show
    both = [each for each in lengths if len(each) == 2]
    assert both
    assert all(first == second for first, second in both if max(first, second) < len(REPLY))
    assert SECOND_REPLY in anna.talk


def test_the_preferred_reply_is_marked_in_words(anna):
    anna.send("hello")
    anna.vote("second")
    marked = re.findall(r'<article class="side [^"]*is-favourite" data-side="(\d)"', anna.talk)
    assert marked == ["1"]
    assert anna.talk.count("your choice") == 1
    anna.act("undo", battle=anna.battle, revision=1)
    assert "your choice" not in anna.talk
    anna.vote("both")
    assert anna.talk.count("your choice") == 2
    anna.act("undo", battle=anna.battle, revision=3)
    anna.vote("neither")
    assert "your choice" not in anna.talk
    assert "You accepted neither, so one was drawn" in anna.talk


def test_no_single_reply_is_marked_after_votes_in_a_circle(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    anna.send("hello", "named", list(MODELS))
    sides = [pair.sides for pair in anna.round.pairs]
    assert sides == [(0, 1), (0, 2), (1, 2)]
    for preference in ("first", "second", "first"):  # 0 beats 1, 2 beats 0, 1 beats 2
        active = anna.round.active
        assert active is not None
        anna.vote(preference, battle=active.battle)
        anna.act("reveal", battle=active.battle)

    assert anna.round.favourites == {0, 1, 2}
    assert "No reply was preferred more often than the others, so one was drawn" in anna.talk
    assert "the reply you preferred" not in anna.talk


def test_the_reveal_shows_both_reasonings_and_the_verdicts(anna):
    anna.send("hello")
    assert "The seeker lost a job" not in anna.talk + anna.ballot
    aged(anna)
    anna.vote("first")
    assert "judged" not in anna.ballot
    anna.reveal()

    assert anna.ballot.count('class="of-side"') == 6
    assert anna.ballot.count("judged correct") == 4 + 1  # the last explains the totals
    assert anna.ballot.count("judged incorrect") == 2 + 1
    assert "The judge&#39;s probabilities:" in anna.ballot
    assert "A total scores the reasoning of one side" in anna.ballot
    assert "point to different sides" not in anna.ballot  # the totals are equal
    assert anna.ballot.count("the judge&#39;s choice") == 2
    assert "This is your first vote that can be compared" in anna.ballot


def test_a_verdict_against_the_totals_is_explained():
    rewards = [
        Reward(
            steps=(1.0, 1.0, 1.0), response=None, format=1.0, total=total, maximum=4, unscorable=0
        )
        for total in (2.0, 4.0)
    ]

    def told(verdict: Preference) -> str:
        return totals_explained(verdict, (rewards[0], rewards[1]), ("A", "B"), load_texts("en"))

    assert "prefers the reply of A, but the reasoning of B has the higher total" in told(
        Preference.FIRST
    )
    assert "point to different sides" not in told(Preference.SECOND)
    assert "point to different sides" not in told(Preference.BOTH)


def test_the_agreement_with_the_judge_counts_own_revealed_blind_votes(anna, services):
    for preference in ("both", "first"):
        anna.send("hello")
        aged(anna)
        anna.vote(preference)
        assert "In all, you and the judge" not in anna.ballot
        anna.reveal()
        anna.see(anna.compare.clear(anna.conversation_id, anna.request))
    anna.send("hello")
    aged(anna)
    anna.vote("both")
    assert services.votes.agreement(anna.key.visitor) == Agreement(1, 2)
    anna.reveal()

    assert "you and the judge agree on 2 of 3 blind votes" in anna.ballot
    assert services.votes.agreement("nobody") == Agreement(0, 0)


def test_opinions_of_steps_are_stored_with_the_vote_and_it_still_counts(anna, services):
    anna.send("hello")
    aged(anna)
    anna.vote("first")
    assert anna.ballot.count("data-mark=") == 12
    marks = [[True, None, False], [None, None, None]]
    anna.act("explain", battle=anna.battle, tags=[], note="", token="t", steps=marks)
    assert "Reasons saved." in anna.ballot
    assert anna.ballot.count('aria-pressed="true"') == 2
    anna.reveal()
    assert "you: correct" in anna.ballot
    assert "you: incorrect" in anna.ballot
    assert "data-mark=" not in anna.ballot
    with services.votes.database.reading() as session:
        last = session.scalars(select(RevisionRow).order_by(RevisionRow.number.desc())).first()
        assert last is not None
        assert last.steps == [[True, None, False], None]
    assert next(services.votes.votes()).flags == ()


def test_a_step_that_a_model_left_out_cannot_be_rated(services, monkeypatch):
    services = replace(services, gated=False)
    anna = Guest(services)
    play(monkeypatch, services, "That sounds hard. What happened then?")
    anna.send("hello")
    aged(anna)
    anna.vote("first")

    place = anna.left("cedar-2")
    assert anna.ballot.count("data-mark=") == 6
    assert f'data-step="{place}-' not in anna.ballot
    assert anna.ballot.count(f'data-step="{1 - place}-') == 6


@pytest.mark.parametrize(
    "steps", [None, "x", [[True]], [[1, 2, 3], {}], [[True] * 4, [True] * 3, []]]
)
def test_odd_opinions_of_steps_count_as_none(anna, services, steps):
    anna.send("hello")
    anna.vote("first")
    anna.act("explain", battle=anna.battle, tags=[], note="", token="t", steps=steps)

    assert anna.error == ""
    assert anna.round.pairs[0].ballot.steps == (None, None)


def test_a_message_is_replayed_with_a_new_pair_and_the_vote_stays(tmp_path):
    anna = Guest(make(tmp_path, tuple(MODELS)))
    for _ in range(4):
        anna.send("hello")
        drawn = {side.plan.model for side in anna.round.sides}
        anna.vote("first")
        anna.draw_again()
        assert "This round already has a vote" in anna.error
        anna.reveal()
        assert "Same message, new pair" in anna.talk
        anna.draw_again()
        assert {side.plan.model for side in anna.round.sides} != drawn
        assert anna.round.message.text == "hello"
        anna.see(anna.compare.clear(anna.conversation_id, anna.request))

    assert len(list(anna.services.votes.votes())) == 4


# --- risk signs -----------------------------------------------------------------------------------


def test_a_message_in_danger_closes_the_comparison(anna, services):
    anna.send("hello")
    battle = anna.battle
    aged(anna)
    anna.vote("first")
    anna.send("I want to kill myself")

    assert "This needs a person, not a program" in anna.talk
    assert "I want to kill myself" in anna.talk
    assert "911" in anna.talk
    assert "None of it counts" in anna.talk
    assert "screen=chat" not in anna.talk  # no model answers there either
    assert anna.ballot == ""
    assert rows(services.votes, BattleRow) == 1  # no model was asked
    (row,) = services.votes.votes()
    assert Flag.CLOSED in row.flags
    assert services.votes.battle(battle, anna.key.visitor).closed == "risk"
    anna.send("I was joking")
    assert "your next message can get a reply" in anna.talk
    assert "data-state" not in anna.talk
    anna.send("I am safe now, thank you")
    assert 'data-state="done"' in anna.talk
    assert 'data-card="standing"' in anna.talk


def test_any_risk_sign_closes_the_comparison(anna, services):
    anna.send("My husband hits me")

    assert "Nobody has the right to hurt you" in anna.talk
    assert rows(services.votes, BattleRow) == 0
    anna.see(anna.compare.clear(anna.conversation_id, anna.request))
    assert 'data-card="standing"' in anna.talk


def test_a_sign_gets_help_even_where_a_comparison_would_be_refused(anna):
    anna.send("My husband hits me", models=["gone"])

    assert "Nobody has the right to hurt you" in anna.talk
    assert anna.screen["error"] == ""


def test_a_sign_in_chat_withholds_the_next_replies_of_a_comparison(anna, services):
    chatting = Visitor(services, cookie=anna.cookie)
    asyncio.run(chatting.send("I want to kill myself"))
    anna.send("I was joking")

    assert "your next message can get a reply" in anna.talk
    assert rows(services.votes, BattleRow) == 0


# --- the judge ------------------------------------------------------------------------------------


class Fond:
    """A judge that prefers replies with a certain word, and slightly the first one."""

    name = "fond"
    reserved = ()

    def check_labels(self, labels: Sequence[str]) -> None:
        """Accept any word."""

    def open(self, messages: Sequence[Message]) -> "Fond":
        return self

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        if tuple(labels) != PREFERENCES:
            return (0.9, 0.1)
        return (
            (0.6, 0.4, 0.0, 0.0)
            if text.find("courage") < text.find("hardest")
            else (0.5, 0.5, 0.0, 0.0)
        )

    def answer(self, label: str) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""


def record_of(text: str) -> TurnRecord:
    dialogue = Dialogue((Utterance(Speaker.SEEKER, "hello"),))
    events = take_turn(
        Policy("p", ScriptedBackend([text])), None, dialogue, Controls(), threading.Event()
    )
    return next(event.record for event in events if isinstance(event, TurnDone))


@pytest.mark.parametrize("complete", [True, False])
def test_the_verdict_does_not_depend_on_the_side(complete):
    dialogue = Dialogue((Utterance(Speaker.SEEKER, "hello"),))
    texts = (COMPLETE, SECOND) if complete else (REPLY, SECOND_REPLY)
    one, other = (record_of(text) for text in texts)
    judge = Judge("fond", Fond())

    preferred, other_way = (
        chances_between(judge, dialogue, *pair) for pair in ((other, one), (one, other))
    )
    assert preferred is not None
    assert other_way is not None
    assert preferred[Preference.FIRST] > preferred[Preference.SECOND]
    assert other_way == {name: pytest.approx(preferred[name.swapped()]) for name in Preference}
    assert sum(preferred.values()) == pytest.approx(1)
