r"""A backend and a label scorer that play a script: for tests, and to replay recorded turns.

A `ScriptedBackend` returns its script's text chunk by chunk, with the delays and failures of the
script. Use it to test users of a backend (a page, a judge, a trainer), or to show recorded turns
without a model; such a page must say that the turns are recorded. In `models.toml` a script's source
is `scripted:FILE`.

A script for a policy, in TOML (or the same in JSON):

```toml
name = "recorded"
can_write = true             # whether a strategy can be forced (default true)

[[turns]]
when = "exam"                # used if the seeker's last message contains this; otherwise by number
text = "<history>...</history>\n<emotion>...</emotion>\n..."
chunk_characters = 4
delay_seconds = 0.02         # before each chunk
ending = "finished"          # or "failed", or "endless"
```

A script for a judge:

```toml
name = "recorded-judge"
answers = [{ True = 0.9, False = 0.1 }, "False", "True", { First = 0.6, Second = 0.2, Both = 0.2 }]
```
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import BackendError, ConfigError

FAILURE = "the script ends this turn with a failure"
SURE = 0.9
"""Probability of an answer given by its label alone; the others share the rest."""


class ScriptedTurn(FrozenModel):
    """One completion to play. For a truncated or incomplete turn, truncate its `text`."""

    text: str
    """The whole text, with tags."""
    when: str = ""
    """Used if the last user message contains this, ignoring case. Empty: used by number."""
    chunk_characters: int = Field(default=4, ge=1)
    """Characters in a chunk; a chunk counts as one token."""
    delay_seconds: float = Field(default=0.0, ge=0.0)
    """Wait before each chunk."""
    first_delay_seconds: float = Field(default=0.0, ge=0.0)
    """Additional wait before the first chunk."""
    ending: Literal["finished", "failed", "endless"] = "finished"
    """What follows the text: the end of the turn, a `BackendError`, or endless repetition.

    `Sampling.max_new_tokens` limits only an endless turn; a recorded one is played whole."""


class PolicyScript(FrozenModel):
    """The file behind a `ScriptedBackend`."""

    name: str = "scripted"
    can_write: bool = True
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)


class JudgeScript(FrozenModel):
    """The file behind a `ScriptedScorer`."""

    name: str = "scripted"
    answers: tuple[str | dict[str, float], ...] = Field(min_length=1)


# --- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedBackend:
    """Plays turns, or plain texts; see the module docstring.

    The turn depends only on the conversation: the first whose `when` matches the last user message,
    otherwise the n-th without `when`, where n is the number of replies so far (cyclic). So all
    visitors see the same, and so does a retry.
    """

    turns: Sequence[ScriptedTurn | str]
    name: str = "scripted"
    can_write: bool = True
    reserved: tuple[str, ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> "ScriptedBackend":
        """Read a script. Raises `ConfigError`, which names the file and the fault."""
        script = _read_script(path, PolicyScript)
        return cls(turns=script.turns, name=script.name, can_write=script.can_write)

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> "ScriptedCompletion":
        turn = self._turn(messages)
        return ScriptedCompletion(turn, sampling.max_new_tokens, stop, self.can_write)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _turn(self, messages: Sequence[Message]) -> ScriptedTurn:
        turns = [ScriptedTurn(text=turn) if isinstance(turn, str) else turn for turn in self.turns]
        user_texts = [message.text for message in messages if message.role == "user"]
        last = user_texts[-1].casefold() if user_texts else ""
        for turn in turns:
            if turn.when and turn.when.casefold() in last:
                return turn
        in_order = [turn for turn in turns if not turn.when] or turns
        replies = sum(message.role == "assistant" for message in messages)
        return in_order[replies % len(in_order)]


class ScriptedCompletion:
    """One scripted turn, as it is played."""

    def __init__(
        self, turn: ScriptedTurn, max_new_tokens: int, stop: threading.Event, can_write: bool
    ) -> None:
        self._turn = turn
        self._budget = max_new_tokens
        self._stop = stop
        self._can_write = can_write
        self._place = 0
        self._tokens = 0
        self._ended = False
        self._closed = False

    def generate(self, until: str | None = None) -> Iterator[str]:
        text = self._turn.text
        end = self._end_of_piece(until)
        while not self._ended and not self._closed:
            if self._place == len(text):
                if self._turn.ending == "failed":
                    raise BackendError(FAILURE)
                if self._turn.ending == "finished" or not text:
                    self._ended = True
                    return
                self._place = 0
                end = self._end_of_piece(until)
            self._wait()
            if self._stop.is_set():
                return
            start = self._place
            self._place = min(start + self._turn.chunk_characters, end)
            self._tokens += 1
            if self._turn.ending == "endless" and self._tokens >= self._budget:
                self._ended = True
            yield text[start : self._place]
            if until and self._place == end and text.endswith(until, 0, end):
                return

    def write(self, text: str) -> None:
        """Accept `text`, and continue the script after the next tag that `text` ends with, if any."""
        if not self._can_write:
            raise BackendError("this script does not let text be written into a turn")
        written = text.rstrip()
        tag = written[written.rfind("<") :] if written.endswith(">") else ""
        at = self._turn.text.find(tag, self._place) if tag else -1
        if at >= 0:
            self._place = at + len(tag)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def tokens(self) -> int:
        return self._tokens

    def close(self) -> None:
        self._closed = True

    def _end_of_piece(self, until: str | None) -> int:
        at = self._turn.text.find(until, self._place) if until else -1
        return len(self._turn.text) if at < 0 else at + len(until or "")

    def _wait(self) -> None:
        first = self._turn.first_delay_seconds if self._tokens == 0 else 0.0
        if first + self._turn.delay_seconds > 0:
            self._stop.wait(first + self._turn.delay_seconds)


# --- judging -----------------------------------------------------------------------------------

Answer = str | Mapping[str, float] | Exception
"""A label (with probability `SURE`), a probability per label (0 if omitted; may be NaN), or an
exception to raise."""


@dataclass(frozen=True)
class ScriptedScorer:
    """Answers from a list.

    Every session starts at the top and uses the next answer that fits the question's labels,
    cyclically. If none fits, the question fails like a broken model.
    """

    answers: Sequence[Answer]
    name: str = "scripted"
    reserved: tuple[str, ...] = ()
    delay_seconds: float = 0.0

    @classmethod
    def from_file(cls, path: Path) -> "ScriptedScorer":
        """Read a script. Raises `ConfigError`, which names the file and the fault."""
        script = _read_script(path, JudgeScript)
        return cls(answers=script.answers, name=script.name)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Accept all labels."""

    def open(self, messages: Sequence[Message]) -> "ScriptedScoring":
        return ScriptedScoring(self, tuple(messages))

    def close(self) -> None:
        """Do nothing: there are no resources."""


