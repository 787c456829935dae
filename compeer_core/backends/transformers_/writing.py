"""Turns that a model writes, token by token, for several visitors by turns.

A turn is written in slices: when somebody else waits, a slice ends after a tenth of a second and
the turn queues up again.

Generation is `model.generate`, with two pieces of ours plugged in: a stopping criterion that sees
every token at once (it decodes, streams, and finds the end of a part) and, for sampling, `Choice`.
`generate` costs about 1 ms to enter and 0.8 ms a token beside the forward pass of COMPEER-nano
(7 ms on one busy core); that did not justify a decoding loop of our own.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.chat_model import ChatModel
from compeer_core.backends.transformers_.choice import Choice
from compeer_core.backends.transformers_.failures import brief
from compeer_core.backends.transformers_.text_decoder import TextDecoder
from compeer_core.backends.transformers_.track import Track
from compeer_core.errors import BackendError, CompeerError

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.1
"""How long a turn may keep the owner thread while somebody else waits for it."""


@dataclass
class _Part:
    """One call of `generate`: what it waits for, and the way back to the caller."""

    until: str | None
    texts: "queue.SimpleQueue[str | Exception | None]" = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    seen: str = ""
    finished: bool = False


class _EveryToken(StoppingCriteria):
    """Hands each new token to the completion and stops when that says so."""

    def __init__(self, take: Callable[[int], bool]) -> None:
        self._take = take
        self._done = False

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        # Some devices are asked for one token more than the criterion wanted: it is not taken.
        self._done = self._done or self._take(int(input_ids[0, -1]))
        return torch.full((1,), self._done, dtype=torch.bool, device=input_ids.device)


class TransformersCompletion:
    """One turn while it is written. See `compeer_core.backends.protocol.Completion`.

    Attributes:
        dropped_turns: Messages at the beginning of the conversation that the model does not see,
            because the conversation is longer than it can read.
    """

    def __init__(
        self,
        chat: ChatModel,
        track: Track,
        sampling: Sampling,
        stop: threading.Event,
        dropped_turns: int,
    ) -> None:
        self._chat = chat
        self._track = track
        self._stop = stop
        self._budget = sampling.max_new_tokens
        self._choice = Choice(sampling, chat.placeholder, chat.model.device)
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
        part = _Part(until or None)
        if self._closed:
            raise BackendError(f"{self._chat.name}: the turn was closed")
        carried, self._carried = self._carried, ""
        if carried:
            self._show(part, carried)
        if part.finished or self._ended:
            part.texts.put(None)
        else:
            self._chat.owner.submit(lambda: self._slice(part))
        try:
            while (text := part.texts.get()) is not None:
                if isinstance(text, Exception):
                    raise text
                yield text
        finally:
            part.cancelled = True  # whoever stops listening stops the model

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

        # The slice that may be running ends at its next token; the cache goes after it.
        try:
            self._chat.owner.submit(self._track.reset)
        except BackendError:
            self._track.reset()

    # --- on the owner thread -------------------------------------------------------------------

    def _slice(self, part: _Part) -> None:
        """Write until the part ends, or somebody else has waited long enough."""
        if self._halted(part):
            part.texts.put(None)
            return
        begun = time.monotonic()

        def take(token: int) -> bool:
            over = self._take(part, token)
            late = time.monotonic() - begun > SLICE_SECONDS
            return over or (late and self._chat.owner.somebody_waits)

        try:
            left = self._budget - self._tokens
            self._chat.run(self._track, left, [self._choice], [_EveryToken(take)])
            if not part.finished and not self._halted(part):
                self._chat.owner.submit(lambda: self._slice(part))
                return
        except CompeerError as error:
            self._ended = True
            part.texts.put(error)
        except Exception as error:
            # Whatever a model runs into, this turn is over, and the thread must live on.
            logger.exception("%s failed while it wrote", self._chat.name)
            self._ended = True
            self._track.reset()
            failure = BackendError(f"{self._chat.name} failed while it wrote: {brief(error)}")
            failure.__cause__ = error
            part.texts.put(failure)
        part.texts.put(None)

    def _halted(self, part: _Part) -> bool:
        given_up = part.cancelled or self._closed or self._chat.owner.closed
        return given_up or self._ended or self._stop.is_set()

    def _take(self, part: _Part, token: int) -> bool:
        """Add a token to the turn; say whether the part (or more) is over."""
        self._track.ids.append(token)
        self._tokens += 1
        if token in self._chat.end_tokens:
            self._ended = True
            return True
        self._show(part, self._decoder.push(token))
        if self._tokens >= self._budget or self._full:
            self._ended = True
        return part.finished or self._halted(part)

    @property
    def _full(self) -> bool:
        limit = self._chat.limit
        return limit is not None and len(self._track.ids) >= limit

    def _show(self, part: _Part, text: str) -> None:
        """Pass text on, and keep what follows the end of the part for the next one."""
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
        if self._carried:
            # The last token said more than the caller has seen. Take it back, and write the part
            # of it that was seen together with the new text.
            count, shown = self._decoder.group
            text = shown[: len(shown) - len(self._carried)] + text
            self._track.truncate(len(self._track.ids) - count)
            self._carried = ""
        self._track.ids += self._chat.continuation(text)
        self._decoder.restart(self._track.ids[-1:])
        if self._full:
            self._ended = True


class TransformersBackend:
    """A policy in this process. See `compeer_core.backends.protocol.Backend`."""

    can_write = True

    def __init__(
        self, name: str, chat: ChatModel, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = chat.reserved
        self._chat = chat
        self._adapter = adapter
        self._release = release

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> TransformersCompletion:
        def begin() -> TransformersCompletion:
            encoded, dropped = self._chat.encode_fitting(messages, sampling.max_new_tokens)
            track = Track(encoded, self._adapter)
            return TransformersCompletion(self._chat, track, sampling, stop, dropped)

        return self._chat.owner.call(begin)

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._release()
