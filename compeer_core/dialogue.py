"""Dialogues: the conversation history H of the paper.

Everything here is immutable, so dialogues can be shared between threads without copies.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from types import MappingProxyType

from compeer_core.errors import InputError
from compeer_core.images import Image

MAX_MESSAGE_CHARACTERS = 4000
"""The longest message a visitor may send."""


class Speaker(StrEnum):
    """The role of a speaker."""

    SEEKER = "seeker"
    """The person who seeks support."""
    SUPPORTER = "supporter"
    """The person or model that supports them."""


_SPEAKER_OF_ROLE: Mapping[str, Speaker] = MappingProxyType(
    {"user": Speaker.SEEKER, "assistant": Speaker.SUPPORTER}
)


@dataclass(frozen=True)
class Utterance:
    """One message of a speaker, with its images."""

    speaker: Speaker
    text: str
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    """Utterances in order.

    Attributes:
        id: A name for logs and files, without content.
    """

    utterances: tuple[Utterance, ...] = ()
    id: str = ""

    def __len__(self) -> int:
        return len(self.utterances)

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self.utterances)

    def adding(self, utterance: Utterance) -> "Dialogue":
        """Return the dialogue with one more utterance at its end."""
        return replace(self, utterances=(*self.utterances, utterance))

    @property
    def last_seeker(self) -> Utterance | None:
        """The seeker's latest utterance, or None."""
        for utterance in reversed(self.utterances):
            if utterance.speaker is Speaker.SEEKER:
                return utterance
        return None

    def merged(self) -> "Dialogue":
        """Return the dialogue with consecutive utterances of a speaker joined, so speakers alternate.

        Texts are joined by a line break; images keep their order.
        """
        runs = (
            list(run) for _, run in groupby(self.utterances, lambda utterance: utterance.speaker)
        )
        return replace(
            self,
            utterances=tuple(
                Utterance(
                    run[0].speaker,
                    "\n".join(utterance.text for utterance in run if utterance.text),
                    tuple(image for utterance in run for image in utterance.images),
                )
                for run in runs
            ),
        )

    @classmethod
    def from_messages(cls, messages: Iterable[Mapping[str, object]], id: str = "") -> "Dialogue":
        """Build a dialogue from chat messages, as the HTTP API receives them.

        Args:
            messages: Each with a ``role`` (``user`` for the seeker, ``assistant`` for the
                supporter) and a string ``content``. Other keys are ignored.
            id: See the class.

        Raises:
            InputError: A message is not of that form (``history_malformed``) or has another role
                (``history_role_unknown``).
        """
        return cls(tuple(map(_utterance_of, messages)), id)


def _utterance_of(message: object) -> Utterance:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise InputError(
            "each message of the history must be a mapping with a role and a string as content",
            "history_malformed",
        )
    role = message.get("role")
    speaker = _SPEAKER_OF_ROLE.get(role) if isinstance(role, str) else None
    if speaker is None:
        raise InputError(
            f"unknown role {role!r} in the history: use user (seeker) or assistant (supporter)",
            "history_role_unknown",
            {"role": str(role)},
        )
    return Utterance(speaker, message["content"])


def check_message(text: str, has_images: bool) -> str:
    r"""Return a visitor's message, cleaned.

    Outer white space, control characters other than line breaks and tabs, and lone surrogates (which
    files and databases cannot store) are dropped; line breaks become ``\n``.

    Args:
        text: The message as typed.
        has_images: Whether images come with it; it may then be empty.

    Raises:
        InputError: The message is empty (``message_empty``) or longer than
            `MAX_MESSAGE_CHARACTERS` (``message_too_long``, with ``limit`` and ``length``).
    """
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    cleaned = "".join(
        character
        for character in unified
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    ).strip()
    if not has_images and not any(_is_visible(character) for character in cleaned):
        raise InputError("the message is empty", "message_empty")
    if len(cleaned) > MAX_MESSAGE_CHARACTERS:
        raise InputError(
            f"the message has {len(cleaned)} characters, at most {MAX_MESSAGE_CHARACTERS} are allowed",
            "message_too_long",
            {"limit": MAX_MESSAGE_CHARACTERS, "length": len(cleaned)},
        )
    return cleaned


