"""What a visitor can do: the box for a message, and the handlers behind every button.

A handler changes the session in the store and yields what the screen shows now. While a reply is
on its way, the handler that began it (or that of a page that was reloaded) watches the store and
yields at most `UPDATES_PER_SECOND`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from compeer_core.dialogue import Speaker, Utterance, check_message, language_of
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.safety import find_risk, forbids_reply
from ui_components.chat.conversation import conversation_html
from ui_components.chat.inspector import inspector_html
from ui_components.chat.starters import with_starter
from ui_components.server.visitors import conversation_of
from ui_components.shared.generation import Order
from ui_components.shared.progress import Origin
from ui_components.shared.services import Services
from ui_components.shared.session import (
    MAX_TURNS,
    UNDO_SECONDS,
    Session,
    Turn,
    Undo,
    way_back,
)
from ui_components.shared.session_store import SessionKey
from ui_components.shared.templating import render
from ui_components.shared.texts import Texts

logger = logging.getLogger(__name__)

UPDATES_PER_SECOND = 12
HEARTBEAT_SECONDS = 1.0
"""Gradio notices that a page was closed only when a handler yields."""
MAX_SEED = 2**31 - 1
OVER_SECONDS = 5.0
"""How long a stopped reply may take to end before the next one is refused."""

Update = dict[Any, Any]


# --- the parts of the screen ---------------------------------------------------------------------


@dataclass(frozen=True)
class ChatParts:
    """The components that the handlers read and fill."""

    conversation: gr.HTML
    inspector: gr.HTML
    message: gr.MultimodalTextbox
    alt: gr.Textbox
    error: gr.HTML
    policy: gr.Dropdown
    judge: gr.Dropdown
    seed: gr.Textbox
    note: gr.HTML
    conversation_id: gr.BrowserState


def build_message(i18n: gr.I18n) -> tuple[gr.MultimodalTextbox, gr.Textbox, gr.HTML]:
    """Lay out the box for a message, the line for a description of photos, and the line for errors."""
    error = gr.HTML(elem_id="error", apply_default_css=False)
    alt, message = message_box(i18n, "chat.message")
    return message, alt, error


def message_box(
    i18n: gr.I18n, label: str, prefix: str = ""
) -> tuple[gr.Textbox, gr.MultimodalTextbox]:
    """Lay out a line for a description of photos and a box for a message, with their ids."""
    alt = gr.Textbox(
        label=i18n("chat.alt"), elem_id=f"{prefix}alt", visible=False, max_lines=1, max_length=300
    )
    message = gr.MultimodalTextbox(
        label=i18n(label),
        placeholder=str(i18n("chat.placeholder")),
        show_label=False,
        file_types=["image"],
        file_count="multiple",
        lines=1,  # with more of them Enter would not send
        max_lines=8,
        max_plain_text_length=1_000_000,  # a longer paste would become a file
        elem_id=f"{prefix}message",
    )
    return alt, message


# --- handlers ------------------------------------------------------------------------------------


class Chat:
    """The handlers of the page: plain functions of what came in, the store and the clock."""

    def __init__(self, services: Services, parts: ChatParts) -> None:
        self._services = services
        self._parts = parts

    # --- saying something ---

    async def send(
        self,
        message: Mapping[str, Any] | None,
        alt: str | None,
        model: str,
        judge: str,
        seed: str | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        """Keep a message, then show how the reply to it comes, or where people are who can help."""
        texts, parts = self._services.texts(request), self._parts
        conversation = conversation_of(conversation_id)
        key = self._services.key(request, conversation)
        text = (message or {}).get("text") or ""
        files = [str(path) for path in (message or {}).get("files") or ()]
        uploads, owner = self._services.uploads, self._services.owner(request)
        try:
            images = await uploads.read(files, owner, alt or "")
            before = self._services.store.get(key)
            kept_images = (
                len(before.turns[before.editing].said.images) if before.editing is not None else 0
            )
            said = check_message(text, bool(images) or bool(kept_images))
            turn = _said(said, images)
            change = _sending(turn, self._services.store.now())
            gets_reply = not forbids_reply(turn.risk)
            if gets_reply:
                await self.begin(key, change, self.order(model, judge, seed))
            else:
                await self.wait_for_stopped(key)
                self._services.writers.keep(key, change)
        except InputError as error:
            yield {parts.error: error_html(error, texts)}
            return
        for path in files:
            uploads.forget(path, owner)
        yield {
            parts.conversation_id: conversation,
            parts.message: gr.MultimodalTextbox(
                value={"text": before.draft, "files": []},
                submit_btn=not gets_reply,
                stop_btn=gets_reply,
            ),
            parts.alt: gr.Textbox(value="", visible=False),
            parts.error: "",
        }
        async for update in self._watch(key, texts):
            yield update

    async def ask_again(
        self,
        model: str,
        judge: str,
        seed: str | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> AsyncIterator[Update]:
        """Write another reply to the last message; the one before is kept beside it."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        index = _number(event)
        try:
            order = self.order(model, judge, seed)
            answered = self._services.store.get(key).turns[-1:]
            shown = answered[0].progress if answered else None
            origin = Origin()
            if shown is not None and shown.has_words:
                origin = Origin("again", parent=shown.number)
            change = _asking_again(index, self._services.store.now())
            await self.begin(key, change, replace(order, origin=origin))
        except InputError as error:
            yield {parts.error: error_html(error, texts)} | self.screen(key, texts)
            return
        async for update in self.shown_while_written(key, texts):
            yield update

    def stop(self, conversation_id: str | None, request: gr.Request) -> None:
        """Ask the reply on its way to end; whoever watches it shows that it did."""
        self._services.writers.stop(self._services.key(request, conversation_of(conversation_id)))

    # --- changing what was said ---

    def edit(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> Update:
        """Put an earlier message into the box; what stood there comes back afterwards."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        index = _number(event)
        session = self._services.store.get(key)
        if not 0 <= index < len(session.turns):
            return {parts.error: error_html(InputError("no such turn", code="turn_gone"), texts)}
        typed = (message or {}).get("text") or ""
        draft = session.draft if session.editing is not None else typed
        self._services.store.update(key, lambda now: replace(now, editing=index, draft=draft))
        text = session.turns[index].said.text
        files = (message or {}).get("files") or []
        return {parts.message: {"text": text, "files": files}} | self.screen(key, texts)

    def stop_edit(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> Update:
        """Leave the earlier message as it was."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        draft = self._services.store.get(key).draft
        self._services.store.update(key, lambda now: replace(now, editing=None, draft=""))
        files = (message or {}).get("files") or []
        return {parts.message: {"text": draft, "files": files}} | self.screen(key, texts)

    def clear(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Empty the conversation; for a while it can be brought back."""
        key = self._services.key(request, conversation_of(conversation_id))
        self._services.writers.stop(key)
        until = self._services.store.now() + UNDO_SECONDS
        self._services.store.update(key, lambda session: _cleared(session, until))
        return {self._parts.error: ""} | self.screen(key, self._services.texts(request))

    def undo(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Bring back what the last change removed."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        undo = self._services.store.get(key).undo
        if undo is None or self._services.store.now() > undo.until:
            return {self._parts.error: error_line(texts("chat.undo_late"))} | self.screen(
                key, texts
            )
        self._services.writers.stop(key)
        self._services.store.update(key, _undone)
        return {self._parts.error: ""} | self.screen(key, texts)

    # --- looking ---

    def pick(self, conversation_id: str | None, request: gr.Request, event: gr.EventData) -> Update:
        """Show another turn in the inspector."""
        key = self._services.key(request, conversation_of(conversation_id))
        index = _number(event)
        self._services.store.update(key, lambda session: _picked(session, index))
        return self.screen(key, self._services.texts(request))

    def use_starter(
        self, message: Mapping[str, Any] | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Put a starter situation into the box, after what is there."""
        texts = self._services.texts(request)
        return {self._parts.message: with_starter(message, _number(event), texts)}

    def attach(self, message: Mapping[str, Any] | None) -> Update:
        """Offer the line for a description as soon as a photo is there."""
        return {self._parts.alt: gr.Textbox(visible=bool((message or {}).get("files")))}

    def choose_model(self, model: str, request: gr.Request) -> Update:
        """Say what is to be known about the model that was picked."""
        return {self._parts.note: self._note(model, self._services.texts(request))}

    async def load(
        self, model: str, conversation_id: str | None, request: gr.Request
    ) -> AsyncIterator[Update]:
        """Show the conversation of whoever came, and what is still on its way."""
        texts, parts = self._services.texts(request), self._parts
        conversation = conversation_of(conversation_id)
        key = self._services.key(request, conversation)
        session = self._services.store.get(key)
        first = {
            parts.conversation_id: conversation,
            parts.note: self._note(model, texts),
            **self.screen(key, texts),
        }
        if session.editing is not None:
            first[parts.message] = {"text": session.turns[session.editing].said.text, "files": []}
        yield first
        if self._services.writers.job(key) is not None:
            yield {parts.message: gr.MultimodalTextbox(submit_btn=False, stop_btn=True)}
            async for update in self._watch(key, texts):
                yield update
        while self._services.models.loading(model) is not None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            yield {parts.note: self._note(model, texts)}

    # --- what they share ---

    async def shown_while_written(self, key: SessionKey, texts: Texts) -> AsyncIterator[Update]:
        """Yield the screen for as long as a reply to an earlier message of one's own is written."""
        stop = gr.MultimodalTextbox(submit_btn=False, stop_btn=True)
        yield {self._parts.error: "", self._parts.message: stop}
        async for update in self._watch(key, texts):
            yield update

    def order(self, model: str, judge: str, seed: str | None) -> Order:
        """Return what is asked for by the choices under the message box.

        Raises:
            InputError: There is no such model or judge, or the seed is none.
        """
        models = self._services.models
        if models.entry("policy", model) is None:
            raise InputError("no such model", code="unknown_model")
        if judge and models.entry("judge", judge) is None:
            raise InputError("no such judge", code="unknown_judge")
        return Order(model, judge or None, read_seed(seed))

    async def begin(
        self,
        key: SessionKey,
        change: Callable[[Session], Session],
        order: Order,
        index: int | None = None,
    ) -> None:
        """Begin a reply as `Writers.begin` does, once one that was stopped has ended."""
        await self.wait_for_stopped(key)
        self._services.writers.begin(key, change, order, index)

    async def wait_for_stopped(self, key: SessionKey) -> None:
        """Let a reply that was stopped end first."""
        stopped = self._services.writers.job(key)
        if stopped is not None and stopped.stop.is_set():
            await asyncio.to_thread(stopped.over.wait, OVER_SECONDS)

    async def _watch(self, key: SessionKey, texts: Texts) -> AsyncIterator[Update]:
        """Yield the screen whenever it changes, until the reply on its way is over."""
        parts = self._parts
        job = self._services.writers.job(key)
        with contextlib.ExitStack() as stack:
            if job is not None:
                stack.enter_context(job.watched())
            shown: tuple[Session, int] | None = None
            last_yield = 0.0
            while True:
                over = job is None or job.over.is_set()
                session = self._services.store.get(key)
                state = (session, _loading_seconds(session))
                if over or shown is None or state[0] is not shown[0] or state[1] != shown[1]:
                    shown, last_yield = state, time.monotonic()
                    yield self.screen(key, texts)
                elif time.monotonic() - last_yield > HEARTBEAT_SECONDS:
                    last_yield = time.monotonic()
                    yield {parts.error: gr.skip()}
                if over:
                    break
                await asyncio.sleep(1 / UPDATES_PER_SECOND)
        yield {parts.message: gr.MultimodalTextbox(submit_btn=True, stop_btn=False)}

    def screen(self, key: SessionKey, texts: Texts, sentence: str = "", place: str = "") -> Update:
        """Draw the conversation and the inspector.

        Args:
            key: Whose conversation.
            texts: The words.
            sentence: What is wrong with what was asked for in the inspector.
            place: The card of the inspector where it was asked for.
        """
        session = self._services.store.get(key)
        conversation = conversation_html(
            session,
            texts,
            self._services.models,
            keep_seconds=self._services.store.keep_seconds,
            now=time.monotonic(),
        )
        return {
            self._parts.conversation: conversation,
            self._parts.inspector: inspector_html(
                session,
                texts,
                sentence=sentence,
                place=place,
                small_judges={
                    entry.name for entry in self._services.models.entries("judge") if entry.small
                },
            ),
        }

    def _note(self, model: str, texts: Texts) -> str:
        models = self._services.models
        entry = models.entry("policy", model)
        if entry is None:
            return ""
        title = entry.title or entry.name
        loading = models.loading(model)
        if loading is not None:
            text = texts("model.loading", model=title, seconds=round(loading.seconds))
            return render("note.html", text=text, kind="loading")
        if models.is_broken(model):
            return render("note.html", text=texts("model.failed", model=title), kind="failed")
        if entry.small:
            return render("note.html", text=texts("model.small", model=title), kind="small")
        return ""


def error_html(error: InputError, texts: Texts) -> str:
    """Draw what is wrong with what a visitor sent, in the visitor's language."""
    return error_line(error_sentence(error, texts))


def error_sentence(error: InputError, texts: Texts) -> str:
    """Say what is wrong with what a visitor sent."""
    key = f"errors.{error.code}"
    return texts(key, **error.values) if key in texts.words else texts("errors.other")


def error_line(sentence: str) -> str:
    """Draw one sentence at the field it is about."""
    return render("error.html", text=sentence)


def read_seed(text: str | None) -> int | None:
    """Return a seed that every model can take, None where none was given.

    Raises:
        InputError: It is not a whole number from 0 to `MAX_SEED`.
    """
    digits = (text or "").strip()
    if not digits:
        return None
    readable = digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_SEED))
    if not readable or int(digits) > MAX_SEED:
        raise InputError("bad seed", code="seed", values={"limit": MAX_SEED})
    return int(digits)


