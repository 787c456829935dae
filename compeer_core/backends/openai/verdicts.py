"""Read a verdict from an endpoint's answer: from log-probabilities, or from text.

`first_token` reads label probabilities from the tokens that a server lists for the first position of
an answer. `written_verdict` parses the verdict from a judgement in natural language. Both detect
answers without a verdict, and never guess.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARE = 0.05
"""Least probability of all labels together in a valid answer."""
MAX_AMBIGUOUS = 0.05
"""Largest share of that probability that is ambiguous between labels in a valid answer."""

SPACES = " \t\r\n\u0120\u010a\u2581"
"""Spaces, and their symbols in the raw spelling of tokenizers."""


# --- from log-probabilities ----------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """A candidate for the first token of an answer."""

    token: str
    probability: float


@dataclass(frozen=True)
class FirstToken:
    """Label probabilities from the first token of an answer."""

    probabilities: tuple[float, ...]
    """One per label; the sum is 1, or 0 if no token belongs to a label."""
    covered: float
    """Probability that the answer begins with a label."""
    ambiguous: float
    """Probability of beginnings that two or more labels share."""

    @property
    def is_readable(self) -> bool:
        """Whether this is a valid answer."""
        either = self.covered + self.ambiguous
        return self.covered >= MIN_SHARE and self.ambiguous <= MAX_AMBIGUOUS * either


def first_token(listed: Sequence[Listed], labels: Sequence[str]) -> FirstToken:
    """Return the probability of each label as the answer.

    A token belongs to a label if they are equal up to spaces and case: " true" and "True" add up. A
    token that is a prefix of labels ("Ne", if a tokenizer has no token for "Neither") belongs to the
    label that it begins; if it begins two or more, it is ambiguous. Labels that are listed whole are
    excluded here: if a tokenizer has a token for "Both", a "B" begins something else.

    A label without a token is less probable than every listed token, and all such labels together are
    at most as probable as all unlisted tokens. Each gets the smaller of these bounds, so its
    probability is an upper bound.

    Args:
        listed: The most probable tokens of the first position.
        labels: Different words, none of which begins another (`indistinct`).

    Example:
        >>> first = first_token([Listed("True", 0.6), Listed(" false", 0.2)], ("True", "False"))
        >>> [round(each, 2) for each in first.probabilities], round(first.covered, 2)
        ([0.75, 0.25], 0.8)
    """
    words = [_plain(label) for label in labels]
    tokens = [(_plain(each.token), each.probability) for each in listed]
    whole = {token for token, _ in tokens}.intersection(words)
    masses = [0.0] * len(words)
    is_listed = [False] * len(words)
    ambiguous = 0.0
    for token, probability in tokens:
        begun = [
            place
            for place, word in enumerate(words)
            if token == word or (token and word not in whole and word.startswith(token))
        ]
        if len(begun) == 1:
            masses[begun[0]] += probability
            is_listed[begun[0]] = True
        elif begun:
            ambiguous += probability
    covered = sum(masses)
    absent = is_listed.count(False)
    if absent and tokens:
        left = max(0.0, 1.0 - sum(probability for _, probability in tokens))
        floor = min(min(probability for _, probability in tokens), left / absent)
        masses = [m if present else floor for m, present in zip(masses, is_listed, strict=True)]
    total = sum(masses)
    shares = tuple(mass / total if total > 0 else 0.0 for mass in masses)
    return FirstToken(shares, covered, ambiguous)


def indistinct(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of labels of which one equals, or begins with, the other."""
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
    """Return the probability of a log-probability.

    Raises:
        ValueError: It is not a log-probability. Minus infinity is valid.
    """
    if not isinstance(logprob, int | float) or not logprob <= _ROUNDING:
        raise ValueError(f"{logprob!r} is not a log-probability")
    return min(1.0, math.exp(logprob))


_ROUNDING = 0.01  # servers compute in 16 bits


# --- from text -----------------------------------------------------------------------------------

