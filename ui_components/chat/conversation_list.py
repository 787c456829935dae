"""The list of a visitor's conversations: open, search, rename, delete and restore them.

`conversation_list_html` draws it from what the store holds. `Conversations` holds its handlers.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import gradio as gr

from ui_components.server.visitors import conversation_of
from ui_components.shared.events import event_data, text_in
from ui_components.shared.jobs import Update
from ui_components.shared.services import Services
from ui_components.shared.session import Session, every_turn
from ui_components.shared.session_store import SessionKey
from ui_components.shared.templating import render
from ui_components.shared.texts import ASSETS, Texts

if TYPE_CHECKING:
    from ui_components.chat.handlers import Chat, ChatParts

MAX_TITLE = 80
MAX_QUERY = 200
NAME_CHARACTERS = 60
"""How much of a first message names its conversation."""


def build_conversation_list() -> gr.HTML:
    """Lay out the list. Its script lists the events that it triggers."""
    return gr.HTML(
        elem_id="conversations",
        js_on_load=(ASSETS / "style" / "conversation_list.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )


def conversation_list_html(
    records: Mapping[SessionKey, Session], current: str, texts: Texts, query: str = ""
) -> str:
    """Draw the list.

    Args:
        records: The visitor's conversations.
        current: The id of the one on the screen.
        texts: The words.
        query: Only conversations that contain it are listed; empty lists all.
    """
    newest_first = sorted(records.items(), key=lambda record: -record[1].written)
    stored = [
        (key, session)
        for key, session in newest_first
        if not (session.is_deleted or session.is_empty)
    ]
    rows = [
        {
            "id": key.conversation,
            "name": _name(session, texts),
            "title": session.title,
            "is_current": key.conversation == current,
        }
        for key, session in stored
        if _contains(session, query)
    ]
    deleted = [
        {
            "id": key.conversation,
            "text": texts("chat.deleted", name=_name(session, texts)),
        }
        for key, session in newest_first
        if session.is_deleted and key.conversation != current
    ]
    names = [(key.conversation, _name(session, texts)) for key, session in stored]
    return render(
        "conversation_list.html",
        t=texts,
        state=blake2b(ascii((names, deleted)).encode(), digest_size=8).hexdigest(),
        rows=rows,
        deleted=deleted,
        count=len(stored),
        query=query,
        max_title=MAX_TITLE,
    )


def _name(session: Session, texts: Texts) -> str:
    name = session.name or " ".join(session.draft.split()) or texts("chat.unnamed")
    return name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS].rstrip()}…"


def _contains(session: Session, query: str) -> bool:
    wanted = query.casefold().strip()
    words = [session.title, session.draft]
    for turn in every_turn(session.turns):
        words += [turn.message.text, *(reply.reply for reply in turn.replies)]
    return any(wanted in text.casefold() for text in words)


class Conversations:
    """The handlers of the list."""

    def __init__(self, services: Services, parts: "ChatParts", chat: "Chat") -> None:
        self._services = services
        self._parts = parts
        self._chat = chat

    async def open(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> AsyncIterator[Update]:
        """Show another conversation and its draft, and continue to stream its reply.

        A deleted one is restored: its Undo opens it.
        """
        wanted = self._key_in(event, request)
        if wanted is not None:
            if self._services.store.get(wanted).is_deleted:
                self._chat.restore(wanted)
            async for update in self._shown(wanted, message, conversation_id, request):
                yield update

    async def new(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        """Show an empty conversation. It is stored once something is written.

        Without a cookie there is no list to return by, and the risk state belongs to the
        conversation: the current one is emptied instead, and Undo restores it.
        """
        wanted = self._services.key(request, conversation_of(conversation_id))
        if wanted.visitor:
            wanted = self._services.key(request, conversation_of(None))
        else:
            self._chat.delete(wanted)
        async for update in self._shown(wanted, message, conversation_id, request):
            yield update

    def rename(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Name a conversation; without a name, its first message names it."""
        wanted = self._key_in(event, request)
        title = " ".join(text_in(event_data(event), "title")[: 4 * MAX_TITLE].split())[:MAX_TITLE]
        if wanted is not None:
            self._services.store.update(wanted, lambda session: replace(session, title=title))
        return self._listed(conversation_id, request)

    def delete(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Delete a conversation, which can be restored for a while, or an unsent draft for good."""
        wanted = self._key_in(event, request)
        if wanted is None:
            return self._listed(conversation_id, request)
        session = self._services.store.get(wanted)
        is_draft = not session.turns and not session.is_deleted
        if is_draft:
            self._services.store.update(wanted, lambda _: Session())
        else:
            self._chat.delete(wanted)
        drawn = self._listed(conversation_id, request)
        if wanted.conversation == conversation_id:
            drawn |= self._chat.screen(wanted, self._services.texts(request))
            if is_draft:
                drawn[self._parts.message] = {"text": "", "files": []}
        return drawn

    def search(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """List the conversations that contain some words."""
        query = text_in(event_data(event), "query")[:MAX_QUERY]
        return self._listed(conversation_id, request, query)

    async def _shown(
        self,
        wanted: SessionKey,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        parts, texts = self._parts, self._services.texts(request)
        before = self._services.key(request, conversation_of(conversation_id))
        self._chat.leave(before, request)
        if message is not None:  # the event of the last key may not have arrived yet
            self._chat.typed(message, conversation_id, request)
        files = (message or {}).get("files") or []
        draft = self._services.store.get(wanted).draft
        yield {
            parts.conversation_id: wanted.conversation,
            parts.message: gr.MultimodalTextbox(
                value={"text": draft, "files": files}, submit_btn=True, stop_btn=False
            ),
            parts.error: "",
            **self._chat.whole_screen(wanted, texts),
        }
        async for update in self._chat.watched_if_writing(wanted, request):
            yield update

    def _key_in(self, event: gr.EventData, request: gr.Request) -> SessionKey | None:
        """The key of the conversation that a script named, None if the visitor has no such one."""
        key = self._services.key(request, text_in(event_data(event), "id"))
        return key if key in self._services.store.keys_of(key.visitor) else None

    def _listed(self, conversation_id: str | None, request: gr.Request, query: str = "") -> Update:
        key = self._services.key(request, conversation_of(conversation_id))
        texts = self._services.texts(request)
        return {self._parts.conversations: self._chat.listed(key, texts, query)}
