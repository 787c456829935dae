"""The policy: from a dialogue to a supporter's turn, as a stream of events.

A turn is generated part by part: the backend writes up to the closing tag of a part and keeps its
cache, so that a judge who shares the model can look at the step before the next one is begun. A
turn ends at `</reply>` whatever the model would like to add; a model that never closes a part ends
when its budget of tokens is spent, and the parser says what is missing.

The strategy can be forced. Where the backend lets text be written for the model, the model reasons
freely, and the label line is then written for it; elsewhere it is asked for in the prompt.

The first steps can be given (`compeer_core.steering`), changed by a person or kept from an earlier
turn. Where the backend lets text be written, the model goes on behind them as if they were its own.
Elsewhere the prompt states them and asks for what follows, and what the model repeats of them is
left out. Either way they stand in the turn word for word, their events come first, and say who
wrote them.
"""

import re
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compeer_core.backends.protocol import Backend, Completion, Message, Sampling
from compeer_core.dialogue import Dialogue, language_of
from compeer_core.errors import BackendError, InputError
from compeer_core.prompts import LANGUAGES, fill, load_prompt, policy_messages
from compeer_core.reasoning import (
    STEPS,
    Event,
    Part,
    PartStarted,
    StreamingParser,
    Writer,
    label_line,
)
from compeer_core.steering import GivenStep, check_given, check_strategy, render_given
from compeer_core.taxonomy import ESCONV_STRATEGIES, StrategyVocabulary

Style = Literal["trained", "prompted"]
"""Was the model trained to write the grammar, or must a prompt ask for it?"""

ANY_LANGUAGE = "*"

LABEL_START = "\n" + label_line("strategy", "").rstrip()
AFTER_FREE_TEXT = (Part.STRATEGY.closing, Part.REPLY.opening, Part.REPLY.closing)


@dataclass(frozen=True)
class Controls:
    """What a person may set for one turn."""

    strategy: str | None = None
    """A name of the policy's vocabulary that the model has to follow."""
    given: tuple[GivenStep, ...] = ()
    """The first steps of the turn; the model goes on behind them."""
    sampling: Sampling | None = None
    """None takes the policy's own; `replace(policy.sampling, seed=7)` changes one thing of it."""


@dataclass(frozen=True)
class Policy:
    """A model in the role of the supporter."""

    name: str
    backend: Backend
    style: Style = "trained"
    languages: tuple[str, ...] = (ANY_LANGUAGE,)
    """Languages that the model's card lists; "*" is any."""
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES
    sampling: Sampling = Sampling()  # noqa: RUF009  (frozen)
    """What is used where `Controls` says nothing."""

    def respond(
        self, dialogue: Dialogue, controls: Controls, stop: threading.Event
    ) -> "TurnStream":
        """Start a turn; nothing is asked of the model before the first event is.

        Raises:
            InputError: The forced strategy is not in the vocabulary (code "strategy_unknown"), the
                given steps cannot begin a turn (see `check_given`), or they say already what the
                strategy is ("strategy_given").
        """
        if controls.strategy is not None:
            check_strategy(controls.strategy, self.vocabulary)
            if len(controls.given) == len(STEPS):
                raise InputError("the strategy step is given", code="strategy_given")
        check_given(controls.given, self.vocabulary)
        return TurnStream(self, dialogue, controls, stop)

    def speaks(self, language: str) -> bool:
        """Whether the model's card lists `language`, see `speaks`."""
        return speaks(self.languages, language)


def speaks(languages: Iterable[str], language: str) -> bool:
    """Whether a card's list covers a language. One that could not be told is not held against it."""
    return language == "und" or not {ANY_LANGUAGE, language}.isdisjoint(languages)


