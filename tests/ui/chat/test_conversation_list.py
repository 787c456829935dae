"""Several conversations of one visitor: the list, its handlers, drafts, models and tabs."""

import asyncio
from dataclasses import replace
from typing import Any

import gradio as gr
import pytest

from tests.pages import REPLY, SECOND_REPLY, Visitor, eventually, pressed
from ui_components.chat.conversation_list import Conversations
from ui_components.chat.steering import Steering
from ui_components.shared.session import UNDO_SECONDS
from ui_components.shared.session_store import OF_VISITOR


def conversations(visitor: Visitor) -> Conversations:
    return Conversations(visitor.services, visitor.chat._parts, visitor.chat)


def named(conversation: str, **more: str) -> gr.EventData:
    return gr.EventData(None, {"id": conversation, **more})


def new(visitor: Visitor, message: dict[str, Any] | None = None) -> str:
    """Begin a conversation; return the id of the one before."""
    before = visitor.conversation_id
    asyncio.run(visitor.watch(conversations(visitor).new(message, before, visitor.request)))
    return before


def open_(visitor: Visitor, conversation: str) -> None:
    handler = conversations(visitor).open
    arguments = (None, visitor.conversation_id, visitor.request, named(conversation))
    asyncio.run(visitor.watch(handler(*arguments)))


def test_each_conversation_has_its_own_messages_and_the_newest_is_first(anna):
    asyncio.run(anna.send("I lost my job"))
    first = new(anna)
    assert "I lost my job" not in anna.screen["conversation"]
    asyncio.run(anna.send("My exam is near"))
    listed = anna.screen["conversations"]
    assert listed.index("My exam is near") < listed.index("I lost my job")
    assert "(2)" in listed
    open_(anna, first)

    assert "I lost my job" in anna.screen["conversation"]
    assert "My exam is near" not in anna.screen["conversation"]
    assert anna.conversation_id == first


def test_nobody_opens_renames_or_deletes_the_conversation_of_another_visitor(services, anna):
    ben = Visitor(services)
    asyncio.run(anna.send("Only Anna knows this"))
    ben.conversation_id = "conversation-" + "b" * 16
    before = ben.conversation_id
    open_(ben, anna.conversation_id)
    event = named(anna.conversation_id, title="Mine now")
    for handler in (
        conversations(ben).rename,
        conversations(ben).delete,
        conversations(ben).search,
    ):
        ben.see(handler(ben.conversation_id, ben.request, event))

    assert ben.conversation_id == before
    assert "Only Anna" not in str(ben.updates)
    assert anna.session.title == ""
    assert len(anna.session.turns) == 1


@pytest.mark.parametrize("way", ["new", "clear"])
def test_without_a_cookie_another_conversation_does_not_reset_the_risk_state(services, way):
    anna = Visitor(services, cookie="")
    asyncio.run(anna.send("My husband hits me"))
    if way == "new":
        new(anna)
        assert "My husband" not in anna.screen["conversation"]
        assert "Undo" in anna.screen["conversation"]
    else:
        anna.see(anna.chat.clear(anna.conversation_id, anna.request))
    asyncio.run(anna.send("I am very tired"))

    assert anna.session.turns[-1].risk_is_earlier
    assert REPLY not in anna.screen["conversation"]


def test_a_conversation_is_renamed_and_keeps_its_name(anna):
    asyncio.run(anna.send("I lost my job"))
    rename = conversations(anna).rename
    event = named(anna.conversation_id, title="  Work <b>  ")
    anna.see(rename(anna.conversation_id, anna.request, event))
    assert "Work &lt;b&gt;" in anna.screen["conversations"]
    asyncio.run(anna.send("two"))
    asyncio.run(anna.save_edit(0, "I lost it"))
    assert anna.session.title == "Work <b>"

    anna.see(rename(anna.conversation_id, anna.request, named(anna.conversation_id, title=" ")))
    assert "I lost it" in anna.screen["conversations"]


