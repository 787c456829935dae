"""Help lines: the strip at the top of every page, and the card beside a message with a risk sign.

The top is rendered once in all languages; the style sheet shows the one that ``<html lang>`` names.
So it is visible before anything else works.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import gradio as gr

from compeer_core.safety import (
    HelpLine,
    HelpLines,
    LineKind,
    RiskKind,
    forbids_reply,
    load_help_lines,
)
from ui_components.shared.templating import render
from ui_components.shared.texts import LANGUAGES, Texts, load_texts, region_of

STRIP_LINES = 3


@cache
def _help_lines() -> HelpLines:
    return load_help_lines()


def lines_for(texts: Texts) -> list[dict[str, str]]:
    """Return all help lines, the reader's first."""
    lines = _help_lines().for_region(texts.region or region_of(None, texts.language))
    return [_in_words(line, texts) for line in lines]


@dataclass(frozen=True)
class RiskCard:
    """The card beside a message with a risk sign. No model writes any of it."""

    title: str
    text: str
    lines: tuple[Mapping[str, str], ...]
    elsewhere: str
    stands_alone: bool
    """It replaces the reply."""

    @property
    def spoken(self) -> str:
        """The card's text for screen readers."""
        numbers = ". ".join(f"{line['number']}, {line['name']}" for line in self.lines)
        return f"{self.title}. {self.text} {numbers}."


def risk_card(texts: Texts, kind: RiskKind) -> RiskCard:
    """Return the card for the reader."""
    return RiskCard(
        title=texts("help.card_title_now" if _first(kind) == "emergency" else "help.card_title"),
        text=texts(f"help.card_{kind}"),
        lines=tuple(_in_words(line, texts) for line in _card_lines(texts, kind)),
        elsewhere=texts("help.elsewhere"),
        stands_alone=forbids_reply(kind),
    )


def help_for(texts: Texts, kind: RiskKind) -> dict[str, object]:
    """Return the sentence and all help lines, for programs that know where their reader is."""
    home = region_of(None, texts.language)
    return {
        "sentence": texts(f"help.card_{kind}"),
        "lines": [
            {
                "number": line.number,
                "name": _name(line, texts),
                "kind": line.kind,
                "region": list(line.regions),
            }
            for line in _help_lines().for_region(home, _first(kind))
        ],
    }


def _card_lines(texts: Texts, kind: RiskKind) -> list[HelpLine]:
    """The numbers of the reader's country; without any, crisis lines in the reader's language.

    An emergency number of another country would only waste time.
    """
    lines = _help_lines()
    home = region_of(None, texts.language)
    region = texts.region or home
    local = [line for line in lines.for_region(region, _first(kind)) if region in line.regions]
    return local or [line for line in lines.lines if home in line.regions and line.kind == "crisis"]


def _first(kind: RiskKind) -> LineKind:
    return "emergency" if kind is RiskKind.MEDICAL_EMERGENCY else "crisis"


def build_top() -> gr.HTML:
    """Lay out the top bar (name, language, theme) and the help strip."""
    languages = [load_texts(language) for language in LANGUAGES]
    lines = {texts.language: lines_for(texts) for texts in languages}
    value = render(
        "top.html",
        languages=languages,
        first={language: lines[language][:STRIP_LINES] for language in LANGUAGES},
        all=lines,
        checked=min(line.checked for line in _help_lines().lines).isoformat(),
    )
    return gr.HTML(value, elem_id="top", js_on_load=None, apply_default_css=False)


def _in_words(line: HelpLine, texts: Texts) -> dict[str, str]:
    regions = ("EU",) if "EU" in line.regions else line.regions
    return {
        "number": line.number,
        "address": f"tel:{line.number.replace(' ', '')}",
        "name": _name(line, texts),
        "place": texts.listed([texts.label("regions", region) for region in regions]),
    }


def _name(line: HelpLine, texts: Texts) -> str:
    return line.name.zh if texts.language == "zh" else line.name.en
