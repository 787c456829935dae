"""How the silver rule reads English text: by the word lists of ``words.toml``.

`compeer_core.phrases` defines how lists match. The signs of strategies and the content words of a
text come from `compeer_core.consistency`.
"""

import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from compeer_core.cer import Case
from compeer_core.config import FrozenModel, load_toml
from compeer_core.consistency import signs
from compeer_core.dialogue import Speaker
from compeer_core.phrases import Phrases, words_of

PATH = Path(__file__).with_name("words.toml")
LANGUAGE = "en"
"""The only language with lists."""

_QUOTED = re.compile(r"[\"“”]([^\"“”]*)[\"“”]")


class _Problem(FrozenModel):
    names: tuple[str, ...] = Field(min_length=1)
    signs: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


class _Phrases(FrozenModel):
    unknown: tuple[str, ...]
    thanks: tuple[str, ...]
    farewell: tuple[str, ...]
    feelings: tuple[str, ...]
    good_news: tuple[str, ...]


class _Strength(FrozenModel):
    weak: tuple[str, ...]
    strong: tuple[str, ...]


class _SetPhrases(FrozenModel):
    welcome: tuple[str, ...]
    praise: tuple[str, ...]
    sympathy: tuple[str, ...]


class _File(FrozenModel):
    problems: Mapping[str, _Problem]
    phrases: _Phrases
    strength: _Strength
    families: Mapping[str, tuple[str, ...]]
    set_phrases: _SetPhrases

    @model_validator(mode="after")
    def _near_ones_exist(self) -> Self:
        for name, problem in self.problems.items():
            for near in problem.near:
                if near not in self.problems:
                    raise ValueError(f"problem {name!r}: near = {near!r} is not a listed problem")
        return self


class Words:
    """The lists of the file, compiled."""

    def __init__(self, file: _File) -> None:
        self.problems = frozenset(file.problems)
        self._names = {name: Phrases(each.names) for name, each in file.problems.items()}
        self._any_name = Phrases(name for each in file.problems.values() for name in each.names)
        self.signs = {
            name: Phrases(each.signs or each.names) for name, each in file.problems.items()
        }
        self.near = {name: frozenset({name, *each.near}) for name, each in file.problems.items()}
        self.unknown = Phrases(file.phrases.unknown)
        self.thanks = Phrases(file.phrases.thanks)
        self.farewell = Phrases(file.phrases.farewell)
        self.feelings = Phrases(file.phrases.feelings)
        self.good_news = Phrases(file.phrases.good_news)
        self._weak = Phrases(file.strength.weak)
        self._any_strength = Phrases((*file.strength.weak, *file.strength.strong))
        self._families = {name: Phrases(each) for name, each in file.families.items()}
        self.set_welcome = Phrases(file.set_phrases.welcome)
        self.set_praise = Phrases(file.set_phrases.praise)
        self.set_sympathy = Phrases(file.set_phrases.sympathy)
        self.content = signs(LANGUAGE).content

    def named(self, text: str) -> frozenset[str]:
        """Return the problems that a text names; the longest of overlapping names counts."""
        matches = self._any_name.found(text)
        return frozenset(
            name for name, names in self._names.items() if any(map(names.is_one, matches))
        )

    def strengths(self, text: str) -> frozenset[str]:
        """Return whether a text calls a feeling `weak`, `strong`, both or neither."""
        matches = self._any_strength.found(text)
        return frozenset("weak" if self._weak.is_one(each) else "strong" for each in matches)

    def families(self, text: str) -> frozenset[str]:
        """Return the families of emotions that a text names."""
        return frozenset(name for name, each in self._families.items() if text in each)


@cache
def words() -> Words:
    """The shipped lists.

    Raises:
        ConfigError: The file is wrong.
    """
    return Words(load_toml(PATH, _File))


def quotations(text: str) -> list[str]:
    """Return the texts in quotation marks."""
    return [quotation.strip() for quotation in _QUOTED.findall(text) if quotation.strip()]


def without_quotations(text: str) -> str:
    return _QUOTED.sub(" ", text)


class Context:
    """The dialogue before the turn in question."""

    def __init__(self, case: Case, lists: Words) -> None:
        self.history = case.history
        self.seeker_turns = [each.text for each in case.history if each.speaker is Speaker.SEEKER]
        """The seeker's turns."""
        self.supporter_turns = [
            each.text for each in case.history if each.speaker is Speaker.SUPPORTER
        ]
        self.last_message = self.seeker_turns[-1]
        self.seeker_text = "\n".join(self.seeker_turns)
        self.position = case.round / case.rounds
        """The share of the dialogue's rounds before this one, in [0, 1)."""
        self._words = lists

    @cached_property
    def seeker_words(self) -> int:
        return len(words_of(self.seeker_text))

    @cached_property
    def content(self) -> frozenset[str]:
        """The content words of the seeker's turns."""
        return self._words.content(self.seeker_text)

    @cached_property
    def signs(self) -> Mapping[str, int]:
        """How often the seeker's words show each problem, for those that occur."""
        counts = {name: signs.count(self.seeker_text) for name, signs in self._words.signs.items()}
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def thanks(self) -> bool:
        """Whether the last message thanks, or says that something helped."""
        return self.last_message in self._words.thanks

    @cached_property
    def closing(self) -> bool:
        """Whether the last message thanks or says goodbye, or the one before it thanked."""
        return self.last_message in self._words.farewell or any(
            each in self._words.thanks for each in self.seeker_turns[-2:]
        )

    def has_disclosed(self, greeting_words: int) -> bool:
        """Whether the seeker has disclosed anything: more words than a greeting, a feeling, a problem."""
        return (
            self.seeker_words > greeting_words
            or bool(self.signs)
            or self.seeker_text in self._words.feelings
        )
