"""The handlers of Chat, called as gradio calls them, without gradio."""

import asyncio
import re
import threading
from pathlib import Path

import gradio as gr
import numpy as np
import PIL.Image
import pytest

from compeer_core.dialogue import Dialogue
from compeer_core.policy import Policy
from compeer_core.safety import RiskKind, RiskSign, load_help_lines, risk_sentences
from compeer_core.turn import take_turn
from tests.draws import Draws
from tests.pages import (
    COMPLETE,
    LOOP,
    REPLY,
    SECOND,
    SECOND_REPLY,
    Visitor,
    eventually,
    make_services,
    pressed,
)
from ui_components.chat.steering import Steering
from ui_components.shared.services import Services
from ui_components.shared.texts import LANGUAGES, load_texts


def picture(folder: Path, name: str = "photo.png", size: tuple[int, int] = (60, 40)) -> Path:
    path = folder / "upload" / name
    path.parent.mkdir(exist_ok=True)
    PIL.Image.new("RGB", size, "teal").save(path)
    return path


# --- sending -------------------------------------------------------------------------------------


def test_a_message_gets_a_reply_with_three_steps_and_scores(anna):
    asyncio.run(anna.send("I lost my job."))

    assert REPLY in anna.screen["conversation"]
    assert "Exploration · Anxiety 4/5 · Reflection of Feelings" in anna.screen["conversation"]
    assert "+2 of 4" in anna.screen["inspector"]
    assert anna.screen["error"] == ""


def test_the_message_is_on_the_screen_before_there_is_a_reply(anna):
    asyncio.run(anna.send("I lost my job, slowly."))
    first = next(update["conversation"] for update in anna.updates if "conversation" in update)

    assert "I lost my job, slowly." in first
    assert REPLY not in first


def test_the_second_reply_knows_the_first(anna):
    asyncio.run(anna.send("I lost my job."))
    asyncio.run(anna.send("My father will be disappointed."))

    assert SECOND_REPLY in anna.screen["conversation"]  # the script counts the replies it is shown


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Please write something"),
        (" \n\u200b", "Please write something"),
        ("x" * 20_000, "20000 characters; the limit is 4000"),
    ],
)
def test_a_message_that_cannot_be_sent_stays_in_the_box(anna, text, sentence):
    asyncio.run(anna.send(text))

    assert sentence in anna.error
    assert "message" not in anna.screen  # the box was not touched
    assert anna.session.turns == ()


def test_an_unknown_model_is_refused_and_the_message_kept(anna):
    asyncio.run(anna.send("hello", model="gone"))

    assert "no model with that name" in anna.error


@pytest.mark.parametrize("seed", ["-1", "1.5", "2147483648", "9" * 5000, "0" * 5000, "seven", "٣"])
def test_a_seed_that_no_model_takes_is_refused(anna, seed):
    asyncio.run(anna.send("hello", seed=seed))

    assert "whole number from 0" in anna.error


def test_a_chosen_seed_is_the_seed_of_the_record(anna):
    asyncio.run(anna.send("hello", seed=" 17 "))

    assert anna.session.turns[0].progress.record.seed == 17


def test_without_a_judge_nothing_is_scored(anna):
    asyncio.run(anna.send("hello", judge=""))

    assert "no judge" in anna.screen["inspector"]


def test_sentences_are_in_the_language_of_the_browser(services):
    li = Visitor(services, language="zh-CN")
    asyncio.run(li.send(""))

    assert "请写点什么" in li.error


# --- the gate ------------------------------------------------------------------------------------


def play(monkeypatch: pytest.MonkeyPatch, services: Services, *texts: str) -> Draws:
    """Let every model play these texts, one after the other."""
    backend = Draws(*texts)
    monkeypatch.setattr(services.models, "policy", lambda name: Policy(name, backend))
    return backend


