"""Help lines: the strip at the top of every page with its SOS button, and the card in place of a reply.

The top is rendered once in all languages; the style sheet shows the one that ``<html lang>`` names.
So it is visible before anything else works. SOS opens a dialog, where the page's script puts the lines of
the reader's country first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import gradio as gr

from compeer_core.safety import (
    HelpLine,
    HelpLines,
    LineKind,
    RiskKind,
    RiskState,
    load_help_lines,
    risk_sentences,
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
    """The card in place of a reply. No model writes any of it."""

    title: str
    text: str
    lines: tuple[Mapping[str, str], ...]
    elsewhere: str
    key: str
    """Names the card for the page, which remembers whether it is folded."""

    @property
    def spoken(self) -> str:
        """The card's text for screen readers."""
        numbers = ". ".join(f"{line['number']}, {line['name']}" for line in self.lines)
        return f"{self.title}. {self.text} {numbers}."


def risk_card(texts: Texts, kind: RiskKind, key: str, *, is_earlier: bool = False) -> RiskCard:
    """Return the card for the reader.

    Args:
        texts: The words.
        kind: The kind of danger.
        key: See `RiskCard.key`.
        is_earlier: The sign is in an earlier message than the card's.
    """
    if is_earlier:
        title = "help.card_title_earlier"
    else:
        title = "help.card_title_now" if _first(kind) == "emergency" else "help.card_title"
    return RiskCard(
        title=texts(title),
        text=_sentence(kind, texts, is_earlier=is_earlier),
        lines=tuple(_in_words(line, texts) for line in _card_lines(texts, kind)),
        elsewhere=texts("help.elsewhere"),
        key=key,
    )


def standing_card(texts: Texts, risk: RiskState) -> RiskCard | None:
    """Return the card that stays on the screen, folded, when no message shows one; None without a sign."""
    if risk.kind is None:
        return None
    if risk.is_hint:
        return hint_card(texts, risk.kind, "")
    card = risk_card(texts, risk.kind, "standing")
    return replace(card, title=texts("help.card_title_earlier"))


def hint_card(texts: Texts, kind: RiskKind, key: str) -> RiskCard:
    """Return the card that a reply is folded behind, after a hint in the message with this key, or in an earlier one."""
    card = risk_card(texts, kind, f"hint-{key}")
    text = _sentence(kind, texts, is_hint=True)
    return replace(card, title=texts("help.card_title_hint"), text=text)


def help_for(texts: Texts, risk: RiskState) -> dict[str, object]:
    """Return the sentence and all help lines after a sign or hint, for programs that know where their reader is."""
    assert risk.kind is not None
    home = region_of(None, texts.language)
    is_earlier = risk.withheld_for is not None and risk.messages_since > 0
    return {
        "sentence": _sentence(risk.kind, texts, is_earlier=is_earlier, is_hint=risk.is_hint),
        "lines": [
            {
                "number": line.number,
                "name": line.name(texts.language),
                "kind": line.kind,
                "region": list(line.regions),
            }
            for line in _help_lines().for_region(home, _first(risk.kind))
        ],
    }


def _sentence(
    kind: RiskKind, texts: Texts, *, is_earlier: bool = False, is_hint: bool = False
) -> str:
    sentences = risk_sentences()
    if is_hint:
        return sentences.hint(texts.language)
    return (sentences.afterwards if is_earlier else sentences.kinds[kind])(texts.language)


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
    """Lay out the top bar (name, language, theme), the help strip, and the dialogs that SOS opens."""
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
        "name": line.name(texts.language),
        "place": texts.listed([texts.label("regions", region) for region in regions]),
        "regions": " ".join(line.regions),
    }
