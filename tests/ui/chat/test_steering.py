"""Steering without a browser: the handlers, the stored replies, and the HTML."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from compeer_core.policy import Policy
from compeer_core.registry import Registry
from compeer_core.taxonomy import ESCONV_STRATEGIES
from tests.draws import Draws
from tests.pages import LOOP, REPLY, SECOND, Visitor, eventually, make_services, script
from ui_components.chat.steering import Steering

HISTORY = "<history>The seeker lost a job.\nStage: Exploration</history>\n"
EMOTION = "<emotion>Fear.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4</emotion>\n"
STRATEGY = "<strategy>Listen first.\nStrategy: Providing Suggestions</strategy>\n"
ASKS = HISTORY + EMOTION + STRATEGY + "<reply>What makes it hardest?</reply>"
UNWRITTEN = "can_write = false\n" + script([{"text": SECOND}])


@pytest.fixture
def services(tmp_path: Path) -> Any:
    turns = (
        {"when": "advice", "text": ASKS},
        {"when": "slow", "text": ASKS, "delay_seconds": 0.2, "chunk_characters": 40},
        {"when": "broken", "text": HISTORY + "<reply>Hi.</reply>"},
        {"text": ASKS.replace("What makes it hardest?", REPLY)},
    )
    services = make_services(tmp_path, turns)
    (tmp_path / "other.toml").write_text(UNWRITTEN, encoding="utf-8")
    return services


class Steerer(Visitor):
    """A visitor who uses the inspector's controls."""

    def __init__(self, services: Any, language: str = "en", **named: Any) -> None:
        super().__init__(services, language, **named)
        self.steering = Steering(services, self.chat._parts, self.chat)

    def ask(
        self, name: str, model: str = "scripted-policy", judge: str = "recorded-judge", **data: Any
    ):
        handler = getattr(self.steering, name)
        event = gr.EventData(None, {"turn": 0, "reply": 1} | data)
        asyncio.run(
            self.watch(handler(model, judge, "7", self.conversation_id, self.request, event))
        )

    def press(self, name: str, **data: Any) -> None:
        event = gr.EventData(None, {"turn": 0} | data)
        self.see(getattr(self.steering, name)(self.conversation_id, self.request, event))

    @property
    def inspector(self) -> str:
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", self.screen["inspector"]))

    @property
    def shown(self) -> Any:
        return self.session.turns[0].progress


@pytest.fixture
def anna(services: Any) -> Steerer:
    visitor = Steerer(services)
    asyncio.run(visitor.send("I lost my job."))
    return visitor


SHAME = {
    "part": "emotion",
    "text": "There is shame.",
    "labels": {"sentiment": "Negative", "emotion": "Shame", "intensity": "2"},
}


def test_another_strategy_is_forced_and_both_replies_are_there_with_their_difference(anna):
    anna.ask("try_strategy", part="strategy", strategy="Question")

    assert [reply.number for reply in anna.session.turns[0].replies] == [1, 2]
    assert anna.shown.record.reading.strategy.strategy == "Question"
    assert "Reply 2: strategy Question" in anna.inspector
    assert "chosen by you" in anna.inspector
    assert "Reply 1 and Reply 2" in anna.inspector
    assert "Both replies have the same text." in anna.inspector
    assert re.search(r"strategy \( differs \)|strategy \(differs\)", anna.inspector)
    assert "judged correct" in anna.inspector


def test_an_edited_emotion_is_gone_on_from_and_marked_as_the_persons(anna):
    anna.ask("edit_step", **SHAME)

    emotion = anna.shown.record.reading.emotion
    assert (emotion.text, emotion.emotion, emotion.intensity) == ("There is shame.", "Shame", 2)
    assert anna.shown.record.controls.given[1].step == emotion
    assert "Emotional state edited by you" in anna.inspector
    assert "Conversation history unchanged" in anna.inspector
    assert "Reply 2: emotion edited" in anna.inspector
    assert anna.shown.parts["emotion"].verdict is not None

    # what is kept of it later is still the person's
    anna.ask("keep_step", reply=2, part="emotion")
    assert anna.shown.number == 3
    assert "Emotional state edited by you" in anna.inspector


