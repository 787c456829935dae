"""Battles as tests need them."""

from dataclasses import replace
from datetime import UTC, datetime

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.judgement import Reward
from compeer_core.votes.battles import BattlePlan, SidePlan, SideResult, SideStatus

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)

TURN = (
    "<history>A failed exam.\nStage: Exploration</history>\n"
    "<emotion>Worried.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4</emotion>\n"
    "<strategy>Ask.\nStrategy: Question</strategy>\n"
    "<reply>{}</reply>"
)
HISTORY = Dialogue(
    (
        Utterance(Speaker.SEEKER, "I failed my exam."),
        Utterance(Speaker.SUPPORTER, "Oh no."),
        Utterance(Speaker.SEEKER, "I cannot tell anyone."),
    ),
    id="talk-1",
)
REWARD = Reward(
    steps=(1.0, -1.0, None), response=None, format=1.0, total=None, maximum=4, unscorable=1
)


def plan(voter="ann", models=("policy", "base"), **changes):
    left, right = models
    made = BattlePlan(
        voter=voter,
        dialogue=HISTORY,
        sides=(SidePlan(left, 11), SidePlan(right, 12)),
        seed=5,
        keep_words=True,
        language="en",
    )
    return replace(made, **changes)


def result(reply="Tell me more.", status=SideStatus.FINISHED, **fields):
    return SideResult(
        status=status,
        turn=TURN.format(reply) if reply else "",
        reply=reply,
        **{"seconds": 1.5, "tokens": 40, "leaked": False} | fields,
    )


def fought(store, voter="ann", **changes):
    """Open a battle and end both sides; return its id."""
    battle = store.open_battle(plan(voter, **changes))
    store.finish_side(battle.id, 0, result("What happened?"))
    store.finish_side(battle.id, 1, result("You will pass next time."))
    return battle.id
