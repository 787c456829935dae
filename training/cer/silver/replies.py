"""The silver rule for the four-way preference. `training.cer.silver.dataset` states it for a reader."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.consistency import Followed, carries_out
from compeer_core.phrases import fold, words_of
from compeer_core.reasoning import Unreadable
from training.cer.silver.words import LANGUAGE, Heard, Words


class ReplySettings(FrozenModel):
    """Thresholds of the rule for replies."""

    failed_dialogues: tuple[str, ...] = ("esconv/original/failed/",)
    """How the ids of dialogues begin that the corpus lists as failed."""
    bad_feedback: int = Field(default=2, ge=1, le=5)
    """A rating of the seeker's up to this one means that the original reply was not acceptable."""
    good_feedback: int = Field(default=4, ge=1, le=5)
    """From this rating on, a reply in a failed dialogue is acceptable all the same."""
    empty_words: int = Field(default=4, ge=0)
    """A reply of at most so many words, without a question or a telling word, says nothing, once
    there is something to answer and nobody is closing the talk."""
    copied_share: float = Field(default=0.7, ge=0.0, le=1.0)
    """A reply is a near copy if at least this share of its runs of three words stand in one earlier
    turn."""
    repeated_words: int = Field(default=3, ge=2)
    """A generated reply must not hold the same run of so many words twice."""
    least_words: int = Field(default=3, ge=1)
    """A generated reply has at least so many words ..."""
    most_words: int = Field(default=120, ge=1)
    """... and at most so many."""
    topic_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """At least this share of a generated reply's telling words are the seeker's, if it has any."""
    most_wrong_steps: int = Field(default=1, ge=0, le=3)
    """A generated reply is acceptable with at most so many wrong steps before it."""
    full_topic_words: int = Field(default=3, ge=1)
    """So many telling words shared with the seeker give a reply the full score for content."""
    full_length_words: int = Field(default=12, ge=1)
    """So many words give it the full score for length."""
    wrong_step_cost: float = Field(default=0.25, ge=0.0, le=1.0)
    """What each wrong step takes from the score of a generated reply."""
    feedback_weight: float = Field(default=0.125, ge=0.0)
    """What each point of the seeker's rating above or below 3 gives to the original or takes."""
    person_bonus: float = Field(default=0.15, ge=0.0)
    """What the original's score gains because a person wrote it for this seeker: what the other
    checks do not see, above all whether a reply makes sense, speaks for it."""
    margin: float = Field(default=0.2, ge=0.0)
    """Two acceptable replies whose scores differ by at most this are equally good."""


@dataclass(frozen=True)
class Assessment:
    """Whether a reply is acceptable, and how good it is beside another acceptable one."""

    faults: tuple[str, ...]
    """Why it is not acceptable, in words; empty if it is."""
    score: float
    """By content and length, and what adds to it or takes from it."""
    by_person: bool
    """Whether the seeker's rating, or the corpus's list of failed dialogues, had a part in it."""

    @property
    def acceptable(self) -> bool:
        return not self.faults

    @property
    def because(self) -> str:
        said = f"not acceptable: {', '.join(self.faults)}" if self.faults else "acceptable"
        return f"{said} (score {self.score:.2f})"


def assess_original(
    reply: str, case: Case, heard: Heard, settings: ReplySettings, greeting_words: int, lists: Words
) -> Assessment:
    """Assess what the supporter of the corpus said."""
    feedback = case.labels.feedback
    failed = case.dialogue_id.startswith(settings.failed_dialogues)
    faults = []
    if feedback is not None and feedback <= settings.bad_feedback:
        faults.append(f"the seeker rated it {feedback} of 5")
    elif failed and (feedback is None or feedback < settings.good_feedback):
        faults.append("the dialogue is one that failed")
    faults += _empty_talk(reply, heard, settings, greeting_words, lists)
    rating = 0.0 if feedback is None else settings.feedback_weight * (feedback - 3)
    score = _score(reply, heard, settings, lists) + settings.person_bonus + rating
    return Assessment(tuple(faults), score, feedback is not None or failed)


