"""A forced strategy is drawn again while the reply does not show it; the draws are worked out by hand."""

import threading

import pytest

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.scripted import ScriptedScorer
from compeer_core.forced_turn import FRESH_DRAWS, take_forced_turn
from compeer_core.gate import Fault, RejectedDraw
from compeer_core.policy import Controls, Policy
from compeer_core.turn import DrawRejected, TurnDone, TurnRecord, draw_seed
from compeer_core.unifireward import Judge
from tests.core.example import DIALOGUE, TEXT
from tests.draws import Draws

JUDGE = Judge("kind", ScriptedScorer(["True", "First"]))
SHARES = TEXT.replace("What happened today?", "My own job once wore me out, too.")
LOOP = TEXT.replace("What happened today?", "Work is hard. " * 9)
WITHOUT_EMOTION = TEXT[: TEXT.index("<emotion>")] + TEXT[TEXT.index("<strategy>") :]
AS_FORCED = TEXT.replace("Strategy: Question", "Strategy: Self-disclosure")
SECOND_SEED = draw_seed(5, 1)
THIRD_SEED = draw_seed(SECOND_SEED, 1)


def forced(
    backend: Draws,
    judge: Judge | None = JUDGE,
    *,
    temperature: float = 0.7,
    gated: bool = False,
    stops: bool = False,
) -> tuple[TurnRecord, list[RejectedDraw]]:
    """Force Self-disclosure; `TEXT` asks instead. Return the record, and the draws that events rejected."""
    controls = Controls(
        strategy="Self-disclosure", sampling=Sampling(temperature=temperature, seed=5)
    )
    stop = threading.Event()
    rejected = []
    for event in take_forced_turn(
        Policy("p", backend), judge, DIALOGUE, controls, stop, gated=gated
    ):
        if isinstance(event, DrawRejected):
            rejected.append(event.draw)
            if stops:
                stop.set()
    assert isinstance(event, TurnDone)
    return event.record, rejected


def test_a_reply_that_shows_the_strategy_is_drawn_once() -> None:
    backend = Draws(SHARES)
    record, rejected = forced(backend)

    assert backend.seeds == [5]
    assert (record.draws, record.rejected, rejected) == (1, (), [])
    assert record.reading.strategy is not None
    assert record.reading.strategy.strategy == "Self-disclosure"


def test_one_that_does_not_show_it_is_drawn_again_with_a_derived_seed() -> None:
    backend = Draws(TEXT, SHARES)
    record, rejected = forced(backend)

    assert backend.seeds == [5, SECOND_SEED]
    assert rejected == [RejectedDraw(5, AS_FORCED, (Fault.NO_SIGN,))]
    assert record.rejected == tuple(rejected)
    assert (record.draws, record.seed) == (2, SECOND_SEED)
    assert record.reading.reply == "My own job once wore me out, too."


def test_of_draws_that_do_not_show_it_the_one_with_the_highest_reward_is_kept() -> None:
    # Without its emotion step a turn breaks the format and gets the lowest reward.
    backend = Draws(WITHOUT_EMOTION, TEXT, WITHOUT_EMOTION)
    record, _ = forced(backend)

    assert len(backend.seeds) == 1 + FRESH_DRAWS
    assert (record.seed, record.draws, record.withheld) == (SECOND_SEED, 3, False)
    assert record.reading.reply == "What happened today?"
    assert [draw.seed for draw in record.rejected] == [5, THIRD_SEED]


def test_without_a_judge_the_first_of_them_is_kept() -> None:
    record, _ = forced(Draws(TEXT), judge=None)

    assert (record.seed, record.draws, record.reward) == (5, 3, None)


@pytest.mark.parametrize(
    ("text", "temperature"),
    [
        pytest.param(TEXT, 0.0, id="greedy decoding"),
        pytest.param(
            TEXT.replace("What happened today?", "后来怎么样了？你愿意多说一点吗？"),
            0.7,
            id="cannot tell",
        ),
    ],
)
def test_a_turn_is_not_drawn_again_in_vain(text: str, temperature: float) -> None:
    backend = Draws(text)
    record, _ = forced(backend, temperature=temperature)

    assert backend.seeds == [5]
    assert record.draws == 1


def test_draws_that_the_gate_rejects_are_counted_too() -> None:
    backend = Draws(LOOP, TEXT, SHARES)
    record, _ = forced(backend, gated=True)

    assert backend.seeds == [5, SECOND_SEED, THIRD_SEED]
    assert [draw.faults for draw in record.rejected] == [
        (Fault.REPEATS_ITSELF,),
        (Fault.NO_SIGN,),
    ]
    assert (record.draws, record.seed) == (3, THIRD_SEED)


def test_a_withheld_reply_is_not_drawn_again() -> None:
    record, _ = forced(Draws(LOOP), gated=True)

    assert record.withheld
    assert {draw.faults for draw in record.rejected} == {(Fault.REPEATS_ITSELF,)}


def test_a_draw_that_was_stopped_does_not_replace_a_finished_one() -> None:
    backend = Draws(TEXT)
    record, _ = forced(backend, stops=True)

    assert len(backend.seeds) == 2
    assert (record.status, record.seed, record.draws) == ("finished", 5, 1)
