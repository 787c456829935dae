"""The message box of Chat, and the handlers behind its buttons.

A handler changes the session in the store and yields what the screen shows now. While a reply is being
generated, the handler that began it (or the one of a reloaded page) watches the store; see `jobs.watch`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from compeer_core.dialogue import Speaker, Utterance, check_message, language_of
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.safety import RiskState
from ui_components.chat.conversation import conversation_html
from ui_components.chat.conversation_list import conversation_list_html
from ui_components.chat.inspector import inspector_html
from ui_components.chat.jobs import ReplyRequest
from ui_components.chat.starters import PICTURE, PICTURE_STARTER, with_starter
from ui_components.server.visitors import conversation_of, site_of
from ui_components.shared.events import event_data, number_in, text_in
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
MAX_DRAFT = 20_000
"""How many characters of an unsent message are stored; longer messages are refused anyway."""


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
    conversations: gr.HTML
    choices: gr.BrowserState
    """The model and the judge that the visitor picked last."""


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
        self._views: dict[tuple[str, str | None], set[asyncio.Event]] = {}
        """What `leave` sets, for every page that watches a reply."""

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
        key = self._services.key(request, conversation_of(conversation_id))
        if key.visitor and self._services.store.get(key).is_deleted:  # it can still be restored
            self._services.store.update(key, lambda session: replace(session, draft=""))
            key = self._services.key(request, conversation_of(None))
        text = (message or {}).get("text") or ""
        files = [str(path) for path in (message or {}).get("files") or ()]
        uploads, owner = self._services.uploads, self._services.owner(request)
        risk = await asyncio.to_thread(self._services.risks.assess, key, text)
        try:
            images = await uploads.read(files, owner, alt or "")
            text = check_message(text, bool(images))
            self.make_room(key)
            turn = _turn(text, images, risk)
            change = _sending(turn, self._services.store.now())
            await self._store_message(key, change, turn, (model, judge, seed))
        except InputError as error:
            yield {parts.error: error_html(error, texts)} | self._help(key, texts)
            return
        self._services.risks.accepted(key, risk)
        for path in files:
            uploads.forget(path, owner)
        gets_reply = turn.risk is None
        yield {
            parts.conversation_id: key.conversation,
            parts.conversations: self.listed(key, texts),
            parts.message: gr.MultimodalTextbox(
                value={"text": "", "files": []}, submit_btn=not gets_reply, stop_btn=gets_reply
            ),
            parts.alt: gr.Textbox(value="", visible=False),
            parts.error: "",
        }
        async for update in self.watched(key, request):
            yield update

    async def _store_message(
        self,
        key: SessionKey,
        change: Callable[[Session], Session],
        turn: Turn,
        settings: tuple[str, str, str | None],
    ) -> None:
        """Store a message and begin the reply with these settings, unless no model may reply."""
        if turn.risk is None:
            await self.begin(key, change, self.reply_request(*settings))
        else:
            await self._services.chat_jobs.wait_for_stopped(key)
            self._services.chat_jobs.update(key, change)

    def typed(
        self,
        message: Mapping[str, Any] | None,
        conversation_id: str | None,
        request: gr.Request,
    ) -> None:
        """Store the unsent text, so that it survives a reload. It is in the server's memory only."""
        key = self._services.key(request, conversation_of(conversation_id))
        text = ((message or {}).get("text") or "")[:MAX_DRAFT]
        store = self._services.store
        is_shown = key.conversation == conversation_id  # not before the page has loaded
        if is_shown and (text or store.get(key).draft) and store.has_room(key):
            store.update(key, lambda session: _drafted(session, text))

    def make_room(self, key: SessionKey) -> None:
        """Make room for a conversation; only a deleted one, whose Undo is lost, gives way.

        Raises:
            InputError: The visitor has as many as are stored (code ``too_many_conversations``).
        """
        store = self._services.store
        if store.has_room(key):
            return
        records = store.records_of(key.visitor)
        deleted = next((each for each, session in records.items() if session.is_deleted), None)
        if deleted is None:
            values = {"limit": len(records)}
            raise InputError("no room", code="too_many_conversations", values=values)
        store.update(deleted, lambda _: Session())

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
        async for update in self.shown_while_written(key, request):
            yield update

    def stop(self, conversation_id: str | None, request: gr.Request) -> None:
        """Stop the reply; the handler that watches it shows the result."""
        self._services.chat_jobs.stop(self._services.key(request, conversation_of(conversation_id)))

    # --- editing ---

    def edit(self, conversation_id: str | None, request: gr.Request, event: gr.EventData) -> Update:
        """Open an earlier message for editing, in its place."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        index = number_in(event_data(event), "turn")
        if not 0 <= index < len(self._services.store.get(key).turns):
            error = InputError("no such turn", code="turn_gone")
            return {self._parts.error: error_html(error, texts)} | self.screen(key, texts)
        self._services.store.update(key, lambda session: replace(session, editing=index))
        return self.screen(key, texts)

    def stop_edit(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Cancel the edit of an earlier message."""
        key = self._services.key(request, conversation_of(conversation_id))
        self._services.store.update(key, lambda session: replace(session, editing=None))
        return {self._parts.error: ""} | self.screen(key, self._services.texts(request))

    async def save_edit(
        self,
        model: str,
        judge: str,
        seed: str | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> AsyncIterator[Update]:
        """Replace an earlier message, which keeps its photos, and stream the reply to it."""
        texts, parts, data = self._services.texts(request), self._parts, event_data(event)
        key = self._services.key(request, conversation_of(conversation_id))
        index, text = number_in(data, "turn"), text_in(data, "text")
        risk = await asyncio.to_thread(self._services.risks.assess, key, text)
        try:
            images = self._services.store.get(key).turn(index).message.images
            turn = _turn(check_message(text, bool(images)), images, risk)
            change = _editing(index, turn, self._services.store.now())
            await self._store_message(key, change, turn, (model, judge, seed))
        except InputError as error:
            yield {parts.error: error_html(error, texts)} | self._help(key, texts)
            return
        self._services.risks.accepted(key, risk)
        yield {parts.conversations: self.listed(key, texts)}
        async for update in self.shown_while_written(key, request):
            yield update

    def clear(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Delete the conversation; it can be restored for a while."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        self.delete(key)
        return {
            self._parts.error: "",
            self._parts.conversations: self.listed(key, texts),
        } | self.screen(key, texts)

    def delete(self, key: SessionKey) -> None:
        """Stop and delete a conversation; what it held can be restored for a while."""
        self._services.chat_jobs.stop(key)
        until = self._services.store.now() + UNDO_SECONDS
        self._services.store.update(key, lambda session: _cleared(session, until))

    def undo(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Restore what the last change removed."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        undo = self._services.store.get(key).undo
        if undo is None or self._services.store.now() > undo.until:
            return {self._parts.error: error_line(texts("chat.undo_late"))} | self.screen(
                key, texts
            )
        self.restore(key)
        return {
            self._parts.error: "",
            self._parts.conversations: self.listed(key, texts),
        } | self.screen(key, texts)

    def restore(self, key: SessionKey) -> None:
        """Restore what the last change of a conversation removed, if that is still possible."""
        undo = self._services.store.get(key).undo
        if undo is not None and self._services.store.now() <= undo.until:
            self._services.chat_jobs.stop(key)
            self._services.store.update(key, _undone)

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
        texts, parts = self._services.texts(request), self._parts
        number = number_in(event_data(event), "turn")
        filled = {parts.message: with_starter(message, number, texts)}
        if number != PICTURE_STARTER or (message or {}).get("files"):
            return filled
        owner, address = self._services.owner(request), site_of(request)
        data = PICTURE.read_bytes()
        filled[parts.message]["files"] = [
            self._services.uploads.add(PICTURE.name, data, owner, address)
        ]
        return filled | {parts.alt: gr.Textbox(value=texts("chat.starter_4_alt"), visible=True)}

    def attach(self, message: Mapping[str, Any] | None) -> Update:
        """Show the description field once a photo is attached."""
        return {self._parts.alt: gr.Textbox(visible=bool((message or {}).get("files")))}

    def choose_model(self, model: str, request: gr.Request) -> Update:
        """Show the note on the selected model."""
        return {self._parts.note: self._note(model, self._services.texts(request))}

    def remember(self, model: str, judge: str) -> list[str]:
        """Return what the browser remembers of the models that the visitor picked."""
        return [model, judge]

    async def load(
        self,
        model: str,
        choices: object,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        """Show the visitor's conversation, draft and models, and continue to stream a reply."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        model, picked = self._picked_models(model, choices)
        draft = self._services.store.get(key).draft
        yield {
            parts.conversation_id: key.conversation,
            parts.note: self._note(model, texts),
            **picked,
            **self.whole_screen(key, texts),
            **({parts.message: {"text": draft, "files": []}} if draft else {}),
        }
        async for update in self.watched_if_writing(key, request):
            yield update
        while self._services.models.loading(model) is not None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            yield {parts.note: self._note(model, texts)}

    def _picked_models(self, model: str, choices: object) -> tuple[str, Update]:
        """Return the policy to use and the fields to fill, from what the browser remembers."""
        models = self._services.models
        policy, judge = choices if isinstance(choices, list) and len(choices) == 2 else ("", None)
        picked: Update = {}
        if isinstance(policy, str) and models.entry("policy", policy) is not None:
            model = picked[self._parts.policy] = policy
        if judge == "" or (isinstance(judge, str) and models.entry("judge", judge) is not None):
            picked[self._parts.judge] = judge
        return model, picked

    async def refresh(
        self, conversation_id: str | None, request: gr.Request
    ) -> AsyncIterator[Update]:
        """Show what another tab of the same browser changed."""
        key = self._services.key(request, conversation_of(conversation_id))
        yield self.whole_screen(key, self._services.texts(request))
        async for update in self.watched_if_writing(key, request):
            yield update

    # --- shared by the handlers ---

    def _help(self, key: SessionKey, texts: Texts) -> Update:
        """Draw the screen with its help card if a message showed a sign, also one that was refused."""
        return self.screen(key, texts) if self._services.risks.get(key).kind else {}

    async def shown_while_written(
        self, key: SessionKey, request: gr.Request
    ) -> AsyncIterator[Update]:
        """Stream a reply that no new message began, with Stop in place of Send."""
        stop = gr.MultimodalTextbox(submit_btn=False, stop_btn=True)
        yield {self._parts.error: "", self._parts.message: stop}
        async for update in self.watched(key, request):
            yield update

    async def watched_if_writing(
        self, key: SessionKey, request: gr.Request
    ) -> AsyncIterator[Update]:
        """Stream the reply of a conversation that was opened while it is generated."""
        if self._services.chat_jobs.job(key) is None:  # it may have ended since the page was drawn
            yield self.screen(key, self._services.texts(request))
            return
        yield {self._parts.message: gr.MultimodalTextbox(submit_btn=False, stop_btn=True)}
        async for update in self.watched(key, request):
            yield update

    def leave(self, key: SessionKey, request: gr.Request) -> None:
        """Let the page show another conversation; a reply in this one continues unwatched."""
        for left in self._views.get((key.visitor, request.session_hash), ()):
            left.set()

    @contextmanager
    def _viewed(self, key: SessionKey, request: gr.Request) -> Iterator[asyncio.Event]:
        """Return an event that is set once the page shows another conversation."""
        page, left = (key.visitor, request.session_hash), asyncio.Event()
        views = self._views.setdefault(page, set())
        views.add(left)
        try:
            yield left
        finally:
            views.discard(left)
            if not views:
                self._views.pop(page, None)

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

    async def watched(self, key: SessionKey, request: gr.Request) -> AsyncIterator[Update]:
        """Yield the screen whenever it changes, until the reply has ended or the page leaves."""
        parts, texts = self._parts, self._services.texts(request)
        heartbeat: Update = {parts.error: gr.skip()}
        drawn: tuple[Session | None, int] = (None, -1)

        def draw(is_over: bool) -> Update:
            nonlocal drawn
            if left.is_set():
                return heartbeat
            session = self._services.store.get(key)
            state = (session, _loading_seconds(session))
            if not is_over and state[0] is drawn[0] and state[1] == drawn[1]:
                return {}
            drawn = state
            return self.screen(key, texts)

        job = self._services.chat_jobs.job(key)
        with self._viewed(key, request) as left:
            async with aclosing(watch(job, draw, heartbeat)) as updates:
                async for update in updates:
                    if left.is_set():
                        if job is not None:
                            job.keep_running()
                        return
                    yield update
        yield {parts.message: gr.MultimodalTextbox(submit_btn=True, stop_btn=False)}

    def listed(self, key: SessionKey, texts: Texts, query: str = "") -> str:
        """Draw the list of the visitor's conversations."""
        records = self._services.store.records_of(key.visitor)
        return conversation_list_html(records, key.conversation, texts, query)

    def whole_screen(self, key: SessionKey, texts: Texts) -> Update:
        """Draw the conversation, the inspector and the list of conversations."""
        return {self._parts.conversations: self.listed(key, texts)} | self.screen(key, texts)

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
        warnings = {"small": entry.small, "blind": not entry.sees_images}
        said = [texts(f"model.{key}", model=title) for key, holds in warnings.items() if holds]
        if said or terms:
            text = explained(" ".join(said) or title, texts)
            return render("note.html", text=text + f" {terms}", kind="small")
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
        hint=risk.kind if risk.is_hint and not risk.messages_since else None,
        language=language_of(text),
    )


def _sending(turn: Turn, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        if len(session.turns) >= MAX_TURNS:
            raise InputError("too many", code="too_many_turns", values={"limit": MAX_TURNS})
        return Session((*session.turns, turn), title=session.title, written=now)

    return change


def _editing(index: int, turn: Turn, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        session.turn(index)
        undo = Undo("edited", session.turns, index + 1, now + UNDO_SECONDS)
        turns = (*session.turns[:index], turn)
        return Session(turns, draft=session.draft, title=session.title, written=now, undo=undo)

    return change


def _drafted(session: Session, text: str) -> Session:
    """Store a draft; the text of a message that has just been sent is none."""
    sent = session.turns[-1].message.text if session.turns else ""
    return replace(session, draft="" if text.strip() == sent else text)


def _asking_again(index: int, now: float) -> Callable[[Session], Session]:
    def change(session: Session) -> Session:
        if index != len(session.turns) - 1 or index < 0:
            raise InputError("not the last turn", code="turn_gone")
        return replace(session, undo=way_back(session, index, now))

    return change


def _undone(session: Session) -> Session:
    """Restore what was removed, or show the earlier reply again; nothing is lost."""
    undo = session.undo
    assert undo is not None
    if not undo.back_to:
        return Session(
            undo.turns, draft=session.draft, title=session.title, written=session.written
        )
    session = session.switched(undo.number - 1, undo.back_to)
    return replace(session, undo=None)


def _cleared(session: Session, until: float) -> Session:
    if not session.turns:
        return session
    undo = Undo("cleared", session.turns, 0, until)
    return replace(session, turns=(), selected=None, editing=None, compared=0, undo=undo)


def _picked(session: Session, index: int) -> Session:
    if not 0 <= index < len(session.turns):
        return session
    return replace(session, selected=None if index == len(session.turns) - 1 else index)


def _loading_seconds(session: Session) -> int:
    replies = session.turns[-1].replies if session.turns else ()
    loading = [reply.since for reply in replies if reply.phase == "loading"]
    return round(time.monotonic() - loading[0]) if loading else -1