def test_a_reply_that_repeats_itself_is_drawn_again_and_never_stays(anna, monkeypatch):
    play(monkeypatch, anna.services, LOOP, COMPLETE)
    asyncio.run(anna.send("I lost my job."))

    assert REPLY in anna.screen["conversation"]
    assert "I am here for you, always" not in anna.screen["conversation"]
    assert "Regenerated: it repeated itself." in anna.screen["inspector"]
    assert "I am here for you, always" in anna.screen["inspector"]  # the rejected draw, on demand


def test_a_line_replaces_the_reply_if_no_draw_is_usable(anna, monkeypatch):
    backend = play(monkeypatch, anna.services, LOOP, LOOP, LOOP, LOOP, COMPLETE, SECOND)
    asyncio.run(anna.send("I lost my job."))

    assert (
        "The model did not produce a usable reply. You can try again."
        in (anna.screen["conversation"])
    )
    assert "I am here for you, always" not in anna.screen["conversation"]
    assert ">Try again</button>" in anna.screen["conversation"]
    assert anna.session.turns[0].progress.reply == ""
    assert len(backend.seeds) == 4

    asyncio.run(anna.ask_again())
    assert REPLY in anna.screen["conversation"]
    assert "usable reply" not in anna.screen["conversation"]


def test_a_withheld_reply_is_not_part_of_the_conversation(anna, monkeypatch):
    play(monkeypatch, anna.services, LOOP)
    asyncio.run(anna.send("I lost my job."))
    asyncio.run(anna.send("Are you there?"))

    speakers = [utterance.speaker.value for utterance in anna.session.dialogue()]
    assert speakers == ["seeker", "seeker"]


def test_a_reply_that_repeats_the_previous_one_is_drawn_again(anna, monkeypatch):
    play(monkeypatch, anna.services, COMPLETE, COMPLETE, SECOND)
    asyncio.run(anna.send("I lost my job."))
    asyncio.run(anna.send("I do not know what to do."))

    assert SECOND_REPLY in anna.screen["conversation"]
    assert "Regenerated: it repeated the previous reply." in anna.screen["inspector"]


def test_the_chip_says_that_the_count_is_about_the_reasoning(anna):
    asyncio.run(anna.send("I lost my job."))

    chip = re.sub(r"<[^>]*>", " ", anna.screen["conversation"])
    assert "Reasoning: Exploration · Anxiety 4/5 · Reflection of Feelings" in chip
    assert "2 of 3 steps judged correct" in anna.screen["conversation"]
    assert (
        'aria-label="Show the reasoning of turn 1: Exploration, Anxiety 4/5, '
        'Reflection of Feelings, 2 of 3 steps judged correct"' in anna.screen["conversation"]
    )


# --- pictures ------------------------------------------------------------------------------------


def test_a_picture_is_kept_in_memory_and_its_upload_deleted(anna, tmp_path):
    path = anna.upload(picture(tmp_path))
    asyncio.run(anna.send("", [path], alt="My desk"))
    image = anna.session.turns[0].message.images[0]

    assert (image.width, image.height, image.alt) == (60, 40, "My desk")
    assert not anna.services.uploads.holds(path, anna.services.owner(anna.request))
    assert not Path(path).parent.exists()
    assert 'alt="My desk"' in anna.screen["conversation"]


def test_several_pictures_may_come_with_any_message(anna, tmp_path):
    asyncio.run(anna.send("first"))
    paths = [picture(tmp_path, f"{number}.png") for number in range(3)]
    asyncio.run(anna.send("second", paths))

    assert len(anna.session.turns[1].message.images) == 3


def test_bad_uploads_are_refused_by_name_and_nothing_is_sent(anna, tmp_path):
    text = tmp_path / "notes.png"
    text.write_text("no picture", encoding="utf-8")
    cut = picture(tmp_path, "cut.png", (200, 200))
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    sentences = {text: "notes.png is not an image", cut: "cut.png cannot be opened"}

    for path, sentence in sentences.items():
        asyncio.run(anna.send("look", [path]))
        assert sentence in anna.error
    asyncio.run(anna.send("look", [tmp_path / "gone.png"]))
    assert "no longer on the server" in anna.error
    asyncio.run(anna.send("look", [picture(tmp_path, f"{number}.png") for number in range(5)]))
    assert "at most 4 photos" in anna.error
    assert anna.session.turns == ()


