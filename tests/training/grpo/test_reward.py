"""The reward function: by hand, then whole groups, unknown rewards, a judge that fails."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.errors import BackendError
from compeer_core.redundancy import Settings
from tests.training.grpo.world import WordEncoder, judge, record, turn
from training.common import processes
from training.data.pictures import Pictures
from training.grpo import reward as reward_module
from training.grpo.reward import GroupReward, part_means
from training.grpo.settings import RewardSettings

ROWS = [record(1), record(2)]
"""The reply of the corpus to each is "good: I see."."""


def group_reward(reweighting: str = "signed", size: int = 2, **changes: object) -> GroupReward:
    return GroupReward(
        changes.pop("judge", judge()),  # type: ignore[arg-type]
        changes.pop("encoder", WordEncoder()),  # type: ignore[arg-type]
        Settings(form=reweighting),  # type: ignore[arg-type]
        ROWS,
        Pictures(),
        size,
        RewardSettings(**changes),  # type: ignore[arg-type]
    )


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_a_turn_is_paid_by_hand():
    # steps +1 -1 +1, reply +1 (as good), format +1: 3; the other lacks all: -5
    logged: dict[str, float] = {}
    texts = [turn("good one", emotion="wrong"), "no turn"]

    found = group_reward("off")(
        completions=[message(text) for text in texts],
        row=[0, 0],
        log_metric=logged.__setitem__,
    )

    assert found == [3.0, -5.0]
    assert logged["reward/total"] == -1.0
    assert logged["reward/emotion"] == -1.0
    assert logged["reward/history"] == 0.0
    assert logged["reward/steps"] == pytest.approx((1 - 1 + 1 - 3) / 6)
    assert (logged["reward/reply"], logged["reward/format"]) == (0.0, 0.0)
    assert (logged["text/complete"], logged["judge/unscorable"]) == (0.5, 0.0)
    assert logged["groups/zero_std"] == 0.0
    assert {"seconds/judging", "seconds/reweighting"} <= logged.keys()


def test_soft_rewards_by_hand():
    # steps 2*0.9-1 = 0.8 each, reply 2*(p first + p both)-1, as the judge has it both ways round
    scored = group_reward("off", form="soft").judged([turn("good one")], [0])

    assert scored[0].parts.steps == pytest.approx((0.8, 0.8, 0.8))
    # asked first: (.1 .2 .6 .1); asked second, swapped: (.2 .1 .6 .1); mean of first .15, both .6
    assert scored[0].parts.response == pytest.approx(2 * 0.75 - 1)


def test_repetition_costs_and_the_numbers_are_those_of_eq_5_to_7():
    texts = [turn("same words here"), turn("same words here"), turn("other reply"), "no turn"]
    one = group_reward("paper", size=4)

    found = one(completions=texts, row=[0] * 4)

    # replies: identical pair 1, with the third 0, with the empty one 0: s_in 1/3; 0 for the others
    assert [member.s_in for member in one.last] == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0])
    tau = 1 / (1 + math.exp(-0.5 * ((3 + 3 + 2 + 0) / 4 - 5)))
    assert one.last[0].tau == pytest.approx(tau)
    # the reply is worse than "good: I see.": 3 steps + format - reply = 3
    expected = 3.0 / ((1 + tau / 3) * (1 + tau * one.last[0].s_hi))
    assert found[0] == pytest.approx(expected) and found[0] == found[1]
    assert found[2] == pytest.approx(3.0 / (1 + tau * one.last[2].s_hi))
    assert found[3] == -5.0


def test_a_member_that_cannot_be_judged_has_no_reward_and_still_counts_as_a_reply():
    logged: dict[str, float] = {}
    texts = [turn("same words here"), turn("same words here", strategy="broken")]
    one = group_reward("paper")

    found = one(completions=texts, row=[0, 0], log_metric=logged.__setitem__)

    assert found[1] is None
    assert one.last[1].reason
    assert one.last[0].s_in == pytest.approx(1.0)
    assert found[0] is not None and found[0] < 3.0
    assert logged["judge/unscorable"] == 0.5
    assert logged["groups/zero_std"] == 1.0


def test_an_embedding_that_is_no_number_costs_its_own_group_alone():
    class Broken(WordEncoder):
        def encode(self, texts):
            found = super().encode(texts)
            for number, text in enumerate(texts):
                if "cursed" in text:
                    found[number] = np.inf
            return found

    one = group_reward("signed", encoder=Broken())

    found = one(
        completions=[turn("a b"), turn("c d"), turn("cursed"), turn("e f")], row=[0, 0, 1, 1]
    )

    assert found[0] is not None and found[1] is not None
    assert found[2:] == [None, None]
    assert one.last[2].reason == "the reweighted reward is not finite"


def failing(count: int, word: str = "broken") -> dict[str, list]:
    """Ten turns for one prompt; the judge fails on the first `count`."""
    turns = [turn(f"x {n}", history=word if n < count else "h") for n in range(10)]
    return {"completions": turns, "row": [0] * 10}


@pytest.mark.parametrize("word", ["broken", "exhausted"])
def test_a_run_stops_where_more_than_a_tenth_of_the_judgements_fail(word):
    one = group_reward(size=10, give_up_after=2)

    assert one(**failing(10, word)) == [None] * 10  # the window of two generations is not full
    assert None not in one(**failing(0))
    one(**failing(1, word))  # the first generation has left the window: 1 of 20
    one(**failing(1, word))  # 2 of 20 are exactly a tenth
    with pytest.raises(
        BackendError, match=r"3 of the latest 20 judgements failed, more than 10%.*reward model fai"
    ):
        one(**failing(2, word))


def test_the_share_of_judgements_that_may_fail_is_a_setting():
    patient = group_reward(size=10, give_up_after=1, max_failed_share=0.5)
    strict = group_reward(size=10, give_up_after=1, max_failed_share=0.0)

    assert patient(**failing(5)).count(None) == 5
    assert None not in strict(**failing(0))
    with pytest.raises(BackendError, match="1 of the latest 10 judgements failed, more than 0%"):
        strict(**failing(1))


def test_incomplete_turns_are_not_failures_of_the_judge():
    one = group_reward(give_up_after=1)

    assert one(completions=["a", "b"], row=[0, 0]) == [-5.0, -5.0]


def test_each_process_gets_its_own_part_of_a_group_that_is_spread(monkeypatch):
    texts = [turn("same words here"), turn("same words here"), turn("a b"), turn("c d")]
    rows = [0, 0, 0, 0]
    whole = group_reward("paper", size=4)(completions=texts, row=rows)
    parts = [group_reward("paper", size=4).judged(texts[n : n + 2], rows[:2]) for n in (0, 2)]
    found = []
    for number in (0, 1):
        monkeypatch.setattr(reward_module, "gather_from_processes", lambda own: parts)
        monkeypatch.setattr(reward_module, "process_rank", lambda number=number: number)
        one = group_reward("paper", size=4)
        found += one(completions=texts[2 * number : 2 * number + 2], row=rows[:2])
        assert len(one.everyone) == 4 and len(one.last) == 2

    assert found == pytest.approx(whole)


def test_alone_a_process_gathers_its_own():
    assert processes.gather_from_processes([1, 2]) == [[1, 2]]
    with pytest.raises(ValueError, match="mine"), processes.fail_together():
        raise ValueError("mine")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a b", "c", "a", ""]), st.sampled_from(["h", "wrong", "broken"])
        ),
        min_size=4,
        max_size=4,
    ),
    st.sampled_from(["paper", "signed", "subtract", "off"]),
)
def test_whatever_is_written_rewards_are_finite_or_unknown(turns, form):
    texts = [turn(reply, strategy=step) if reply else step for reply, step in turns]
    one = group_reward(form)

    found = one(completions=texts, row=[0, 0, 1, 1])

    assert len(found) == 4
    for reward, (reply, step) in zip(found, turns, strict=True):
        assert (reward is None) == (bool(reply) and step == "broken")
        assert reward is None or math.isfinite(reward)
    means = part_means(one.everyone, 2)
    assert all(math.isfinite(value) for value in means.values())
    assert 0 <= means["judge/unscorable"] <= 1


def test_means_of_known_rewards_leave_out_the_unknown():
    scored = group_reward("off").judged([turn("good x")], [0])[0]
    known = replace(scored, weighted=scored.total)
    unknown = replace(scored, total=math.nan, weighted=math.nan)

    means = part_means([known, unknown], 2)

    assert means["reward/total"] == known.total == 5.0
    assert means["judge/unscorable"] == 0.5