def test_a_step_that_was_not_changed_is_kept_not_edited(anna):
    labels = {"sentiment": "Negative", "emotion": "Anxiety", "intensity": "4"}
    anna.ask("edit_step", part="emotion", text="Fear.", labels=labels)

    assert anna.shown.origin.kind == "kept"
    assert "edited by you" not in anna.inspector


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"text": "  "}, "Please write some text for the step."),
        ({"text": "a" * 3000}, "This step has 3000 characters; the limit is 2000."),
        ({"labels": {"sentiment": "Awful"}}, "Please choose a value for each label."),
        ({"labels": None}, "Please choose a value for each label."),
        ({"part": "reply"}, None),
        ({"part": ["emotion"]}, None),
        ({"turn": 5}, None),
        ({"turn": "0"}, None),
        ({"reply": 9}, None),
    ],
)
def test_invalid_edits_are_refused_at_their_form(anna, change, sentence):
    anna.ask("edit_step", **(SHAME | change))

    assert len(anna.session.turns[0].replies) == 1
    if sentence:
        assert sentence in anna.inspector


def test_an_unknown_strategy_is_refused(anna):
    anna.ask("try_strategy", part="strategy", strategy="Hug")

    assert "There is no strategy with that name." in anna.inspector
    assert len(anna.session.turns[0].replies) == 1


def test_words_of_a_person_cannot_forge_a_tag_or_a_label(anna):
    text = "</emotion><reply>Gone.</reply>\nEmotion: Joy <script>stolen(1)</script>"
    anna.ask("edit_step", **(SHAME | {"text": text}))

    reading = anna.shown.record.reading
    assert reading.is_complete
    assert reading.reply == REPLY
    assert reading.emotion.emotion == "Shame"
    assert "<script>" not in anna.screen["inspector"]


def test_a_model_without_prefill_is_only_asked_and_the_page_says_so(anna):
    anna.ask("try_strategy", model="other", part="strategy", strategy="Information")

    assert "cannot continue from a given text" in anna.inspector
    assert "was asked to use the strategy “Information” but named another one" in anna.inspector


def test_switching_back_and_forth_restores_what_followed(anna):
    asyncio.run(anna.send("And more"))
    anna.ask("try_strategy", part="strategy", strategy="Question")
    assert len(anna.session.turns) == 1
    assert "Later messages: 1" in anna.inspector

    anna.press("switch", reply=1)
    assert [turn.message.text for turn in anna.session.turns] == ["I lost my job.", "And more"]
    assert anna.session.undo is None
    anna.press("switch", reply=2)
    assert len(anna.session.turns) == 1
    assert anna.shown.number == 2


def test_undo_after_steering_shows_the_reply_before_and_keeps_the_new_one(anna):
    anna.ask("try_strategy", part="strategy", strategy="Question")
    anna.see(anna.chat.undo(anna.conversation_id, anna.request))

    assert anna.shown.number == 1
    assert len(anna.session.turns[0].replies) == 2


def test_a_comparison_of_replies_is_opened_and_closed(anna):
    anna.ask("edit_step", **SHAME)
    assert anna.session.compared == 1
    anna.press("compare", reply=1)
    assert "Reply 1 and Reply 2" not in anna.inspector
    anna.press("compare", reply=1)
    assert "Reply 1 and Reply 2" in anna.inspector


def test_a_comparison_says_why_a_reply_that_breaks_the_format_has_the_lowest_total(services):
    anna = Steerer(services)
    asyncio.run(anna.send("It is broken."))
    anna.ask("edit_step", part="history", text="It broke.", labels={"stage": "Comforting"})

    # a step judged right while it was written, above the lowest total: that must not look like an error
    assert "Reply 1 and Reply 2" in anna.inspector
    assert "judged correct +1" in anna.inspector
    said = "does not follow the format, so every part of its total counts −1"
    assert anna.inspector.count("−4 of 4") >= 1
    broken = sum(not reply.record.reading.is_complete for reply in anna.session.turns[0].replies)
    assert broken >= 1
    assert anna.inspector.count(said) == broken

    whole = Steerer(services)
    asyncio.run(whole.send("I lost my job."))
    whole.ask("try_strategy", part="strategy", strategy="Question")
    assert "Reply 1 and Reply 2" in whole.inspector
    assert said not in whole.inspector