# --- changes of a session ------------------------------------------------------------------------


def _said(text: str, images: tuple[Image, ...]) -> Turn:
    sign = find_risk(text)
    return Turn(
        Utterance(Speaker.SEEKER, text, images),
        risk=sign.kind if sign else None,
        language=language_of(text),
    )


def _sending(turn: Turn, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        index = session.editing
        if index is None or index >= len(session.turns):
            if len(session.turns) >= MAX_TURNS:
                raise InputError("too many", code="too_many_turns", values={"limit": MAX_TURNS})
            return Session(turns=(*session.turns, turn))
        images = session.turns[index].said.images + turn.said.images
        edited = replace(turn, said=replace(turn.said, images=images))
        undo = Undo("edited", session.turns, index + 1, now + UNDO_SECONDS)
        return Session(turns=(*session.turns[:index], edited), undo=undo)

    return change


def _asking_again(index: int, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        if index != len(session.turns) - 1 or index < 0:
            raise InputError("not the last turn", code="turn_gone")
        return replace(session, undo=way_back(session, index, "retried", now))

    return change


def _undone(session: Session) -> Session:
    """Bring back what was removed, or show again what was shown; nothing is lost by it."""
    undo = session.undo
    assert undo is not None
    if not undo.back_to:
        return Session(turns=undo.turns)
    session = session.switched(undo.number - 1, undo.back_to)
    return replace(session, undo=None)


def _cleared(session: Session, until: float) -> Session:
    if not session.turns:
        return session
    return Session(undo=Undo("cleared", session.turns, 0, until))


def _picked(session: Session, index: int) -> Session:
    if not 0 <= index < len(session.turns):
        return session
    return replace(session, selected=None if index == len(session.turns) - 1 else index)


def _loading_seconds(session: Session) -> int:
    replies = session.turns[-1].replies if session.turns else ()
    loading = [reply.since for reply in replies if reply.phase == "loading"]
    return round(time.monotonic() - loading[0]) if loading else -1


# --- what comes in -------------------------------------------------------------------------------


def _number(event: gr.EventData) -> int:
    data = event._data
    return number_in(data if isinstance(data, Mapping) else {}, "turn")


def number_in(data: Mapping[str, Any], name: str) -> int:
    """Return a whole number that a script sent, -1 for anything else."""
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
