"""The API for programs: ``/chat``, ``/score``, ``/models`` and ``/leaderboard``, with plain types.

Invalid input gives one clear English sentence as a `gradio.Error`, which clients raise. Nothing
sent here is stored. A turn starts when its caller listens for the answer, and stops when they
leave.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import gradio as gr
from gradio.events import api

from compeer_core.dialogue import Dialogue, Speaker, Utterance, check_message, language_of
from compeer_core.errors import BackendError, CompeerError, ConfigError, InputError
from compeer_core.grounding import StepChecker
from compeer_core.images import Image
from compeer_core.policy import Controls
from compeer_core.reasoning import LABELS, STEPS, Reading, Unreadable
from compeer_core.safety import WITHHELD_AFTERWARDS, RiskCheck, RiskSign, RiskState, find_risk
from compeer_core.turn import TurnDone, TurnEvent, TurnRecord, take_turn
from compeer_core.unifireward import Judge, Judgement, ResponseVerdict, StepVerdict, Unscorable
from compeer_core.votes.leaderboard.board import Filters
from ui_components.server.admission import PROGRAM, call_of
from ui_components.server.admission_queue import AdmissionQueue, QueueFullError
from ui_components.server.visitors import Caller
from ui_components.shared.help import help_for
from ui_components.shared.services import Services
from ui_components.shared.texts import LANGUAGES, Texts, load_texts

logger = logging.getLogger(__name__)

MAX_SEED = 2**31 - 1
MAX_HISTORY = 200
MAX_CHARACTERS = 20_000
"""Per message of the history, or turn to score."""
MAX_SEARCHED = 20_000
"""How many characters of earlier messages are searched for risk signs, newest first."""
LOOK_SECONDS = 0.25
"""How often to check whether the caller is still connected."""

PICTURE_PARAMETERS = {"chat": 2}
"""The position of an endpoint's image parameter."""

Messages = list[dict[str, Any]]
Work = Callable[[Caller, threading.Event], dict[str, Any]]


def publish(services: Services) -> None:
    """Add the endpoints to the open `gradio.Blocks`."""
    program = Program(services)
    for endpoint in (program.chat, program.score, program.models, program.leaderboard):
        # `admission` limits concurrency.
        api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)