# --- stopping, regenerating, editing -------------------------------------------------------------


async def send_and_stop(visitor: Visitor, text: str) -> None:
    sending = asyncio.create_task(visitor.send(text))
    while "is-done" not in str(visitor.screen.get("conversation")):
        await asyncio.sleep(0.01)
    visitor.chat.stop(visitor.conversation_id, visitor.request)
    await asyncio.wait_for(sending, 10)


def test_a_reply_that_ends_while_a_page_is_loading_is_shown_whole(anna):
    async def reload_late() -> None:
        sending = asyncio.create_task(anna.send("slowly again"))
        while "is-done" not in str(anna.screen.get("conversation")):
            await asyncio.sleep(0.01)
        updates = anna.chat.load("scripted-policy", None, anna.conversation_id, anna.request)
        reloaded = await anext(updates)
        assert SECOND_REPLY not in reloaded["conversation"]
        await asyncio.wait_for(sending, 30)
        anna.screen = {}
        await anna.watch(updates)

    asyncio.run(reload_late())

    assert SECOND_REPLY in anna.screen["conversation"]


def test_stop_ends_the_reply_and_keeps_the_message(anna):
    asyncio.run(send_and_stop(anna, "Write for ever"))

    assert anna.session.turns[0].progress.outcome == "stopped"
    assert "You stopped this reply" in anna.screen["conversation"]
    assert "Try again" in anna.screen["conversation"]


def test_a_failed_reply_keeps_everything_and_offers_another_try(anna):
    asyncio.run(anna.send("Please fail"))

    assert "The reply could not be generated. Your message is saved." in anna.screen["conversation"]
    assert "Please fail" in anna.screen["conversation"]
    asyncio.run(anna.ask_again(model="other"))
    assert SECOND_REPLY in anna.screen["conversation"]


def test_a_model_that_cannot_be_loaded_is_said_and_the_server_goes_on(anna):
    asyncio.run(anna.send("hello", model="wrong"))
    assert "could not be loaded" in anna.screen["conversation"]
    asyncio.run(anna.ask_again())

    assert REPLY in anna.screen["conversation"]


def test_a_judge_that_cannot_be_loaded_costs_the_scores_only(anna):
    asyncio.run(anna.send("hello", judge="wrong-judge"))

    assert REPLY in anna.screen["conversation"]
    assert "judge could not be loaded" in anna.screen["inspector"]


def test_another_reply_replaces_the_last_one_and_can_be_taken_back(anna):
    asyncio.run(anna.send("hello"))
    asyncio.run(anna.ask_again(model="other"))
    assert SECOND_REPLY in anna.screen["conversation"]
    assert REPLY not in anna.screen["conversation"]
    anna.see(anna.chat.undo(anna.conversation_id, anna.request))

    assert REPLY in anna.screen["conversation"]
    assert SECOND_REPLY not in anna.screen["conversation"]


def test_only_the_last_message_can_have_another_reply(anna):
    asyncio.run(anna.send("one"))
    asyncio.run(anna.send("two"))
    asyncio.run(anna.ask_again(index=0))

    assert "no longer exists" in anna.error
    assert len(anna.session.turns) == 2


def test_an_earlier_message_can_be_changed_and_what_came_after_is_cut(anna, tmp_path):
    asyncio.run(anna.send("one", [picture(tmp_path)]))
    asyncio.run(anna.send("two"))
    anna.chat.typed({"text": "half a thought"}, anna.conversation_id, anna.request)
    anna.see(anna.chat.edit(anna.conversation_id, anna.request, pressed(0)))
    assert ">one</textarea>" in anna.screen["conversation"]
    assert "Sending removes everything after this message" in anna.screen["conversation"]

    asyncio.run(anna.save_edit(0, "one, but better"))

    turns = anna.session.turns
    assert [turn.message.text for turn in turns] == ["one, but better"]
    assert len(turns[0].message.images) == 1  # the photo stays with its message
    assert anna.session.draft == "half a thought"  # the message box is left alone
    anna.see(anna.chat.undo(anna.conversation_id, anna.request))
    assert [turn.message.text for turn in anna.session.turns] == ["one", "two"]