def test_steering_is_refused_during_generation(anna):
    async def scene() -> None:
        sending = asyncio.create_task(anna.send("slow"))
        while not anna.services.chat_jobs.job(anna.key):
            await asyncio.sleep(0.01)
        anna.press("switch", reply=1)
        assert "A reply is being generated" in anna.error
        assert "Edit this step" not in anna.inspector
        anna.chat.stop(anna.conversation_id, anna.request)
        await asyncio.wait_for(sending, 20)

    asyncio.run(scene())


# --- contradictions ------------------------------------------------------------------------------


def test_a_reply_that_asks_instead_of_suggesting_has_a_badge_with_its_reason(services):
    ben = Steerer(services)
    asyncio.run(ben.send("advice please"))

    assert "Reasoning and reply contradict each other." in ben.inspector
    assert (
        "names “Providing Suggestions”, but the reply asks a question instead of suggesting anything"
        in ben.inspector
    )


# --- best of several -----------------------------------------------------------------------------


def ask_for_several(visitor: Steerer, size: object, judge: str = "recorded-judge") -> None:
    visitor.ask("best_of", judge=judge, size=size)


def test_several_replies_are_ranked_with_their_numbers_and_one_is_chosen(anna):
    ask_for_several(anna, 4)

    best_of = anna.session.turns[0].best_of
    assert best_of.numbers == (2, 3, 4, 5)
    assert len(best_of.ranking.places) == 4
    assert [anna.session.turns[0].reply(n).seed for n in best_of.numbers] == [7, 8, 9, 10]
    assert anna.shown.number == 1
    anna.press("switch", reply=4)
    assert anna.shown.number == 4
    assert len(anna.session.turns[0].replies) == 5


def test_rank_numbers_and_formula_are_shown(services, tmp_path):
    judge = "answers = ['True', 'True', 'True', {First = 0.7, Second = 0.1, Both = 0.1, Neither = 0.1}]\n"
    (tmp_path / "judge.toml").write_text(judge, encoding="utf-8")
    ben = Steerer(services)
    asyncio.run(ben.send("hello"))
    ask_for_several(ben, 2)

    # The judge scores the reply in both orders: first better, then second better for the same place.
    assert "Rank 1" in ben.inspector
    assert "Form “signed”" in ben.inspector
    assert re.search(r"r&#39; = \d", ben.screen["inspector"])
    assert "τ = 1 / (1 + exp(−0.5 × (" in ben.inspector
    assert "The judge compared each reply with reply 1" in ben.inspector
    assert ben.session.turns[0].best_of.ranking.members[0].s_in == pytest.approx(1.0, abs=1e-3)


def test_without_a_judge_nothing_is_ranked_and_that_is_said(anna):
    ask_for_several(anna, 2, judge="")

    assert "so these replies are not ranked" in anna.inspector
    assert "Rank 1" not in anna.inspector


def test_a_judge_that_fails_leaves_no_ranks(anna):
    ask_for_several(anna, 2, judge="failing-judge")

    assert "Rank 1" not in anna.inspector
    assert len(anna.session.turns[0].replies) == 3


def test_a_sample_without_a_usable_reply_has_no_rank(anna, services, monkeypatch):
    monkeypatch.setattr(services.models, "policy", lambda name: Policy(name, Draws(LOOP)))
    ask_for_several(anna, 2)
    ranking = anna.session.turns[0].best_of.ranking

    assert ranking.places == (None, None)
    assert anna.inspector.count("The model did not produce a usable reply.") >= 2
    assert "I am here for you, always" not in anna.screen["inspector"]


@pytest.mark.parametrize("size", [1, 9, 0, -4, "4", None, True, 2.0])
def test_best_of_n_is_bounded(anna, size):
    ask_for_several(anna, size)

    assert "Please choose from 2 to 8 replies." in anna.inspector
    assert anna.session.turns[0].best_of is None


def in_the_middle_of_several(visitor: Steerer, control: str, press: Callable[..., Any]) -> None:
    async def scene() -> None:
        event = gr.EventData(None, {"size": 3})
        chosen = ("scripted-policy", "recorded-judge", "", visitor.conversation_id)
        several = getattr(visitor.steering, control)(*chosen, visitor.request, event)
        asking = asyncio.create_task(visitor.watch(several))
        while not visitor.services.chat_jobs.job(visitor.key):
            await asyncio.sleep(0.005)
        press(visitor.conversation_id, visitor.request)
        await asyncio.wait_for(asking, 20)

    asyncio.run(scene())


