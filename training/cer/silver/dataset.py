"""Silver CER: labels of steps and replies by a published rule, from the corpus's human labels.

No person judged these turns. A model wrote them, so their errors are a model's own, and the rule below
compares them with the human labels of the corpus. It can be applied by hand. Numbers in brackets are
constants of `words`, `steps` and `replies`, or defaults of `Settings`; word lists are those of
``words.toml``. It reads English only.

**Disclosed.** The seeker has disclosed something after more than [6] words, or a word of a feeling or
of a problem.

**History step.** Right if both its issue and its stage are right.

- Issue, before anything is disclosed: right if the step says that the problem is not known; wrong if
  it names or implies one.
- Issue, later: right if the step, without its quotations, names the problem type of the dialogue, or
  one that the seeker's own words show at least [3] times and more often than that one. A step that
  says that the problem is not known is right for up to [15] words of the seeker, if none shows a
  problem. A step that names no listed problem ("a hard time") is right if at least half [0.5], and at
  least [2], of the content words of its quotation are the seeker's. Otherwise wrong. A hallucinated
  quote alone does not make a step wrong.
- Stage: right if it is the stage of its third of the dialogue's rounds, with a tolerance of [0.15] of
  them, or [0.25] for a usual stage of a strategy that the person used here; Exploration is right
  until something is disclosed.

**Emotion step.** Right if the sentiment matches the emotion, the words of the step name no other
family of emotions and no contrary strength, and the emotion and its intensity match the human labels:

- The label of the dialogue does not count in three cases. Before anything is disclosed, only Neutral
  is right. While no word of a feeling has been said, Neutral is right too. If the seeker gives thanks
  or says goodbye after [0.6] of the rounds, and their rating did not stay equal or rise, Joy and
  Neutral are right too. All of these need an intensity of at most [3].
- Otherwise the emotion is the labelled one, or one of its family (worry: Anxiety, Nervousness, Fear;
  sorrow: Sadness, Depression, Pain; anger: Anger, Disgust, Jealousy; shame: Shame, Guilt), and the
  intensity differs by at most [1.5] from the line between the ratings before and after.
- **Depends on the history step:** if that is not right, only the labelled emotion is right.

**Strategy step.** Right if it is a strategy that the person used in this turn, or one that people used
in at least [15 %] of the train turns in the same situation: family of the emotion, third of the
dialogue, and whether the supporter's last turn asked a question.

- **Depends on both earlier steps:** if one of them is not right, only a strategy that the person used
  is right.

With ``chained = false`` the two dependences are removed: the unchained control.

**Reply.** Two replies are compared, the corpus's and the generated one, in random order.

- The original is acceptable unless the seeker rated the support up to [2] of 5 right after it; or the
  dialogue failed and there is no rating of [4] or more; or it is empty talk (at most [4] words, no
  question, no content word, and nobody is closing the dialogue). The first two are human judgements,
  the third is the rule's.
- The generated reply is acceptable if at most [1] of its steps is wrong; it has [3] to [120] words; it
  is no near copy of an earlier turn and repeats no run of [3] words; it is not empty talk; at least
  [20 %] of its content words, if any, are the seeker's; it does not welcome thanks, praise news or
  pity a trouble that did not occur; and it shows the surface signs of the strategy that it names
  (`compeer_core.consistency`). All of this is the rule's.
- One acceptable: it is better. None: neither. Both: the higher score wins, and both are equally good
  if the scores differ by at most [0.2]. The score is the mean of two numbers in [0, 1]: content words
  shared with the seeker (full at [3]) and length (full at [12] words). A generated reply loses [0.25]
  for each wrong step. An original gains [0.15] because a person wrote it for this seeker, and gains or
  loses [0.125] for each point of the seeker's rating above or below 3.

**Selection.** A small model is wrong far too often. Rows are sampled by the pattern of their three
labels so that each step is wrong as often as `Settings.false_shares` states, for the train split
`Settings.train_false_shares` (`training.cer.steps.raking`, which preserves odds ratios), for each split
separately. Before that, answers to a seeker who has disclosed nothing are reduced to at most [0.1] of
each pattern. All judged rows, selected or not, are written to a second file.

**Limits.** The rule cannot see whether a sentence makes sense, whether a quotation was ever said, and
whether a strategy that nobody used here would have been as good. The last makes the chained labels
stricter than a reader: a fitting strategy after a wrong step counts as wrong.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, Case, CerRecord, DecidedBy, Split
from compeer_core.config import FrozenModel
from compeer_core.reasoning import STEPS, SupportTurn, read
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from training.cer.pairs import pair_of
from training.cer.records import StepReport
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import generator_for
from training.cer.silver.replies import (
    MARGIN,
    Assessment,
    assess_generated,
    assess_original,
    same_words,
)
from training.cer.silver.steps import (
    Habits,
    StepVerdicts,
    count_habits,
    judge_steps,
)
from training.cer.silver.words import LANGUAGE, Context, Words, words
from training.cer.steps.generation import GeneratedTurn
from training.cer.steps.raking import Pattern, Row, UnreachableError, choose, dependence
from training.common.progress import count_lines, track
from training.data.records import read_records

VERSION = "silver/1"
"""Raise it whenever a constant or a rule of this package changes: finished steps are reused under it."""
CORPUS = "corpus"
"""The author of the corpus's own reply."""

