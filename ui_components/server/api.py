"""The endpoints for programs: ``/chat``, ``/score``, ``/models`` and ``/leaderboard``, with plain types only.

A wrong value gives one clear sentence as a `gradio.Error`, which clients raise, and the server goes
on. Sentences are English here. Nothing that is said here is kept. A turn begins when its caller listens
for the answer, and is stopped when they leave.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
from gradio.events import api

from compeer_core.dialogue import Dialogue, Speaker, Utterance, check_message, language_of
from compeer_core.errors import BackendError, CompeerError, ConfigError, InputError
from compeer_core.images import Image
from compeer_core.policy import Controls
from compeer_core.reasoning import LABELS, STEPS, Reading, Unreadable
from compeer_core.safety import RiskKind, find_risk, forbids_reply
from compeer_core.turn import TurnDone, TurnEvent, TurnRecord, take_turn
from compeer_core.unifireward import Judge, Judgement, ResponseVerdict, StepVerdict, Unscorable
from compeer_core.votes.leaderboard.board import Filters
from ui_components.server.admission import PROGRAM, call_of
from ui_components.server.admission_queue import AdmissionQueue, LineFullError
from ui_components.server.visitors import Caller
from ui_components.shared.help import help_for
from ui_components.shared.services import Services
from ui_components.shared.texts import LANGUAGES, load_texts

logger = logging.getLogger(__name__)

MAX_SEED = 2**31 - 1
MAX_HISTORY = 200
MAX_CHARACTERS = 20_000
"""Of one message of the history, or of a turn to be scored."""
MAX_SEARCHED = 20_000
"""Characters of earlier messages in which signs of danger are looked for, the newest first."""
LOOK_SECONDS = 0.25
"""How often to look whether a caller is still there."""

PICTURE_PARAMETERS = {"chat": 2}
"""Where an endpoint takes a picture, by the parameter's place."""

Messages = list[dict[str, Any]]
Work = Callable[[Caller, threading.Event], dict[str, Any]]


def publish(services: Services) -> None:
    """Add the endpoints to the `gradio.Blocks` that is open."""
    program = Program(services)
    for endpoint in (program.chat, program.score, program.models, program.leaderboard):
        # How many may ask at once is for `admission` to say.
        api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)


