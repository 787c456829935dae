"""How the silver rule reads English text: by the word lists of ``words.toml``.

`compeer_core.phrases` defines how lists match. The signs of strategies and the content words of a
text come from `compeer_core.consistency`.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

from compeer_core.cer import Case, HumanLabels
from compeer_core.consistency import signs
from compeer_core.dialogue import Speaker
from compeer_core.phrases import Phrases, words_of

LANGUAGE = "en"
"""The only language with lists."""

GREETING_WORDS = 6
"""A seeker with at most this many words, and no word of a feeling or a problem, has disclosed nothing."""

_QUOTED = re.compile(r"[\"“”]([^\"“”]*)[\"“”]")


class Words:
    """The lists, compiled."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("words.toml")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        problems, phrases = table["problems"], table["phrases"]
        strength, set_phrases = table["strength"], table["set_phrases"]
        self.problems = frozenset(problems)
        self._names = {name: Phrases(each["names"]) for name, each in problems.items()}
        self._any_name = Phrases(name for each in problems.values() for name in each["names"])
        self.signs = {
            name: Phrases(each.get("signs") or each["names"]) for name, each in problems.items()
        }
        self.near = {
            name: frozenset({name, *each.get("near", ())}) for name, each in problems.items()
        }
        self.unknown = Phrases(phrases["unknown"])
        self.thanks = Phrases(phrases["thanks"])
        self.farewell = Phrases(phrases["farewell"])
        self.feelings = Phrases(phrases["feelings"])
        self.good_news = Phrases(phrases["good_news"])
        self._weak = Phrases(strength["weak"])
        self._any_strength = Phrases((*strength["weak"], *strength["strong"]))
        self._families = {name: Phrases(each) for name, each in table["families"].items()}
        self.set_welcome = Phrases(set_phrases["welcome"])
        self.set_praise = Phrases(set_phrases["praise"])
        self.set_sympathy = Phrases(set_phrases["sympathy"])
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
    """Return the lists."""
    return Words()


def quotations(text: str) -> list[str]:
    """Return the texts in quotation marks."""
    return [quotation.strip() for quotation in _QUOTED.findall(text) if quotation.strip()]


def without_quotations(text: str) -> str:
    return _QUOTED.sub(" ", text)


class Context:
    """The dialogue before the turn in question."""

    def __init__(self, case: Case, lists: Words) -> None:
        self.case = case
        self.lists = lists
        self.seeker_turns = [each.text for each in case.history if each.speaker is Speaker.SEEKER]
        """The seeker's turns."""
        self.supporter_turns = [
            each.text for each in case.history if each.speaker is Speaker.SUPPORTER
        ]
        self.last_message = self.seeker_turns[-1]
        self.seeker_text = "\n".join(self.seeker_turns)
        self.position = case.round / case.rounds
        """The share of the dialogue's rounds before this one, in [0, 1)."""

    @property
    def labels(self) -> HumanLabels:
        return self.case.labels

    @cached_property
    def seeker_words(self) -> int:
        return len(words_of(self.seeker_text))

    @cached_property
    def content(self) -> frozenset[str]:
        """The content words of the seeker's turns."""
        return self.lists.content(self.seeker_text)

    @cached_property
    def signs(self) -> Mapping[str, int]:
        """How often the seeker's words show each problem, for those that occur."""
        counts = {name: signs.count(self.seeker_text) for name, signs in self.lists.signs.items()}
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def thanks(self) -> bool:
        """Whether the last message thanks, or says that something helped."""
        return self.last_message in self.lists.thanks

    @cached_property
    def closing(self) -> bool:
        """Whether the last message thanks or says goodbye, or the one before it thanked."""
        return self.last_message in self.lists.farewell or any(
            each in self.lists.thanks for each in self.seeker_turns[-2:]
        )

    @cached_property
    def has_disclosed(self) -> bool:
        """Whether the seeker has disclosed anything: more words than a greeting, a feeling, a problem."""
        return (
            self.seeker_words > GREETING_WORDS
            or bool(self.signs)
            or self.seeker_text in self.lists.feelings
        )