_SIGNS = r"(?:[^\w\n]|_)*"
_MARKED = re.compile(
    rf"^{_SIGNS}(?:final\s+|最终)?(?:verdict|结论|判断){_SIGNS}[:：](?P<verdict>[^\n]*)",
    re.M | re.I,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[;。！？；\n]")
_DENIAL = re.compile(r"\b(?:not|never|neither|nor|cannot|or)\b|n['’]t\b|[不没非无或]", re.I)


def written_verdict(answer: str, labels: Sequence[str], judged: str = "") -> str | None:
    r"""Return the verdict at the end of a written judgement, or None if there is none.

    The verdict is the last line of the form "Verdict: False". If that line contains anything but one
    label, there is no verdict. Without such a line it is the last label that is alone in a line, or
    the last word of a last sentence with neither a negation nor another label. Labels inside a
    sentence, and text before `</think>`, are never verdicts.

    A label with text after it may be a heading, or quoted from the judged text. So it is ignored if
    the judged text contains a verdict in one of these forms, and a label alone in a line is ignored if
    another label has a line of its own, too.

    Args:
        answer: The judge's whole text.
        labels: The possible answers, Latin letters only.
        judged: All untrusted text that the judge read.

    Example:
        >>> written_verdict("The stage fits.\nVerdict: **True**.", ("True", "False"))
        'True'
        >>> written_verdict("I cannot say whether this is True or False.", ("True", "False"))
    """
    text = _without_thoughts(answer)
    if text is None:
        return None
    verdict = _last_marked(text, labels) if _MARKED.search(text) else _last_alone(text, labels)
    if verdict is None:
        return None
    label, end = verdict
    if not _ends(text, end) and (_MARKED.search(judged) or _alone(labels).search(judged)):
        return None
    return label


def _without_thoughts(answer: str) -> str | None:
    """Return the answer after the last thought; None if a thought does not end."""
    lower = answer.lower()
    opened, closed = lower.rfind("<think>"), lower.rfind("</think>")
    if opened > closed:
        return None
    return answer if closed < 0 else answer[closed + len("</think>") :]


def _last_marked(text: str, labels: Sequence[str]) -> tuple[str, int] | None:
    last = list(_MARKED.finditer(text))[-1]
    # A reason may follow in the same line, after punctuation, if it names no other label.
    verdict = re.fullmatch(
        rf"{_SIGNS}(?P<label>{_any_of(labels)})(?:{_SIGNS}|[\s*_\"”]*[.,;:!(。，；：！（–—-](?P<more>.*))",
        last["verdict"],
        re.I,
    )
    if verdict is None or re.search(_word(labels), verdict["more"] or "", re.I):
        return None
    return _as_spelt(verdict["label"], labels), last.start("verdict") + verdict.end("label")


def _last_alone(text: str, labels: Sequence[str]) -> tuple[str, int] | None:
    alone = [
        (_as_spelt(match["label"], labels), match.end("label"))
        for match in _alone(labels).finditer(text)
    ]
    if alone and (_ends(text, alone[-1][1]) or len({label for label, _ in alone}) == 1):
        return alone[-1]
    # In a sentence the case distinguishes label and word: "this is not quite true" is no verdict.
    last = re.search(rf"{_word(labels)}[\W_]*\Z", text)
    if last is None:
        return None
    before = _SENTENCE_END.split(text[: last.start("label")])[-1]
    if _DENIAL.search(before) or re.search(_word(labels), before):
        return None
    return last["label"], last.end("label")


def _alone(labels: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of a label alone in a line. With a colon after it, it is a heading."""
    return re.compile(rf"^{_SIGNS}(?P<label>{_any_of(labels)})(?:[^\w\n:：]|_)*$", re.M | re.I)


def _word(labels: Sequence[str]) -> str:
    # Not \b: Chinese characters count as word characters, and need no space before a label.
    return rf"(?<![A-Za-z])(?P<label>{_any_of(labels)})(?![A-Za-z])"


def _any_of(labels: Sequence[str]) -> str:
    return "|".join(map(re.escape, labels))


def _ends(text: str, end: int) -> bool:
    return re.search(r"[^\W_]", text[end:]) is None


def _as_spelt(word: str, labels: Sequence[str]) -> str:
    return next(label for label in labels if label.casefold() == word.casefold())