class Program:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # Separate threads: the page needs those of the server.
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
        """Reply to a seeker, with the reasoning before the reply and the judge's scores.

        If the message shows a sign of danger, ``risk`` gives its kind, a sentence to show in the
        language of the message, and help lines: ``{kind, sentence, lines, where, withheld, hint}``,
        each line with ``number``, ``name``, ``kind`` (crisis or emergency) and ``region`` (country
        codes). Show them. Unless it is a ``hint``, of which the learned check is not sure, no model
        is called (``withheld`` is true): ``reply`` is "", ``complete`` false, every part of
        ``reasoning`` and ``reward`` null. The seeker's next message gets no reply either. A sign in
        the history is reported with ``where`` "history", not "message". Null means that the check
        finds nothing, not that all is well.

        The gate rejects a reply that breaks the format, repeats itself, contains markup, is too long
        or says nothing, and the model draws again, up to three times. ``gate`` has the number of
        ``draws`` and, of each ``rejected`` one, ``seed`` and ``reasons``. If all draws are rejected,
        ``reply`` is "" and ``gate.sentence`` says so in the language of the message; otherwise it is
        "". ``gate`` is null if the server runs without the gate.

        Each step of ``reasoning`` has ``evidence``: its quotations, and its sentences about a photo
        that nobody sent, as docs/serving.md describes them.

        Args:
            message: The seeker's message.
            history: Earlier messages: ``role`` is user (seeker) or assistant (supporter),
                ``content`` a string.
            image: An image with the message.
            model: A policy of ``/models``; empty means the default.
            strategy: A strategy that the reply must follow.
            seed: The same seed gives the same reply; -1 draws one.
            request: Set by gradio; callers do not send it.
        """

        def work(caller: Caller, stop: threading.Event) -> dict[str, Any]:
            dialogue = _dialogue(history)
            images = self._images(image, request)
            text = check_message(_text(message, "message"), bool(images))
            dialogue = dialogue.adding(Utterance(Speaker.SEEKER, text, images))
            models = self._services.models
            name = models.named("policy", _text(model, "model"))
            risk = _risk(dialogue, self._services.risk_check)
            in_words = {"risk": _risk_in_words(risk, text)}
            if risk.withheld_for:
                return _no_turn(name) | in_words
            with _admitted(models.queue(name), caller, stop):
                policy = models.policy(name)
                judge_name = models.default("judge")
                judge = models.judge(judge_name) if judge_name else None
                sampling = replace(policy.sampling, seed=_seed(seed))
                controls = Controls(strategy=strategy or None, sampling=sampling)
                gated = self._services.gated
                record = _record(take_turn(policy, judge, dialogue, controls, stop, gated=gated))
            self._services.metrics.count(record)
            if record.status == "failed":
                raise BackendError(record.error or "generation failed")
            return _turn(record, dialogue) | in_words

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
            history: Earlier messages; the last one is the seeker's.
            turn: The turn to judge, with its tags; without tags it is judged as a reply only.
            reference: A reply to compare with; without it the reply gets no verdict.
            judge: A judge of ``/models``; empty means the default.
            request: Set by gradio; callers do not send it.
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
            # A judge may share its weights with the policies here, so it waits in their queue.
            with _admitted(models.queue(name), caller, stop):
                loaded = models.judge(name)
                return _score(_judged(loaded, dialogue, text, compared or None, stop))

        return await self._answered(request, work)

    def _images(self, image: object, request: gr.Request | None) -> tuple[Image, ...]:
        """Read the image of a request and delete the upload."""
        if image is None:
            return ()
        path = image.get("path") if isinstance(image, Mapping) else None
        if not isinstance(path, str):
            raise InputError("image must be a file; with gradio_client: handle_file(path)")
        assert request is not None  # gradio sets it for every HTTP call
        uploads, owner = self._services.uploads, self._services.owner(request)
        try:
            return (uploads.begin_reading(path, owner).result(),)
        finally:
            uploads.forget(path, owner)

    def models(self) -> list[dict[str, Any]]:
        """List the models: policies and judges."""
        return self._services.models.public()

    def leaderboard(self) -> list[dict[str, Any]]:
        """List the models as ranked by people, best first, with 95 % CIs.

        With too few votes, ``rank`` and ``score`` are null; ``/results/board.json`` says why and
        has all other results.
        """
        with _one_sentence():
            standing = self._services.boards.current(Filters()).result()
            return [row.model_dump(mode="json") for row in standing.board.models]

    async def _answered(self, request: gr.Request | None, work: Work) -> dict[str, Any]:
        """Do the work in a thread once the caller listens, and stop it when they leave."""
        call = call_of(request)
        caller = Caller("") if request is None else self._services.caller(request)
        caller = replace(caller, is_program=True)
        stop = threading.Event()

        def one_sentence() -> dict[str, Any]:
            with _one_sentence():
                return work(caller, stop)

        with _one_sentence():
            if call is not None and not await call.heard():
                raise InputError("nobody listened for the answer; open the event stream first")
        answer = asyncio.get_running_loop().run_in_executor(self._threads, one_sentence)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_SECONDS))[0]:
                if call is not None and call.has_left:
                    stop.set()
            return answer.result()
        finally:
            stop.set()


# --- input ---------------------------------------------------------------------------------------


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
    """Turn expected errors into one sentence for the caller."""
    try:
        yield
    except (InputError, ConfigError) as error:
        raise gr.Error(str(error), print_exception=False) from error
    except QueueFullError as error:
        sentence = "the queue is full, try again in a minute"
        raise gr.Error(sentence, print_exception=False) from error
    except CompeerError as error:
        logger.warning("a request failed: %s", type(error).__name__)
        raise gr.Error(str(error), print_exception=False) from error


