"""Times single turns in this process."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import BackendError
from compeer_core.policy import Controls, Policy
from compeer_core.turn import TurnDone, TurnRecord, take_turn
from compeer_core.unifireward import Judge


def timed_turns(
    policy: Policy, judge: Judge | None, messages: Sequence[str], count: int, seed: int
) -> list[TurnRecord]:
    """Take `count` first turns and return their records.

    Messages are taken in rotation, and turn number i samples with `seed + i`. One more turn is taken
    before them and not counted: it loads what is loaded on first use.

    Raises:
        BackendError: A turn failed.
    """
    _turn(policy, judge, messages[0], seed)
    return [_turn(policy, judge, messages[i % len(messages)], seed + i) for i in range(count)]


def tokens_per_second(record: TurnRecord) -> float:
    """Return the speed of a turn from Send to its last token.

    The judge takes its steps between the parts, so the time of those counts.
    """
    return record.tokens / record.seconds


def _turn(policy: Policy, judge: Judge | None, message: str, seed: int) -> TurnRecord:
    dialogue = Dialogue((Utterance(Speaker.SEEKER, message),))
    controls = Controls(sampling=replace(policy.sampling, seed=seed))
    for event in take_turn(policy, judge, dialogue, controls, threading.Event()):
        if isinstance(event, TurnDone):
            if event.record.status != "finished":
                raise BackendError(f"a turn of the benchmark failed: {event.record.error}")
            return event.record
    raise BackendError("a turn of the benchmark had no end")
