"""The screen Compare: one message, two to four replies side by side, one vote.

Handlers change the `Comparison` in the store and draw it. While a round is being generated, the handler
that began it (or the one of a reloaded page) watches all its sides in one generator, because a browser
would run two of them one after the other.

Nothing that a page sends is trusted: the store decides which battle a vote is for, whose it is and
whether it may be voted on.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from compeer_core.cer import StepLabels
from compeer_core.dialogue import Speaker, Utterance, check_message
from compeer_core.errors import InputError, StoreError
from compeer_core.reasoning import STEPS
from compeer_core.votes.battles import Agreement, Steps
from ui_components.chat.handlers import (
    error_line,
    message_box,
)
from ui_components.chat.starters import with_starter
from ui_components.compare.comparison import LETTERS, Comparison
from ui_components.compare.jobs import RoundJob, RoundJobs, RoundRequest
from ui_components.compare.view import ballot_html, talk_html
from ui_components.server.visitors import address_of, conversation_of
from ui_components.shared.events import event_data, number_in, on, text_in
from ui_components.shared.jobs import Update, watch
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey
from ui_components.shared.texts import ASSETS, Texts

logger = logging.getLogger(__name__)

STORAGE_KEY = "compeer-comparison"
BLIND, NAMED = "blind", "named"
FEWEST, MOST = 2, len(LETTERS)


# --- the parts of the screen ---------------------------------------------------------------------


@dataclass(frozen=True)
class CompareParts:
    """The components that the handlers read and fill."""

    talk: gr.HTML
    ballot: gr.HTML
    error: gr.HTML
    message: gr.MultimodalTextbox
    alt: gr.Textbox
    mode: gr.Radio
    models: gr.CheckboxGroup
    with_reasoning: gr.Checkbox
    keep_words: gr.Checkbox
    conversation_id: gr.BrowserState


def remember_comparison() -> gr.BrowserState:
    """Add the component that stores the comparison's id in the browser.

    It must be outside the tabs: in one that is not open yet it would not have read the browser's storage
    when the page asks for it.
    """
    # The secret protects nothing; without one the entry would be unreadable after a restart.
    return gr.BrowserState("", storage_key=STORAGE_KEY, secret=STORAGE_KEY)


def build_compare(
    services: Services, i18n: gr.I18n, page: gr.Blocks, conversation_id: gr.BrowserState
) -> None:
    """Lay out the screen and wire it."""
    policies = [
        (entry.title or entry.name, entry.name) for entry in services.models.entries("policy")
    ]
    enough = len(policies) >= FEWEST
    with gr.Column(elem_id="compare"):
        talk = gr.HTML(
            elem_id="compare-talk",
            js_on_load=(ASSETS / "style" / "compare.js").read_text(encoding="utf-8"),
            apply_default_css=False,
        )
        ballot = gr.HTML(
            elem_id="compare-ballot",
            js_on_load=(ASSETS / "style" / "compare_ballot.js").read_text(encoding="utf-8"),
            apply_default_css=False,
        )
        error = gr.HTML(elem_id="compare-error", js_on_load=None, apply_default_css=False)
        with gr.Column(elem_id="compare-ask", visible=enough):
            alt, message = message_box(i18n, "compare.message", "compare-")
            with gr.Accordion(i18n("compare.settings"), open=True, elem_id="compare-settings"):
                mode = gr.Radio(
                    [(str(i18n("compare.blind")), BLIND), (str(i18n("compare.named")), NAMED)],
                    value=BLIND,
                    label=i18n("compare.mode"),
                    elem_id="compare-mode",
                )
                models = gr.CheckboxGroup(
                    policies,
                    label=i18n("compare.models"),
                    info=i18n("compare.models_info"),
                    elem_id="compare-models",
                )
                with gr.Row():
                    with_reasoning = gr.Checkbox(
                        label=i18n("compare.with_reasoning"),
                        info=i18n("compare.with_reasoning_info"),
                        elem_id="compare-with-reasoning",
                        min_width=280,
                    )
                    keep_words = gr.Checkbox(
                        label=i18n("compare.keep_words"),
                        info=i18n("compare.keep_words_info"),
                        elem_id="compare-keep-words",
                        min_width=280,
                    )
    parts = CompareParts(
        talk, ballot, error, message, alt, mode, models, with_reasoning, keep_words, conversation_id
    )
    _wire(page, Compare(services, parts), parts)


def _wire(page: gr.Blocks, compare: "Compare", parts: CompareParts) -> None:
    talk, ballot, conversation = parts.talk, parts.ballot, parts.conversation_id
    settings = [parts.mode, parts.models, parts.with_reasoning, parts.keep_words, conversation]
    everything = [talk, ballot, parts.error, parts.message, parts.alt, conversation]
    drawn = [talk, ballot, parts.error]
    on(
        parts.message.submit,
        compare.send,
        [parts.message, parts.alt, *settings],
        everything,
        streams=True,
    )
    on(talk.draw_again, compare.draw_again, settings, everything, streams=True)
    on(page.load, compare.load, [conversation], everything, streams=True)
    on(parts.message.change, compare.attach, [parts.message], [parts.alt])
    on(parts.message.stop, compare.stop_all, [conversation], [])
    on(talk.stop_side, compare.stop_side, [conversation], [])
    on(talk.use_starter, compare.use_starter, [parts.message], [parts.message])
    on(talk.choose_side, compare.choose_side, [conversation], drawn)
    on(talk.clear_all, compare.clear, [conversation], drawn)
    on(ballot.stop_all, compare.stop_all, [conversation], [])
    on(ballot.vote, compare.vote, [conversation], drawn)
    on(ballot.undo, compare.undo, [conversation], drawn)
    on(ballot.explain, compare.explain, [conversation], drawn)
    on(ballot.reveal, compare.reveal, [conversation], drawn)


# --- handlers ------------------------------------------------------------------------------------


class Compare:
    """The handlers of the screen."""

    def __init__(self, services: Services, parts: CompareParts) -> None:
        self._services = services
        self._parts = parts

    @property
    def _jobs(self) -> RoundJobs:
        return self._services.compare_jobs

    # --- rounds ---

    async def send(
        self,
        message: Mapping[str, Any] | None,
        alt: str | None,
        mode: str,
        models: Sequence[str] | None,
        with_reasoning: bool,
        keep_words: bool,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        """Open a round for a message and stream its replies."""
        texts, parts = self._services.texts(request), self._parts
        conversation = conversation_of(conversation_id)
        key = self._services.key(request, conversation)
        files = [str(path) for path in (message or {}).get("files") or ()]
        uploads, owner = self._services.uploads, self._services.owner(request)
        text = (message or {}).get("text") or ""
        risk = await asyncio.to_thread(self._services.risks.assess, key, text)
        try:
            images = await uploads.read(files, owner, alt or "")
            text = check_message(text, bool(images))
            gets_replies = risk.withheld_for is None
            if not gets_replies:
                await asyncio.to_thread(self._jobs.end_for_risk, key, risk, text)
            else:
                round_request = self._round_request(key, mode, models, with_reasoning, keep_words)
                utterance = Utterance(Speaker.SEEKER, text, images)
                await self._begin(
                    key,
                    lambda: self._jobs.begin(key, utterance, round_request, address_of(request)),
                )
        except (InputError, StoreError) as error:
            help_card = self._screen(key, texts) if self._services.risks.get(key).kind else {}
            yield {parts.error: refusal_html(error, texts)} | help_card
            return
        self._services.risks.accepted(key, risk)
        for path in files:
            uploads.forget(path, owner)
        yield {
            parts.conversation_id: conversation,
            parts.message: gr.MultimodalTextbox(
                value={"text": "", "files": []}, submit_btn=not gets_replies, stop_btn=gets_replies
            ),
            parts.alt: gr.Textbox(value="", visible=False),
            parts.error: "",
        }
        async for update in self._watch(key, texts):
            yield update

    async def draw_again(
        self,
        mode: str,
        models: Sequence[str] | None,
        with_reasoning: bool,
        keep_words: bool,
        conversation_id: str | None,
        request: gr.Request,
    ) -> AsyncIterator[Update]:
        """Draw other models for the last message and stream their replies."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        try:
            round_request = self._round_request(key, mode, models, with_reasoning, keep_words)
            await self._begin(
                key, lambda: self._jobs.begin_again(key, round_request, address_of(request))
            )
        except (InputError, StoreError) as error:
            yield {parts.error: refusal_html(error, texts)} | self._screen(key, texts)
            return
        yield {
            parts.error: "",
            parts.message: gr.MultimodalTextbox(submit_btn=False, stop_btn=True),
        }
        async for update in self._watch(key, texts):
            yield update

    async def load(self, conversation_id: str | None, request: gr.Request) -> AsyncIterator[Update]:
        """Show the visitor's comparison and continue to stream a running round."""
        texts, parts = self._services.texts(request), self._parts
        key = self._services.key(request, conversation_of(conversation_id))
        yield self._screen(key, texts)
        if self._jobs.job(key) is not None:
            yield {parts.message: gr.MultimodalTextbox(submit_btn=False, stop_btn=True)}
            async for update in self._watch(key, texts):
                yield update

    def stop_side(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> None:
        """Stop one side; the handler that watches it shows the result."""
        key = self._services.key(request, conversation_of(conversation_id))
        self._jobs.stop(key, number_in(event_data(event), "number"))

    def stop_all(self, conversation_id: str | None, request: gr.Request) -> None:
        """Stop all sides; the visitor can vote on what they have written."""
        self._jobs.stop(self._services.key(request, conversation_of(conversation_id)))

    def clear(self, conversation_id: str | None, request: gr.Request) -> Update:
        """Clear the comparison; votes remain."""
        key = self._services.key(request, conversation_of(conversation_id))
        self._jobs.stop(key)
        self._jobs.store.update(key, lambda _: Comparison())
        return {self._parts.error: ""} | self._screen(key, self._services.texts(request))

    def choose_side(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Continue from another reply than the preferred one."""
        number = number_in(event_data(event), "number")
        return self._changed(conversation_id, request, lambda key: self._jobs.choose(key, number))

    # --- votes ---

    def vote(self, conversation_id: str | None, request: gr.Request, event: gr.EventData) -> Update:
        """Vote on the battle that the page showed."""
        data = event_data(event)
        both_seen = data.get("both_seen")
        return self._changed(
            conversation_id,
            request,
            lambda key: self._jobs.vote(
                key,
                text_in(data, "battle"),
                text_in(data, "preference"),
                revision=number_in(data, "revision"),
                dwell_ms=number_in(data, "dwell_ms") if "dwell_ms" in data else None,
                both_seen=both_seen if isinstance(both_seen, bool) else None,
            ),
        )

    def undo(self, conversation_id: str | None, request: gr.Request, event: gr.EventData) -> Update:
        """Take a vote back."""
        data = event_data(event)
        battle, revision = text_in(data, "battle"), number_in(data, "revision")
        return self._changed(
            conversation_id, request, lambda key: self._jobs.undo(key, battle, revision)
        )

    def explain(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Add reasons to a vote."""
        data = event_data(event)
        return self._changed(conversation_id, request, lambda key: self._explain(key, data))

    def reveal(
        self, conversation_id: str | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Show the models' names after the vote; reasons may be sent along."""
        data = event_data(event)

        def change(key: SessionKey) -> None:
            if "note" in data:
                self._explain(key, data)
            self._jobs.reveal(key, text_in(data, "battle"))

        return self._changed(conversation_id, request, change)

    def _explain(self, key: SessionKey, data: Mapping[str, Any]) -> None:
        tags = data.get("tags")
        named = [str(tag) for tag in tags] if isinstance(tags, list) else []
        self._jobs.explain(
            key,
            text_in(data, "battle"),
            named,
            text_in(data, "note"),
            text_in(data, "token"),
            _steps_in(data),
        )

    # --- the message box ---

    def use_starter(
        self, message: Mapping[str, Any] | None, request: gr.Request, event: gr.EventData
    ) -> Update:
        """Put a starter into the box."""
        texts = self._services.texts(request)
        return {
            self._parts.message: with_starter(
                message, number_in(event_data(event), "number"), texts
            )
        }

    def attach(self, message: Mapping[str, Any] | None) -> Update:
        """Show the description field once a photo is attached."""
        return {self._parts.alt: gr.Textbox(visible=bool((message or {}).get("files")))}

    # --- shared by the handlers ---

    def _round_request(
        self,
        key: SessionKey,
        mode: str,
        models: Sequence[str] | None,
        with_reasoning: bool,
        keep_words: bool,
    ) -> RoundRequest:
        """Check the settings and return the request that they make.

        Raises:
            InputError: There is no cookie, a model is not in the list, or their number does not fit.
        """
        if not key.visitor:
            raise InputError("there is no cookie", code="compare_cookies")
        if mode not in {BLIND, NAMED}:
            raise InputError("there is no such mode", code="compare_form")
        known = [entry.name for entry in self._services.models.entries("policy")]
        named = list(dict.fromkeys(models or ()))
        if not set(named) <= set(known):
            raise InputError("no such model", code="unknown_model")
        blind = mode == BLIND
        if named and not FEWEST <= len(named) <= MOST:
            code = "compare_models" if blind else "compare_named_models"
            raise InputError("too many or too few models", code=code)
        if not named and not blind and len(known) > MOST:
            raise InputError("too many models", code="compare_named_models")
        candidates = named or known
        if blind:
            # A model that cannot be loaded would spoil every round that it is drawn for.
            able = [name for name in candidates if not self._services.models.is_broken(name)]
            candidates = able if len(able) >= FEWEST else candidates
        if len(candidates) < FEWEST:
            raise InputError("too few models", code="compare_too_few")
        return RoundRequest(
            models=tuple(candidates),
            blind=blind,
            with_reasoning=bool(with_reasoning),
            keep_words=bool(keep_words),
            judge=self._services.models.default("judge"),
        )

    async def _begin(self, key: SessionKey, begin: Callable[[], RoundJob]) -> None:
        await self._jobs.wait_for_stopped(key)
        await asyncio.to_thread(begin)

    def _changed(
        self,
        conversation_id: str | None,
        request: gr.Request,
        change: Callable[[SessionKey], None],
    ) -> Update:
        """Apply a change and draw the result, or why it was refused."""
        texts = self._services.texts(request)
        key = self._services.key(request, conversation_of(conversation_id))
        refusal = ""
        try:
            change(key)
        except (InputError, StoreError) as error:
            refusal = refusal_html(error, texts)
        return {self._parts.error: refusal} | self._screen(key, texts)

    async def _watch(self, key: SessionKey, texts: Texts) -> AsyncIterator[Update]:
        """Yield what has changed on the screen, until all sides and the judge have ended."""
        parts = self._parts
        drawn_comparison: Comparison | None = None
        drawn: dict[gr.HTML, str] = {}
        is_box_open = False

        def draw(is_over: bool) -> Update:
            nonlocal drawn_comparison, is_box_open
            comparison = self._jobs.store.get(key)
            update: Update = {parts.talk: self._talk(key, comparison, texts)}
            # The ballot shows how many seconds are left for taking a vote back. It is redrawn only when
            # the comparison has changed, because the visitor may be writing a note in it.
            if comparison is not drawn_comparison:
                drawn_comparison = comparison
                update[parts.ballot] = self._ballot(key, comparison, texts)
            update = {part: html for part, html in update.items() if html != drawn.get(part)}
            drawn.update(update)
            last = comparison.last
            if not is_box_open and (is_over or last is None or last.is_over):
                is_box_open = (
                    True  # the judge may still be running; the visitor need not wait for it
                )
                update[parts.message] = gr.MultimodalTextbox(submit_btn=True, stop_btn=False)
            return update

        job = self._jobs.job(key)
        async for update in watch(job, draw, heartbeat={parts.error: gr.skip()}):
            yield update

    def _screen(self, key: SessionKey, texts: Texts) -> Update:
        comparison = self._jobs.store.get(key)
        return {
            self._parts.talk: self._talk(key, comparison, texts),
            self._parts.ballot: self._ballot(key, comparison, texts),
        }

    def _talk(self, key: SessionKey, comparison: Comparison, texts: Texts) -> str:
        return talk_html(
            comparison,
            texts,
            self._services.models,
            now=time.monotonic(),
            keep_seconds=self._jobs.store.keep_seconds,
            risk=self._services.risks.get(key),
        )

    def _ballot(self, key: SessionKey, comparison: Comparison, texts: Texts) -> str:
        now = self._jobs.store.now()
        return ballot_html(
            comparison,
            texts,
            self._services.models,
            now=now,
            agreement=self._agreement(key, comparison),
        )

    def _agreement(self, key: SessionKey, comparison: Comparison) -> Agreement | None:
        last = comparison.last
        if last is None or not last.blind or all(pair.ballot.reveal is None for pair in last.pairs):
            return None
        try:
            return self._jobs.agreement(key.visitor)
        except StoreError as error:
            logger.error("the agreement with the judge could not be read: %s", error)
            return None


def _steps_in(data: Mapping[str, Any]) -> Steps:
    """Return what an event says about the steps of both sides; anything odd counts as no opinion."""
    sent = data.get("steps")
    sides = sent if isinstance(sent, list) and len(sent) == 2 else ((), ())

    def of_side(side: Any) -> StepLabels | None:
        if not isinstance(side, list) or len(side) != len(STEPS):
            return None
        first, second, third = (mark if isinstance(mark, bool) else None for mark in side)
        labels = (first, second, third)
        return None if labels == (None, None, None) else labels

    return of_side(sides[0]), of_side(sides[1])


def refusal_html(error: InputError | StoreError, texts: Texts) -> str:
    """Draw why something was refused, in the visitor's language."""
    if isinstance(error, StoreError):
        logger.error("a vote or battle could not be stored: %s", error)
        return error_line(texts("compare.refused.store"))
    for key in (f"compare.refused.{error.code}", f"errors.{error.code}"):
        if key in texts.words:
            return error_line(texts(key, **error.values))
    return error_line(texts("compare.refused.compare_form"))