def test_an_edit_can_be_cancelled(anna):
    asyncio.run(anna.send("one"))
    anna.see(anna.chat.edit(anna.conversation_id, anna.request, pressed(0)))
    assert "<textarea" in anna.screen["conversation"]
    anna.see(anna.chat.stop_edit(anna.conversation_id, anna.request))

    assert "<textarea" not in anna.screen["conversation"]
    assert anna.session.editing is None
    asyncio.run(anna.send("two"))
    assert len(anna.session.turns) == 2


def test_a_deleted_conversation_can_be_restored_also_after_the_next_message(anna):
    asyncio.run(anna.send("one"))
    anna.see(anna.chat.clear(anna.conversation_id, anna.request))
    assert "Conversation deleted." in anna.screen["conversation"]
    assert REPLY not in anna.screen["conversation"]
    anna.see(anna.chat.undo(anna.conversation_id, anna.request))
    assert REPLY in anna.screen["conversation"]

    anna.chat.clear(anna.conversation_id, anna.request)
    first = anna.conversation_id
    asyncio.run(anna.send("new"))
    assert anna.conversation_id != first
    assert "Deleted: “one”" in anna.screen["conversations"]
    anna.see(anna.chat.undo(anna.conversation_id, anna.request))
    assert "no longer be undone" in anna.error
    assert [turn.message.text for turn in anna.session.turns] == ["new"]
    anna.see(anna.chat.undo(first, anna.request))
    assert REPLY in anna.screen["conversation"]


def test_clearing_while_a_reply_is_written_ends_it_and_the_next_message_is_taken(anna):
    async def scene() -> None:
        sending = asyncio.create_task(anna.send("Write for ever"))
        while not anna.services.chat_jobs.job(anna.key):
            await asyncio.sleep(0.01)
        anna.chat.clear(anna.conversation_id, anna.request)
        await anna.send("And now?")
        await asyncio.wait_for(sending, 10)

    asyncio.run(scene())

    assert [turn.message.text for turn in anna.session.turns] == ["And now?"]
    assert anna.session.turns[0].progress.outcome == "finished"


def test_a_second_message_waits_for_the_first_reply(anna):
    async def scene() -> None:
        sending = asyncio.create_task(anna.send("Write for ever"))
        while not anna.services.chat_jobs.job(anna.key):
            await asyncio.sleep(0.01)
        other_tab = Visitor(anna.services, cookie=anna.cookie)
        await other_tab.send("Me too")
        assert "A reply is being generated" in other_tab.error
        anna.chat.stop(anna.conversation_id, anna.request)
        await asyncio.wait_for(sending, 10)

    asyncio.run(scene())
    assert len(anna.session.turns) == 1


# --- viewing -------------------------------------------------------------------------------------


def test_a_page_that_comes_back_finds_its_conversation(anna):
    asyncio.run(anna.send("I lost my job."))
    again = Visitor(anna.services, cookie=anna.cookie)
    asyncio.run(again.load())

    assert REPLY in again.screen["conversation"]
    assert again.screen["conversation_id"] == anna.conversation_id


@pytest.mark.parametrize("claimed", [None, "", 5, "x", "../../etc/passwd", "x" * 100])
def test_a_made_up_id_is_replaced_by_one_that_nobody_can_guess(anna, claimed):
    asyncio.run(anna.watch(anna.chat.load("scripted-policy", None, claimed, anna.request)))

    assert len(anna.screen["conversation_id"]) >= 32
    assert anna.screen["conversation_id"] != claimed


