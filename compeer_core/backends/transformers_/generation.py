"""Turns that a model writes, token by token, for several visitors at the same time.

Here is what belongs to one turn: its parts, its text, its budget, how it is stopped. Which turn gets
the next token, and how several get theirs in one pass, is the business of `rounds`.

A turn that is alone is written by `model.generate`, with two pieces of ours plugged in: a stopping
criterion that sees every token at once (it decodes, streams, and finds the end of a part) and, for
sampling, `Choice`. `generate` costs about 1 ms to enter and 0.8 ms a token beside the forward pass
of COMPEER-nano (7 ms on one busy core); that did not justify a decoding loop of our own. What it
calls for each token is ours where that pays: see `fused_step`.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.sampler import Choice
from compeer_core.backends.transformers_.scheduler import Rounds
from compeer_core.backends.transformers_.sequence_state import Track
from compeer_core.backends.transformers_.text_decoder import TextDecoder
from compeer_core.errors import BackendError, CompeerError


@dataclass(eq=False)
class _Part:
    """One call of `generate`: what it waits for, and the way back to the caller.

    It is what `rounds` writes. The queue takes all that a turn may say, so a caller who does not
    read holds up nobody.
    """

    turn: "TransformersCompletion"
    until: str | None
    texts: "queue.SimpleQueue[str | Exception | None]" = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    seen: str = ""
    finished: bool = False
    alone: bool = False

    @property
    def track(self) -> Track:
        return self.turn.track

    @property
    def choice(self) -> Choice:
        return self.turn.choice

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
    """One turn while it is written. See `compeer_core.backends.protocol.Completion`.

    Attributes:
        track: What the model has read of it, and what it shall read next.
        choice: How its next token is chosen.
        dropped_turns: Messages at the beginning of the conversation that the model does not see,
            because the conversation is longer than it can read.
    """

    def __init__(
        self,
        rounds: Rounds,
        track: Track,
        sampling: Sampling,
        stop: threading.Event,
        dropped_turns: int,
    ) -> None:
        chat = rounds.chat
        self._rounds = rounds
        self._chat = chat
        self.track = track
        self.choice = Choice(sampling, chat.placeholder, chat.model.device)
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
            self._rounds.add(part)
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

        # The round that may be running ends at its next token; the cache goes after it.
        try:
            self._chat.owner.submit(self.track.reset)
        except BackendError:
            self.track.reset()

    # --- on the owner thread -------------------------------------------------------------------

    @property
    def is_halted(self) -> bool:
        """Whether no more tokens are wanted."""
        given_up = self._closed or self._chat.owner.closed
        return given_up or self._ended or self._stop.is_set()

    @property
    def left(self) -> int:
        """Tokens that the budget still allows."""
        return self._budget - self._tokens

    def take(self, part: _Part, token: int) -> None:
        """Add a token to the turn."""
        self.track.ids.append(token)
        self._tokens += 1
        if token in self._chat.end_tokens:
            self._ended = True
            return
        self._show(part, self._decoder.push(token))
        if self._tokens >= self._budget or self._full:
            self._ended = True

    def give_up(self) -> None:
        """Let the turn be over, after a failure."""
        self._ended = True

    @property
    def _full(self) -> bool:
        limit = self._chat.limit
        return limit is not None and len(self.track.ids) >= limit

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
            self.track.truncate(len(self.track.ids) - count)
            self._carried = ""
        self.track.ids += self._chat.continuation(text)
        self._decoder.restart(self.track.ids[-1:])
        if self._full:
            self._ended = True


class TransformersBackend:
    """A policy in this process. See `compeer_core.backends.protocol.Backend`."""

    can_write = True

    def __init__(
        self, name: str, rounds: Rounds, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = rounds.chat.reserved
        self._rounds = rounds
        self._chat = rounds.chat
        self._adapter = adapter
        self._release = release

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> TransformersCompletion:
        def begin() -> TransformersCompletion:
            encoded, dropped = self._chat.encode_fitting(messages, sampling.max_new_tokens)
            track = Track(encoded, self._adapter)
            self._rounds.tracks.add(track)
            return TransformersCompletion(self._rounds, track, sampling, stop, dropped)

        return self._chat.owner.call(begin)

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._release()
