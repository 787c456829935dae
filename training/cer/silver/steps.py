"""The silver rule for the three reasoning steps, as stated in `training.cer.silver.dataset`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import Field

from compeer_core.cer import Case, StepLabels
from compeer_core.config import FrozenModel
from compeer_core.reasoning import EmotionStep, HistoryStep, Reasoning, StrategyStep, Unreadable
from compeer_core.taxonomy import ESCONV_STRATEGIES, SENTIMENT_OF, Emotion, Stage, Strategy
from training.cer.rule_reasoning import stage_at
from training.cer.silver.words import Context, Words, quotations, without_quotations

FAMILIES: Mapping[Emotion, str] = MappingProxyType(
    {
        **dict.fromkeys((Emotion.ANXIETY, Emotion.NERVOUSNESS, Emotion.FEAR), "worry"),
        **dict.fromkeys((Emotion.SADNESS, Emotion.DEPRESSION, Emotion.PAIN), "sorrow"),
        **dict.fromkeys((Emotion.ANGER, Emotion.DISGUST, Emotion.JEALOUSY), "anger"),
        **dict.fromkeys((Emotion.SHAME, Emotion.GUILT), "shame"),
        Emotion.JOY: "joy",
        Emotion.NEUTRAL: "neutral",
    }
)
"""Emotions that a careful reader might confuse."""

ANY_FAMILY = "any"
_STAGES = tuple(Stage)


class StepSettings(FrozenModel):
    """Thresholds of the rule for steps."""

    chained: bool = True
    """Whether a wrong step removes the tolerance for later ones. False: the control in which no label
    depends on another."""
    greeting_words: int = Field(default=6, ge=0)
    """A seeker with at most this many words, and no word of a feeling or a problem, has disclosed
    nothing."""
    unknown_words: int = Field(default=15, ge=0)
    """Up to this many words of the seeker, none of which shows a problem, a history step may say that
    the problem is not known."""
    problem_signs: int = Field(default=3, ge=1)
    """Another problem than the corpus's may be named if the seeker's words show it this often, and
    more often than the corpus's."""
    cited_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Least share of content words from the seeker in a history step that names no listed problem: of
    its quotation, or of the whole text if there is none."""
    cited_words: int = Field(default=2, ge=1)
    """Least number of such words."""
    quoted_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least share of a quotation's content words that are the seeker's; below it the history step is
    wrong. 0 accepts hallucinated quotes if the problem is right."""
    stage_slack: float = Field(default=0.15, ge=0.0, le=1.0)
    """How far outside its third of the dialogue a stage is accepted, as a share of the rounds."""
    stage_slack_by_strategy: float = Field(default=0.25, ge=0.0, le=1.0)
    """The same for a usual stage of a strategy that the person used."""
    intensity_slack: float = Field(default=1.5, ge=0.0, le=4.0)
    """Largest distance of an intensity from the line between the ratings before and after."""
    light_intensity: int = Field(default=3, ge=1, le=5)
    """The strongest intensity of relief, and of a neutral state."""
    relief_from: float = Field(default=0.6, ge=0.0, le=1.0)
    """From this share of the rounds on, thanks count as relief."""
    habit_share: float = Field(default=0.15, ge=0.0, le=1.0)
    """A strategy that was not used here is accepted if people used it in at least this share of the
    turns in the same situation (`Habits`)."""
    habit_turns: int = Field(default=30, ge=1)
    """For situations with fewer turns, the family of the emotion is ignored."""


@dataclass(frozen=True)
class Verdict:
    """Whether a step is right, and why; None without a human label."""

    right: bool | None
    because: str


@dataclass(frozen=True)
class StepVerdicts:
    """The verdicts on the three steps of one turn."""

    history: Verdict
    emotion: Verdict
    strategy: Verdict

    @property
    def labels(self) -> StepLabels:
        return self.history.right, self.emotion.right, self.strategy.right

    @property
    def wrong(self) -> int:
        """The number of wrong steps."""
        return self.labels.count(False)

    @property
    def because(self) -> str:
        """All three in one line."""
        names = ("history", "emotion", "strategy")
        verdicts = (self.history, self.emotion, self.strategy)
        return "; ".join(
            f"{name} {_WORD_OF[verdict.right]}: {verdict.because}"
            for name, verdict in zip(names, verdicts, strict=True)
        )


_WORD_OF = {True: "right", False: "wrong", None: "not judged"}


class Habits(FrozenModel):
    """How often people used each strategy in a situation, on the train split.

    A situation is the family of the seeker's emotion, the third of the dialogue, and the supporter's
    last turn: none yet (`begins`), with a question (`asked`), or without one (`told`). A turn with two
    strategies counts for both.
    """

    turns: Mapping[str, int] = {}
    """By situation."""
    used: Mapping[str, Mapping[Strategy, int]] = {}

    def share(self, case: Case, context: Context, strategy: Strategy, least_turns: int) -> float:
        """Return the share of the turns in the case's situation that use a strategy, in [0, 1]."""
        situations = _situations(case, context)
        for situation in situations:
            turns = self.turns.get(situation, 0)
            if turns >= least_turns or situation == situations[-1]:
                return self.used.get(situation, {}).get(strategy, 0) / turns if turns else 0.0
        raise AssertionError("the last situation always returns")