def test_a_reply_survives_a_reload_and_stops_without_watchers(anna):
    async def scene() -> None:
        sending = asyncio.create_task(anna.send("Write for ever"))
        while not anna.services.chat_jobs.job(anna.key):
            await asyncio.sleep(0.01)
        job = anna.services.chat_jobs.job(anna.key)
        again = Visitor(anna.services, cookie=anna.cookie)
        loading = asyncio.create_task(again.load())
        while "conversation" not in again.screen or len(again.updates) < 3:
            await asyncio.sleep(0.01)
        sending.cancel()  # the first page is gone
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.sleep(2 * anna.services.grace_seconds)
        assert not job.stopped.is_set()
        loading.cancel()  # and now the second
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(scene())
    eventually(lambda: anna.services.chat_jobs.job(anna.key) is None)
    assert anna.session.turns[0].progress.outcome == "stopped"


def test_two_visitors_never_meet(services):
    anna, ben = Visitor(services), Visitor(services)
    asyncio.run(anna.send("Only Anna knows this"))
    asyncio.run(
        ben.watch(ben.chat.load("scripted-policy", None, anna.conversation_id, ben.request))
    )

    assert "Only Anna knows this" not in str(ben.updates)
    asyncio.run(ben.send("Ben here"))
    assert [turn.message.text for turn in anna.session.turns] == ["Only Anna knows this"]
    ben.chat.clear(anna.conversation_id, ben.request)
    assert len(anna.session.turns) == 1


def test_a_waiting_visitor_sees_the_place_and_can_stop(services):
    anna, ben = Visitor(services), Visitor(services)

    async def scene() -> None:
        first = asyncio.create_task(anna.send("Write for ever"))
        while "is-done" not in str(anna.screen.get("conversation")):
            await asyncio.sleep(0.01)
        second = asyncio.create_task(ben.send("And me?"))
        while "number 1 in the queue" not in str(ben.screen.get("conversation")):
            await asyncio.sleep(0.01)
        ben.chat.stop(ben.conversation_id, ben.request)
        await asyncio.wait_for(second, 10)
        anna.chat.stop(anna.conversation_id, anna.request)
        await asyncio.wait_for(first, 10)

    asyncio.run(scene())
    assert ben.session.turns[0].progress.outcome == "stopped"
    assert "And me?" in ben.screen["conversation"]


def test_an_earlier_turn_can_be_picked(anna):
    asyncio.run(anna.send("one"))
    asyncio.run(anna.send("two"))
    anna.see(anna.chat.pick(anna.conversation_id, anna.request, pressed(0)))
    assert "Turn 1 of 2" in anna.screen["inspector"]
    anna.see(anna.chat.pick(anna.conversation_id, anna.request, pressed(99)))
    assert "Turn 1 of 2" in anna.screen["inspector"]
    anna.see(anna.chat.pick(anna.conversation_id, anna.request, pressed(1)))
    assert anna.session.selected is None


def test_a_starter_is_offered_and_does_not_push_out_what_was_typed(anna):
    empty, typed = {"text": "", "files": []}, {"text": "my own words", "files": []}
    first = anna.chat.use_starter(empty, anna.request, pressed(1))["message"]["text"]
    replaced = anna.chat.use_starter({"text": first}, anna.request, pressed(2))["message"]["text"]
    kept = anna.chat.use_starter(typed, anna.request, pressed(1))["message"]["text"]

    assert "position is being cut" in first
    assert "closest friend" in replaced
    assert "position" not in replaced
    assert kept.startswith("my own words\n")


# --- safety --------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch) -> list[Dialogue]:
    """The dialogues that reached a model."""
    dialogues: list[Dialogue] = []

    def watched(policy, judge, dialogue, *rest, **named):
        dialogues.append(dialogue)
        return take_turn(policy, judge, dialogue, *rest, **named)

    monkeypatch.setattr("ui_components.shared.jobs.take_turn", watched)
    return dialogues


