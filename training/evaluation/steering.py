"""Obedience to a forced strategy: `python -m training evaluate steering <config.toml>`.

All policies answer each context with strategies forced as on the page, all eight equally often. A line of the sheet
(`training.evaluation.blind_sheet`) has a conversation, a strategy with its definition, and a reply; the reader judges
according to `steering_rubric.md` whether the reply carries out that strategy, and whether it fits the message.

A reply may carry out several strategies, and a reader may be lenient. So additional lines, one for ten turns, show a
reply again with another strategy than the forced one. Their share of yes bounds the reader's false-yes rate from above,
and is what a policy reaches that ignores the forced strategy.

The rule that decides about fresh draws, `compeer_core.consistency.carries_out`, is compared with the reader.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field

from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.consistency import Followed, carries_out
from compeer_core.reasoning import reply_of
from compeer_core.stats import bootstrap_weights, estimate
from compeer_core.taxonomy import ESCONV_STRATEGIES
from training.common import results
from training.data.pictures import Pictures
from training.evaluation.blind_sheet import (
    NO_REPLY,
    RATERS,
    Line,
    Sheet,
    SheetConfig,
    WrittenTurn,
    contexts_of,
    judgements_of,
    publish,
    read_key,
    share,
)
from training.evaluation.contexts import SampledTurn, sampled_turns
from training.evaluation.metrics import balanced_accuracy, confusion

RUBRIC = Path(__file__).with_name("steering_rubric.md")
STRATEGIES = ESCONV_STRATEGIES.names
TURNS_PER_CONTROL = 10
ALL = "all strategies"
CONTROL = "control: another strategy than the forced one"
RULE = "rule (carries_out) against the reader"


class Config(SheetConfig):
    """`[evaluate steering]`: policies, contexts and reader."""

    name: str = Field(pattern=r"^steering_[\w-]+$")
    strategies_per_context: int = Field(default=1, ge=1, le=len(STRATEGIES))
    """How many strategies are forced in each context, each in a turn of its own."""
    draws: int = Field(default=1, ge=1)
    """How often a turn is drawn at most until, by rule, its reply carries out the strategy; see `AnswerRequest`."""
    command: str = (
        "python -m training evaluate steering training/configs/small/evaluate_steering.toml"
    )


class SteeredTurn(WrittenTurn):
    """A turn under a forced strategy."""

    strategy: str
    by_rule: Followed
    """Whether its reply carries out the strategy."""

    @classmethod
    def of_sampled(cls, turn: SampledTurn) -> Self:
        """Return the row of a turn with a forced strategy."""
        assert turn.strategy is not None
        history, reply = turn.case.dialogue().merged().utterances, reply_of(turn.text)
        by_rule = carries_out(history, reply, turn.strategy, turn.case.language)
        return cls.of(turn, strategy=turn.strategy, by_rule=by_rule)


class SheetLine(Line):
    """A reply, as shown to the reader."""

    conversation: tuple[str, ...] = Field(min_length=1)
    strategy: str
    definition: str
    reply: str


class Hidden(FrozenModel):
    """What a line of the sheet hides."""

    policy: str
    context: str
    source: str
    """Source dialogue of the context, the unit of resampling."""
    forced: str
    shown: str
    """The strategy on the sheet. If it is not the forced one, the line is a control."""
    by_rule: Followed
    """Whether the reply carries out the forced strategy."""

    @property
    def is_control(self) -> bool:
        return self.shown != self.forced


class Judgement(Line):
    """The reader's answers about a line; see `steering_rubric.md`."""

    carries_out: bool
    fits: bool


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the sheet, or compute the metrics once the reader's judgements exist.

    Raises:
        WaitingForPeople: The sheet is written, the judgements are missing.
    """
    contexts = contexts_of(config, resume)
    if dry_run:
        return

    def make() -> Sheet:
        return blind_sheet(_generate_turns(config, contexts), config.seed)

    judgements = judgements_of(config, RUBRIC, Judgement, make)
    key = {line: Hidden(**hidden) for line, hidden in read_key(config).items()}
    metrics = steering_metrics(key, judgements, RATERS[config.label_source])
    publish(config, "Turns under a forced strategy, judged blind", metrics)


def _generate_turns(config: Config, contexts: Sequence[Case]) -> list[SteeredTurn]:
    repeated = [case for case in contexts for _ in range(config.strategies_per_context)]
    forced = [STRATEGIES[number % len(STRATEGIES)] for number in range(len(repeated))]
    turns = sampled_turns(
        config.policies,
        repeated,
        Pictures(None, config.faces),
        config.sampling,
        config.output,
        config.seed,
        forced,
        config.draws,
    )
    return [*map(SteeredTurn.of_sampled, turns)]


def blind_sheet(turns: Sequence[SteeredTurn], seed: int) -> Sheet:
    """Return a sheet with all turns and the controls, in random order.

    Args:
        turns: Of all policies.
        seed: Of the order and the controls, which are drawn among the turns with a reply.
    """
    rng = np.random.default_rng([seed, 1])
    with_reply = [turn for turn in turns if reply_of(turn.text)]
    count = min(-(-len(turns) // TURNS_PER_CONTROL), len(with_reply))
    asked = [(turn, turn.strategy) for turn in turns]
    for place in rng.permutation(len(with_reply))[:count].tolist():
        others = [name for name in STRATEGIES if name != with_reply[place].strategy]
        asked.append((with_reply[place], others[rng.integers(len(others))]))
    lines: list[SheetLine] = []
    key: dict[str, dict[str, Any]] = {}
    for place in rng.permutation(len(asked)).tolist():
        turn, shown = asked[place]
        line = SheetLine(
            id=f"s{len(lines) + 1:03}",
            conversation=turn.conversation,
            strategy=shown,
            definition=ESCONV_STRATEGIES.entry(shown).definition("en"),
            reply=reply_of(turn.text) or NO_REPLY,
        )
        lines.append(line)
        key[line.id] = Hidden(
            policy=turn.policy,
            context=turn.context,
            source=turn.source,
            forced=turn.strategy,
            shown=shown,
            by_rule=turn.by_rule,
        ).model_dump(mode="json")
    return Sheet(turns, lines, key)


def steering_metrics(
    key: Mapping[str, Hidden], judgements: Mapping[str, Judgement], rater: str
) -> Iterator[results.Metric]:
    """Yield obedience and fit, of all turns and by strategy, then the controls and the rule.

    Args:
        key: What each line of the sheet hides.
        judgements: One for each line.
        rater: One of `RATERS`.
    """
    for policy in dict.fromkeys(hidden.policy for hidden in key.values()):
        own = {line: hidden for line, hidden in key.items() if hidden.policy == policy}
        turns = {line: hidden for line, hidden in own.items() if not hidden.is_control}
        groups = {ALL: turns}
        for name in STRATEGIES:
            groups[name] = {line: each for line, each in turns.items() if each.forced == name}
        groups[CONTROL] = {line: each for line, each in own.items() if each.is_control}
        for about, group in groups.items():
            if not group:
                continue
            weights = bootstrap_weights([hidden.source for hidden in group.values()])
            answers = [judgements[line] for line in group]
            obeyed = [float(answer.carries_out) for answer in answers]
            yield share(f"carried out ({rater})", obeyed, weights, about, policy)
            fitting = [float(answer.fits) for answer in answers]
            yield share(f"fits ({rater})", fitting, weights, about, policy)
        yield from _rule_metrics(turns, judgements, policy)


def _rule_metrics(
    turns: Mapping[str, Hidden], judgements: Mapping[str, Judgement], policy: str
) -> Iterator[results.Metric]:
    """Yield how well the rule agrees with the reader; nothing if the reader gave only one answer."""
    known = {line: each for line, each in turns.items() if each.by_rule is not Followed.UNKNOWN}
    truth = np.array([judgements[line].carries_out for line in known], dtype=int)
    if len({*truth.tolist()}) < 2:
        return
    by_rule = np.array([each.by_rule is Followed.YES for each in known.values()], dtype=int)
    weights = bootstrap_weights([each.source for each in known.values()])
    agreement = balanced_accuracy(confusion(weights, truth, by_rule, 2))
    yield results.measured(
        *("balanced accuracy", estimate(agreement, len(known))), unit="%", of=policy, about=RULE
    )
