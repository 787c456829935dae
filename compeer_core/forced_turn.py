"""A turn with a forced strategy, drawn again while its reply does not show that strategy.

Forcing writes the label, and for some models the first words of the step; the model may still reply as it likes.
`take_forced_turn` checks the reply with
`compeer_core.consistency.carries_out` and draws the turn again, up to `FRESH_DRAWS` times. Unlike a fault of
`compeer_core.gate`, a missing sign withholds nothing, since the check can be wrong: of several such draws the
judge's favourite is kept. "Cannot tell" is no reason to draw again.
"""

import math
import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from compeer_core.consistency import Followed, carries_out
from compeer_core.dialogue import Dialogue
from compeer_core.gate import Fault, RejectedDraw
from compeer_core.policy import Controls, Policy
from compeer_core.turn import DrawRejected, TurnDone, TurnEvent, TurnRecord, draw_seed, take_turn
from compeer_core.unifireward import Judge

FRESH_DRAWS = 2
"""How often a turn is drawn again because its reply does not show the strategy. Greedy decoding is not repeated."""


def take_forced_turn(
    policy: Policy,
    judge: Judge | None,
    dialogue: Dialogue,
    controls: Controls,
    stop: threading.Event,
    reference: str | None = None,
    deadline_seconds: float = 120,
    *,
    gated: bool = False,
) -> Generator[TurnEvent, None, None]:
    """Generate and judge a turn as `take_turn` does, and draw it again while it does not show its strategy.

    The record is that of the best draw, and its `rejected` holds all others: draws that the gate rejected, and
    draws with `Fault.NO_SIGN`.

    Args:
        policy: As for `take_turn`, like the arguments below.
        judge: Its reward decides between draws that do not show the strategy; without it the first is kept.
        dialogue: The history.
        controls: They force a strategy.
        stop: Ends the turn. An interrupted draw does not replace a finished one.
        reference: A reply to compare with.
        deadline_seconds: Time limit of all draws together.
        gated: Whether draws with a fault are rejected.

    Raises:
        InputError: The controls are invalid; the model was not called.
    """
    strategy = controls.strategy
    assert strategy is not None
    started = time.monotonic()
    history = dialogue.merged()

    def may_show(record: TurnRecord) -> bool:
        return carries_out(history, record.reading.reply or "", strategy) is not Followed.NO

    def goodness(record: TurnRecord) -> tuple[bool, bool, float]:
        reward = -math.inf if record.reward is None else record.reward
        return _is_usable(record), may_show(record), reward

    records: list[TurnRecord] = []
    while True:
        before = time.monotonic() - started
        left = deadline_seconds - before
        record = yield from _drawn(
            take_turn(policy, judge, dialogue, controls, stop, reference, left, gated=gated)
        )
        records.append(record)
        sampling = record.controls.sampling
        assert sampling is not None
        is_over = stop.is_set() or time.monotonic() - started >= deadline_seconds
        may_draw_again = len(records) <= FRESH_DRAWS and sampling.temperature > 0 and not is_over
        if may_show(record) or not _is_usable(record) or not may_draw_again:
            break
        yield DrawRejected(_rejected(record))
        controls = replace(controls, sampling=replace(sampling, seed=draw_seed(record.seed, 1)))

    best = max(records, key=goodness)  # the first of equal ones
    rejected: list[RejectedDraw] = []
    for each in records:
        rejected += each.rejected
        if each is not best and _is_usable(each):
            rejected.append(_rejected(each))
    yield TurnDone(
        replace(
            best,
            rejected=tuple(rejected),
            first_token_seconds=records[0].first_token_seconds,
            seconds=before + record.seconds,
            tokens=sum(each.tokens for each in records),
        )
    )


def _drawn(events: Generator[TurnEvent, None, None]) -> Generator[TurnEvent, None, TurnRecord]:
    """Yield the events of one draw, except for the last, whose record is returned."""
    with closing(events):
        for event in events:
            if isinstance(event, TurnDone):
                return event.record
            yield event
    raise AssertionError("a turn ends with its record")


def _is_usable(record: TurnRecord) -> bool:
    return record.status == "finished" and not record.withheld


def _rejected(record: TurnRecord) -> RejectedDraw:
    return RejectedDraw(record.seed, record.raw, (Fault.NO_SIGN,))
