"""The reward of GRPO: one function that reads, judges, adds up and reweights (COMPEER, Eq. 5).

trl adds up what several reward functions say. Eq. 5 multiplies the total, so all of it is one
function here:

1. each completion is read (`compeer_core.reasoning`); one that lacks a part earns -1 everywhere, and
   the judge is not asked;
2. the judge sees all candidates for a history at once;
3. the totals of a group are reweighted by how much its replies repeat each other and the history;
4. every part is logged.

Of several processes each judges its own completions. Groups are put together before they are
reweighted, so one that is spread over processes is treated as if it were not.

A completion whose judgement could not be read has no reward (None): it takes no part in its group's
mean and gets no advantage. It still counts as one of the others' replies.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compeer_core.dialogue import Dialogue
from compeer_core.encoder import SentenceEncoder
from compeer_core.errors import BackendError
from compeer_core.judgement import Judgement, Reward, Unscorable
from compeer_core.reasoning import STEPS, Reading, read
from compeer_core.redundancy import Group, Reweighted, Settings, reply_length, reweighted_groups
from compeer_core.taxonomy import ESCONV_STRATEGIES, StrategyVocabulary
from compeer_core.unifireward import Judge
from training.common.diversity import distinct
from training.common.processes import fail_together, gather_from_processes, process_rank
from training.data.histories import History
from training.data.pictures import Pictures
from training.grpo.settings import RewardSettings

_log = logging.getLogger(__name__)

LogMetric = Callable[[str, float], None]


@dataclass(frozen=True)
class Scored:
    """One completion with all that is known about it."""

    row: int
    """Number of its prompt."""
    text: str
    reply: str
    """Empty where there is none."""
    is_complete: bool
    parts: Reward
    total: float
    """Before reweighting; NaN where it is not known."""
    reason: str = ""
    """Why the judge could not score it."""
    s_in: float = 0.0
    s_hi: float = 0.0
    tau: float = 0.0
    weighted: float = math.nan
    """What is learnt from; NaN where it is not known."""


class GroupReward:
    """The reward function, as trl calls it.

    Attributes:
        last: The completions of this process that were scored last, in order.
        everyone: Those of all processes, in the order of the groups.
    """

    __name__ = "reward"

    def __init__(
        self,
        judge: Judge,
        encoder: SentenceEncoder,
        reweighting: Settings,
        histories: Sequence[History],
        pictures: Pictures,
        group_size: int,
        settings: RewardSettings,
        vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
    ) -> None:
        """Take what is needed to score completions.

        Args:
            judge: The reward model.
            encoder: Tells how alike two texts are.
            reweighting: What repetition costs.
            histories: What the prompts were made of, by the number in the column `row`.
            pictures: Opens the pictures of the histories.
            group_size: G.
            settings: What a judgement is worth.
            vocabulary: The strategies that a turn may name.
        """
        self.last: list[Scored] = []
        self.everyone: list[Scored] = []
        self._judge = judge
        self._encoder = encoder
        self._reweighting = reweighting
        self._histories = histories
        self._pictures = pictures
        self._group_size = group_size
        self._settings = settings
        self._vocabulary = vocabulary
        self._silent = 0

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        row: Sequence[int],
        log_metric: LogMetric | None = None,
        **others: Any,
    ) -> list[float | None]:
        """Return the reweighted reward of each completion, None where it is not known.

        Args:
            completions: A list of one assistant message for each; plain texts do as well.
            row: The number of each one's prompt. Those of a group stand together.
            log_metric: Where the parts go.
            others: What else trl passes.

        Raises:
            BackendError: The judge has been silent for too long.
        """
        texts = [one if isinstance(one, str) else str(one[0]["content"]) for one in completions]
        begun = time.perf_counter()
        with fail_together():
            scored = self.judged(texts, row)
        judging = time.perf_counter() - begun
        parts = gather_from_processes(scored)
        begin = sum(len(part) for part in parts[: process_rank()])
        begun = time.perf_counter()
        self.everyone = self._reweighted([one for part in parts for one in part])
        reweighting = time.perf_counter() - begun
        self.last = self.everyone[begin : begin + len(scored)]
        if log_metric is not None:
            log_parts(self.everyone, self._group_size, log_metric)
            log_metric("seconds/judging", judging)
            log_metric("seconds/reweighting", reweighting)
        self._give_up_if_silent()
        return [None if math.isnan(one.weighted) else one.weighted for one in self.last]

    # --- one after the other ---------------------------------------------------------------------

    def judged(self, texts: Sequence[str], rows: Sequence[int]) -> list[Scored]:
        """Read and judge completions; all of one prompt are judged at once."""
        readings = [read(text, self._vocabulary) for text in texts]
        of_row: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            of_row.setdefault(int(row), []).append(place)
        scored: dict[int, Scored] = {}
        for row, places in of_row.items():
            history = self._histories[row]
            is_asked = any(readings[place].is_complete for place in places)
            judgements = self._judge.judge(
                history.dialogue(self._pictures) if is_asked else Dialogue(),
                [readings[place] for place in places],
                [history.reference] * len(places),
            )
            for place, judgement in zip(places, judgements, strict=True):
                scored[place] = self._scored(row, readings[place], judgement)
        return [scored[place] for place in range(len(texts))]

    def _scored(self, row: int, reading: Reading, judgement: Judgement) -> Scored:
        parts = judgement.reward(self._settings.form)
        total = math.nan if parts.total is None else parts.total
        reason = next(
            (
                outcome.reason
                for outcome in (*(judgement.steps or ()), judgement.response)
                if isinstance(outcome, Unscorable)
            ),
            "",
        )
        if not reason and not math.isfinite(total):
            reason = "the judge's reward is no number"
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
        members = [scored[begin : begin + size] for begin in range(0, len(scored), size)]
        groups = [self._group(of_group) for of_group in members]
        with np.errstate(invalid="ignore"):
            try:
                found = reweighted_groups(groups, self._encoder, self._reweighting)
            except ValueError:
                # One embedding that is no number must not cost the other groups their rewards.
                found = [self._one_group(group) for group in groups]
        return [
            _with(one, of)
            for of_group, after in zip(members, found, strict=True)
            for one, of in zip(of_group, after, strict=True)
        ]

    def _group(self, scored: Sequence[Scored]) -> Group:
        said = [one.text for one in self._histories[scored[0].row].utterances]
        return Group([one.total for one in scored], [one.reply for one in scored], said)

    def _one_group(self, group: Group) -> tuple[Reweighted, ...]:
        try:
            return reweighted_groups([group], self._encoder, self._reweighting)[0]
        except ValueError:
            return tuple(Reweighted(r, 0.0, 0.0, 0.0, math.nan) for r in group.rewards)

    def _give_up_if_silent(self) -> None:
        """Count generations of which the judge scored nothing, the same in every process."""
        asked = [one for one in self.everyone if one.is_complete]
        if not asked or any(not math.isnan(one.total) for one in asked):
            self._silent = 0
            return
        self._silent += 1
        reason, _ = Counter(one.reason for one in asked).most_common(1)[0]
        _log.warning("the judge could score none of %d complete turns: %s", len(asked), reason)
        if self._silent >= self._settings.give_up_after:
            raise BackendError(
                f"the judge could score nothing for {self._silent} generations in a row, lastly "
                f"because: {reason}; once that is cured, go on with --resume"
            )


def _with(one: Scored, found: Reweighted) -> Scored:
    """Return a completion with what reweighting found; a reward that is no number is unknown."""
    is_known = math.isfinite(found.weighted)
    return replace(
        one,
        s_in=found.s_in,
        s_hi=found.s_hi,
        tau=found.tau,
        weighted=found.weighted if is_known else math.nan,
        reason=one.reason or ("" if is_known else "the reweighted reward is no number"),
    )


# --- what is logged ----------------------------------------------------------------------------


def log_parts(scored: Sequence[Scored], group_size: int, log_metric: LogMetric) -> None:
    """Log every part of the rewards of whole groups."""
    for name, value in part_means(scored, group_size).items():
        log_metric(name, value)


def part_means(scored: Sequence[Scored], group_size: int) -> dict[str, float]:
    """Return the means that are watched, those that are defined.

    Args:
        scored: Whole groups, one behind the other.
        group_size: G.
    """
    known = [one for one in scored if not math.isnan(one.total)]
    learnt = [one for one in scored if not math.isnan(one.weighted)]
    groups = [scored[begin : begin + group_size] for begin in range(0, len(scored), group_size)]
    found: dict[str, list[float]] = {
        "reward/total": [one.total for one in known],
        "reward/weighted": [one.weighted for one in learnt],
        "reward/steps": [
            value for one in scored for value in one.parts.steps or () if value is not None
        ],
        "reward/reply": [one.parts.response for one in scored if one.parts.response is not None],
        "reward/format": [one.parts.format for one in scored if one.parts.format is not None],
        "redundancy/s_in": [one.s_in for one in scored],
        "redundancy/s_hi": [one.s_hi for one in scored],
        "redundancy/tau": [one.tau for one in scored],
        "redundancy/taken": [one.total - one.weighted for one in learnt],
        "groups/zero_std": [float(_is_level([one.total for one in group])) for group in groups],
        "groups/zero_std_weighted": [
            float(_is_level([one.weighted for one in group])) for group in groups
        ],
        "judge/unscorable": [float(math.isnan(one.weighted)) for one in scored],
        "text/complete": [float(one.is_complete) for one in scored],
        "text/reply_words": [reply_length(one.reply) for one in scored],
    }
    for place, part in enumerate(STEPS):
        values = [one.parts.steps[place] for one in scored if one.parts.steps is not None]
        found[f"reward/{part.value}"] = [value for value in values if value is not None]
    means = {name: sum(values) / len(values) for name, values in found.items() if values}
    replies = [one.reply for one in scored]
    for length in (1, 2):
        share = distinct(replies, length)
        if share is not None:
            means[f"text/distinct_{length}"] = share
    return means


def _is_level(rewards: Sequence[float]) -> bool:
    """Whether the known rewards of a group leave nothing to learn from."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return len(known) < 2 or max(known) - min(known) < 1e-9