@contextmanager
def _admitted(queue: AdmissionQueue, caller: Caller, stop: threading.Event) -> Iterator[None]:
    """Wait in a queue and hold the slot until the block ends."""
    with queue.admitted(caller, stop) as is_admitted:
        if not is_admitted:
            raise InputError("the caller has disconnected")
        yield


def _record(events: Generator[TurnEvent, None, None]) -> TurnRecord:
    with closing(events):
        for event in events:
            if isinstance(event, TurnDone):
                return event.record
    raise BackendError("the turn ended without a result")


def _judged(
    judge: Judge, dialogue: Dialogue, turn: str, reference: str | None, stop: threading.Event
) -> Judgement:
    return judge.judge(dialogue, [turn], [reference], stop)[0]


# --- risk signs ----------------------------------------------------------------------------------


def _texts(language: str) -> Texts:
    return load_texts(language if language in LANGUAGES else LANGUAGES[0])


def _risk(dialogue: Dialogue, check: RiskCheck) -> RiskState:
    """Return the state after the seeker's messages, searched from the newest back to the latest sign.

    The learned check, which takes tens of milliseconds, reads only the messages that can withhold this reply.
    Of hints only one in the newest message counts.
    """
    left = MAX_SEARCHED
    signs: list[RiskSign | None] = []
    seeker = [each for each in dialogue.utterances if each.speaker is Speaker.SEEKER]
    for messages_since, utterance in enumerate(reversed(seeker)):
        if messages_since:
            left -= len(utterance.text)
        if left < 0:
            break
        finds = check if messages_since <= WITHHELD_AFTERWARDS else find_risk
        sign = finds(utterance.text, language_of(utterance.text))
        signs.append(None if messages_since and sign and sign.is_hint else sign)
        if sign is not None and not sign.is_hint:
            break
    state = RiskState()
    for sign in reversed(signs):
        state = state.after(sign)
    return state


def _risk_in_words(risk: RiskState, message: str) -> dict[str, Any] | None:
    if risk.kind is None:
        return None
    return (
        {"kind": risk.kind.value, "hint": risk.is_hint}
        | help_for(_texts(language_of(message)), risk)
        | {
            "where": "history" if risk.messages_since else "message",
            "withheld": risk.withheld_for is not None,
        }
    )


# --- output --------------------------------------------------------------------------------------


def _turn(record: TurnRecord, dialogue: Dialogue) -> dict[str, Any]:
    reading = record.reading
    reward = None
    if record.judgement is not None:
        reward = _score(record.judgement) | {"judge": record.judge}
    return {
        "reply": reading.reply or "",
        "reasoning": _reasoning(reading, dialogue),
        "complete": reading.is_complete,
        "problems": [str(problem) for problem in reading.problems],
        "reward": reward,
        "model": record.model,
        "seed": record.seed,
        "seconds": round(record.seconds, 3),
        "first_token_seconds": _rounded(record.first_token_seconds),
        "tokens": record.tokens,
        "gate": _gate(record, dialogue) if record.gated else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _gate(record: TurnRecord, dialogue: Dialogue) -> dict[str, Any]:
    texts = _texts(language_of(dialogue.utterances[-1].text))
    return {
        "draws": record.draws,
        "rejected": [
            {"seed": draw.seed, "reasons": [fault.value for fault in draw.faults]}
            for draw in record.rejected
        ],
        "sentence": texts("gate.withheld") if record.withheld else "",
    }


def _no_turn(model: str) -> dict[str, Any]:
    """What `_turn` returns if no model was called."""
    return {
        "reply": "",
        "reasoning": dict.fromkeys(part.value for part in STEPS),
        "complete": False,
        "problems": [],
        "reward": None,
        "model": model,
        "seed": None,
        "seconds": 0.0,
        "first_token_seconds": None,
        "tokens": 0,
        "gate": None,
    }


def _reasoning(reading: Reading, dialogue: Dialogue) -> dict[str, Any]:
    """Each step's text, labels and evidence; None for a missing step."""
    checker = StepChecker(dialogue)
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
        reasoning[part.value]["evidence"] = [
            asdict(evidence) | {"ground": evidence.ground.value}
            for evidence in checker.check(step.text)
        ]
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