@pytest.mark.parametrize("text", ["I want to kill myself", "I cut myself last night", "我割腕了"])
def test_a_message_in_danger_gets_a_card_and_no_model_is_called(anna, asked, text):
    anna.request.headers["accept-language"] = "en-GB"
    asyncio.run(anna.send(text))
    screen = anna.screen["conversation"]

    assert text in screen
    assert "116 123" in screen
    assert "999" in screen
    assert "988" not in screen  # the numbers of the country only
    assert "No program answers this message" in screen
    assert "Try again" not in screen
    assert "Supporter" not in screen
    assert "No model replies to this message" in anna.screen["inspector"]
    assert asked == []
    assert anna.session.turns[0].progress is None
    assert not anna.services.chat_jobs.count()
    assert (
        anna.screen["message"]._constructor_args[0]["submit_btn"] is True
    )  # the visitor can continue


def test_the_card_comes_whatever_model_was_picked(anna):
    asyncio.run(anna.send("I want to kill myself", model="gone", seed="seven"))

    assert "988" in anna.screen["conversation"]
    assert anna.error == ""


def test_an_emergency_number_comes_first_where_minutes_count(anna):
    asyncio.run(anna.send("I took 30 tylenol an hour ago"))
    screen = anna.screen["conversation"]

    assert "Please get help now" in screen
    assert screen.index("tel:911") < screen.index("tel:988")
    asyncio.run(anna.send("I want to die"))
    suicide = anna.screen["conversation"].split("I want to die")[1]
    assert suicide.index("tel:988") < suicide.index("tel:911")


def test_the_card_cannot_be_bypassed(anna, asked):
    asyncio.run(anna.send("I want to kill myself"))
    steering = Steering(anna.services, anna.chat._parts, anna.chat)
    order = ("scripted-policy", "recorded-judge", None, anna.conversation_id, anna.request)
    asyncio.run(anna.ask_again(0))
    assert "Real people answer" in anna.error
    for handler, data in (
        (steering.best_of, {"size": 2}),
        (steering.each_strategy, {"turn": 0}),
        (steering.try_strategy, {"turn": 0, "reply": 1, "strategy": "Question"}),
        (steering.keep_step, {"turn": 0, "reply": 1, "part": "history"}),
    ):
        asyncio.run(anna.watch(handler(*order, gr.EventData(None, data))))
    anna.see(anna.chat.edit(anna.conversation_id, anna.request, pressed(0)))
    asyncio.run(anna.save_edit(0, "I will end my life tonight"))

    assert asked == []
    assert len(anna.session.turns) == 1
    assert anna.session.turns[0].replies == ()


def test_the_next_message_gets_no_reply_either_and_the_second_one_does(anna, asked):
    asyncio.run(anna.send("I want to kill myself"))
    asyncio.run(anna.send("I was joking"))
    denial = anna.screen["conversation"]

    assert asked == []
    assert "your next message can get a reply" in denial
    assert denial.count("tel:988") == 2
    asyncio.run(anna.ask_again(1))
    assert "Real people answer" in anna.error
    asyncio.run(anna.send("I called somebody. I feel a little safer."))
    assert REPLY in anna.screen["conversation"]
    assert 'data-card="standing"' in anna.screen["conversation"]
    assert [utterance.text for utterance in asked[0]] == [
        "I want to kill myself",
        "I was joking",
        "I called somebody. I feel a little safer.",
    ]


def test_a_new_sign_starts_the_count_again(anna, asked):
    for text in ("I want to kill myself", "I was joking", "My husband hits me", "sorry"):
        asyncio.run(anna.send(text))

    assert asked == []
    assert [turn.risk for turn in anna.session.turns] == [
        *2 * [RiskKind.SUICIDE],
        *2 * [RiskKind.VIOLENCE_SUFFERED],
    ]


