"""How a verdict is read from what an endpoint sends: from one place, or from words.

`first_token` reads probabilities from the tokens that a server lists for the first place of an
answer. `written_verdict` reads the verdict from a judgement in natural language. Both tell a verdict
from an answer that holds none, and never guess.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARE = 0.05
"""An answer is read only if its first token is one of the labels with at least this probability."""
MAX_AMBIGUOUS = 0.05
"""And only if no more than this share of the labels' probability may belong to either of two."""

SPACES = " \t\r\n\u0120\u010a\u2581"
"""Blanks, and the letters that stand for them where a server shows the tokenizer's own spelling."""


# --- from one place ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """One of the tokens that an answer could have begun with."""

    token: str
    probability: float


@dataclass(frozen=True)
class FirstToken:
    """What the beginning of an answer says about some labels."""

    probabilities: tuple[float, ...]
    """One for each label; the sum is 1, or 0 where nothing belongs to any of them."""
    covered: float
    """How probable it is that the answer begins with any of the labels."""
    ambiguous: float
    """How probable it is that it begins with something that begins two or more of them."""

    @property
    def is_readable(self) -> bool:
        """Whether this is an answer to the question at all."""
        either = self.covered + self.ambiguous
        return self.covered >= MIN_SHARE and self.ambiguous <= MAX_AMBIGUOUS * either


def first_token(listed: Sequence[Listed], labels: Sequence[str]) -> FirstToken:
    """Find out how probable each label is as the answer.

    A token belongs to a label if it is that label, blanks around it and case aside: " true" and
    "True" add up. A token that is only the beginning of labels ("Ne", where a tokenizer has no
    token for "Neither") belongs to the one label that it begins; if it begins two or more, it is
    ambiguous. Labels that are listed whole do not count in this: where a tokenizer has a token for
    "Both", a "B" is the beginning of something else.

    A label without a token is less probable than every listed token, and all such labels together
    have no more than what the list leaves. Each gets the smaller of the two bounds, so its
    probability is rather too high than too low.

    Args:
        listed: The likeliest tokens of the first place.
        labels: Different words, none of which begins another (`indistinct`).

    Example:
        >>> found = first_token([Listed("True", 0.6), Listed(" false", 0.2)], ("True", "False"))
        >>> [round(one, 2) for one in found.probabilities], round(found.covered, 2)
        ([0.75, 0.25], 0.8)
    """
    words = [_plain(label) for label in labels]
    tokens = [(_plain(one.token), one.probability) for one in listed]
    whole = {token for token, _ in tokens}.intersection(words)
    masses = [0.0] * len(words)
    found = [False] * len(words)
    ambiguous = 0.0
    for token, probability in tokens:
        begun = [
            place
            for place, word in enumerate(words)
            if token == word or (token and word not in whole and word.startswith(token))
        ]
        if len(begun) == 1:
            masses[begun[0]] += probability
            found[begun[0]] = True
        elif begun:
            ambiguous += probability
    covered = sum(masses)
    absent = found.count(False)
    if absent and tokens:
        left = max(0.0, 1.0 - sum(probability for _, probability in tokens))
        floor = min(min(probability for _, probability in tokens), left / absent)
        masses = [mass if one else floor for mass, one in zip(masses, found, strict=True)]
    total = sum(masses)
    shares = tuple(mass / total if total > 0 else 0.0 for mass in masses)
    return FirstToken(shares, covered, ambiguous)