Figures = dict[str, float | int | str | None]
InnerShare = Annotated[float, Field(gt=0.0, lt=1.0)]


class Settings(FrozenModel):
    """Chaining, and the selection of rows."""

    chained: bool = True
    """Whether a step is judged by the verdicts on earlier ones as well. False is the control, in which no
    label depends on another."""
    false_shares: tuple[InnerShare, InnerShare, InnerShare] | None = (0.4, 0.3, 0.3)
    """Target rate of wrong history, emotion and strategy steps, each in (0, 1); None selects all
    rows. The paper states 23 % over all; its Table 1 implies about 41, 18 and 20 %."""
    train_false_shares: tuple[InnerShare, InnerShare, InnerShare] | None = None
    """The same for the train split; None: as `false_shares`. If right and wrong steps are equally
    frequent, a judge gains nothing from learning the majority class."""
    greeting_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """In each pattern, the largest share of candidate rows that may answer a seeker who has disclosed
    nothing. Such turns are easily right, and would otherwise be most of the right ones."""
    rows_per_case: int = Field(default=1, ge=1)
    """The most generated turns of one history that are selected."""

    def false_shares_in(self, split: Split) -> tuple[float, float, float] | None:
        """Return the target rates of wrong steps in a split; None if all its rows are selected."""
        if self.false_shares is None or split != "train":
            return self.false_shares
        return self.train_false_shares or self.false_shares


class Reason(StrEnum):
    """Why a generated turn is not judged."""

    LANGUAGE = "no word lists for the language"
    INCOMPLETE = "incomplete turn"
    REPEATED = "repeated turn for the same history"
    UNLABELLED = "too few human labels"


@dataclass(frozen=True)
class Silver:
    """The rule's result for one generated turn."""

    steps: StepVerdicts
    generated: Assessment
    original: Assessment | None
    """None if the corpus has no reply, or the same one."""
    preference: Preference | None
    """The preference with the original as the first reply."""


def judge(turn: SupportTurn, context: Context, habits: Habits, *, chained: bool = True) -> Silver:
    """Apply the rule to one turn."""
    steps = judge_steps(turn.reasoning, context, habits, chained=chained)
    strategy = turn.reasoning.strategy.strategy
    generated = assess_generated(turn.reply, strategy, steps.wrong, context)
    reply = context.case.original
    if not reply or same_words(reply, turn.reply):
        return Silver(steps, generated, None, None)
    original = assess_original(reply, context)
    return Silver(steps, generated, original, prefer(original, generated))


def prefer(first: Assessment, second: Assessment) -> Preference:
    """Compare two replies by acceptability, then by score.

    Example:
        >>> good, better = Assessment((), 0.5, False), Assessment((), 0.8, False)
        >>> prefer(good, better).value
        'second'
    """
    if not first.acceptable and not second.acceptable:
        return Preference.NEITHER
    if first.acceptable != second.acceptable:
        return Preference.FIRST if first.acceptable else Preference.SECOND
    if abs(first.score - second.score) <= MARGIN:
        return Preference.BOTH
    return Preference.FIRST if first.score > second.score else Preference.SECOND