class ScriptedScoring:
    """One scripted judgement; tests may inspect `asked` and `answered`."""

    def __init__(self, scorer: ScriptedScorer, messages: tuple[Message, ...]) -> None:
        self._scorer = scorer
        self._next = 0
        self.messages = messages
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.closed = False

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self.asked.append(text)
        if self._scorer.delay_seconds > 0:
            time.sleep(self._scorer.delay_seconds)
        answers = self._scorer.answers
        for step in range(len(answers)):
            answer = answers[(self._next + step) % len(answers)]
            if _fits(answer, labels):
                self._next += step + 1
                return _probabilities(answer, labels)
        raise BackendError(f"the script has no answer among {', '.join(labels)}")

    def answer(self, label: str) -> None:
        self.answered.append(label)

    def close(self) -> None:
        self.closed = True


def _fits(answer: Answer, labels: Sequence[str]) -> bool:
    if isinstance(answer, Exception):
        return True
    answer_labels = {answer} if isinstance(answer, str) else set(answer)
    return answer_labels <= set(labels)


def _probabilities(answer: Answer, labels: Sequence[str]) -> tuple[float, ...]:
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, str):
        others = (1.0 - SURE) / (len(labels) - 1)
        return tuple(SURE if label == answer else others for label in labels)
    return tuple(answer.get(label, 0.0) for label in labels)


# --- files -------------------------------------------------------------------------------------

Script = TypeVar("Script", PolicyScript, JudgeScript)


def _read_script(path: Path, form: type[Script]) -> Script:
    if path.suffix != ".json":
        return load_toml(path, form)
    try:
        return form.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{path}: {'; '.join(faults)}") from error
