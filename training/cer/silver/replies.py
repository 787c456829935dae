"""The silver rule for the four-way preference, as stated in `training.cer.silver.dataset`."""

from collections.abc import Sequence
from dataclasses import dataclass

from compeer_core.consistency import Followed, carries_out
from compeer_core.phrases import fold, words_of
from compeer_core.reasoning import Unreadable
from training.cer.silver.words import LANGUAGE, Context

FAILED_DIALOGUES = "esconv/original/failed/"
"""Prefix of the ids of dialogues that the corpus lists as failed."""
BAD_FEEDBACK = 2
"""Up to this rating by the seeker, the original reply is not acceptable."""
GOOD_FEEDBACK = 4
"""From this rating on, a reply in a failed dialogue is acceptable."""
EMPTY_WORDS = 4
"""A reply of at most this many words, without a question or a content word, is empty talk, if the
seeker has disclosed something and nobody is closing the dialogue."""
COPIED_SHARE = 0.7
"""A reply is a near copy if at least this share of its 3-grams occurs in one earlier turn."""
REPEATED_WORDS = 3
"""A generated reply must not contain the same n-gram of this length twice."""
LEAST_WORDS, MOST_WORDS = 3, 120
"""Of a generated reply."""
TOPIC_SHARE = 0.2
"""Least share of a generated reply's content words that are the seeker's, if it has any."""
MOST_WRONG_STEPS = 1
"""The most wrong steps before an acceptable generated reply."""
FULL_TOPIC_WORDS = 3
"""Content words shared with the seeker for the full content score."""
FULL_LENGTH_WORDS = 12
"""Words for the full length score."""
WRONG_STEP_COST = 0.25
"""Penalty on the score of a generated reply for each wrong step."""
FEEDBACK_WEIGHT = 0.125
"""Weight of the seeker's rating minus 3 in the score of the original."""
PERSON_BONUS = 0.15
"""Bonus of the original because a person wrote it for this seeker: the checks cannot see whether a
reply makes sense."""
MARGIN = 0.2
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


def assess_original(reply: str, context: Context) -> Assessment:
    """Assess the corpus's own reply."""
    feedback = context.labels.feedback
    failed = context.case.dialogue_id.startswith(FAILED_DIALOGUES)
    faults = []
    if feedback is not None and feedback <= BAD_FEEDBACK:
        faults.append(f"the seeker rated it {feedback} of 5")
    elif failed and (feedback is None or feedback < GOOD_FEEDBACK):
        faults.append("the dialogue is one that failed")
    faults += _empty_talk(reply, context)
    rating = 0.0 if feedback is None else FEEDBACK_WEIGHT * (feedback - 3)
    score = _score(reply, context) + PERSON_BONUS + rating
    return Assessment(tuple(faults), score, feedback is not None or failed)


def assess_generated(
    reply: str, strategy: str | Unreadable, wrong_steps: int, context: Context
) -> Assessment:
    """Assess the reply of a generated turn."""
    words = words_of(reply)
    faults = []
    if wrong_steps > MOST_WRONG_STEPS:
        faults.append(f"{wrong_steps} steps before it are wrong")
    if not LEAST_WORDS <= len(words) <= MOST_WORDS:
        faults.append(f"it has {len(words)} words")
    if is_copy(words, [*context.seeker_turns, *context.supporter_turns]):
        faults.append("it repeats an earlier turn")
    if repeats_itself(words):
        faults.append("it repeats itself")
    faults += _empty_talk(reply, context)
    faults += _off_topic(reply, context)
    faults += _out_of_place(reply, context)
    # A strategy of another vocabulary has no surface signs to check.
    does = carries_out(context.case.history, reply, strategy, LANGUAGE)
    if isinstance(strategy, Unreadable) or does is Followed.NO:
        faults.append(f"it does not carry out its strategy ({_named(strategy)})")
    score = _score(reply, context) - WRONG_STEP_COST * wrong_steps
    return Assessment(tuple(faults), max(0.0, score), by_person=False)


def is_copy(reply: Sequence[str], earlier: Sequence[str]) -> bool:
    """Whether at least `COPIED_SHARE` of a reply's 3-grams occurs in one earlier turn.

    Replies of fewer than five words are never copies: anybody may use such words.
    """
    if len(reply) < 5:
        return False
    runs = set(zip(reply, reply[1:], reply[2:], strict=False))
    least = COPIED_SHARE * len(runs)
    for text in earlier:
        words = words_of(text)
        if len(runs & set(zip(words, words[1:], words[2:], strict=False))) >= least:
            return True
    return False


def repeats_itself(words: Sequence[str]) -> bool:
    """Whether an n-gram of `REPEATED_WORDS` words occurs twice in a reply."""
    runs = [tuple(words[i : i + REPEATED_WORDS]) for i in range(len(words) - REPEATED_WORDS + 1)]
    return len(set(runs)) < len(runs)


def _empty_talk(reply: str, context: Context) -> list[str]:
    short = len(words_of(reply)) <= EMPTY_WORDS
    says_nothing = short and "?" not in reply and not context.lists.content(reply)
    if says_nothing and context.has_disclosed and not context.closing:
        return ["it says nothing"]
    return []


def _off_topic(reply: str, context: Context) -> list[str]:
    words = context.lists.content(reply)
    if len(words & context.content) >= TOPIC_SHARE * len(words):
        return []
    return ["it is not about what the seeker said"]


def _out_of_place(reply: str, context: Context) -> list[str]:
    lists = context.lists
    has_good_news = context.last_message in lists.good_news or context.thanks
    faults = []
    if reply in lists.set_welcome and not context.closing:
        faults.append("it takes a thank-you that was not said")
    if reply in lists.set_praise and not has_good_news:
        faults.append("it is glad of what is no good news")
    if reply in lists.set_sympathy and not context.has_disclosed:
        faults.append("it feels for what was not told")
    return faults


def _score(reply: str, context: Context) -> float:
    shared = len(context.lists.content(reply) & context.content)
    content = min(1.0, shared / FULL_TOPIC_WORDS)
    length = min(1.0, len(words_of(reply)) / FULL_LENGTH_WORDS)
    return (content + length) / 2


def _named(strategy: str | Unreadable) -> str:
    return "unreadable" if isinstance(strategy, Unreadable) else strategy


def same_words(first: str, second: str) -> bool:
    return " ".join(fold(first).split()) == " ".join(fold(second).split())
