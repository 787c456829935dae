"""Check whether the conversation contains what a step quotes or describes.

A policy can quote words that nobody wrote and describe a photo that nobody sent. Both are checked against the
conversation, by rule and in linear time, so that a page can mark them while a step is being generated:

- A *quotation* is text in double quotation marks, English or Chinese. It is found if some message contains it, apart
  from case, the form of apostrophes and spaces, and punctuation at its ends.
- *Photo talk* is a sentence that speaks of a photo, a picture or a visible face. It is unsupported if the conversation
  contains no photo.

The checks do not judge meaning: a step can quote correctly and still misread the person.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from compeer_core.dialogue import Dialogue

_QUOTATION = re.compile(
    r'"([^"\n]{1,400})"|“([^“”\n]{1,400})”|「([^「」\n]{1,400})」|『([^『』\n]{1,400})』'
)
_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]*")
_PHOTO_TALK = re.compile(
    r"\b(?:in|on|from|of) (?:the|their|this|your|his|her) (?:photo|picture|image|selfie)s?\b"
    r"|\b(?:the|their|this|your|his|her) (?:photo|picture|image|selfie)s? (?:shows?|looks?|seems?|is|fits?)\b"
    r"|\b(?:the|their|your|his|her) (?:face|expression) (?:in|on) the\b"
    r"|\b(?:the|their|your|his|her) (?:face|facial expression) (?:shows?|looks?|seems?)\b"
    r"|(?:照片|图片|图像|相片|自拍)(?:中|里|上|显示|看)"
    r"|从(?:这张|那张)?(?:照片|图片|图像)",
    re.IGNORECASE,
)
_APOSTROPHES = str.maketrans("’‘`´＇", "'''''")
_EDGES = " .,;:!?…。，；：！？、"


class Ground(StrEnum):
    """The result of a check."""

    FOUND = "found"
    """The quoted words are in a message."""
    NOT_SAID = "not_said"
    """No message contains the quoted words."""
    NO_PHOTO = "no_photo"
    """The sentence speaks of a photo, and the conversation has none."""


@dataclass(frozen=True)
class Evidence:
    """A passage of a step that refers to the conversation.

    Attributes:
        start: First character of the passage in the step's text; quotation marks are outside of it.
        end: Character after its last.
        ground: Whether the conversation supports it.
        message: Index of the utterance that contains a quotation that was found, else None.
        message_start: First character of the quoted words in that utterance, else None.
        message_end: Character after their last, else None.
    """

    start: int
    end: int
    ground: Ground
    message: int | None = None
    message_start: int | None = None
    message_end: int | None = None


class StepChecker:
    """Checks steps against one conversation.

    It folds the messages once and looks a quotation up once, so a step can be checked at every token.

    Args:
        dialogue: The conversation before the turn.

    Example:
        >>> from compeer_core.dialogue import Speaker, Utterance
        >>> checker = StepChecker(Dialogue((Utterance(Speaker.SEEKER, "My boss shouted at me."),)))
        >>> [e.ground.value for e in checker.check('They say "my boss" and "my job".')]
        ['found', 'not_said']
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self._messages = [utterance.text for utterance in dialogue]
        self._folded = [_folded(message) for message in self._messages]
        self._has_photo = any(utterance.images for utterance in dialogue)
        self._places: dict[str, _Place | None] = {}

    def check(self, text: str) -> tuple[Evidence, ...]:
        """Return the passages of a step that refer to words or photos, in their order.

        Args:
            text: Free text of one step, English or Chinese. A quotation that is still open is left out.
        """
        passages = [*self._quotations(text), *self._photo_talk(text)]
        return tuple(sorted(passages, key=lambda evidence: (evidence.start, evidence.end)))

    def _quotations(self, text: str) -> Iterator[Evidence]:
        for start, quotation in _quoted(text):
            end = start + len(quotation)
            place = self._place(quotation)
            if place is None:
                yield Evidence(start, end, Ground.NOT_SAID)
            else:
                yield Evidence(start, end, Ground.FOUND, *place)

    def _place(self, quotation: str) -> "_Place | None":
        if quotation not in self._places:
            place = _folded_place(quotation, self._folded)
            if place is not None:
                number, start, end = place
                places = _places(self._messages[number])
                place = number, places[start], places[end - 1] + 1
            self._places[quotation] = place
        return self._places[quotation]

    def _photo_talk(self, text: str) -> Iterator[Evidence]:
        if self._has_photo:
            return
        for sentence in _SENTENCE.finditer(text):
            if _PHOTO_TALK.search(sentence[0]):
                start = sentence.start() + len(sentence[0]) - len(sentence[0].lstrip())
                yield Evidence(start, sentence.end(), Ground.NO_PHOTO)


def invented_quotations(
    text: str, messages: Sequence[str], *, exact: bool = False
) -> tuple[str, ...]:
    """Return the quotations of a text that no message contains.

    Args:
        text: Any text, such as the history step of a turn.
        messages: What was said before it.
        exact: Compare letter for letter, as evaluations do. Only the case of the first letter is free, since a
            quotation may begin a sentence or be taken from the beginning of one.

    Example:
        >>> invented_quotations('They say "My boss" and "my Job".', ["my boss took my job"])
        ()
        >>> invented_quotations('They say "My boss" and "my Job".', ["my boss took my job"], exact=True)
        ('my Job',)
    """
    quotations = [quotation for _, quotation in _quoted(text)]
    if exact:
        return tuple(q for q in quotations if not any(_is_verbatim(q, said) for said in messages))
    folded = [_folded(message) for message in messages]
    return tuple(q for q in quotations if _folded_place(q, folded) is None)


def _is_verbatim(quotation: str, message: str) -> bool:
    return quotation in message or quotation[:1].swapcase() + quotation[1:] in message


def _quoted(text: str) -> Iterator[tuple[int, str]]:
    """Yield each quotation with the place of its first character."""
    for match in _QUOTATION.finditer(text):
        group = match.lastindex
        assert group is not None  # every alternative has a group
        yield match.start(group), match[group]


_Place = tuple[int, int, int]
"""The index of a message, the first character of some words in it, and the character after their last."""


def _folded(text: str) -> str:
    """Return a text without differences of case, with plain apostrophes and single spaces."""
    return " ".join(text.translate(_APOSTROPHES).casefold().split())


def _places(text: str) -> list[int]:
    """Return where each character of `_folded` stands in the text."""
    places: list[int] = []
    follows_space = True
    for place, character in enumerate(text):
        if not (character.isspace() and follows_space):
            places += [place] * len(character.casefold())  # some letters fold to two or three
        follows_space = character.isspace()
    return places


def _folded_place(quotation: str, messages: Sequence[str]) -> _Place | None:
    """Return the place of a quotation in the latest of some folded messages that has it, or None."""
    wanted = _folded(quotation).strip(_EDGES)
    if not wanted:
        return None
    for number in range(len(messages) - 1, -1, -1):
        start = _word_start(messages[number], wanted)
        if start is not None:
            return number, start, start + len(wanted)
    return None


def _word_start(text: str, wanted: str) -> int | None:
    """Return where `wanted` stands in a text without cutting a word at either end, or None."""
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        if not (
            _joins(text[start - 1 : start], wanted[0]) or _joins(wanted[-1], text[end : end + 1])
        ):
            return start
        start = text.find(wanted, start + 1)
    return None


def _joins(left: str, right: str) -> bool:
    """Whether two characters belong to one word; Chinese has no spaces, so there they never do."""
    return bool(left and right) and all(c.isalnum() and ord(c) < 0x2E80 for c in (left, right))