def test_clearing_editing_or_another_conversation_does_not_reset_the_state(anna, asked):
    asyncio.run(anna.send("I want to kill myself"))
    anna.see(anna.chat.clear(anna.conversation_id, anna.request))
    cleared = anna.screen["conversation"]

    assert cleared.count("tel:988") == 1
    assert '<details class="risk" data-card="standing">' in cleared  # folded
    anna.conversation_id = "conversation-" + "y" * 16
    asyncio.run(anna.send("I am very tired"))
    assert asked == []
    assert anna.session.turns[0].risk_is_earlier
    anna.see(anna.chat.edit(anna.conversation_id, anna.request, pressed(0)))
    asyncio.run(anna.save_edit(0, "I am very tired today"))
    assert REPLY in anna.screen["conversation"]  # the second message after the sign


def test_the_state_is_the_visitors_own_and_is_deleted_with_their_data(anna):
    other = Visitor(anna.services)
    asyncio.run(anna.send("I want to kill myself"))
    asyncio.run(other.send("hello"))

    assert REPLY in other.screen["conversation"]
    assert "tel:" not in other.screen["conversation"]
    anna.services.forget(anna.key.visitor)
    asyncio.run(anna.send("hello"))
    assert REPLY in anna.screen["conversation"]


def test_the_state_of_a_browser_without_cookies_is_its_conversations(services):
    anna, other = Visitor(services, cookie=""), Visitor(services, cookie="")
    other.conversation_id = "conversation-" + "y" * 16
    asyncio.run(anna.send("I want to kill myself"))

    assert services.risks.get(anna.key).kind is RiskKind.SUICIDE
    assert services.risks.get(other.key).kind is None


def test_another_check_can_take_the_place_of_the_phrases(tmp_path, asked):
    services = make_services(tmp_path)
    services = Services(
        services.models,
        services.votes,
        risk_check=lambda text, language: RiskSign(RiskKind.SUICIDE) if language == "zh" else None,
    )
    anna = Visitor(services)
    asyncio.run(anna.send("今天累死了"))

    assert asked == []
    assert "tel:988" in anna.screen["conversation"]


def test_a_hint_shows_help_first_and_folds_the_reply(tmp_path):
    services = make_services(tmp_path)
    services = Services(
        services.models,
        services.votes,
        risk_check=lambda text, language: (
            RiskSign(RiskKind.SUICIDE, is_hint=True) if "cat" in text else None
        ),
    )
    anna = Visitor(services)
    asyncio.run(anna.send("my cat goes to the neighbours tonight"))

    key = anna.session.turns[0].key
    screen = anna.screen["conversation"]
    help_lines = screen.index(f'<details class="risk" data-card="hint-{key}" open>')
    folded = screen.index(f'<details class="behind" data-card="reply-{key}"><summary>')
    assert help_lines < folded < screen.index(REPLY)
    assert "If nobody is in danger, just carry on." in screen
    assert screen.count('class="risk"') == 1
    assert anna.session.turns[0].risk is None

    asyncio.run(anna.send("she eats there"))

    screen = anna.screen["conversation"]
    assert '<details class="risk" data-card="hint-">' in screen  # at the top, folded
    assert screen.count('class="behind"') == 1
    assert anna.session.turns[1].hint is None


def test_a_sign_in_a_refused_message_still_brings_the_help_card(anna):
    asyncio.run(anna.send("I want to kill myself " * 5000))

    assert "the limit is" in anna.error
    assert anna.session.turns == ()
    assert "tel:988" in anna.screen["conversation"]