def test_a_deleted_conversation_is_offered_for_undo_and_comes_back_whole(anna):
    asyncio.run(anna.send("I lost my job"))
    first = new(anna)
    anna.see(conversations(anna).delete(anna.conversation_id, anna.request, named(first)))
    assert "Deleted: “I lost my job”" in anna.screen["conversations"]
    assert "(0)" in anna.screen["conversations"]
    open_(anna, first)

    assert REPLY in anna.screen["conversation"]
    assert anna.conversation_id == first
    assert "Deleted" not in anna.screen["conversations"]


def test_a_deleted_conversation_leaves_the_list_with_its_draft_and_stays_restorable(anna):
    asyncio.run(anna.send("I lost my job"))
    anna.chat.typed({"text": "half a thought"}, anna.conversation_id, anna.request)
    first = new(anna)
    for _ in range(2):  # another tab still lists it
        anna.see(conversations(anna).delete(anna.conversation_id, anna.request, named(first)))
    assert "(0)" in anna.screen["conversations"]
    open_(anna, first)

    assert REPLY in anna.screen["conversation"]
    assert anna.session.draft == "half a thought"


def test_deleting_the_draft_on_the_screen_empties_the_message_box(anna):
    anna.chat.typed({"text": "half a thought"}, anna.conversation_id, anna.request)
    event = named(anna.conversation_id)
    anna.see(conversations(anna).delete(anna.conversation_id, anna.request, event))

    assert anna.screen["message"]["text"] == ""
    assert len(anna.services.store) == 0


def test_delete_my_data_leaves_no_draft_and_no_undo(anna):
    asyncio.run(anna.send("I lost my job"))
    first = new(anna)
    anna.chat.delete(replace(anna.key, conversation=first))
    anna.chat.typed({"text": "half a thought"}, anna.conversation_id, anna.request)
    anna.services.forget(anna.key.visitor)
    open_(anna, first)
    asyncio.run(anna.load())

    assert len(anna.services.store) == 0
    assert "I lost my job" not in str(anna.screen)


def test_a_deleted_conversation_is_gone_after_its_time(anna):
    asyncio.run(anna.send("I lost my job"))
    first = new(anna)
    anna.chat.delete(replace(anna.key, conversation=first))
    store = anna.services.store
    later = store.now() + UNDO_SECONDS + 1
    store._clock = lambda: later
    asyncio.run(anna.load())

    assert "I lost my job" not in anna.screen["conversations"]
    assert "(0)" in anna.screen["conversations"]
    store.sweep()
    assert len(store) == 0


@pytest.mark.parametrize("query", ["LOST", "heavy thing", "work"])
def test_search_finds_titles_messages_and_replies(anna, query):
    asyncio.run(anna.send("I lost my sleep"))
    event = named(anna.conversation_id, title="Work")
    conversations(anna).rename(anna.conversation_id, anna.request, event)
    new(anna)
    asyncio.run(anna.send("Another matter", model="other"))
    search = conversations(anna).search
    event = gr.EventData(None, {"query": query})
    anna.see(search(anna.conversation_id, anna.request, event))

    assert "Work" in anna.screen["conversations"]
    assert "Another matter" not in anna.screen["conversations"]
    anna.see(search(anna.conversation_id, anna.request, gr.EventData(None, {"query": "zebra"})))
    assert "No conversation contains" in anna.screen["conversations"]


def test_one_conversation_too_many_is_refused_and_none_is_lost(anna):
    for number in range(OF_VISITOR.sessions):
        asyncio.run(anna.send(f"My husband hits me {number}"))  # gets no reply, so it is quick
        last = new(anna)
    asyncio.run(anna.send("One more"))
    assert "16 conversations, the most" in anna.error
    assert len(anna.services.store) == OF_VISITOR.sessions
    assert "My husband hits me 0" in anna.screen["conversations"]

    deleted = replace(anna.key, conversation=last)
    anna.chat.delete(deleted)
    asyncio.run(anna.send("x" * 20_000))  # is refused, so the deleted one can still be restored
    assert anna.services.store.get(deleted).is_deleted
    asyncio.run(anna.send("One more"))
    assert anna.session.turns[0].message.text == "One more"