def count_habits(cases: Iterable[Case], lists: Words) -> Habits:
    """Count the strategies of the cases of the train split."""
    turns: Counter[str] = Counter()
    used: defaultdict[str, Counter[Strategy]] = defaultdict(Counter)
    for case in cases:
        if case.split != "train" or not case.labels.strategies:
            continue
        for situation in _situations(case, Context(case, lists)):
            turns[situation] += 1
            used[situation].update(case.labels.strategies)
    return Habits(turns=turns, used=used)


def _situations(case: Case, context: Context) -> tuple[str, ...]:
    """Return the case's situation, then the same without the family of the emotion."""
    before = "begins"
    if context.supporter_turns:
        before = "asked" if "?" in context.supporter_turns[-1] else "told"
    rest = f"{stage_at(context.position)}, {before}"
    emotion = case.labels.emotion
    family = () if emotion is None else (f"{FAMILIES[emotion]}, {rest}",)
    return (*family, f"{ANY_FAMILY}, {rest}")


def judge_steps(
    reasoning: Reasoning,
    case: Case,
    context: Context,
    habits: Habits,
    settings: StepSettings,
    lists: Words,
) -> StepVerdicts:
    """Judge the three steps of a turn in their order."""
    history = judge_history(reasoning.history, case, context, settings, lists)
    emotion = judge_emotion(reasoning.emotion, case, context, history.right, settings, lists)
    strategy = judge_strategy(
        reasoning.strategy, case, context, habits, (history.right, emotion.right), settings
    )
    return StepVerdicts(history, emotion, strategy)


# --- history ----------------------------------------------------------------------------------


def judge_history(
    step: HistoryStep, case: Case, context: Context, settings: StepSettings, lists: Words
) -> Verdict:
    """Judge the core issue and the stage; the step is right if both are."""
    issue = _issue(step.text, case, context, settings, lists)
    stage = _stage(step.stage, case, context, settings)
    if issue.right is False or stage.right is False:
        wrong = [verdict.because for verdict in (issue, stage) if verdict.right is False]
        return Verdict(False, " and ".join(wrong))
    both = None if issue.right is None else True
    return Verdict(both, f"{issue.because}, {stage.because}")


def _issue(
    text: str, case: Case, context: Context, settings: StepSettings, lists: Words
) -> Verdict:
    disclosed = context.has_disclosed(settings.greeting_words)
    own = without_quotations(text)
    named = lists.named(own)
    for quotation in quotations(text):
        if _share_of(quotation, context, lists) < settings.quoted_share:
            return Verdict(False, "quotes words that the seeker did not say")
    if own in lists.unknown and not named:
        if disclosed and (context.seeker_words > settings.unknown_words or context.signs):
            return Verdict(False, "says that nothing has been told, though the seeker has")
        return Verdict(True, "says rightly that the problem is not known yet")
    if not disclosed:
        if named:
            return Verdict(False, f"names {_list(named)} before the seeker has told anything")
        return Verdict(False, "speaks of a problem before the seeker has told anything")
    problem = case.labels.problem
    if problem in lists.problems and lists.near[problem] & named:
        return Verdict(True, f"names the problem of the dialogue ({problem})")
    least = max(settings.problem_signs, context.signs.get(problem or "", 0) + 1)
    shown = frozenset(name for name in named if context.signs.get(name, 0) >= least)
    if shown:
        return Verdict(True, f"names what the seeker speaks of ({_list(shown)})")
    if named and problem in lists.problems:
        return Verdict(False, f"names {_list(named)}, while the dialogue is about {problem}")
    if named:
        return Verdict(None, "nobody labelled the problem of the dialogue")
    source = "\n".join(quotations(text)) or own
    words = lists.content(source)
    if len(words & context.content) >= settings.cited_words and (
        _share_of(source, context, lists) >= settings.cited_share
    ):
        return Verdict(True, "cites what the seeker said")
    return Verdict(False, "names no problem and cites nothing that the seeker said")


def _share_of(text: str, context: Context, lists: Words) -> float:
    """Return the share of a text's content words that the seeker used; 1 if it has none."""
    words = lists.content(text)
    return len(words & context.content) / len(words) if words else 1.0


def _stage(
    stage: Stage | Unreadable, case: Case, context: Context, settings: StepSettings
) -> Verdict:
    if isinstance(stage, Unreadable):
        return Verdict(False, "its stage cannot be read")
    if stage is Stage.EXPLORATION and not context.has_disclosed(settings.greeting_words):
        return Verdict(True, "nothing is explored yet")
    distance = _distance(stage, context.position)
    where = f"round {case.round + 1} of {case.rounds}"
    if distance <= settings.stage_slack:
        return Verdict(True, f"{stage} fits {where}")
    for strategy in case.labels.strategies:
        usual = ESCONV_STRATEGIES.entry(strategy).stages
        if stage in usual and distance <= settings.stage_slack_by_strategy:
            return Verdict(True, f"{stage} is near enough to {where} for {strategy}")
    return Verdict(False, f"says {stage} in {where}")