class Program:
    """What a program may ask for."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # Threads of its own: the page needs those of the server.
        self._threads = ThreadPoolExecutor(PROGRAM.in_all, thread_name_prefix="program")

    async def chat(
        self,
        message: str,
        history: Messages | None = None,
        image: dict[str, Any] | None = None,
        model: str = "",
        strategy: str | None = None,
        seed: int = -1,
        request: gr.Request | None = None,
    ) -> dict[str, Any]:
        """Reply to a seeker, with the reasoning before the reply and what the judge makes of it.

        Where the message has a phrase that may mean danger, ``risk`` says which kind, a sentence to
        show, in the language of the message, and help lines: ``{kind, sentence, lines, where}``, each
        line with ``number``, ``name``, ``kind`` (crisis or emergency) and ``region`` (country codes).
        Show them. For ``suicide``, ``self_harm`` and ``medical_emergency`` in the message no model is
        asked: ``reply`` is "", ``complete`` false, every part of ``reasoning`` and ``reward`` null.
        A sign in an earlier message of the seeker is told (``where`` is "history", not "message")
        and does not stop the reply. Null means that no listed phrase was found, not that all is well.

        Args:
            message: What the seeker says.
            history: What was said before: ``role`` is user (seeker) or assistant (supporter),
                ``content`` a string.
            image: A picture that comes with the message.
            model: A policy of ``/models``; empty means the default.
            strategy: A strategy that the reply has to follow.
            seed: The same seed gives the same reply; -1 draws one.
            request: Gradio's own; no caller sends it.
        """

        def work(caller: Caller, stop: threading.Event) -> dict[str, Any]:
            dialogue = _dialogue(history)
            images = self._images(image, request)
            said = check_message(_text(message, "message"), bool(images))
            dialogue = dialogue.adding(Utterance(Speaker.SEEKER, said, images))
            models = self._services.models
            name = models.named("policy", _text(model, "model"))
            risk = _risk(dialogue)
            if risk is not None and risk.forbids_reply:
                return _no_turn(name) | {"risk": risk.in_words()}
            with _served(models.line(name), caller, stop):
                policy = models.policy(name)
                judge_name = models.default("judge")
                judge = models.judge(judge_name) if judge_name else None
                sampling = replace(policy.sampling, seed=_seed(seed))
                controls = Controls(strategy=strategy or None, sampling=sampling)
                record = _record(take_turn(policy, judge, dialogue, controls, stop))
            self._services.metrics.count(record)
            if record.status == "failed":
                raise BackendError(record.error or "the reply broke off")
            return _turn(record) | {"risk": risk.in_words() if risk else None}

        return await self._answered(request, work)

    async def score(
        self,
        history: Messages,
        turn: str,
        reference: str | None = None,
        judge: str = "",
        request: gr.Request | None = None,
    ) -> dict[str, Any]:
        """Judge a supporter's turn.

        Args:
            history: What was said before; the last message is the seeker's.
            turn: The turn to be judged, with its tags; without any it is judged as a reply alone.
            reference: A reply to compare with; without it the reply itself has no verdict.
            judge: A judge of ``/models``; empty means the default.
            request: Gradio's own; no caller sends it.
        """

        def work(caller: Caller, stop: threading.Event) -> dict[str, Any]:
            dialogue = _dialogue(history)
            if not dialogue.utterances or dialogue.utterances[-1].speaker is not Speaker.SEEKER:
                raise InputError("the last message of the history must be the seeker's (role user)")
            text = _bounded(_text(turn, "turn"), "turn")
            if not text.strip():
                raise InputError("the turn is empty")
            compared = (
                None if reference is None else _bounded(_text(reference, "reference"), "reference")
            )
            models = self._services.models
            name = models.named("judge", _text(judge, "judge"))
            # A judge may share its weights with the policies here, so it stands in their line.
            with _served(models.line(name), caller, stop):
                loaded = models.judge(name)
                return _score(_judged(loaded, dialogue, text, compared or None, stop))

        return await self._answered(request, work)

    def _images(self, image: object, request: gr.Request | None) -> tuple[Image, ...]:
        """Read the picture of a request, and delete the upload."""
        if image is None:
            return ()
        path = image.get("path") if isinstance(image, Mapping) else None
        if not isinstance(path, str):
            raise InputError("image must be a file; with gradio_client: handle_file(path)")
        assert request is not None  # gradio hands it in; only a call without one has none
        uploads, owner = self._services.uploads, self._services.owner(request)
        try:
            return (uploads.begin_reading(path, owner).result(),)
        finally:
            uploads.forget(path, owner)

    def models(self) -> list[dict[str, Any]]:
        """List the models: policies that reply and judges that score."""
        return self._services.models.public()

    def leaderboard(self) -> list[dict[str, Any]]:
        """List the models as people rank them, best first, with 95 % intervals.

        Where too few people voted, ``rank`` and ``score`` are null; ``/results/board.json`` says why, and
        has all else that the results show.
        """
        with _one_sentence():
            standing = self._services.boards.current(Filters()).result()
            return [row.model_dump(mode="json") for row in standing.board.models]

    async def _answered(self, request: gr.Request | None, work: Work) -> dict[str, Any]:
        """Do the work in a thread once the caller listens, and stop it when they have left."""
        call = call_of(request)
        caller = Caller("") if request is None else self._services.caller(request)
        caller = replace(caller, is_program=True)
        stop = threading.Event()

        def one_sentence() -> dict[str, Any]:
            with _one_sentence():
                return work(caller, stop)

        with _one_sentence():
            if call is not None and not await call.heard():
                raise InputError("nobody listened for the answer")
        answer = asyncio.get_running_loop().run_in_executor(self._threads, one_sentence)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_SECONDS))[0]:
                if call is not None and call.has_left:
                    stop.set()
            return answer.result()
        finally:
            stop.set()


# --- what comes in -------------------------------------------------------------------------------


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be a string")
    return value


def _bounded(text: str, name: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{name} has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    return text


def _dialogue(history: object) -> Dialogue:
    if history is None:
        return Dialogue()
    if not isinstance(history, Sequence) or isinstance(history, str):
        raise InputError("history must be a list of messages")
    if len(history) > MAX_HISTORY:
        raise InputError(f"history has {len(history)} messages, at most {MAX_HISTORY} are allowed")
    dialogue = Dialogue.from_messages(history)
    for utterance in dialogue:
        _bounded(utterance.text, "a message of the history")
    return dialogue


def _seed(seed: object) -> int | None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not -1 <= seed <= MAX_SEED:
        raise InputError(f"seed must be a whole number from 0 to {MAX_SEED}, or -1 to draw one")
    return None if seed == -1 else seed


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn what may go wrong into one sentence for the caller."""
    try:
        yield
    except (InputError, ConfigError) as error:
        raise gr.Error(str(error), print_exception=False) from error
    except LineFullError as error:
        sentence = "too many wait already, try again in a minute"
        raise gr.Error(sentence, print_exception=False) from error
    except CompeerError as error:
        logger.warning("a request failed: %s", type(error).__name__)
        raise gr.Error(str(error), print_exception=False) from error


