"""The message box of Chat, and the handlers behind its buttons.

A handler changes the session in the store and yields what the screen shows now. While a reply is being
generated, the handler that began it (or the one of a reloaded page) watches the store; see `jobs.watch`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from compeer_core.dialogue import Speaker, Utterance, check_message, language_of
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.safety import RiskState
from ui_components.chat.conversation import conversation_html
from ui_components.chat.inspector import inspector_html
from ui_components.chat.jobs import ReplyRequest
from ui_components.chat.starters import with_starter
from ui_components.server.visitors import conversation_of
from ui_components.shared.events import event_data, number_in
from ui_components.shared.jobs import HEARTBEAT_SECONDS, Update, watch
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
from ui_components.shared.terms import explained, terms_line
from ui_components.shared.texts import Texts

logger = logging.getLogger(__name__)

MAX_SEED = 2**31 - 1


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
    """Lay out the message box, the field for a photo's description, and the line for errors."""
    error = gr.HTML(elem_id="error", apply_default_css=False)
    alt, message = message_box(i18n, "chat.message")
    return message, alt, error


def message_box(
    i18n: gr.I18n, label: str, prefix: str = ""
) -> tuple[gr.Textbox, gr.MultimodalTextbox]:
    """Lay out the field for a photo's description and the message box, with their ids."""
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
    """The handlers of Chat: plain functions of their input, the store and the clock."""

    def __init__(self, services: Services, parts: ChatParts) -> None:
        self._services = services
        self._parts = parts

    # --- sending ---

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
        """Store a message, then stream the reply to it, or show where to get help."""
        texts, parts = self._services.texts(request), self._parts
        conversation = conversation_of(conversation_id)
        key = self._services.key(request, conversation)
        text = (message or {}).get("text") or ""
        files = [str(path) for path in (message or {}).get("files") or ()]
        uploads, owner = self._services.uploads, self._services.owner(request)
        risk = await asyncio.to_thread(self._services.risks.assess, key, text)
        try:
            images = await uploads.read(files, owner, alt or "")
            before = self._services.store.get(key)
            kept_images = (
                len(before.turns[before.editing].message.images)
                if before.editing is not None
                else 0
            )
            text = check_message(text, bool(images) or bool(kept_images))
            turn = _turn(text, images, risk)
            change = _sending(turn, self._services.store.now())
            gets_reply = turn.risk is None
            if gets_reply:
                await self.begin(key, change, self.reply_request(model, judge, seed))
            else:
                await self._services.chat_jobs.wait_for_stopped(key)
                self._services.chat_jobs.update(key, change)
        except InputError as error:
            yield {parts.error: error_html(error, texts)} | self._help(key, texts)
            return
        self._services.risks.accepted(key, risk)
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
        """Generate another reply to the last message; the earlier one stays available."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        index = number_in(event_data(event), "turn")
        try:
            reply_request = self.reply_request(model, judge, seed)
            last = self._services.store.get(key).turns[-1:]
            shown = last[0].progress if last else None
            origin = Origin()
            if shown is not None and shown.has_words:
                origin = Origin("again", parent=shown.number)
            change = _asking_again(index, self._services.store.now())
            await self.begin(key, change, replace(reply_request, origin=origin))
        except InputError as error:
            yield {parts.error: error_html(error, texts)} | self.screen(key, texts)
            return
        async for update in self.shown_while_written(key, texts):
            yield update

    def stop(self, conversation_id: str | None, request: gr.Request) -> None:
        """Stop the reply; the handler that watches it shows the result."""
        self._services.chat_jobs.stop(self._services.key(request, conversation_of(conversation_id)))

    # --- editing ---

    def edit(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> Update:
        """Put an earlier message into the box; the draft that was there comes back afterwards."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        index = number_in(event_data(event), "turn")
        session = self._services.store.get(key)
        if not 0 <= index < len(session.turns):
            return {parts.error: error_html(InputError("no such turn", code="turn_gone"), texts)}
        typed = (message or {}).get("text") or ""
        draft = session.draft if session.editing is not None else typed
        self._services.store.update(key, lambda now: replace(now, editing=index, draft=draft))
        text = session.turns[index].message.text
        files = (message or {}).get("files") or []
        return {parts.message: {"text": text, "files": files}} | self.screen(key, texts)

    def stop_edit(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> Update:
        """Cancel the edit of an earlier message."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        draft = self._services.store.get(key).draft
        self._services.store.update(key, lambda now: replace(now, editing=None, draft=""))
        files = (message or {}).get("files") or []
        return {parts.message: {"text": draft, "files": files}} | self.screen(key, texts)

    def clear(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Clear the conversation; it can be restored for a while."""
        key = self._services.key(request, conversation_of(conversation_id))
        self._services.chat_jobs.stop(key)
        until = self._services.store.now() + UNDO_SECONDS
        self._services.store.update(key, lambda session: _cleared(session, until))
        return {self._parts.error: ""} | self.screen(key, self._services.texts(request))

    def undo(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Restore what the last change removed."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        undo = self._services.store.get(key).undo
        if undo is None or self._services.store.now() > undo.until:
            return {self._parts.error: error_line(texts("chat.undo_late"))} | self.screen(
                key, texts
            )
        self._services.chat_jobs.stop(key)
        self._services.store.update(key, _undone)
        return {self._parts.error: ""} | self.screen(key, texts)

    # --- viewing ---

    def pick(self, conversation_id: str | None, request: gr.Request, event: gr.EventData) -> Update:
        """Show another turn in the inspector."""
        key = self._services.key(request, conversation_of(conversation_id))
        index = number_in(event_data(event), "turn")
        self._services.store.update(key, lambda session: _picked(session, index))
        return self.screen(key, self._services.texts(request))

    def use_starter(
        self, message: Mapping[str, Any] | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Put a starter into the box."""
        texts = self._services.texts(request)
        return {
            self._parts.message: with_starter(message, number_in(event_data(event), "turn"), texts)
        }

    def attach(self, message: Mapping[str, Any] | None) -> Update:
        """Show the description field once a photo is attached."""
        return {self._parts.alt: gr.Textbox(visible=bool((message or {}).get("files")))}

    def choose_model(self, model: str, request: gr.Request) -> Update:
        """Show the note on the selected model."""
        return {self._parts.note: self._note(model, self._services.texts(request))}

    async def load(
        self, model: str, conversation_id: str | None, request: gr.Request
    ) -> AsyncIterator[Update]:
        """Show the visitor's conversation and continue to stream a running reply."""
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
            first[parts.message] = {
                "text": session.turns[session.editing].message.text,
                "files": [],
            }
        yield first
        if self._services.chat_jobs.job(key) is not None:
            yield {parts.message: gr.MultimodalTextbox(submit_btn=False, stop_btn=True)}
            async for update in self._watch(key, texts):
                yield update
        while self._services.models.loading(model) is not None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            yield {parts.note: self._note(model, texts)}

    # --- shared by the handlers ---

    def _help(self, key: SessionKey, texts: Texts) -> Update:
        """Draw the screen with its help card if a message showed a sign, also one that was refused."""
        return self.screen(key, texts) if self._services.risks.get(key).kind else {}

    async def shown_while_written(self, key: SessionKey, texts: Texts) -> AsyncIterator[Update]:
        """Stream a reply that no new message began, with Stop in place of Send."""
        stop = gr.MultimodalTextbox(submit_btn=False, stop_btn=True)
        yield {self._parts.error: "", self._parts.message: stop}
        async for update in self._watch(key, texts):
            yield update

    def reply_request(self, model: str, judge: str, seed: str | None) -> ReplyRequest:
        """Return the request that the choices under the message box make.

        Raises:
            InputError: There is no such model or judge, or the seed is invalid.
        """
        models = self._services.models
        if models.entry("policy", model) is None:
            raise InputError("no such model", code="unknown_model")
        if judge and models.entry("judge", judge) is None:
            raise InputError("no such judge", code="unknown_judge")
        return ReplyRequest(model, judge or None, read_seed(seed))

    async def begin(
        self,
        key: SessionKey,
        change: Callable[[Session], Session],
        reply_request: ReplyRequest,
        index: int | None = None,
    ) -> None:
        """Begin a reply as `ReplyJobs.begin` does, once a stopped one has ended."""
        await self._services.chat_jobs.wait_for_stopped(key)
        self._services.chat_jobs.begin(key, change, reply_request, index)

    async def _watch(self, key: SessionKey, texts: Texts) -> AsyncIterator[Update]:
        """Yield the screen whenever it changes, until no reply is being generated."""
        parts = self._parts
        drawn: tuple[Session | None, int] = (None, -1)

        def draw(is_over: bool) -> Update:
            nonlocal drawn
            session = self._services.store.get(key)
            state = (session, _loading_seconds(session))
            if not is_over and state[0] is drawn[0] and state[1] == drawn[1]:
                return {}
            drawn = state
            return self.screen(key, texts)

        job = self._services.chat_jobs.job(key)
        async for update in watch(job, draw, heartbeat={parts.error: gr.skip()}):
            yield update
        yield {parts.message: gr.MultimodalTextbox(submit_btn=True, stop_btn=False)}

    def screen(self, key: SessionKey, texts: Texts, sentence: str = "", place: str = "") -> Update:
        """Draw the conversation and the inspector.

        Args:
            key: The conversation.
            texts: The words.
            sentence: The error to show in the inspector.
            place: The card of the inspector that it belongs to.
        """
        session = self._services.store.get(key)
        conversation = conversation_html(
            session,
            texts,
            self._services.models,
            keep_seconds=self._services.store.keep_seconds,
            now=time.monotonic(),
            risk=self._services.risks.get(key),
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
        terms = terms_line([title, *(judge.title for judge in models.entries("judge"))], texts)
        if entry.small or terms:
            small = texts("model.small", model=title) if entry.small else title
            return render("note.html", text=explained(small, texts) + f" {terms}", kind="small")
        return ""


def error_html(error: InputError, texts: Texts) -> str:
    """Draw an error in the visitor's language."""
    return error_line(error_sentence(error, texts))


def error_sentence(error: InputError, texts: Texts) -> str:
    """Return the text of an error in the visitor's language."""
    key = f"errors.{error.code}"
    return texts(key, **error.values) if key in texts.words else texts("errors.other")


def error_line(sentence: str) -> str:
    """Draw one sentence as an error."""
    return render("error.html", text=sentence)


def read_seed(text: str | None) -> int | None:
    """Return a seed that every model accepts, None for an empty field.

    Raises:
        InputError: It is not an integer from 0 to `MAX_SEED`.
    """
    digits = (text or "").strip()
    if not digits:
        return None
    readable = digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_SEED))
    if not readable or int(digits) > MAX_SEED:
        raise InputError("bad seed", code="seed", values={"limit": MAX_SEED})
    return int(digits)


# --- changes of a session ------------------------------------------------------------------------


def _turn(text: str, images: tuple[Image, ...], risk: RiskState) -> Turn:
    return Turn(
        Utterance(Speaker.SEEKER, text, images),
        risk=risk.withheld_for,
        risk_is_earlier=risk.messages_since > 0,
        language=language_of(text),
    )


def _sending(turn: Turn, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        index = session.editing
        if index is None or index >= len(session.turns):
            if len(session.turns) >= MAX_TURNS:
                raise InputError("too many", code="too_many_turns", values={"limit": MAX_TURNS})
            return Session(turns=(*session.turns, turn))
        images = session.turns[index].message.images + turn.message.images
        edited = replace(turn, message=replace(turn.message, images=images))
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
    """Restore what was removed, or show the earlier reply again; nothing is lost."""
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
