"""Steering: a person changes a step, asks for another strategy, goes on from a step, or draws several.

These are the handlers behind the inspector's controls. A reply that comes of it stands beside the one
before, and is shown.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
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
    Update,
    error_html,
    error_sentence,
    number_in,
)
from ui_components.server.visitors import conversation_of
from ui_components.shared.progress import Origin, Progress
from ui_components.shared.services import Services
from ui_components.shared.session import Session, way_back
from ui_components.shared.session_store import SessionKey

MOST_CHARACTERS = 20_000
"""Of what a form may send; who sends more did not use the form."""


class Steering:
    """The handlers of the inspector's controls."""

    def __init__(self, services: Services, parts: ChatParts, chat: Chat) -> None:
        self._services = services
        self._parts = parts
        self._chat = chat
        self.edit_step = self._handler(_edited)
        """Go on from a step as a person has changed it."""
        self.keep_step = self._handler(_kept)
        """Write again what follows a step."""
        self.try_strategy = self._handler(_by_strategy)
        """Write a reply that follows another strategy, from the same history and emotion step."""

    # --- another reply that goes out from this one ---

    def _handler(self, wish: "_Asked") -> Callable[..., AsyncIterator[Update]]:
        """Return what gradio calls for a wish: it tells by the signature what to hand over."""

        async def handler(
            model: str,
            judge: str,
            seed: str | None,
            conversation_id: str | None,
            request: gr.Request,
            event: gr.EventData,
        ) -> AsyncIterator[Update]:
            texts, data = self._services.texts(request), _data(event)
            key = self._services.key(request, conversation_of(conversation_id))
            index = number_in(data, "turn")
            try:
                order = self._chat.order(model, judge, seed)
                progress = self._services.store.get(key).turn(index).progress
                if progress is None or progress.number != number_in(data, "reply"):
                    raise InputError("another reply is shown", code="turn_gone")
                given, strategy, origin = wish(progress, data)
                order = replace(order, given=given, strategy=strategy, origin=origin)
                await self._chat.begin(key, self._remembering(index, origin), order, index)
            except InputError as error:
                sentence = error_sentence(error, texts)
                yield self._chat.screen(key, texts, sentence, str(data.get("part", "")))
                return
            self._services.store.update(key, lambda now: replace(now, compared=origin.parent))
            async for update in self._chat.shown_while_written(key, texts):
                yield update

        return handler

    def _remembering(self, index: int, origin: Origin) -> Callable[[Session], Session]:
        now = self._services.store.now()

        def change(session: Session) -> Session:
            progress = session.turn(index).progress
            if progress is None or progress.number != origin.parent:
                raise InputError("another reply is shown", code="turn_gone")
            undo = way_back(session, index, "retried", now)
            return replace(session, undo=undo, editing=None)

        return change

    # --- several at once ---

    async def best_of(
        self,
        model: str,
        judge: str,
        seed: str | None,
        conversation_id: str | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> AsyncIterator[Update]:
        """Write several replies to the last message, to be ranked and chosen from."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        size = number_in(_data(event), "size")
        try:
            if not SMALLEST <= size <= LARGEST:
                values = {"smallest": SMALLEST, "largest": LARGEST}
                raise InputError("not so many", code="best_of_size", values=values)
            order = replace(self._chat.order(model, judge, seed), origin=Origin("sample"))
            await self._chat.wait_for_stopped(key)
            self._services.writers.begin_best_of(key, order, size)
        except InputError as error:
            yield self._chat.screen(key, texts, error_sentence(error, texts), "best_of")
            return
        async for update in self._chat.shown_while_written(key, texts):
            yield update

    # --- among the replies that there are ---

    def switch(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Show another reply to a message, and go on from it."""
        data, now = _data(event), self._services.store.now()
        index, number = number_in(data, "turn"), number_in(data, "reply")

        def change(session: Session) -> Session:
            switched = session.switched(index, number)
            if switched is session:
                return session
            return replace(switched, undo=way_back(session, index, "switched", now))

        return self._changed(conversation_id, request, change)

    def compare(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Lay another reply beside the one that is shown; the same one again takes it away."""
        number = number_in(_data(event), "reply")

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
        if self._services.writers.job(key) is not None:
            raise InputError("a reply is on its way", code="already_writing")


# --- what was asked for --------------------------------------------------------------------------

_Wish = tuple[tuple[GivenStep, ...], str | None, Origin]
_Asked = Callable[[Progress, Mapping[str, Any]], _Wish]
"""From the reply that is shown and what the browser sent to what is to be written."""


def _edited(progress: Progress, data: Mapping[str, Any]) -> _Wish:
    part = _part(data)
    labels = data.get("labels")
    typed = _text(data.get("text"))
    chosen = {
        name: _text(labels.get(name)) if isinstance(labels, Mapping) else ""
        for name in LABELS[part]
    }
    step = edited_step(part, typed, chosen)
    *before, as_it_was = _before(progress, _following(part))
    if as_it_was.step == step:  # nothing was changed
        return (*before, as_it_was), None, Origin("kept", part, parent=progress.number)
    origin = Origin("edited", part, parent=progress.number)
    return (*before, GivenStep(step)), None, origin


def _kept(progress: Progress, data: Mapping[str, Any]) -> _Wish:
    part = _part(data)
    return _before(progress, _following(part)), None, Origin("kept", part, parent=progress.number)


def _by_strategy(progress: Progress, data: Mapping[str, Any]) -> _Wish:
    strategy = _text(data.get("strategy"))
    check_strategy(strategy, ESCONV_STRATEGIES)
    origin = Origin("strategy", Part.STRATEGY, strategy, progress.number)
    return _before(progress, Part.STRATEGY), strategy, origin


def _before(progress: Progress, part: Part) -> tuple[GivenStep, ...]:
    """Return the steps that stand before a part, and who wrote them at first."""
    if progress.record is None:
        raise InputError("the reply is not over", code="already_writing")
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


def _text(value: object) -> str:
    return value[:MOST_CHARACTERS] if isinstance(value, str) else ""


def _data(event: gr.EventData) -> Mapping[str, Any]:
    data = event._data
    return data if isinstance(data, Mapping) else {}
