"""The reward of GRPO in one function: parse, judge, add up and reweight (COMPEER, Eq. 5).

trl adds up several reward functions, but Eq. 5 multiplies their sum. So one function does it all:

1. Parse each completion (`compeer_core.reasoning`). One that lacks a part gets -1 for every part
   without asking the judge.
2. Judge all candidates for a history at once.
3. Reweight the totals of a group by how much its replies repeat each other and the history.
4. Log every part.

Each process judges its own completions. Groups are gathered before they are reweighted, so a group
may be spread over processes.

A completion whose judgement failed has no reward (None): it is left out of its group's mean and gets
no advantage, but still counts as one of the group's replies. When too many judgements fail, the run
stops (`RewardSettings.max_failed_share`).
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.dialogue import Dialogue
from compeer_core.encoder import SentenceEncoder
from compeer_core.errors import BackendError
from compeer_core.judgement import Judgement, Reward, Unscorable
from compeer_core.reasoning import STEPS, Reading, read
from compeer_core.redundancy import Group, Reweighted, Settings, reply_length, reweighted_groups
from compeer_core.unifireward import Judge
from training.common.diversity import distinct
from training.common.processes import fail_together, gather_from_processes, process_rank
from training.data.pictures import Pictures
from training.grpo.settings import RewardSettings

_log = logging.getLogger(__name__)

LogMetric = Callable[[str, float], None]


@dataclass(frozen=True)
class Scored:
    """One completion with its rewards."""

    row: int
    """Number of its prompt."""
    text: str
    reply: str
    """Empty if it could not be parsed."""
    is_complete: bool
    parts: Reward
    total: float
    """Before reweighting; NaN if unknown."""
    reason: str = ""
    """Why it has no reward."""
    s_in: float = 0.0
    s_hi: float = 0.0
    tau: float = 0.0
    weighted: float = math.nan
    """After reweighting, what GRPO learns from; NaN if unknown."""


class GroupReward:
    """The reward function, as trl calls it.

    Attributes:
        last: The latest completions of this process, in order.
        everyone: The latest completions of all processes, group after group.
    """

    __name__ = "reward"

    def __init__(
        self,
        judge: Judge,
        encoder: SentenceEncoder,
        reweighting: Settings,
        records: Sequence[CerRecord],
        pictures: Pictures,
        group_size: int,
        settings: RewardSettings,
    ) -> None:
        """Take the models and settings.

        Args:
            judge: The reward model.
            encoder: Embeds texts to measure repetition.
            reweighting: The penalty on repetition.
            records: The rows of the prompts, by the number in the column `row`.
            pictures: Opens the pictures of the histories.
            group_size: G.
            settings: The value of a judgement, and how many may fail.
        """
        self.last: list[Scored] = []
        self.everyone: list[Scored] = []
        self._judge = judge
        self._encoder = encoder
        self._reweighting = reweighting
        self._records = records
        self._pictures = pictures
        self._group_size = group_size
        self._settings = settings
        self._failures: deque[tuple[int, int]] = deque(maxlen=settings.give_up_after)
        """Failed and all judgements of the latest generations, the same in every process."""

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        row: Sequence[int],
        log_metric: LogMetric | None = None,
        **others: Any,
    ) -> list[float | None]:
        """Return the reweighted reward of each completion, None if unknown.

        Args:
            completions: One list with an assistant message each, or plain texts.
            row: The number of each completion's prompt. Completions of a group are adjacent.
            log_metric: Receives the mean of every part.
            others: Other columns that trl passes.

        Raises:
            BackendError: Too many judgements failed.
        """
        texts = [c if isinstance(c, str) else str(c[0]["content"]) for c in completions]
        start = time.perf_counter()
        with fail_together():
            scored = self.judged(texts, row)
        judging = time.perf_counter() - start
        parts = gather_from_processes(scored)
        first = sum(len(part) for part in parts[: process_rank()])
        start = time.perf_counter()
        self.everyone = self._reweighted([completion for part in parts for completion in part])
        reweighting = time.perf_counter() - start
        self.last = self.everyone[first : first + len(scored)]
        if log_metric is not None:
            for name, value in part_means(self.everyone, self._group_size).items():
                log_metric(name, value)
            log_metric("seconds/judging", judging)
            log_metric("seconds/reweighting", reweighting)
        self._stop_if_judging_fails()
        return [None if math.isnan(c.weighted) else c.weighted for c in self.last]

    # --- the steps -------------------------------------------------------------------------------

    def judged(self, texts: Sequence[str], rows: Sequence[int]) -> list[Scored]:
        """Parse and judge completions; those of one prompt are judged at once."""
        readings = [read(text) for text in texts]
        indices_of: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            indices_of.setdefault(int(row), []).append(index)
        scored: dict[int, Scored] = {}
        for row, indices in indices_of.items():
            case = self._records[row].case
            needs_judge = any(readings[index].is_complete for index in indices)
            judgements = self._judge.judge(
                self._pictures.dialogue(case) if needs_judge else Dialogue(),
                [readings[index] for index in indices],
                [case.original or ""] * len(indices),
            )
            for index, judgement in zip(indices, judgements, strict=True):
                scored[index] = self._scored(row, readings[index], judgement)
        return [scored[index] for index in range(len(texts))]

    def _scored(self, row: int, reading: Reading, judgement: Judgement) -> Scored:
        parts = judgement.reward(self._settings.form)
        total = math.nan if parts.total is None else parts.total
        outcomes = (*(judgement.steps or ()), judgement.response)
        reason = next((o.reason for o in outcomes if isinstance(o, Unscorable)), "")
        if not reason and not math.isfinite(total):
            reason = "the judge's reward is not finite"
        return Scored(
            row=row,
            text=reading.raw,
            reply=reading.reply or "",
            is_complete=reading.is_complete,
            parts=parts,
            total=total if math.isfinite(total) else math.nan,
            reason=reason,
        )

    def _reweighted(self, scored: Sequence[Scored]) -> list[Scored]:
        size = self._group_size
        members = [scored[start : start + size] for start in range(0, len(scored), size)]
        groups = [self._group(completions) for completions in members]
        with np.errstate(invalid="ignore"):
            try:
                reweighted = reweighted_groups(groups, self._encoder, self._reweighting)
            except ValueError:
                # An embedding that is not finite must not cost the other groups their rewards.
                reweighted = [self._one_group(group) for group in groups]
        return [
            _with(completion, values)
            for completions, group in zip(members, reweighted, strict=True)
            for completion, values in zip(completions, group, strict=True)
        ]

    def _group(self, scored: Sequence[Scored]) -> Group:
        history = [utterance.text for utterance in self._records[scored[0].row].case.history]
        return Group([c.total for c in scored], [c.reply for c in scored], history)

    def _one_group(self, group: Group) -> tuple[Reweighted, ...]:
        try:
            return reweighted_groups([group], self._encoder, self._reweighting)[0]
        except ValueError:
            return tuple(Reweighted(r, 0.0, 0.0, 0.0, math.nan) for r in group.rewards)

    def _stop_if_judging_fails(self) -> None:
        """Stop the run if too many judgements of the latest generations failed.

        Raises:
            BackendError: More than `max_failed_share` of them failed, torch errors included.
        """
        judged = [completion for completion in self.everyone if completion.is_complete]
        if not judged:
            return
        reasons = Counter(c.reason for c in judged if math.isnan(c.total))
        self._failures.append((reasons.total(), len(judged)))
        if not reasons:
            return
        (reason, _), *_ = reasons.most_common(1)
        _log.warning("%d of %d judgements failed: %s", reasons.total(), len(judged), reason)
        failed, total = map(sum, zip(*self._failures, strict=True))
        limit = self._settings.max_failed_share
        if len(self._failures) == self._failures.maxlen and failed > limit * total:
            raise BackendError(
                f"{failed} of the latest {total} judgements failed, more than {limit:.0%} "
                f"(reward.max_failed_share); latest reason: {reason}. Fix the judge, then continue "
                "with --resume"
            )


def _with(completion: Scored, values: Reweighted) -> Scored:
    """Add the result of reweighting; a reward that is not finite is unknown."""
    is_known = math.isfinite(values.weighted)
    return replace(
        completion,
        s_in=values.s_in,
        s_hi=values.s_hi,
        tau=values.tau,
        weighted=values.weighted if is_known else math.nan,
        reason=completion.reason or ("" if is_known else "the reweighted reward is not finite"),
    )


# --- metrics ----------------------------------------------------------------------------------


def part_means(scored: Sequence[Scored], group_size: int) -> dict[str, float]:
    """Return the metrics of whole groups, as far as they are defined.

    Args:
        scored: Completions, group after group.
        group_size: G.
    """
    known = [c for c in scored if not math.isnan(c.total)]
    learnt = [c for c in scored if not math.isnan(c.weighted)]
    groups = [scored[begin : begin + group_size] for begin in range(0, len(scored), group_size)]
    values_of: dict[str, list[float]] = {
        "reward/total": [c.total for c in known],
        "reward/weighted": [c.weighted for c in learnt],
        "reward/steps": [
            value for c in scored for value in c.parts.steps or () if value is not None
        ],
        "reward/reply": [c.parts.response for c in scored if c.parts.response is not None],
        "reward/format": [c.parts.format for c in scored if c.parts.format is not None],
        "redundancy/s_in": [c.s_in for c in scored],
        "redundancy/s_hi": [c.s_hi for c in scored],
        "redundancy/tau": [c.tau for c in scored],
        "redundancy/taken": [c.total - c.weighted for c in learnt],
        "groups/zero_std": [float(_is_level([c.total for c in group])) for group in groups],
        "groups/zero_std_weighted": [
            float(_is_level([c.weighted for c in group])) for group in groups
        ],
        "judge/unscorable": [float(math.isnan(c.weighted)) for c in scored],
        "text/complete": [float(c.is_complete) for c in scored],
        "text/reply_words": [reply_length(c.reply) for c in scored],
    }
    for index, part in enumerate(STEPS):
        values = [c.parts.steps[index] for c in scored if c.parts.steps is not None]
        values_of[f"reward/{part.value}"] = [value for value in values if value is not None]
    means = {name: sum(values) / len(values) for name, values in values_of.items() if values}
    replies = [c.reply for c in scored]
    for length in (1, 2):
        share = distinct(replies, length)
        if share is not None:
            means[f"text/distinct_{length}"] = share
    return means


def _is_level(rewards: Sequence[float]) -> bool:
    """Return whether all known rewards of a group are equal, so that it teaches nothing."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return len(known) < 2 or max(known) - min(known) < 1e-9
