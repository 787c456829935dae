"""The policy: from a dialogue to a supporter's turn, as a stream of events.

A turn is generated part by part: the backend generates up to the closing tag of a part and keeps its
cache, so a judge that shares the model can score the step before the next one begins. A turn ends at
`</reply>`, whatever the model would add; a model that never closes a part ends when its token budget
is spent, and the parser reports what is missing.

The strategy can be forced. If the backend can write text into the turn, the model reasons freely and
the label line is then written for it; otherwise the prompt asks for the strategy.

The first steps can be given (`compeer_core.steering`): edited by a person, or reused from an earlier
turn. If the backend can write, the model continues after them as if they were its own. Otherwise the
prompt states them and asks for the rest, and repetitions of them are dropped. Either way they appear
in the turn verbatim, and their events come first and name their writer.
"""

import re
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from compeer_core.backends.protocol import Backend, Completion, Message, Sampling
from compeer_core.dialogue import Dialogue, language_of
from compeer_core.errors import BackendError, InputError
from compeer_core.messages import without_images
from compeer_core.prompts import LANGUAGES, fill, load_prompt, policy_messages
from compeer_core.reasoning import (
    END_OF_THOUGHTS,
    STEPS,
    THOUGHTS,
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
"""Whether the model was trained on the grammar, or a prompt asks for it."""

ANY_LANGUAGE = "*"

LABEL_START = "\n" + label_line("strategy", "").rstrip()
AFTER_FREE_TEXT = (Part.STRATEGY.closing, Part.REPLY.opening, Part.REPLY.closing)


@dataclass(frozen=True)
class Controls:
    """Settings of one turn that a person may change."""

    strategy: str | None = None
    """The strategy to force; a name of the policy's vocabulary."""
    given: tuple[GivenStep, ...] = ()
    """The first steps of the turn; the model continues after them."""
    sampling: Sampling | None = None
    """None takes the policy's own; `replace(policy.sampling, seed=7)` changes one value."""


@dataclass(frozen=True)
class Policy:
    """A model in the role of the supporter."""

    name: str
    backend: Backend
    style: Style = "trained"
    languages: tuple[str, ...] = (ANY_LANGUAGE,)
    """Languages that the model's card lists; "*" is any."""
    system_prompt: str = ""
    """The system message in the style "trained"."""
    message_suffix: str = ""
    """See `policy_messages`."""
    sees_images: bool = True
    """False leaves pictures out of its prompts."""
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES
    sampling: Sampling = Sampling()  # noqa: RUF009  (frozen)
    """The default of `Controls.sampling`."""
    strategy_openings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """First words of the strategy step, by strategy: where a strategy is forced, the step begins with them, if
    the backend can write. Otherwise a model may argue for another strategy before the forced label, and
    follow its own words in the reply."""

    def respond(
        self, dialogue: Dialogue, controls: Controls, stop: threading.Event
    ) -> "TurnStream":
        """Start a turn. The model is first called when the first event is requested.

        Raises:
            InputError: The forced strategy is not in the vocabulary (code "strategy_unknown"), the
                given steps cannot begin a turn (see `check_given`), or they already include the
                strategy ("strategy_given").
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
    """Whether a card's list covers a language; an undetermined one ("und") always counts as covered."""
    return language == "und" or not {ANY_LANGUAGE, language}.isdisjoint(languages)


class TurnStream:
    """The events of one turn. Iterate over it; close it when done early.

    The last event is always `TurnFinished`, also after a stop. If the backend fails, the partial
    turn ends in the same way, and then the `BackendError` is raised.
    """

    def __init__(
        self, policy: Policy, dialogue: Dialogue, controls: Controls, stop: threading.Event
    ) -> None:
        self._policy = policy
        self._sampling = policy.sampling if controls.sampling is None else controls.sampling
        self._stop = stop
        self._forced = controls.strategy
        self._given = {step.part: step.writer for step in controls.given}
        self._prefix = render_given(controls.given, policy.backend.reserved)
        self._messages = self._prompt(dialogue)
        self._completion: Completion | None = None
        self._tokens_before = 0  # of completions that were replaced by one with a forced label
        self._written = ""
        self._over = False  # the reply was closed
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """End the turn and release the model."""
        self._events.close()

    @property
    def tokens(self) -> int:
        """Tokens generated so far (chunks, if an endpoint reports no usage)."""
        return self._tokens_before + (self._completion.tokens if self._completion else 0)

    # --- the turn ------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, None, None]:
        parser = StreamingParser(self._policy.vocabulary)
        failure: BackendError | None = None
        try:
            for text in self._beginning():
                self._written += text
                yield from map(self._with_writer, parser.feed(text))
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

    def _with_writer(self, event: Event) -> Event:
        """Add the writer to the event that starts a part."""
        if isinstance(event, PartStarted):
            return replace(event, writer=self._given.get(event.part, Writer.MODEL))
        return event

    def _beginning(self) -> Iterator[str]:
        """Yield the given steps, then what the model generates after them."""
        if not self._prefix:
            self._open(self._sampling)
            yield from self._texts()
        elif self._policy.backend.can_write:
            text = self._prefix + self._open_parts[0].opening
            yield text
            self._open(self._sampling).write(text)
            yield from self._texts()
        else:
            yield self._prefix
            self._open(self._sampling)
            yield from self._without_given(self._texts())

    @property
    def _open_parts(self) -> list[Part]:
        """The parts that the model has to generate."""
        return [part for part in Part if part not in self._given]

    def _texts(self) -> Iterator[str]:
        if self._sampling.thinking:
            yield from self._after_thoughts()
            if self._stop.is_set() or self._current.ended:
                return
        for part in self._open_parts:
            if part is Part.STRATEGY and self._forced and self._policy.backend.can_write:
                yield from self._with_forced_label(self._forced)
            else:
                yield from self._generated(part.closing)
            if self._over or self._stop.is_set() or self._current.ended:
                return

    def _after_thoughts(self) -> Iterator[str]:
        """Drop the thoughts that a reasoning model may write before its turn; yield what it writes instead."""
        held = ""
        for text in self._current.generate(THOUGHTS[-1]):
            held += text
            if not THOUGHTS.startswith(held.strip()):
                yield held
                held = ""
        if held.strip() == THOUGHTS:
            for _ in self._current.generate(END_OF_THOUGHTS):
                pass
        else:
            yield held

    @property
    def _current(self) -> Completion:
        assert self._completion is not None
        return self._completion

    def _generated(self, until: str) -> Iterator[str]:
        """Yield what the model generates up to `until`, but nothing after a closed reply."""
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
        """Drop repetitions of the given steps from a model that was asked to continue them.

        Nothing is yielded before the first part that was not given.
        """
        held, is_beyond = "", False
        for text in texts:
            if is_beyond:
                yield text
                continue
            held += text
            starts = [at for part in self._open_parts if (at := held.find(part.opening)) >= 0]
            if starts:
                is_beyond = True
                yield held[min(starts) :]
        if not is_beyond:
            given_parts = "|".join(f"{part.opening}.*?(?:{part.closing}|$)" for part in self._given)
            yield re.sub(given_parts, "", held, flags=re.DOTALL).lstrip()

    def _with_forced_label(self, strategy: str) -> Iterator[str]:
        """Yield the strategy part: its opening words, the model's own free text, then the forced label.

        A model that begins its label line in the expected form is stopped there, and the value is
        written for it. If it ends the part without such a line, its completion is replaced by a new
        one that starts with the text so far and the label. So a tag that may end the part is held
        back until it is clear.
        """
        if opening := self._policy.strategy_openings.get(strategy):
            is_open = self._written.endswith(Part.STRATEGY.opening)
            opening = opening if is_open else f"\n{Part.STRATEGY.opening}{opening}"
            self._current.write(opening)
            yield opening
        ending = f" {strategy}{Part.STRATEGY.closing}\n{Part.REPLY.opening}"
        passed, held = "", ""
        for text in self._generated(LABEL_START):
            whole = held + text
            ends = [at for tag in AFTER_FREE_TEXT if (at := whole.find(tag)) >= 0]
            end = min(ends, default=_start_of_partial(AFTER_FREE_TEXT, whole))
            passed, held = passed + whole[:end], whole[end:]
            if end:
                yield whole[:end]
            if ends:
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
        language = "en" if last is None else language_of(last.text)
        language = language if language in LANGUAGES else "en"
        messages = policy_messages(
            dialogue,
            policy.style,
            language,
            policy.backend.reserved,
            policy.vocabulary,
            policy.system_prompt,
            policy.message_suffix,
        )
        if not policy.sees_images:
            messages = without_images(messages)
        if policy.backend.can_write:
            return messages
        if self._forced is not None:
            request = fill(load_prompt("policy_strategy", language), strategy=self._forced)
            messages = _with_request(messages, request)
        if self._prefix:
            steps, following = self._prefix.rstrip(), self._open_parts[0].opening
            request = fill(load_prompt("policy_given", language), steps=steps, next=following)
            messages = _with_request(messages, request)
        return messages


def _start_of_partial(tags: Sequence[str], text: str) -> int:
    """Return the start of a suffix of `text` that may become one of the tags, or its length."""
    longest = max(map(len, tags))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)


def _with_request(messages: Sequence[Message], request: str) -> tuple[Message, ...]:
    """Return the messages with a request to the model in front."""
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=(*messages[0].content, "\n\n" + request))
        return (first, *messages[1:])
    return (Message(role="system", content=(request,)), *messages)