def indistinct(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of labels of which one is, or begins with, the other."""
    return [
        (one, other)
        for place, one in enumerate(labels)
        for number, other in enumerate(labels)
        if place != number
        and _plain(other).startswith(_plain(one))
        and (_plain(one) != _plain(other) or place < number)
    ]


def _plain(token: str) -> str:
    return token.strip(SPACES).casefold()


def probability_of(logprob: object) -> float:
    """Return the probability behind a log-probability.

    Raises:
        ValueError: It is none. Minus infinity is one.
    """
    if not isinstance(logprob, int | float) or not logprob <= _ROUNDING:
        raise ValueError(f"{logprob!r} is not a log-probability")
    return min(1.0, math.exp(logprob))


_ROUNDING = 0.01  # servers count in 16 bits


# --- from words ----------------------------------------------------------------------------------

_SIGNS = r"(?:[^\w\n]|_)*"
_MARKED = re.compile(
    rf"^{_SIGNS}(?:final\s+|最终)?(?:verdict|结论|判断){_SIGNS}[:：](?P<said>[^\n]*)", re.M | re.I
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[;。！？；\n]")
_DENIAL = re.compile(r"\b(?:not|never|neither|nor|cannot|or)\b|n['’]t\b|[不没非无或]", re.I)


def written_verdict(answer: str, labels: Sequence[str], judged: str = "") -> str | None:
    r"""Return the label that a written judgement ends with, or None if there is no such label.

    The verdict is the last line of the form "Verdict: False". If that line says anything but one
    label, there is no verdict. Without such a line it is the last label that stands on its own:
    alone in a line, or as the last word of a last sentence that neither denies nor names another
    label. Labels in the middle of a sentence are never taken for a verdict, nor is what stands
    before `</think>`.

    What is followed by more text may be a heading, or quoted from the judged text. So it does not
    count where the judged text holds a verdict in one of these forms, and a label alone in a line
    does not where another one has a line of its own as well.

    Args:
        answer: What the judge wrote, whole.
        labels: The possible answers, Latin letters only.
        judged: Everything that the judge read and that is not ours.

    Example:
        >>> written_verdict("The stage fits.\nVerdict: **True**.", ("True", "False"))
        'True'
        >>> written_verdict("I cannot say whether this is True or False.", ("True", "False"))
    """
    text = _without_thoughts(answer)
    if text is None:
        return None
    found = _last_marked(text, labels) if _MARKED.search(text) else _last_alone(text, labels)
    if found is None:
        return None
    label, end = found
    if not _ends(text, end) and (_MARKED.search(judged) or _alone(labels).search(judged)):
        return None
    return label


def _without_thoughts(answer: str) -> str | None:
    """The answer behind the last thought; None if a thought does not end."""
    lower = answer.lower()
    opened, closed = lower.rfind("<think>"), lower.rfind("</think>")
    if opened > closed:
        return None
    return answer if closed < 0 else answer[closed + len("</think>") :]


def _last_marked(text: str, labels: Sequence[str]) -> tuple[str, int] | None:
    last = list(_MARKED.finditer(text))[-1]
    # A reason may follow in the same line, behind a sign, as long as it names no other label.
    said = re.fullmatch(
        rf"{_SIGNS}(?P<label>{_any_of(labels)})(?:{_SIGNS}|[\s*_\"”]*[.,;:!(。，；：！（–—-](?P<more>.*))",
        last["said"],
        re.I,
    )
    if said is None or re.search(_word(labels), said["more"] or "", re.I):
        return None
    return _as_spelt(said["label"], labels), last.start("said") + said.end("label")


def _last_alone(text: str, labels: Sequence[str]) -> tuple[str, int] | None:
    alone = [
        (_as_spelt(match["label"], labels), match.end("label"))
        for match in _alone(labels).finditer(text)
    ]
    if alone and (_ends(text, alone[-1][1]) or len({label for label, _ in alone}) == 1):
        return alone[-1]
    # In a sentence case tells the label from the word: "this is not quite true" is no verdict.
    last = re.search(rf"{_word(labels)}[\W_]*\Z", text)
    if last is None:
        return None
    before = _SENTENCE_END.split(text[: last.start("label")])[-1]
    if _DENIAL.search(before) or re.search(_word(labels), before):
        return None
    return last["label"], last.end("label")


def _alone(labels: Sequence[str]) -> re.Pattern[str]:
    """A label alone in a line. With a colon behind it, it would be a heading."""
    return re.compile(rf"^{_SIGNS}(?P<label>{_any_of(labels)})(?:[^\w\n:：]|_)*$", re.M | re.I)


def _word(labels: Sequence[str]) -> str:
    # Not \b: a Chinese character is a word's letter to it, and needs no space before a label.
    return rf"(?<![A-Za-z])(?P<label>{_any_of(labels)})(?![A-Za-z])"


def _any_of(labels: Sequence[str]) -> str:
    return "|".join(map(re.escape, labels))


def _ends(text: str, end: int) -> bool:
    return re.search(r"[^\W_]", text[end:]) is None


def _as_spelt(word: str, labels: Sequence[str]) -> str:
    return next(label for label in labels if label.casefold() == word.casefold())
