"""The texts of the page, in every language.

One folder per language in ``assets/texts``, one TOML per screen. Labels that gradio renders come
from a `gradio.I18n` made of the same files; the server's own HTML uses `Texts`.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gradio as gr

from compeer_core.taxonomy import INTENSITIES

ASSETS = Path(__file__).resolve().parents[2] / "assets"
LANGUAGES = ("en", "zh")
"""The languages of the page, the default first."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_TITLES = {"emotion": "feeling", "strategy": "chosen"}
"""Keys of the titles of labels, where they differ from their names."""
_VOCABULARIES = {
    "stage": "stages",
    "sentiment": "sentiments",
    "emotion": "emotions",
    "strategy": "strategies",
}
"""The table of each label's values."""


@dataclass(frozen=True)
class Texts:
    """The texts of one language."""

    language: str
    words: Mapping[str, str]
    region: str = ""
    """The reader's country according to the browser (ISO 3166); empty if unknown."""

    def __call__(self, key: str, **values: object) -> str:
        """Return a text with its placeholders filled in one pass.

        Raises:
            KeyError: There is no such key, or a placeholder has no value.
        """
        return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), self.words[key])

    def label(self, vocabulary: str, label: str) -> str:
        """Return a taxonomy label in this language; an unknown label is returned unchanged.

        Args:
            vocabulary: The table of labels, for example ``stages`` or ``strategies``.
            label: The label as models write it.
        """
        return self.words.get(f"{vocabulary}.{label}", label)

    def label_title(self, name: str) -> str:
        """Return the title of a label of the output grammar, such as ``stage``."""
        return self(f"inspector.{_TITLES.get(name, name)}")

    def label_value(self, name: str, value: str) -> str:
        """Return the value of such a label; an unknown value is returned unchanged."""
        return self.label(_VOCABULARIES[name], value) if name in _VOCABULARIES else value

    def label_words(self, name: str, value: str | int) -> str:
        """Return the value in words, an intensity with its scale; an unknown value is returned unchanged."""
        if name == "intensity" and str(value) in map(str, INTENSITIES):
            return self("inspector.intensity_of", value=value)
        return self.label_value(name, str(value))

    @property
    def colon(self) -> str:
        """What separates a title from its words."""
        return "：" if self.language == "zh" else ": "

    @property
    def stop(self) -> str:
        """What separates two sentences."""
        return "。" if self.language == "zh" else ". "

    def listed(self, parts: list[str]) -> str:
        """Join parts into one list."""
        return ("、" if self.language == "zh" else ", ").join(parts)


@cache
def load_texts(language: str) -> Texts:
    """Read the texts of a language of `LANGUAGES`; screens share no key."""
    words: dict[str, str] = {}
    for path in sorted((ASSETS / "texts" / language).glob("*.toml")):
        words |= _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    return Texts(language, MappingProxyType(words))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def gradio_texts() -> gr.I18n:
    """Return the texts for the labels that gradio renders in the browser."""
    return gr.I18n(**{language: dict(load_texts(language).words) for language in LANGUAGES})


def choose_language(chosen: str | None, accepted: str | None, default: str | None = None) -> str:
    """Return the language for a visitor.

    Args:
        chosen: What the visitor selected on the page, if anything.
        accepted: The browser's ``Accept-Language`` header.
        default: The operator's choice; it outranks the header.

    Example:
        >>> choose_language(None, "fr, zh-TW;q=0.8, en;q=0.5")
        'zh'
    """
    if chosen in LANGUAGES:
        return str(chosen)
    if default in LANGUAGES:
        return str(default)
    for tag in _by_preference(accepted or ""):
        primary = tag.split("-")[0].lower()
        if primary in LANGUAGES:
            return primary
    return LANGUAGES[0]


def region_of(accepted: str | None, language: str) -> str:
    """Return the country in a browser's ``Accept-Language``, else that of the language.

    Example:
        >>> region_of("en-GB,en;q=0.8", "en"), region_of("en", "en"), region_of(None, "zh")
        ('GB', 'US', 'CN')
    """
    for tag in _by_preference(accepted or ""):
        region = tag.rpartition("-")[2]
        if len(region) == 2 and region.isalpha() and "-" in tag:
            return region.upper()
    return "CN" if language == "zh" else "US"


def _by_preference(header: str) -> list[str]:
    weighted: list[tuple[float, str]] = []
    for entry in header.split(","):
        tag, _, parameters = entry.strip().partition(";")
        quality = re.search(r"q\s*=\s*([0-9.]+)", parameters)
        try:
            weight = float(quality[1]) if quality else 1.0
        except ValueError:
            weight = 0.0
        if tag and weight > 0:
            weighted.append((weight, tag))
    return [tag for _, tag in sorted(weighted, key=lambda pair: -pair[0])]