class TurnStream:
    """The events of one turn. Iterate over it; close it when done early.

    The last event is always `TurnFinished`, also after a stop. Where the backend failed, what it
    had written is finished in the same way first, and the `BackendError` follows.
    """

    def __init__(
        self, policy: Policy, dialogue: Dialogue, controls: Controls, stop: threading.Event
    ) -> None:
        self._policy = policy
        self._sampling = policy.sampling if controls.sampling is None else controls.sampling
        self._stop = stop
        self._forced = controls.strategy
        self._given = {one.part: one.writer for one in controls.given}
        self._prefix = render_given(controls.given, policy.backend.reserved)
        self._messages = self._prompt(dialogue)
        self._completion: Completion | None = None
        self._tokens_before = 0  # of completions that were given up for one with a forced label
        self._written = ""
        self._over = False  # the reply was closed
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """End the turn and let go of the model."""
        self._events.close()

    @property
    def tokens(self) -> int:
        """Tokens generated so far (chunks, where an endpoint does not say)."""
        return self._tokens_before + (self._completion.tokens if self._completion else 0)

    # --- the turn ------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        parser = StreamingParser(self._policy.vocabulary)
        failure: BackendError | None = None
        try:
            for text in self._beginning():
                self._written += text
                yield from map(self._signed, parser.feed(text))
        except BackendError as error:
            failure = error
        finally:
            if self._completion is not None:
                self._completion.close()
        yield from parser.close()
        if failure is not None:
            raise failure

    def _open(self, sampling: Sampling) -> Completion:
        if self._completion is not None:
            self._tokens_before += self._completion.tokens
            self._completion.close()
            self._completion = None  # so that its tokens are not counted twice if open() fails
        self._completion = self._policy.backend.open(self._messages, sampling, self._stop)
        return self._completion

    def _signed(self, event: Event) -> Event:
        """Say of a part that begins who wrote it."""
        if isinstance(event, PartStarted):
            return replace(event, writer=self._given.get(event.part, Writer.MODEL))
        return event

    def _beginning(self) -> Iterator[str]:
        """The given steps, then what the model writes behind them."""
        if not self._prefix:
            self._open(self._sampling)
            yield from self._texts()
        elif self._policy.backend.can_write:
            text = self._prefix + self._ahead[0].opening
            yield text
            self._open(self._sampling).write(text)
            yield from self._texts()
        else:
            yield self._prefix
            self._open(self._sampling)
            yield from self._without_given(self._texts())

    @property
    def _ahead(self) -> list[Part]:
        """The parts that the model has to write."""
        return [part for part in Part if part not in self._given]

    def _texts(self) -> Iterator[str]:
        for part in self._ahead:
            if part is Part.STRATEGY and self._forced and self._policy.backend.can_write:
                yield from self._with_forced_label(self._forced)
            else:
                yield from self._generated(part.closing)
            if self._over or self._stop.is_set() or self._current.ended:
                return

    @property
    def _current(self) -> Completion:
        assert self._completion is not None
        return self._completion

    def _generated(self, until: str) -> Iterator[str]:
        """What the model writes up to `until`, but nothing after a closed reply."""
        end = Part.REPLY.closing
        seen = ""
        for text in self._current.generate(until):
            window = seen + text
            at = window.find(end)
            if at >= 0:
                self._over = True
                yield text[: at + len(end) - len(seen)]
                return
            seen = window[-len(end) + 1 :]
            yield text

    def _without_given(self, texts: Iterable[str]) -> Iterator[str]:
        """What a model writes that was asked to go on, without what it repeats of the beginning.

        Nothing passes before a part begins that was not given.
        """
        held, is_beyond = "", False
        for text in texts:
            if is_beyond:
                yield text
                continue
            held += text
            found = [at for part in self._ahead if (at := held.find(part.opening)) >= 0]
            if found:
                is_beyond = True
                yield held[min(found) :]
        if not is_beyond:
            again = "|".join(f"{part.opening}.*?(?:{part.closing}|$)" for part in self._given)
            yield re.sub(again, "", held, flags=re.DOTALL).lstrip()

    def _with_forced_label(self, strategy: str) -> Iterator[str]:
        """The strategy part: free text of the model's own, then the label that was asked for.

        A model that begins its label line in the expected form is stopped there, and the value is
        written for it. One that ends the part without such a line has gone too far when that is
        noticed: its completion is given up for a new one that starts with the text so far and the
        label. A tag that may end the part is therefore held back until it is known.
        """
        ending = f" {strategy}{Part.STRATEGY.closing}\n{Part.REPLY.opening}"
        passed, held = "", ""
        for text in self._generated(LABEL_START):
            whole = held + text
            found = [at for tag in AFTER_FREE_TEXT if (at := whole.find(tag)) >= 0]
            end = min(found, default=_start_of_partial(AFTER_FREE_TEXT, whole))
            passed, held = passed + whole[:end], whole[end:]
            if end:
                yield whole[:end]
            if found:
                break
        if passed.endswith(LABEL_START):
            self._current.write(ending)
            yield ending
            return
        left = self._sampling.max_new_tokens - self.tokens
        if self._stop.is_set() or left < 1:
            if held:
                yield held
            return
        opening = "" if Part.STRATEGY.opening in self._written else Part.STRATEGY.opening
        ending = f"{opening}{LABEL_START}{ending}"
        self._over = False
        self._open(replace(self._sampling, max_new_tokens=left)).write(self._written + ending)
        yield ending

    # --- the prompt ----------------------------------------------------------------------------

    def _prompt(self, dialogue: Dialogue) -> tuple[Message, ...]:
        policy = self._policy
        last = dialogue.last_seeker
        spoken = "en" if last is None else language_of(last.text)
        language = spoken if spoken in LANGUAGES else "en"
        messages = policy_messages(
            dialogue, policy.style, language, policy.backend.reserved, policy.vocabulary
        )
        if policy.backend.can_write:
            return messages
        if self._forced is not None:
            wish = fill(load_prompt("policy_strategy", language), strategy=self._forced)
            messages = _asking(messages, wish)
        if self._prefix:
            steps, following = self._prefix.rstrip(), self._ahead[0].opening
            wish = fill(load_prompt("policy_given", language), steps=steps, next=following)
            messages = _asking(messages, wish)
        return messages


def _start_of_partial(tags: Sequence[str], text: str) -> int:
    """Where an end of `text` begins that may become one of the tags, or the length of `text`."""
    longest = max(map(len, tags))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)


def _asking(messages: Sequence[Message], request: str) -> tuple[Message, ...]:
    """The same messages with a request to the model in front."""
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=(*messages[0].content, "\n\n" + request))
        return (first, *messages[1:])
    return (Message(role="system", content=(request,)), *messages)
