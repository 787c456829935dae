"""The silver rule for the three reasoning steps, as stated in `training.cer.silver.dataset`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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


UNKNOWN_WORDS = 15
"""Up to this many words of the seeker, none of which shows a problem, a history step may say that the
problem is not known."""
PROBLEM_SIGNS = 3
"""Another problem than the corpus's may be named if the seeker's words show it this often, and more
often than the corpus's."""
CITED_SHARE = 0.5
"""Least share of content words from the seeker in a history step that names no listed problem: of its
quotation, or of the whole text if there is none."""
CITED_WORDS = 2
"""Least number of such words."""
STAGE_SLACK = 0.15
"""How far outside its third of the dialogue a stage is accepted, as a share of the rounds."""
STAGE_SLACK_BY_STRATEGY = 0.25
"""The same for a usual stage of a strategy that the person used."""
INTENSITY_SLACK = 1.5
"""Largest distance of an intensity from the line between the ratings before and after."""
LIGHT_INTENSITY = 3
"""The strongest intensity of relief, and of a neutral state."""
RELIEF_FROM = 0.6
"""From this share of the rounds on, thanks count as relief."""
HABIT_SHARE = 0.15
"""A strategy that was not used here is accepted if people used it in at least this share of the turns
in the same situation (`Habits`)."""
HABIT_TURNS = 30
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

    def share(self, context: Context, strategy: Strategy) -> float:
        """Return the share of the turns in the situation that use a strategy, in [0, 1]."""
        situations = _situations(context)
        for situation in situations:
            turns = self.turns.get(situation, 0)
            if turns >= HABIT_TURNS or situation == situations[-1]:
                return self.used.get(situation, {}).get(strategy, 0) / turns if turns else 0.0
        raise AssertionError("the last situation always returns")


def count_habits(cases: Iterable[Case], lists: Words) -> Habits:
    """Count the strategies of the cases of the train split."""
    turns: Counter[str] = Counter()
    used: defaultdict[str, Counter[Strategy]] = defaultdict(Counter)
    for case in cases:
        if case.split != "train" or not case.labels.strategies:
            continue
        for situation in _situations(Context(case, lists)):
            turns[situation] += 1
            used[situation].update(case.labels.strategies)
    return Habits(turns=turns, used=used)


def _situations(context: Context) -> tuple[str, ...]:
    """Return the situation, then the same without the family of the emotion."""
    before = "begins"
    if context.supporter_turns:
        before = "asked" if "?" in context.supporter_turns[-1] else "told"
    rest = f"{stage_at(context.position)}, {before}"
    emotion = context.labels.emotion
    family = () if emotion is None else (f"{FAMILIES[emotion]}, {rest}",)
    return (*family, f"{ANY_FAMILY}, {rest}")


def judge_steps(
    reasoning: Reasoning, context: Context, habits: Habits, *, chained: bool = True
) -> StepVerdicts:
    """Judge the three steps of a turn in their order; unchained, each as if those before it were right."""
    history = judge_history(reasoning.history, context)
    emotion = judge_emotion(reasoning.emotion, context, history.right if chained else True)
    earlier = (history.right, emotion.right) if chained else (True, True)
    strategy = judge_strategy(reasoning.strategy, context, habits, earlier)
    return StepVerdicts(history, emotion, strategy)


# --- history ----------------------------------------------------------------------------------


def judge_history(step: HistoryStep, context: Context) -> Verdict:
    """Judge the core issue and the stage; the step is right if both are."""
    issue = _issue(step.text, context)
    stage = _stage(step.stage, context)
    if issue.right is False or stage.right is False:
        wrong = [verdict.because for verdict in (issue, stage) if verdict.right is False]
        return Verdict(False, " and ".join(wrong))
    both = None if issue.right is None else True
    return Verdict(both, f"{issue.because}, {stage.because}")


def _issue(text: str, context: Context) -> Verdict:
    lists, disclosed = context.lists, context.has_disclosed
    own = without_quotations(text)
    named = lists.named(own)
    if own in lists.unknown and not named:
        if disclosed and (context.seeker_words > UNKNOWN_WORDS or context.signs):
            return Verdict(False, "says that nothing has been told, though the seeker has")
        return Verdict(True, "says rightly that the problem is not known yet")
    if not disclosed:
        if named:
            return Verdict(False, f"names {_list(named)} before the seeker has told anything")
        return Verdict(False, "speaks of a problem before the seeker has told anything")
    problem = context.labels.problem
    if problem in lists.problems and lists.near[problem] & named:
        return Verdict(True, f"names the problem of the dialogue ({problem})")
    least = max(PROBLEM_SIGNS, context.signs.get(problem or "", 0) + 1)
    shown = frozenset(name for name in named if context.signs.get(name, 0) >= least)
    if shown:
        return Verdict(True, f"names what the seeker speaks of ({_list(shown)})")
    if named and problem in lists.problems:
        return Verdict(False, f"names {_list(named)}, while the dialogue is about {problem}")
    if named:
        return Verdict(None, "nobody labelled the problem of the dialogue")
    source = "\n".join(quotations(text)) or own
    words = lists.content(source)
    cited = len(words & context.content)
    if cited >= max(CITED_WORDS, CITED_SHARE * len(words)):
        return Verdict(True, "cites what the seeker said")
    return Verdict(False, "names no problem and cites nothing that the seeker said")