def _distance(stage: Stage, position: float) -> float:
    begin = _STAGES.index(stage) / 3
    return max(0.0, begin - position, position - (begin + 1 / 3))


# --- emotion ----------------------------------------------------------------------------------


def judge_emotion(
    step: EmotionStep,
    case: Case,
    context: Context,
    history_right: bool | None,
    settings: StepSettings,
    lists: Words,
) -> Verdict:
    """Judge sentiment, emotion and intensity; `history_right` is the verdict on the step before."""
    human = case.labels.emotion
    if human is None:
        return Verdict(None, "nobody labelled the emotion")
    emotion, intensity = step.emotion, step.intensity
    if isinstance(emotion, Unreadable) or isinstance(intensity, Unreadable):
        return Verdict(False, "a label of it cannot be read")
    if step.sentiment is not SENTIMENT_OF[emotion]:
        return Verdict(False, f"its sentiment does not go with {emotion}")
    if contradiction := _contradiction(step.text, emotion, intensity, lists):
        return Verdict(False, contradiction)
    light = intensity <= settings.light_intensity
    if case.labels.emotion_of != "utterance":
        if not context.has_disclosed(settings.greeting_words):
            if emotion is Emotion.NEUTRAL and light:
                return Verdict(True, "no feeling has been shown yet")
            return Verdict(False, f"sees {_strength(emotion, intensity)} before any was shown")
        if emotion is Emotion.NEUTRAL and light and context.seeker_text not in lists.feelings:
            return Verdict(True, "the seeker has not spoken of a feeling")
        if (
            emotion in {Emotion.JOY, Emotion.NEUTRAL}
            and light
            and is_relieved(case, context, settings)
        ):
            return Verdict(True, "the seeker gives thanks or takes leave near the end")
    if emotion is not human:
        near = FAMILIES[emotion] == FAMILIES[human]
        if not near:
            return Verdict(False, f"sees {emotion}, where people labelled {human}")
        if settings.chained and history_right is not True:
            return Verdict(
                False, f"{emotion} is near to {human}, but the history step does not bear it"
            )
    expected = expected_intensity(case)
    if expected is not None and abs(intensity - expected) > settings.intensity_slack:
        return Verdict(False, f"intensity {intensity}, where the ratings give {expected:.1f}")
    kind = "as labelled" if emotion is human else f"near to {human}"
    return Verdict(True, f"{emotion} is {kind}" if kind != "as labelled" else f"{emotion} {kind}")


def _contradiction(text: str, emotion: Emotion, intensity: int, lists: Words) -> str:
    """Return how the words of a step contradict its labels, or ""."""
    own = without_quotations(text)
    named = lists.families(own)
    if named and FAMILIES[emotion] not in named:
        return f"its words are of {_list(named)}, its label is {emotion}"
    strengths = lists.strengths(own)
    if (strengths == {"strong"} and intensity <= 2) or (strengths == {"weak"} and intensity >= 4):
        return f"its words call the feeling {_list(strengths)}, its intensity is {intensity}"
    return ""


def expected_intensity(case: Case) -> float | None:
    """Return the intensity on the line between the seeker's ratings before and after the dialogue.

    If only the rating before is known, return it; without it, None.
    """
    before, after = case.labels.intensity_before, case.labels.intensity_after
    if before is None:
        return None
    return before if after is None else before + (after - before) * case.round / case.rounds


def is_relieved(case: Case, context: Context, settings: StepSettings) -> bool:
    """Whether the seeker closes a dialogue that, as far as is known, helped."""
    before, after = case.labels.intensity_before, case.labels.intensity_after
    helped = before is None or after is None or after < before
    return helped and context.closing and context.position >= settings.relief_from


def _strength(emotion: Emotion, intensity: int) -> str:
    return f"{emotion} of strength {intensity}"


# --- strategy ---------------------------------------------------------------------------------


def judge_strategy(
    step: StrategyStep,
    case: Case,
    context: Context,
    habits: Habits,
    earlier: tuple[bool | None, bool | None],
    settings: StepSettings,
) -> Verdict:
    """Judge the strategy; `earlier` are the verdicts on the two steps before."""
    human = case.labels.strategies
    if not human:
        return Verdict(None, "nobody labelled the strategy")
    if step.strategy in human:
        return Verdict(True, f"{step.strategy} is what the person did")
    if isinstance(step.strategy, Unreadable) or step.strategy not in set(Strategy):
        return Verdict(False, "its strategy cannot be read")
    share = habits.share(case, context, Strategy(step.strategy), settings.habit_turns)
    habit = f"people chose {step.strategy} in {share:.0%} of such turns"
    if share < settings.habit_share:
        return Verdict(False, f"the person chose {_list(human)}, and {habit}")
    if settings.chained and earlier != (True, True):
        return Verdict(False, f"{habit}, but an earlier step does not bear it")
    return Verdict(True, habit)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