def _is_visible(character: str) -> bool:
    # Cf contains zero-width characters, which strip() does not treat as space.
    return not character.isspace() and unicodedata.category(character) != "Cf"


# --- Language ---------------------------------------------------------------------------------

_SCRIPTS = (
    # Kana and hangul before ideographs: Japanese mixes kana with ideographs.
    ("ja", re.compile("[\u3041-\u30ff\uff66-\uff9d]")),
    ("ko", re.compile("[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]")),
    ("zh", re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")),
    ("ru", re.compile("[\u0400-\u052f]+")),
    ("el", re.compile("[\u0370-\u03ff\u1f00-\u1fff]+")),
    ("ar", re.compile("[\u0600-\u06ff\u0750-\u077f]+")),
    ("he", re.compile("[\u0590-\u05ff]+")),
    ("hi", re.compile("[\u0900-\u097f]+")),
    ("th", re.compile("[\u0e00-\u0e7f]+")),
)
_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]+(?:['’][A-Za-z]+)*")
# Short words that are frequent in one language and rare or absent in the others.
_STOP_WORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        language: frozenset(words.split())
        for language, words in (
            (
                "en",
                "the and i you is it to of my that in was for with this have not but be are i'm "
                "it's don't what how do so just me she he they we at",
            ),
            (
                "fr",
                "le la les et je tu il est une des que qui pas ne mon ma mes avec pour dans suis "
                "c'est j'ai très nous vous mais",
            ),
            (
                "de",
                "der die das und ich du ist nicht ein eine mein meine mit für auf habe bin sie wir "
                "es zu aber sehr auch",
            ),
            (
                "es",
                "el la los las y yo es una que no mi mis con para en estoy muy por pero lo se me "
                "tengo",
            ),
            ("it", "il gli e io è una che non mio mia con per sono molto ma mi ho di della sto"),
            ("pt", "o os e eu é uma que não meu minha com para em estou muito mas me tenho do da"),
            ("nl", "de het en ik je is een niet mijn met voor op heb ben maar zo ook"),
        )
    }
)


def language_of(text: str) -> str:
    """Detect the language of a message: ``zh``, ``en``, another ISO 639-1 code, or ``und``.

    The script with the largest weight decides; one ideograph, kana or hangul syllable counts as much
    as one word of an alphabet. For Latin script a few stop words decide, with English as default.

    Limits: languages that share a script without a word list here (Ukrainian becomes ``ru``, Polish
    ``en``), Japanese without kana, traditional and simplified Chinese, transliterations (pinyin
    becomes ``en``), and messages of one or two words. ``und`` means no letters of a known script.

    Example:
        >>> [language_of(text) for text in ("I feel alone", "我很孤单", "Je suis triste", "123 :(")]
        ['en', 'zh', 'fr', 'und']
    """
    weights = {language: len(pattern.findall(text)) for language, pattern in _SCRIPTS}
    if weights["ja"]:
        weights["ja"] += weights.pop("zh")
    words = [word.lower().replace("’", "'") for word in _LATIN_WORD.findall(text)]
    weights["latin"] = len(words)
    best = max(weights, key=lambda language: weights[language])
    if not weights[best]:
        return "und"
    return best if best != "latin" else _latin_language(words)


def _latin_language(words: Iterable[str]) -> str:
    counts = dict.fromkeys(_STOP_WORDS, 0)
    for word in words:
        for language, stop_words in _STOP_WORDS.items():
            counts[language] += word in stop_words
    return max(counts, key=lambda language: counts[language])  # ties go to the first, English
