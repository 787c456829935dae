"""Steering: edit a step, choose another strategy, regenerate from a step, or draw several replies.

These are the handlers behind the inspector's controls. The new reply becomes the current one; the
earlier one stays available.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from compeer_core.best_of import LARGEST, SMALLEST
from compeer_core.errors import InputError
from compeer_core.reasoning import LABELS, STEPS, Part, Writer
from compeer_core.steering import GivenStep, check_strategy, edited_step, kept_steps
from compeer_core.taxonomy import ESCONV_STRATEGIES
from ui_components.chat.handlers import (
    Chat,
    ChatParts,
    error_html,
    error_sentence,
)
from ui_components.chat.jobs import ReplyRequest
from ui_components.server.visitors import conversation_of
from ui_components.shared.events import event_data, number_in, text_in
from ui_components.shared.jobs import Update
from ui_components.shared.progress import Origin, Progress
from ui_components.shared.services import Services
from ui_components.shared.session import Session, way_back
from ui_components.shared.session_store import SessionKey

MOST_CHARACTERS = 20_000
"""The most that is read of a form's field."""


class Steering:
    """The handlers of the inspector's controls."""

    def __init__(self, services: Services, parts: ChatParts, chat: Chat) -> None:
        self._services = services
        self._parts = parts
        self._chat = chat
        self.edit_step = self._handler(_edited)
        """Continue from a step as the visitor edited it."""
        self.keep_step = self._handler(_kept)
        """Regenerate what follows a step."""
        self.try_strategy = self._handler(_by_strategy)
        """Generate a reply with another strategy from the same history and emotion steps."""
        self.best_of = self._several(_samples)
        """Generate and rank several replies to the last message."""
        self.each_strategy = self._several(self._one_per_strategy)
        """Generate a reply to the last message under each strategy."""

    # --- another reply, based on this one ---

    def _handler(self, steer: "_Steer") -> Callable[..., AsyncIterator[Update]]:
        """Return the handler of a control; gradio reads its signature."""

        async def handler(
            model: str,
            judge: str,
            seed: str | None,
            conversation_id: str | None,
            request: gr.Request,
            event: gr.EventData,
        ) -> AsyncIterator[Update]:
            texts, data = self._services.texts(request), event_data(event)
            key = self._services.key(request, conversation_of(conversation_id))
            index = number_in(data, "turn")
            try:
                reply_request = self._chat.reply_request(model, judge, seed)
                progress = self._services.store.get(key).turn(index).progress
                if progress is None or progress.number != number_in(data, "reply"):
                    raise InputError("another reply is shown", code="turn_gone")
                steered = steer(progress, data)
                await self._chat.begin(
                    key,
                    self._with_undo(index, steered.origin),
                    replace(
                        reply_request,
                        given=steered.given,
                        strategy=steered.strategy,
                        origin=steered.origin,
                    ),
                    index,
                )
            except InputError as error:
                sentence = error_sentence(error, texts)
                yield self._chat.screen(key, texts, sentence, str(data.get("part", "")))
                return
            self._services.store.update(
                key, lambda now: replace(now, compared=steered.origin.parent)
            )
            async for update in self._chat.shown_while_written(key, request):
                yield update

        return handler

    def _with_undo(self, index: int, origin: Origin) -> Callable[[Session], Session]:
        now = self._services.store.now()

        def change(session: Session) -> Session:
            progress = session.turn(index).progress
            if progress is None or progress.number != origin.parent:
                raise InputError("another reply is shown", code="turn_gone")
            undo = way_back(session, index, now)
            return replace(session, undo=undo, editing=None)

        return change

    # --- several at once ---

    def _several(self, requests: "_Several") -> Callable[..., AsyncIterator[Update]]:
        """Return the handler of a control that begins several replies at once."""

        async def handler(
            model: str,
            judge: str,
            seed: str | None,
            conversation_id: str | None,
            request: gr.Request,
            event: gr.EventData,
        ) -> AsyncIterator[Update]:
            texts, data = self._services.texts(request), event_data(event)
            key = self._services.key(request, conversation_of(conversation_id))
            try:
                wanted = requests(self._chat.reply_request(model, judge, seed), data)
                await self._services.chat_jobs.wait_for_stopped(key)
                self._services.chat_jobs.begin_best_of(key, wanted)
            except InputError as error:
                yield self._chat.screen(key, texts, error_sentence(error, texts), "best_of")
                return
            async for update in self._chat.shown_while_written(key, request):
                yield update

        return handler

    def _one_per_strategy(
        self, request: ReplyRequest, data: Mapping[str, Any]
    ) -> list[ReplyRequest]:
        if not self._services.models.can_force(request.model):
            raise InputError("the model cannot continue given text", code="cannot_force")
        return [
            replace(
                request,
                strategy=name,
                must_show=True,
                origin=Origin("strategy", Part.STRATEGY, name),
            )
            for name in ESCONV_STRATEGIES.names
        ]

    # --- among existing replies ---

    def switch(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Make another reply the current one."""
        data = event_data(event)
        index, number = number_in(data, "turn"), number_in(data, "reply")

        def change(session: Session) -> Session:
            switched = session.switched(index, number)
            # Switching again restores the earlier reply; an Undo that restores messages stays.
            return (
                replace(switched, undo=None) if session.undo and session.undo.back_to else switched
            )

        return self._changed(conversation_id, request, change)

    def compare(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Compare another reply with the current one; the same reply again ends the comparison."""
        number = number_in(event_data(event), "reply")

        def change(session: Session) -> Session:
            return replace(session, compared=0 if session.compared == number else max(0, number))

        return self._changed(conversation_id, request, change)

    def _changed(
        self,
        conversation_id: str | None,
        request: gr.Request,
        change: Callable[[Session], Session],
    ) -> Update:
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        try:
            self._not_while_writing(key)
            self._services.store.update(key, change)
        except InputError as error:
            return {self._parts.error: error_html(error, texts)} | self._chat.screen(key, texts)
        return {self._parts.error: ""} | self._chat.screen(key, texts)

    def _not_while_writing(self, key: SessionKey) -> None:
        if self._services.chat_jobs.job(key) is not None:
            raise InputError("a reply is on its way", code="already_writing")


# --- what a control requests ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Steered:
    given: tuple[GivenStep, ...]
    strategy: str | None
    origin: Origin


_Steer = Callable[[Progress, Mapping[str, Any]], _Steered]
"""From the current reply and what the browser sent to what is requested."""


_Several = Callable[[ReplyRequest, Mapping[str, Any]], Sequence[ReplyRequest]]
"""From the choices under the message box and what the browser sent to one request per reply."""


def _samples(request: ReplyRequest, data: Mapping[str, Any]) -> list[ReplyRequest]:
    size = number_in(data, "size")
    if not SMALLEST <= size <= LARGEST:
        values = {"smallest": SMALLEST, "largest": LARGEST}
        raise InputError("not so many", code="best_of_size", values=values)
    return [replace(request, origin=Origin("sample"))] * size


def _edited(progress: Progress, data: Mapping[str, Any]) -> _Steered:
    part = _part(data)
    labels = data.get("labels")
    labels = labels if isinstance(labels, Mapping) else {}
    chosen = {name: _text(labels, name) for name in LABELS[part]}
    step = edited_step(part, _text(data, "text"), chosen)
    *before, original = _before(progress, _following(part))
    if original.step == step:
        return _Steered((*before, original), None, Origin("kept", part, parent=progress.number))
    origin = Origin("edited", part, parent=progress.number)
    return _Steered((*before, GivenStep(step)), None, origin)


def _kept(progress: Progress, data: Mapping[str, Any]) -> _Steered:
    part = _part(data)
    origin = Origin("kept", part, parent=progress.number)
    return _Steered(_before(progress, _following(part)), None, origin)


def _by_strategy(progress: Progress, data: Mapping[str, Any]) -> _Steered:
    strategy = _text(data, "strategy")
    check_strategy(strategy, ESCONV_STRATEGIES)
    origin = Origin("strategy", Part.STRATEGY, strategy, progress.number)
    return _Steered(_before(progress, Part.STRATEGY), strategy, origin)


def _before(progress: Progress, part: Part) -> tuple[GivenStep, ...]:
    """Return the steps before a part, and who first wrote them."""
    if progress.record is None:
        raise InputError("the reply has not ended", code="already_writing")
    return tuple(
        replace(kept, writer=Writer.PERSON)
        if progress.parts[kept.part].writer is Writer.PERSON
        else kept
        for kept in kept_steps(progress.record.reading, part)
    )


def _following(part: Part) -> Part:
    return list(Part)[list(Part).index(part) + 1]


def _part(data: Mapping[str, Any]) -> Part:
    named = data.get("part")
    part = next((step for step in STEPS if step.value == named), None)
    if part is None:
        raise InputError("no such step", code="step_unknown")
    return part


def _text(data: Mapping[str, Any], name: str) -> str:
    return text_in(data, name)[:MOST_CHARACTERS]
