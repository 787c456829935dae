"""Times single turns in this process, where every token is observed as it is generated."""

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
    """Generate `count` first turns and return their records.

    Messages are used in rotation; turn i samples with `seed + i`. An extra turn is generated first,
    as a warm-up.

    Raises:
        BackendError: A turn failed.
    """
    _turn(policy, judge, messages[0], seed)
    return [_turn(policy, judge, messages[i % len(messages)], seed + i) for i in range(count)]


def tokens_per_second(record: TurnRecord) -> float:
    """Return the speed of a turn from Send to its last token, including the judging of its steps."""
    return record.tokens / record.seconds


def _turn(policy: Policy, judge: Judge | None, message: str, seed: int) -> TurnRecord:
    dialogue = Dialogue((Utterance(Speaker.SEEKER, message),))
    controls = Controls(sampling=replace(policy.sampling, seed=seed))
    for event in take_turn(policy, judge, dialogue, controls, threading.Event()):
        if isinstance(event, TurnDone):
            if event.record.status != "finished":
                raise BackendError(f"a benchmark turn failed: {event.record.error}")
            return event.record
    raise BackendError("a benchmark turn did not finish")