def to_record(
    generated: GeneratedTurn, turn: SupportTurn, verdict: Silver, seed: int, *, chained: bool = True
) -> CerRecord:
    """Return the row of a judged turn; seed and id determine the order of replies."""
    case = generated.case
    kind = "chained" if chained else "not chained"
    candidate = Candidate(
        author=generated.author,
        reply=turn.reply,
        turn=generated.text.strip(),
        steps=verdict.steps.labels,
        steps_by=DecidedBy(kind="rule", name=f"{VERSION} steps, {kind}"),
        reason=f"{verdict.steps.because}; reply {verdict.generated.because}",
    )
    if verdict.original is None or verdict.preference is None:
        return CerRecord(id=generated.id, case=case, first=candidate)
    original = Candidate(
        author=CORPUS, reply=case.original or "", reason=f"reply {verdict.original.because}"
    )
    by = f"{VERSION} replies, {kind}"
    if verdict.original.by_person:
        by += ", with the seeker's rating or the corpus's list of failed dialogues"
    return pair_of(
        generated.id,
        case,
        original,
        candidate,
        preference=verdict.preference,
        by=DecidedBy(kind="rule", name=by),
        swapped=generator_for(seed, "order", generated.id).random() < 0.5,
    )


# --- the step of the pipeline -----------------------------------------------------------------


@dataclass
class _Tally:
    rows: list[Row] = field(default_factory=list)
    greetings: set[str] = field(default_factory=set)
    """Ids of rows whose seeker has disclosed nothing."""
    preferences: Counter[str] = field(default_factory=Counter)


def label(
    cases: Path,
    turns: Path,
    output: Path,
    judged: Path,
    settings: Settings,
    seed: int = 0,
    *,
    engine: Engine = LOCAL,
) -> StepReport:
    """Judge generated turns and select rows with the target rates of wrong steps.

    Args:
        cases: `Case` rows; those of the train split provide the habit counts.
        turns: `GeneratedTurn` rows.
        output: Receives the selected `CerRecord` rows, atomically.
        judged: Receives all judged turns.
        settings: The control, and the selection.
        seed: Draws the order of replies and the selection.
        engine: Judges the turns. Habits are counted and rows selected in this process.

    Raises:
        ConfigError: A file is missing or has another format.
    """
    lists = words()
    habits = count_habits(read_records(cases, Case), lists)
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    tallies: dict[Split, _Tally] = {split: _Tally() for split in SPLITS}
    judges = _Judges(habits, seed, settings.chained)
    written = write_rows(judged, _judged(turns, judges, engine, dropped, tallies))
    figures: Figures = {"judged": written}
    selected: set[str] = set()
    for split, tally in tallies.items():
        chosen, note = _chosen(tally, settings.false_shares_in(split), settings, seed)
        selected |= chosen
        rows = [row for row in tally.rows if row.id in chosen]
        figures |= _figures(f"{split}.raw", tally.rows)
        figures |= _figures(f"{split}.selected", rows)
        figures |= {f"{split}.raw.preference.{k}": v for k, v in sorted(tally.preferences.items())}
        if note:
            figures[f"{split}.selected.note"] = note
    chosen_rows = (row for row in read_records(judged, CerRecord) if row.id in selected)
    count = write_rows(output, chosen_rows)
    read_count = written + sum(sum(reasons.values()) for reasons in dropped.values())
    left_out = written - len(selected)
    return StepReport(
        step="silver",
        read=read_count,
        written=count,
        dropped={corpus: dict(reasons) for corpus, reasons in sorted(dropped.items())},
        figures={**figures, "judged but not selected": left_out},
    )


@dataclass(frozen=True)
class _Turn:
    """A generated turn, and whether it repeats an earlier one for the same history."""

    generated: GeneratedTurn
    repeated: bool


@dataclass(frozen=True)
class _Judged:
    """A row, with what is counted."""

    record: CerRecord
    pattern: Pattern
    is_greeting: bool
    """The seeker has disclosed nothing."""
    outcome: str


@dataclass(frozen=True)
class _Left:
    """A turn that is not judged."""

    corpus: str
    reason: Reason


@dataclass(frozen=True)
class _Judges:
    """Applies the rule to each turn."""

    habits: Habits
    seed: int
    chained: bool

    def __call__(self, turns: Iterator[_Turn]) -> Iterator[_Judged | _Left]:
        lists = words()
        for turn in turns:
            result = self._of(turn, lists)
            if isinstance(result, Reason):
                yield _Left(turn.generated.case.corpus, result)
            else:
                yield result

    def _of(self, turn: _Turn, lists: Words) -> _Judged | Reason:
        generated, case = turn.generated, turn.generated.case
        if case.language != LANGUAGE:
            return Reason.LANGUAGE
        reading = read(generated.text)
        if not reading.is_complete:
            return Reason.INCOMPLETE
        if turn.repeated:
            return Reason.REPEATED
        context = Context(case, lists)
        verdict = judge(reading.turn, context, self.habits, chained=self.chained)
        if None in verdict.steps.labels:
            return Reason.UNLABELLED
        return _Judged(
            to_record(generated, reading.turn, verdict, self.seed, chained=self.chained),
            _pattern(verdict.steps),
            not context.has_disclosed,
            _outcome(verdict.preference),
        )