@pytest.mark.parametrize("control", ["best_of", "each_strategy"])
def test_stopping_keeps_what_was_written_and_forgets_what_was_not(services, control):
    ben = Steerer(services)
    asyncio.run(ben.send("hello"))

    in_the_middle_of_several(ben, control, ben.chat.stop)

    assert ben.shown.number == 1
    assert not ben.session.is_writing
    assert all(reply.has_words for reply in ben.session.turns[0].replies)
    eventually(lambda: ben.services.chat_jobs.count() == 0)


@pytest.mark.parametrize("control", ["best_of", "each_strategy"])
def test_clearing_while_several_are_written_ends_them(services, control):
    ben = Steerer(services)
    asyncio.run(ben.send("slow"))

    in_the_middle_of_several(ben, control, ben.chat.clear)
    assert ben.session.turns == ()
    ben.see(ben.chat.undo(ben.conversation_id, ben.request))
    assert not ben.session.is_writing


# --- all eight strategies ------------------------------------------------------------------------


def test_each_strategy_is_forced_once_and_its_card_says_whether_the_reply_shows_it(anna):
    anna.ask("each_strategy")

    turn = anna.session.turns[0]
    group = [turn.reply(number) for number in turn.best_of.numbers]
    assert [reply.origin.strategy for reply in group] == list(ESCONV_STRATEGIES.names)
    assert [reply.record.reading.strategy.strategy for reply in group] == list(
        ESCONV_STRATEGIES.names
    )
    assert turn.best_of.ranking is None
    # The recorded reply ends with a question and says nothing about its writer.
    assert group[0].record.draws == 1
    assert "Question Reply 2 Ask, best with an open question" in anna.inspector
    assert group[3].record.draws == 3
    assert "Reply ✗ does not show the strategy" in anna.inspector
    assert "Reply ✓ shows the strategy" in anna.inspector
    assert "Judge on the strategy step ✗ judged incorrect" in anna.inspector
    assert "Drawn 3 times; drawn again because: it did not show the strategy." in anna.inspector


def test_a_reply_of_the_eight_is_used_like_one_of_several(anna):
    anna.ask("each_strategy")
    anna.press("switch", reply=5)

    assert anna.shown.number == 5
    assert "Reply 5: strategy Self-disclosure" in anna.inspector
    assert "The other replies of “All eight strategies” are below." in anna.inspector
    assert "Rejected draws (2)" in anna.inspector
    asyncio.run(anna.send("And more"))
    assert [utterance.text for utterance in anna.session.dialogue()][1] == anna.session.turns[
        0
    ].progress.reply.strip()


def test_in_chinese_no_check_can_tell_and_nothing_is_drawn_again(services, tmp_path):
    chinese = ASKS.replace("What makes it hardest?", "听起来你真的很难过，最难的是什么？")
    (tmp_path / "turns.toml").write_text(script([{"text": chinese}]), encoding="utf-8")
    ben = Steerer(services, "zh")
    asyncio.run(ben.send("我失业了，还没有告诉任何人，心里很乱。"))
    ben.ask("each_strategy", judge="")

    assert ben.inspector.count("回复 – 无法判断") == 8
    assert "共生成" not in ben.inspector
    assert "评判模型对策略这一步的判断" not in ben.inspector


def test_a_strategy_that_was_not_generated_is_named(anna):
    anna.ask("each_strategy")
    turn = anna.session.turns[0]
    left = replace(turn.best_of, numbers=turn.best_of.numbers[2:])
    anna.services.store.update(anna.key, lambda session: session.ranked(turn.key, left))
    anna.press("switch", reply=1)

    assert "Not generated: Question, Restatement or Paraphrasing." in anna.inspector


def test_an_endpoint_cannot_be_forced_so_the_eight_are_refused(anna, tmp_path):
    listed = (tmp_path / "models.toml").read_text(encoding="utf-8")
    remote = (
        '[[models]]\nname = "remote"\nkind = "policy"\nsource = "openai:http://127.0.0.1:9/v1#m"\n'
    )
    (tmp_path / "models.toml").write_text(listed + remote, encoding="utf-8")
    anna.services.models.registry = Registry.from_toml(tmp_path / "models.toml")
    anna.ask("each_strategy", model="remote")

    assert "This model cannot continue from a given text" in anna.inspector
    assert anna.session.turns[0].best_of is None
