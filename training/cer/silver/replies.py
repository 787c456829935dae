"""The silver rule for the four-way preference, as stated in `training.cer.silver.dataset`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.consistency import Followed, carries_out
from compeer_core.phrases import fold, words_of
from compeer_core.reasoning import Unreadable
from training.cer.silver.words import LANGUAGE, Context, Words


class ReplySettings(FrozenModel):
    """Thresholds of the rule for replies."""

    failed_dialogues: tuple[str, ...] = ("esconv/original/failed/",)
    """Prefixes of the ids of dialogues that the corpus lists as failed."""
    bad_feedback: int = Field(default=2, ge=1, le=5)
    """Up to this rating by the seeker, the original reply is not acceptable."""
    good_feedback: int = Field(default=4, ge=1, le=5)
    """From this rating on, a reply in a failed dialogue is acceptable."""
    empty_words: int = Field(default=4, ge=0)
    """A reply of at most this many words, without a question or a content word, is empty talk, if the
    seeker has disclosed something and nobody is closing the dialogue."""
    copied_share: float = Field(default=0.7, ge=0.0, le=1.0)
    """A reply is a near copy if at least this share of its 3-grams occurs in one earlier turn."""
    repeated_words: int = Field(default=3, ge=2)
    """A generated reply must not contain the same n-gram of this length twice."""
    least_words: int = Field(default=3, ge=1)
    """The fewest words of a generated reply."""
    most_words: int = Field(default=120, ge=1)
    """The most words of a generated reply."""
    topic_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """Least share of a generated reply's content words that are the seeker's, if it has any."""
    most_wrong_steps: int = Field(default=1, ge=0, le=3)
    """The most wrong steps before an acceptable generated reply."""
    full_topic_words: int = Field(default=3, ge=1)
    """Content words shared with the seeker for the full content score."""
    full_length_words: int = Field(default=12, ge=1)
    """Words for the full length score."""
    wrong_step_cost: float = Field(default=0.25, ge=0.0, le=1.0)
    """Penalty on the score of a generated reply for each wrong step."""
    feedback_weight: float = Field(default=0.125, ge=0.0)
    """Weight of the seeker's rating minus 3 in the score of the original."""
    person_bonus: float = Field(default=0.15, ge=0.0)
    """Bonus of the original because a person wrote it for this seeker: the checks cannot see whether
    a reply makes sense."""
    margin: float = Field(default=0.2, ge=0.0)
    """Largest difference in score between two equally good replies."""


@dataclass(frozen=True)
class Assessment:
    """Whether a reply is acceptable, and its score against another acceptable one."""

    faults: tuple[str, ...]
    """Why it is not acceptable; empty if it is."""
    score: float
    """Content and length, with bonus and penalties."""
    by_person: bool
    """Whether the seeker's rating or the corpus's list of failed dialogues contributed."""

    @property
    def acceptable(self) -> bool:
        return not self.faults

    @property
    def because(self) -> str:
        result = f"not acceptable: {', '.join(self.faults)}" if self.faults else "acceptable"
        return f"{result} (score {self.score:.2f})"


def assess_original(
    reply: str,
    case: Case,
    context: Context,
    settings: ReplySettings,
    greeting_words: int,
    lists: Words,
) -> Assessment:
    """Assess the corpus's own reply."""
    feedback = case.labels.feedback
    failed = case.dialogue_id.startswith(settings.failed_dialogues)
    faults = []
    if feedback is not None and feedback <= settings.bad_feedback:
        faults.append(f"the seeker rated it {feedback} of 5")
    elif failed and (feedback is None or feedback < settings.good_feedback):
        faults.append("the dialogue is one that failed")
    faults += _empty_talk(reply, context, settings, greeting_words, lists)
    rating = 0.0 if feedback is None else settings.feedback_weight * (feedback - 3)
    score = _score(reply, context, settings, lists) + settings.person_bonus + rating
    return Assessment(tuple(faults), score, feedback is not None or failed)