def _stage(stage: Stage | Unreadable, context: Context) -> Verdict:
    if isinstance(stage, Unreadable):
        return Verdict(False, "its stage cannot be read")
    if stage is Stage.EXPLORATION and not context.has_disclosed:
        return Verdict(True, "nothing is explored yet")
    distance = _distance(stage, context.position)
    where = f"round {context.case.round + 1} of {context.case.rounds}"
    if distance <= STAGE_SLACK:
        return Verdict(True, f"{stage} fits {where}")
    for strategy in context.labels.strategies:
        usual = ESCONV_STRATEGIES.entry(strategy).stages
        if stage in usual and distance <= STAGE_SLACK_BY_STRATEGY:
            return Verdict(True, f"{stage} is near enough to {where} for {strategy}")
    return Verdict(False, f"says {stage} in {where}")


def _distance(stage: Stage, position: float) -> float:
    begin = _STAGES.index(stage) / 3
    return max(0.0, begin - position, position - (begin + 1 / 3))


# --- emotion ----------------------------------------------------------------------------------


def judge_emotion(step: EmotionStep, context: Context, history_right: bool | None) -> Verdict:
    """Judge sentiment, emotion and intensity; `history_right` is the verdict on the step before."""
    human = context.labels.emotion
    if human is None:
        return Verdict(None, "nobody labelled the emotion")
    emotion, intensity = step.emotion, step.intensity
    if isinstance(emotion, Unreadable) or isinstance(intensity, Unreadable):
        return Verdict(False, "a label of it cannot be read")
    if step.sentiment is not SENTIMENT_OF[emotion]:
        return Verdict(False, f"its sentiment does not go with {emotion}")
    if contradiction := _contradiction(step.text, emotion, intensity, context.lists):
        return Verdict(False, contradiction)
    light = intensity <= LIGHT_INTENSITY
    if context.labels.emotion_of != "utterance":
        if not context.has_disclosed:
            if emotion is Emotion.NEUTRAL and light:
                return Verdict(True, "no feeling has been shown yet")
            return Verdict(False, f"sees {_strength(emotion, intensity)} before any was shown")
        if (
            emotion is Emotion.NEUTRAL
            and light
            and context.seeker_text not in context.lists.feelings
        ):
            return Verdict(True, "the seeker has not spoken of a feeling")
        if emotion in {Emotion.JOY, Emotion.NEUTRAL} and light and is_relieved(context):
            return Verdict(True, "the seeker gives thanks or takes leave near the end")
    if emotion is not human:
        near = FAMILIES[emotion] == FAMILIES[human]
        if not near:
            return Verdict(False, f"sees {emotion}, where people labelled {human}")
        if history_right is not True:
            return Verdict(
                False, f"{emotion} is near to {human}, but the history step does not bear it"
            )
    expected = expected_intensity(context.case)
    if expected is not None and abs(intensity - expected) > INTENSITY_SLACK:
        return Verdict(False, f"intensity {intensity}, where the ratings give {expected:.1f}")
    return Verdict(
        True, f"{emotion} " + ("as labelled" if emotion is human else f"is near to {human}")
    )


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


def is_relieved(context: Context) -> bool:
    """Whether the seeker closes a dialogue that, as far as is known, helped."""
    before, after = context.labels.intensity_before, context.labels.intensity_after
    helped = before is None or after is None or after < before
    return helped and context.closing and context.position >= RELIEF_FROM


def _strength(emotion: Emotion, intensity: int) -> str:
    return f"{emotion} of strength {intensity}"


# --- strategy ---------------------------------------------------------------------------------


def judge_strategy(
    step: StrategyStep,
    context: Context,
    habits: Habits,
    earlier: tuple[bool | None, bool | None],
) -> Verdict:
    """Judge the strategy; `earlier` are the verdicts on the two steps before."""
    human = context.labels.strategies
    if not human:
        return Verdict(None, "nobody labelled the strategy")
    if step.strategy in human:
        return Verdict(True, f"{step.strategy} is what the person did")
    if isinstance(step.strategy, Unreadable) or step.strategy not in set(Strategy):
        return Verdict(False, "its strategy cannot be read")
    share = habits.share(context, Strategy(step.strategy))
    habit = f"people chose {step.strategy} in {share:.0%} of such turns"
    if share < HABIT_SHARE:
        return Verdict(False, f"the person chose {_list(human)}, and {habit}")
    if earlier != (True, True):
        return Verdict(False, f"{habit}, but an earlier step does not bear it")
    return Verdict(True, habit)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