@contextmanager
def _served(line: AdmissionQueue, caller: Caller, stop: threading.Event) -> Iterator[None]:
    """Wait in a line, and hold the place until the block ends."""
    with line.place(caller) as ticket:
        while not line.wait(ticket):
            if stop.is_set():
                raise InputError("nobody waits for the answer any more")
        yield


def _record(events: Generator[TurnEvent, None, None]) -> TurnRecord:
    with closing(events):
        for event in events:
            if isinstance(event, TurnDone):
                return event.record
    raise BackendError("the turn did not end")


def _judged(
    judge: Judge, dialogue: Dialogue, turn: str, reference: str | None, stop: threading.Event
) -> Judgement:
    return judge.judge(dialogue, [turn], [reference], stop)[0]


# --- signs of danger -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Risk:
    """A sign of danger, and where it was found."""

    kind: RiskKind
    language: str
    in_message: bool

    @property
    def forbids_reply(self) -> bool:
        return self.in_message and forbids_reply(self.kind)

    def in_words(self) -> dict[str, Any]:
        texts = load_texts(self.language if self.language in LANGUAGES else LANGUAGES[0])
        where = "message" if self.in_message else "history"
        return {"kind": self.kind.value} | help_for(texts, self.kind) | {"where": where}


def _risk(dialogue: Dialogue) -> _Risk | None:
    """Return the sign in the last message, else the newest one in earlier messages of the seeker."""
    left = MAX_SEARCHED
    last = dialogue.utterances[-1]
    for utterance in reversed(dialogue.utterances):
        if utterance.speaker is not Speaker.SEEKER:
            continue
        if utterance is not last:
            left -= len(utterance.text)
            if left < 0:
                return None
        sign = find_risk(utterance.text)
        if sign is not None:
            return _Risk(sign.kind, language_of(utterance.text), utterance is last)
    return None


# --- what goes out -------------------------------------------------------------------------------


def _turn(record: TurnRecord) -> dict[str, Any]:
    reading = record.reading
    reward = None
    if record.judgement is not None:
        reward = _score(record.judgement) | {"judge": record.judge}
    return {
        "reply": reading.reply or "",
        "reasoning": _reasoning(reading),
        "complete": reading.is_complete,
        "problems": [str(problem) for problem in reading.problems],
        "reward": reward,
        "model": record.model,
        "seed": record.seed,
        "seconds": round(record.seconds, 3),
    }


def _no_turn(model: str) -> dict[str, Any]:
    """What `_turn` returns, where no model was asked."""
    return {
        "reply": "",
        "reasoning": dict.fromkeys(part.value for part in STEPS),
        "complete": False,
        "problems": [],
        "reward": None,
        "model": model,
        "seed": None,
        "seconds": 0.0,
    }


def _reasoning(reading: Reading) -> dict[str, Any]:
    """Each step with its text and its labels; None where the model wrote none."""
    reasoning: dict[str, Any] = {}
    for part, step in zip(STEPS, reading.steps, strict=True):
        if step is None:
            reasoning[part.value] = None
            continue
        labels = {name: getattr(step, name) for name in LABELS[part]}
        reasoning[part.value] = {"text": step.text} | {
            name: None if isinstance(value, Unreadable) else _plain(value)
            for name, value in labels.items()
        }
    return reasoning


def _plain(value: str | int) -> str | int:
    return str(value) if isinstance(value, str) else value


def _score(judgement: Judgement) -> dict[str, Any]:
    reward = judgement.reward()
    return {
        "steps": None if judgement.steps is None else [_step(step) for step in judgement.steps],
        "response": _response(judgement.response),
        "format": reward.format,
        "total": reward.total,
        "maximum": reward.maximum,
    }


def _step(outcome: StepVerdict | Unscorable) -> dict[str, Any]:
    if isinstance(outcome, Unscorable):
        return {"correct": None, "probability_correct": None, "unscorable": outcome.reason}
    return {"correct": outcome.correct, "probability_correct": outcome.probability_correct}


def _response(outcome: object) -> dict[str, Any] | None:
    if isinstance(outcome, ResponseVerdict):
        return {
            "verdict": outcome.preference.value,
            "probabilities": {key.value: value for key, value in outcome.probabilities.items()},
        }
    if isinstance(outcome, Unscorable):
        return {"verdict": None, "probabilities": None, "unscorable": outcome.reason}
    return None