def assess_generated(
    reply: str,
    strategy: str | Unreadable,
    wrong_steps: int,
    context: Context,
    settings: ReplySettings,
    greeting_words: int,
    lists: Words,
) -> Assessment:
    """Assess the reply of a generated turn, given the verdicts on its steps.

    Args:
        reply: The reply's text.
        strategy: The strategy that the turn names.
        wrong_steps: The number of its wrong steps.
        context: The history.
        settings: Thresholds.
        greeting_words: See `StepSettings`.
        lists: Word lists.
    """
    words = words_of(reply)
    faults = []
    if wrong_steps > settings.most_wrong_steps:
        faults.append(f"{wrong_steps} steps before it are wrong")
    if not settings.least_words <= len(words) <= settings.most_words:
        faults.append(f"it has {len(words)} words")
    if is_copy(words, [*context.seeker_turns, *context.supporter_turns], settings.copied_share):
        faults.append("it repeats an earlier turn")
    if repeats_itself(words, settings.repeated_words):
        faults.append("it repeats itself")
    faults += _empty_talk(reply, context, settings, greeting_words, lists)
    faults += _off_topic(reply, context, settings, lists)
    faults += _out_of_place(reply, context, greeting_words, lists)
    # A strategy of another vocabulary has no surface signs to check.
    does = carries_out(context.history, reply, strategy, LANGUAGE)
    if isinstance(strategy, Unreadable) or does is Followed.NO:
        faults.append(f"it does not carry out its strategy ({_named(strategy)})")
    score = _score(reply, context, settings, lists) - settings.wrong_step_cost * wrong_steps
    return Assessment(tuple(faults), max(0.0, score), by_person=False)


def is_copy(reply: Sequence[str], earlier: Sequence[str], share: float) -> bool:
    """Whether at least a share of a reply's 3-grams occurs in one earlier turn.

    Replies of fewer than five words are never copies: anybody may use such words.
    """
    if len(reply) < 5:
        return False
    runs = set(zip(reply, reply[1:], reply[2:], strict=False))
    for text in earlier:
        words = words_of(text)
        if len(runs & set(zip(words, words[1:], words[2:], strict=False))) >= share * len(runs):
            return True
    return False


def repeats_itself(words: Sequence[str], length: int) -> bool:
    """Whether an n-gram of `length` words occurs twice in a reply."""
    runs = Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    return any(count > 1 for count in runs.values())


def _empty_talk(
    reply: str, context: Context, settings: ReplySettings, greeting_words: int, lists: Words
) -> list[str]:
    short = len(words_of(reply)) <= settings.empty_words
    short = short and "?" not in reply and not lists.content(reply)
    return (
        ["it says nothing"]
        if short and context.has_disclosed(greeting_words) and not context.closing
        else []
    )


def _off_topic(reply: str, context: Context, settings: ReplySettings, lists: Words) -> list[str]:
    words = lists.content(reply)
    common = len(words & context.content)
    if common >= settings.topic_share * len(words):
        return []
    return ["it is not about what the seeker said"]


def _out_of_place(reply: str, context: Context, greeting_words: int, lists: Words) -> list[str]:
    faults = []
    if reply in lists.set_welcome and not context.closing:
        faults.append("it takes a thank-you that was not said")
    if (
        reply in lists.set_praise
        and context.last_message not in lists.good_news
        and not context.thanks
    ):
        faults.append("it is glad of what is no good news")
    if reply in lists.set_sympathy and not context.has_disclosed(greeting_words):
        faults.append("it feels for what was not told")
    return faults


def _score(reply: str, context: Context, settings: ReplySettings, lists: Words) -> float:
    content = min(1.0, len(lists.content(reply) & context.content) / settings.full_topic_words)
    length = min(1.0, len(words_of(reply)) / settings.full_length_words)
    return (content + length) / 2


def _named(strategy: str | Unreadable) -> str:
    return "unreadable" if isinstance(strategy, Unreadable) else strategy


def same_words(first: str, second: str) -> bool:
    return " ".join(fold(first).split()) == " ".join(fold(second).split())
