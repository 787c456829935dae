"""Turns that a model generates token by token, for several visitors at the same time.

This module has what belongs to one turn: parts, text, budget, stopping. `scheduler` decides which
turn gets the next token, and batches them.

A turn that is alone runs `model.generate` with two plug-ins: a stopping criterion that sees every
token at once (it decodes, streams, and finds the end of a part) and, for sampling, `Sampler`.
`generate` costs about 1 ms per call and 0.8 ms per token beside the forward pass, which takes 7 ms for a
model of 10 million weights on one busy core: too little to justify a decoding loop of our own. `fused_step` replaces the
forward pass where that pays.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.sampler import Sampler
from compeer_core.backends.transformers_.scheduler import Scheduler
from compeer_core.backends.transformers_.sequence_state import SequenceState
from compeer_core.backends.transformers_.tokens import TextDecoder
from compeer_core.backends.transformers_.turn_constraints import TurnConstraints
from compeer_core.errors import BackendError, CompeerError


@dataclass(eq=False)
class _Part:
    """One call of `generate`: its end marker, and the queue back to the caller.

    It is the row that the scheduler generates. The queue is unbounded, so a caller that does not
    read delays no other turn.
    """

    turn: "TransformersCompletion"
    until: str | None
    texts: "queue.SimpleQueue[str | Exception | None]" = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    seen: str = ""
    finished: bool = False
    alone: bool = False

    @property
    def state(self) -> SequenceState:
        return self.turn.state

    @property
    def sampler(self) -> Sampler:
        return self.turn.sampler

    @property
    def left(self) -> int:
        return self.turn.left

    @property
    def is_over(self) -> bool:
        return self.finished or self.cancelled or self.turn.is_halted

    def take(self, token: int) -> None:
        self.turn.take(self, token)

    def fail(self, error: CompeerError) -> None:
        self.turn.give_up()
        self.texts.put(error)

    def end(self) -> None:
        self.texts.put(None)


class TransformersCompletion:
    """One turn while it is generated. See `compeer_core.backends.protocol.Completion`.

    Attributes:
        state: Its tokens and cache.
        sampler: Draws its next token.
        dropped_turns: Oldest messages left out because the conversation exceeds the context.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        state: SequenceState,
        sampling: Sampling,
        stop: threading.Event,
        dropped_turns: int,
        constraints: TurnConstraints | None = None,
    ) -> None:
        chat = scheduler.chat
        self._scheduler = scheduler
        self._chat = chat
        self.state = state
        self.sampler = Sampler(sampling, chat.placeholder, chat.model.device, constraints)
        self._constraints = constraints
        self._stop = stop
        self._budget = sampling.max_new_tokens
        self._decoder = TextDecoder(chat.tokenizer, chat.hidden)
        self._carried = ""
        self._tokens = 0
        self._ended = False
        self._closed = False
        self.dropped_turns = dropped_turns

    @property
    def ended(self) -> bool:
        return self._ended and not self._carried

    @property
    def tokens(self) -> int:
        return self._tokens

    def generate(self, until: str | None = None) -> Iterator[str]:
        part = _Part(self, until or None)
        if self._closed:
            raise BackendError(f"{self._chat.name}: the turn was closed")
        carried, self._carried = self._carried, ""
        if carried:
            self._show(part, carried)
        if part.finished or self._ended:
            part.texts.put(None)
        else:
            self._scheduler.add(part)
        try:
            while (text := part.texts.get()) is not None:
                if isinstance(text, Exception):
                    raise text
                yield text
        finally:
            part.cancelled = True  # a caller that stops reading stops the model

    def write(self, text: str) -> None:
        if self._closed:
            raise BackendError(f"{self._chat.name}: the turn was closed")
        self._chat.owner.call(lambda: self._write(text))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ended = True
        self._carried = ""

        # A running slice ends at its next token; the cache is stored and freed after it.
        try:
            self._chat.owner.submit(self._store)
        except BackendError:
            self.state.reset()

    # --- on the owner thread -------------------------------------------------------------------

    def _store(self) -> None:
        """Store the prompt, with which the next turn begins, and free the rest."""
        self._chat.stored.put(self.state, len(self.state.encoded.ids))
        self.state.reset()

    @property
    def is_halted(self) -> bool:
        """Whether generation has to stop."""
        given_up = self._closed or self._chat.owner.closed
        return given_up or self._ended or self._stop.is_set()

    @property
    def left(self) -> int:
        """Tokens left in the budget."""
        return self._budget - self._tokens

    def take(self, part: _Part, token: int) -> None:
        """Add a token to the turn."""
        self.state.ids.append(token)
        self._tokens += 1
        if token in self._chat.end_tokens:
            self._ended = True
            return
        if self._constraints is not None:
            self._constraints.push(token)
        self._show(part, self._decoder.push(token))
        if self._tokens >= self._budget or self._full:
            self._ended = True

    def give_up(self) -> None:
        """End the turn after a failure."""
        self._ended = True

    @property
    def _full(self) -> bool:
        limit = self._chat.limit
        return limit is not None and len(self.state.ids) >= limit

    def _show(self, part: _Part, text: str) -> None:
        """Pass text on, and hold back what follows the end of the part for the next one."""
        if not text:
            return
        if part.until is not None:
            window = part.seen + text
            at = window.find(part.until)
            if at >= 0:
                end = at + len(part.until) - len(part.seen)
                text, self._carried = text[:end], text[end:]
                part.finished = True
            part.seen = window[max(0, len(window) - len(part.until) + 1) :]
        part.texts.put(text)

    def _write(self, text: str) -> None:
        if self._constraints is not None:
            self._constraints.write(text)
        if self._carried:
            # The last token has more text than the caller has seen. Remove it, and tokenize its
            # visible part together with the new text.
            count, shown = self._decoder.group
            text = shown[: len(shown) - len(self._carried)] + text
            self.state.truncate(len(self.state.ids) - count)
            self._carried = ""
        self.state.ids += self._chat.continuation(text)
        self._decoder.restart(self.state.ids[-1:])
        if self._full:
            self._ended = True


class TransformersBackend:
    """A policy in this process. See `compeer_core.backends.protocol.Backend`."""

    can_write = True

    def __init__(
        self, name: str, scheduler: Scheduler, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = scheduler.chat.reserved
        self._scheduler = scheduler
        self._chat = scheduler.chat
        self._adapter = adapter
        self._release = release

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> TransformersCompletion:
        def begin() -> TransformersCompletion:
            encoded, dropped = self._chat.encode_fitting(
                messages, sampling.max_new_tokens, sampling.thinking
            )
            state = SequenceState(encoded, self._adapter)
            self._scheduler.states.add(state)
            constraints = self._chat.constraints(messages, dropped, sampling)
            return TransformersCompletion(
                self._scheduler, state, sampling, stop, dropped, constraints
            )

        return self._chat.owner.call(begin)

    def close(self) -> None:
        """Release the model. May be called twice."""
        self._release()