def assess_generated(
    reply: str,
    strategy: str | Unreadable,
    wrong_steps: int,
    heard: Heard,
    settings: ReplySettings,
    greeting_words: int,
    lists: Words,
) -> Assessment:
    """Assess the reply of a generated turn, given what its steps were worth.

    Args:
        reply: Its words.
        strategy: What the turn says that it does.
        wrong_steps: How many of its steps are wrong.
        heard: The history.
        settings: Thresholds.
        greeting_words: See `StepSettings`.
        lists: Word lists.
    """
    found = words_of(reply)
    faults = []
    if wrong_steps > settings.most_wrong_steps:
        faults.append(f"{wrong_steps} steps before it are wrong")
    if not settings.least_words <= len(found) <= settings.most_words:
        faults.append(f"it has {len(found)} words")
    if is_copy(found, [*heard.said, *heard.supporter], settings.copied_share):
        faults.append("it repeats an earlier turn")
    if repeats_itself(found, settings.repeated_words):
        faults.append("it repeats itself")
    faults += _empty_talk(reply, heard, settings, greeting_words, lists)
    faults += _off_topic(reply, heard, settings, lists)
    faults += _out_of_place(reply, heard, greeting_words, lists)
    # A strategy of another vocabulary has no signs that could be missing.
    does = carries_out(heard.history, reply, strategy, LANGUAGE)
    if isinstance(strategy, Unreadable) or does is Followed.NO:
        faults.append(f"it does not carry out its strategy ({_named(strategy)})")
    score = _score(reply, heard, settings, lists) - settings.wrong_step_cost * wrong_steps
    return Assessment(tuple(faults), max(0.0, score), by_person=False)


def is_copy(found: Sequence[str], earlier: Sequence[str], share: float) -> bool:
    """Whether at least a share of a reply's runs of three words stand in one earlier turn.

    Replies of fewer than five words are never copies: such words are anybody's.
    """
    if len(found) < 5:
        return False
    runs = set(zip(found, found[1:], found[2:], strict=False))
    for text in earlier:
        words = words_of(text)
        if len(runs & set(zip(words, words[1:], words[2:], strict=False))) >= share * len(runs):
            return True
    return False


def repeats_itself(found: Sequence[str], length: int) -> bool:
    """Whether a run of `length` words stands twice in a reply."""
    runs = Counter(tuple(found[i : i + length]) for i in range(len(found) - length + 1))
    return any(count > 1 for count in runs.values())


def _empty_talk(
    reply: str, heard: Heard, settings: ReplySettings, greeting_words: int, lists: Words
) -> list[str]:
    short = len(words_of(reply)) <= settings.empty_words
    short = short and "?" not in reply and not lists.content(reply)
    return ["it says nothing"] if short and heard.told(greeting_words) and not heard.closing else []


def _off_topic(reply: str, heard: Heard, settings: ReplySettings, lists: Words) -> list[str]:
    words = lists.content(reply)
    common = len(words & heard.content)
    if common >= settings.topic_share * len(words):
        return []
    return ["it is not about what the seeker said"]


def _out_of_place(reply: str, heard: Heard, greeting_words: int, lists: Words) -> list[str]:
    faults = []
    if reply in lists.set_welcome and not heard.closing:
        faults.append("it takes a thank-you that was not said")
    if reply in lists.set_praise and heard.last not in lists.good_news and not heard.thanks:
        faults.append("it is glad of what is no good news")
    if reply in lists.set_sympathy and not heard.told(greeting_words):
        faults.append("it feels for what was not told")
    return faults


def _score(reply: str, heard: Heard, settings: ReplySettings, lists: Words) -> float:
    content = min(1.0, len(lists.content(reply) & heard.content) / settings.full_topic_words)
    length = min(1.0, len(words_of(reply)) / settings.full_length_words)
    return (content + length) / 2


def _named(strategy: str | Unreadable) -> str:
    return "unreadable" if isinstance(strategy, Unreadable) else strategy


def same_words(first: str, second: str) -> bool:
    return " ".join(fold(first).split()) == " ".join(fold(second).split())