def test_a_reply_continues_while_another_conversation_is_read(anna):
    async def scene() -> None:
        sending = asyncio.create_task(anna.send("slowly"))
        while not anna.services.chat_jobs.job(anna.key):
            await asyncio.sleep(0.01)
        first = anna.key
        other = conversations(anna).new(None, anna.conversation_id, anna.request)
        await anna.watch(other)
        updates = len(anna.updates)
        await asyncio.wait_for(sending, 10)
        # The first conversation no longer draws on this page.
        assert not any("conversation" in update for update in anna.updates[updates:])
        await asyncio.to_thread(
            eventually, lambda: anna.services.chat_jobs.job(first) is None, 30.0
        )
        assert anna.services.store.get(first).turns[0].progress.outcome == "finished"

    asyncio.run(scene())


def test_a_draft_survives_a_reload_and_each_conversation_has_its_own(anna):
    asyncio.run(anna.send("one"))
    anna.chat.typed({"text": "half a thought"}, anna.conversation_id, anna.request)
    asyncio.run(anna.load())
    assert anna.screen["message"]["text"] == "half a thought"
    first = new(anna)
    assert anna.screen["message"].value["text"] == ""
    open_(anna, first)
    assert anna.screen["message"].value["text"] == "half a thought"

    asyncio.run(anna.send("half a thought, finished"))
    assert anna.session.draft == ""
    anna.chat.typed({"text": "half a thought, finished"}, anna.conversation_id, anna.request)
    assert anna.session.draft == ""  # a late event must not bring back what has been sent


def test_what_was_typed_last_is_stored_when_another_conversation_is_opened(anna):
    first = new(anna, {"text": "half a thought", "files": []})
    assert anna.screen["message"].value["text"] == ""
    assert "half a thought" in anna.screen["conversations"]
    open_(anna, first)
    assert anna.screen["message"].value["text"] == "half a thought"


@pytest.mark.parametrize("claimed", [None, "", "x", "../../etc/passwd"])
def test_a_draft_is_stored_only_for_a_conversation_that_a_page_shows(anna, claimed):
    anna.chat.typed({"text": "half a thought"}, claimed, anna.request)
    assert len(anna.services.store) == 0


def test_the_models_survive_a_reload_and_unknown_ones_are_ignored(anna):
    asyncio.run(anna.load(anna.chat.remember("other", "")))
    assert (anna.screen["policy"], anna.screen["judge"]) == ("other", "")
    for choices in (None, "x", ["gone", 5], [None, "gone"]):
        ben = Visitor(anna.services)
        asyncio.run(ben.load(choices))
        assert "policy" not in ben.screen
        assert "judge" not in ben.screen


def test_another_tab_shows_what_was_changed_meanwhile(anna):
    tab = Visitor(anna.services, cookie=anna.cookie)
    asyncio.run(anna.send("one"))
    asyncio.run(tab.watch(tab.chat.refresh(tab.conversation_id, tab.request)))

    assert REPLY in tab.screen["conversation"]
    assert "(1)" in tab.screen["conversations"]


def test_the_pager_names_the_replies_and_switches_without_an_undo(anna):
    asyncio.run(anna.send("one"))
    assert "pager" not in anna.screen["conversation"]
    asyncio.run(anna.ask_again(model="other"))
    assert "<span>2/2</span>" in anna.screen["conversation"]
    steering = Steering(anna.services, anna.chat._parts, anna.chat)
    event = gr.EventData(None, {"turn": 0, "reply": 1})
    anna.see(steering.switch(anna.conversation_id, anna.request, event))

    assert "<span>1/2</span>" in anna.screen["conversation"]
    assert REPLY in anna.screen["conversation"]
    assert SECOND_REPLY not in anna.screen["conversation"]


def test_the_starter_with_a_picture_attaches_it_with_its_description(anna):
    update = anna.chat.use_starter(None, anna.request, pressed(4))
    assert "his chair has stayed empty" in update["message"]["text"]
    (path,) = update["message"]["files"]
    asyncio.run(anna.send(update["message"]["text"], [path], alt=update["alt"].value))

    (image,) = anna.session.turns[0].message.images
    assert (image.width, image.height) == (640, 440)
    assert image.alt.startswith("A drawing of a table")
