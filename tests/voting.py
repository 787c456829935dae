"""Votes in a real store, for tests of the leaderboard."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.judgement import Reward
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import BattlePlan, SidePlan, SideResult, SideStatus
from compeer_core.votes.store import VoteStore

HISTORY = Dialogue((Utterance(Speaker.SEEKER, "I failed my exam."),), id="talk")


@dataclass
class Clock:
    """A clock that stands still until it is set."""

    time: datetime = datetime(2026, 11, 21, 12, 34, 56, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def forward(self, **amount: float) -> None:
        self.time += timedelta(**amount)


def vote(
    store: VoteStore,
    voter: str,
    left: str,
    right: str,
    preference: Preference = Preference.FIRST,
    *,
    replies: tuple[str, str] = ("What happened?", "You will pass next time."),
    rewards: tuple[float, float] | None = None,
    verdict: Preference | None = None,
    leaked: bool = False,
    dwell_ms: int = 5000,
    language: str = "en",
    topic: str = "",
    blind: bool = True,
) -> str:
    """Open a battle and vote on it; returns its id."""
    sides = (SidePlan(left, 1), SidePlan(right, 2))
    plan = BattlePlan(
        voter=voter,
        dialogue=HISTORY,
        sides=sides,
        seed=3,
        language=language,
        topic=topic,
        blind=blind,
    )
    battle = store.open_battle(plan).id
    for side, reply in enumerate(replies):
        reward = None
        if rewards is not None:
            reward = Reward(
                steps=(1.0, 1.0, 1.0), response=None, format=1.0, total=rewards[side], maximum=4,
                unscorable=0,
            )  # fmt: skip
        store.finish_side(
            battle,
            side,
            SideResult(SideStatus.FINISHED, reply=reply, reward=reward, leaked=leaked),
        )
    if verdict is not None:
        store.record_verdict(battle, "judge", verdict)
    store.cast(battle, voter, preference, dwell_ms=dwell_ms, both_seen=True)
    return battle


def hold_votes(
    store: VoteStore,
    number: int,
    *,
    models: Sequence[str] = ("scripted-policy", "other"),
    voters: int = 8,
    seed: int = 1,
) -> None:
    """Draw votes on models, of which each is better than those after it."""
    drawn = random.Random(seed)
    for turn in range(number):
        pair = sorted(drawn.sample(range(len(models)), 2))
        left, right = drawn.sample(pair, 2)
        better = Preference.FIRST if left < right else Preference.SECOND
        said = drawn.choices(
            [better, better.swapped(), Preference.BOTH, Preference.NEITHER], (10, 3, 2, 1)
        )[0]
        lengths = drawn.randrange(20, 90), drawn.randrange(20, 90)
        vote(
            store,
            f"voter-{turn % voters}",
            models[left],
            models[right],
            said,
            replies=("x" * lengths[0], "y" * lengths[1]),
            rewards=(drawn.choice([0.0, 1.0, 2.0]), drawn.choice([0.0, 1.0, 2.0])),
            verdict=said if drawn.random() < 0.5 else drawn.choice(list(Preference)),
            language=drawn.choice(["en", "zh"]),
            topic=drawn.choice(["exam", "work"]),
            dwell_ms=900 if turn % 9 == 4 else 5000,
        )
