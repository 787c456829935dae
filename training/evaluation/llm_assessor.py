"""An LLM behind an endpoint assesses whether a judge's verdicts are consistent.

COMPEER uses GPT-4o for this; its prompt is not public, ours is ``compeer_core/prompts/consistency.*.md``.
The LLM sees the turn and the verdicts, not the judge's name, and answers with a JSON object.

Two kinds of failures are counted separately. An invalid answer (truncated JSON, extra text) is requested
again, up to `tries` times, then the question is given up. A question that the endpoint does not answer is
asked again by the next run. `training.cer.requests.asking` sends the requests and stores each text at once,
so no question is asked twice.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import StrictBool, ValidationError

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from training.cer.requests.asking import Asker, Question
from training.cer.requests.generators import GeneratorSettings

MAX_ANSWER_TOKENS = 300
"""Enough to recognise (and reject) an LLM that reasons before its JSON object."""
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


class _Object(FrozenModel):
    consistent: StrictBool


@dataclass
class Counts:
    """Counts of the questions, by outcome; the same in every run, but for `unanswered`."""

    asked: int = 0
    given_up: int = 0
    """Questions without a valid answer."""
    unanswered: int = 0
    """Questions without any answer."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Invalid answers, by reason."""


class Assessor:
    """Sends questions to an LLM, several at a time."""

    def __init__(self, source: str, folder: Path, *, in_flight: int = 8, tries: int = 3) -> None:
        """Create an assessor; nothing is sent yet.

        Args:
            source: ``openai:URL#MODEL``.
            folder: Where answers are stored.
            in_flight: Number of concurrent requests.
            tries: Maximum number of answers per question.

        Raises:
            ConfigError: The source is not an endpoint.
        """
        self._settings = assessor_settings(source).model_copy(update={"in_flight": in_flight})
        self._folder = folder
        self._tries = tries
        self.counts = Counts()

    @property
    def name(self) -> str:
        """The name of the LLM."""
        return self._settings.author

    def ask(self, questions: Iterable[str]) -> dict[str, bool]:
        """Return the valid answers, by question.

        Raises:
            BackendError: The endpoint cannot be used, or failed too often in a row.
        """
        open_questions = {_key(question): question for question in questions}
        self.counts.asked += len(open_questions)
        answers: dict[str, bool] = {}
        # Greedy decoding would repeat an invalid answer.
        for temperature, tries in ((0.0, 1), (0.7, self._tries - 1)):
            if tries == 0:
                break
            changes = {"temperature": temperature, "tries": tries}
            asker = Asker(self._settings.model_copy(update=changes), self._folder)
            asked = [
                Question(key, (Message("user", (question,)),), seed=0)
                for key, question in open_questions.items()
            ]
            for answer in asker.ask(asked, _check, label="consistency", total=len(asked)):
                if answer.text is not None:
                    answers[open_questions.pop(answer.key)] = read_answer(answer.text)
                elif answer.tries < tries:  # the endpoint did not answer
                    del open_questions[answer.key]
                    self.counts.unanswered += 1
            self.counts.invalid += Counter(asker.counts.retried) + Counter(asker.counts.failed)
        self.counts.given_up += len(open_questions)
        return answers


def assessor_settings(source: str) -> GeneratorSettings:
    """Return the settings of an endpoint.

    Raises:
        ConfigError: The source is not an endpoint.
    """
    settings = GeneratorSettings(source=source, top_p=1.0, max_new_tokens=MAX_ANSWER_TOKENS)
    if not settings.is_endpoint:
        raise ConfigError(f"assessor: {source!r} is not an endpoint; write openai:URL#MODEL")
    return settings


def read_answer(text: str) -> bool:
    """Parse an answer.

    Raises:
        ValueError: It is not exactly the requested JSON object; the message says why.

    Example:
        >>> read_answer('{"consistent": false}')
        False
    """
    bare = _FENCE.sub("", text.strip())
    try:
        return _Object.model_validate(json.loads(bare)).consistent
    except ValidationError as error:
        raise ValueError("another object") from error
    except json.JSONDecodeError as error:
        raise ValueError("incomplete JSON" if bare.startswith("{") else "no JSON") from error


def _check(key: str, text: str) -> str | None:
    try:
        read_answer(text)
    except ValueError as error:
        return str(error)
    return None


def _key(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:24]
