"""The top of the page: name, language, theme, and the strip that says where help is.

It is drawn once, in all languages, and the style sheet shows the one that ``<html lang>`` names. So
it is there before anything else works.
"""

from functools import cache

import gradio as gr

from compeer_core.safety import HelpLine, HelpLines, load_help_lines
from ui_components.templating import render
from ui_components.texts import LANGUAGES, Texts, load_texts, region_of

STRIP_LINES = 3
CARD_LINES = 2


@cache
def _help_lines() -> HelpLines:
    return load_help_lines()


def lines_for(texts: Texts) -> list[dict[str, str]]:
    """Return the help lines for whoever reads: those of the country first, then somebody to talk to."""
    region = texts.region or region_of(None, texts.language)
    lines = sorted(
        _help_lines().for_region(region),
        key=lambda line: region not in line.regions and line.kind == "emergency",
    )
    return [_in_words(line, texts) for line in lines]


def card_lines(texts: Texts) -> list[dict[str, str]]:
    """Return the one or two numbers of the calm card: those of the country, where there are any."""
    region = texts.region or region_of(None, texts.language)
    local = sum(region in line.regions for line in _help_lines().lines)
    return lines_for(texts)[: min(local, CARD_LINES) or CARD_LINES]


def build_top() -> gr.HTML:
    """Lay out the top bar and the help strip."""
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
    region = "EU" if "EU" in line.regions else line.regions[0]
    return {
        "number": line.number,
        "address": f"tel:{line.number.replace(' ', '')}",
        "name": line.name.zh if texts.language == "zh" else line.name.en,
        "place": texts.label("regions", region),
    }