def _judged(
    turns: Path,
    judges: _Judges,
    engine: Engine,
    dropped: Mapping[str, Counter[str]],
    tallies: Mapping[Split, _Tally],
) -> Iterator[CerRecord]:
    results = engine.map(judges, _with_repetitions(read_records(turns, GeneratedTurn)))
    for each in track(results, "silver", total=count_lines(turns), unit="turns"):
        if isinstance(each, _Left):
            dropped[each.corpus][each.reason] += 1
            continue
        record = each.record
        tally = tallies[record.case.split]
        tally.rows.append(Row(record.id, record.case.id, each.pattern))
        if each.is_greeting:
            tally.greetings.add(record.id)
        tally.preferences[each.outcome] += 1
        yield record


def _with_repetitions(turns: Iterator[GeneratedTurn]) -> Iterator[_Turn]:
    seen: set[bytes] = set()
    for generated in turns:
        text = f"{generated.case.id}\n{generated.text.strip()}"
        key = hashlib.sha256(text.encode()).digest()
        yield _Turn(generated, repeated=key in seen)
        seen.add(key)


def _pattern(steps: StepVerdicts) -> Pattern:
    history, emotion, strategy = (label is True for label in steps.labels)
    return history, emotion, strategy


def _outcome(preference: Preference | None) -> str:
    names = {
        Preference.FIRST: "original better",
        Preference.SECOND: "generated better",
        Preference.BOTH: "both",
        Preference.NEITHER: "neither",
    }
    return "none" if preference is None else names[preference]


def _chosen(
    tally: _Tally,
    false_shares: tuple[float, float, float] | None,
    settings: Settings,
    seed: int,
) -> tuple[frozenset[str], str]:
    """Return the ids of the selected rows, and a note for the report or ""."""
    everything = frozenset(row.id for row in tally.rows)
    if false_shares is None or not tally.rows:
        return everything, ""
    rows = _with_few_greetings(tally, settings.greeting_share, seed)
    try:
        chosen = choose(rows, false_shares, per_group=settings.rows_per_case, seed=seed)
    except UnreachableError as error:
        return everything, f"all rows are selected: {error}"
    return chosen, ""


def _with_few_greetings(tally: _Tally, share: float, seed: int) -> list[Row]:
    if share == 1:
        return tally.rows
    others: Counter[Pattern] = Counter()
    greetings: defaultdict[Pattern, list[Row]] = defaultdict(list)
    for row in tally.rows:
        if row.id in tally.greetings:
            greetings[row.pattern].append(row)
        else:
            others[row.pattern] += 1
    dropped: set[str] = set()
    for pattern, rows in greetings.items():
        most = int(others[pattern] * share / (1 - share))
        rows.sort(key=lambda row: generator_for(seed, "greetings", row.id).random())
        dropped |= {row.id for row in rows[most:]}
    return [row for row in tally.rows if row.id not in dropped]


def _figures(prefix: str, rows: Sequence[Row]) -> Figures:
    """Return how often each step is wrong, and how the labels depend on each other."""
    patterns = [row.pattern for row in rows]
    figures: Figures = {f"{prefix}.rows": len(patterns)}
    if not patterns:
        return figures
    for number, part in enumerate(STEPS):
        wrong = sum(not pattern[number] for pattern in patterns)
        figures[f"{prefix}.wrong.{part}"] = round(wrong / len(patterns), 4)
    for pattern, count in sorted(Counter(patterns).items(), reverse=True):
        name = "".join("T" if right else "F" for right in pattern)
        figures[f"{prefix}.pattern.{name}"] = count
    for number in (1, 2):
        measured = dependence(patterns, number)
        for name in ("wrong_after_wrong", "wrong_after_right", "phi", "bits"):
            value = getattr(measured, name)
            figures[f"{prefix}.{STEPS[number]}.{name}"] = None if value is None else round(value, 4)
    return figures