def test_a_message_in_danger_waits_for_the_reply_before_it(anna):
    async def two_at_once() -> None:
        first = asyncio.create_task(anna.send("slowly, please"))
        while anna.services.chat_jobs.job(anna.key) is None:
            await asyncio.sleep(0.01)
        await anna.send("I want to kill myself")
        assert "Press Stop first" in anna.error
        anna.chat.stop(anna.conversation_id, anna.request)
        await anna.send("I want to kill myself")
        await first

    asyncio.run(two_at_once())

    assert [turn.risk for turn in anna.session.turns] == [None, RiskKind.SUICIDE]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("I took 30 tylenol an hour ago", RiskKind.MEDICAL_EMERGENCY),
        ("I want to kill myself", RiskKind.SUICIDE),
        ("I cut myself last night", RiskKind.SELF_HARM),
        ("My husband hits me", RiskKind.VIOLENCE_SUFFERED),
        ("I want to kill someone", RiskKind.VIOLENCE),
        ("My brother wants to kill himself", RiskKind.OTHER_IN_DANGER),
        ("Ten years ago I tried to kill myself", RiskKind.PAST_SELF_HARM),
    ],
)
def test_every_kind_gets_a_sentence_of_its_own_and_no_reply(anna, asked, text, kind, language):
    anna.request.headers["accept-language"] = language
    asyncio.run(anna.send(text))

    assert asked == []
    assert risk_sentences().kinds[kind](language) in anna.screen["conversation"]
    assert ("tel:911" if language == "en" else "tel:120") in anna.screen["conversation"]


def test_a_country_without_numbers_gets_no_emergency_number_of_another_one(anna):
    anna.request.headers["accept-language"] = "en-ZA"
    asyncio.run(anna.send("I want to kill myself"))
    screen = anna.screen["conversation"]

    assert "988 Suicide &amp; Crisis Lifeline (USA)" in screen
    assert "911" not in screen
    assert "Call the emergency number where you are" in screen


def test_other_messages_get_no_card(anna):
    asyncio.run(anna.send("My week was bad."))

    assert "data-card" not in anna.screen["conversation"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_region_has_a_name(language):
    texts = load_texts(language)
    regions = {region for line in load_help_lines().lines for region in line.regions}

    named = {region for region in regions if f"regions.{region}" in texts.words}
    unnamed = regions - named
    (europe,) = (line for line in load_help_lines().lines if "EU" in line.regions)
    assert unnamed <= set(europe.regions)  # they are covered by the EU


def test_a_language_that_the_model_does_not_list_gets_a_notice_and_a_reply(anna):
    asyncio.run(anna.send("我很难过，不知道怎么办。"))

    assert "Scripted policy was trained for English" in anna.screen["conversation"]
    assert REPLY in anna.screen["conversation"]


def test_what_a_visitor_types_stays_text(anna):
    asyncio.run(anna.send("<img src=x onerror=alert(1)> ${alert(2)} hostile"))

    assert "<img" not in anna.screen["conversation"]
    assert "&lt;img src=x" in anna.screen["conversation"]


def test_the_log_of_a_failure_holds_no_words_of_the_visitor(anna, caplog, monkeypatch):
    def break_down(policy: object, judge: object, dialogue: Dialogue, *_: object, **__: object):
        raise RuntimeError(f"could not encode: {dialogue.utterances[0].text}")

    monkeypatch.setattr("ui_components.shared.jobs.take_turn", break_down)
    asyncio.run(anna.send("my secret"))

    assert "RuntimeError" in caplog.text
    assert "my secret" not in caplog.text
    assert "The reply could not be generated" in anna.screen["conversation"]


def test_loading_is_said_in_seconds_and_the_message_waits(anna, monkeypatch):
    loaded = threading.Event()
    load = anna.services.models.registry.policy

    def slowly(name: str):
        loaded.wait(10)
        return load(name)

    monkeypatch.setattr(anna.services.models.registry, "policy", slowly)

    async def scene() -> None:
        sending = asyncio.create_task(anna.send("hello"))
        while "still loading" not in str(anna.screen.get("conversation")):
            await asyncio.sleep(0.01)
        note = anna.chat.choose_model("scripted-policy", anna.request)["note"]
        assert "Loading" in note
        loaded.set()
        await asyncio.wait_for(sending, 10)

    asyncio.run(scene())
    assert REPLY in anna.screen["conversation"]
    assert (
        "not fit to support anyone"
        in anna.chat.choose_model("scripted-policy", anna.request)["note"]
    )
