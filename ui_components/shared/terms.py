"""Explains the short names in model titles, on hover and in one line."""

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from ui_components.shared.texts import Texts

TERMS = ("por", "ur", "urp", "edition")
"""Short names, each with a text of the table ``terms``; see docs/glossary.md."""

_TERM = re.compile(rf"(?<![^\W_])(?:{'|'.join(TERMS)})(?![^\W_])", re.IGNORECASE)


def explained(text: str, texts: Texts) -> Markup:
    """Return a text as HTML, with each short name explained on hover.

    Example:
        >>> from ui_components.shared.texts import load_texts
        >>> explained("<mine>, edition", load_texts("en"))[:30]
        Markup('&lt;mine&gt;, <abbr title="Edi')
    """

    def abbreviation(term: re.Match[str]) -> Markup:
        meaning = texts(f"terms.{term[0].lower()}")
        return Markup('<abbr title="{}">{}</abbr>').format(meaning, term[0])

    pieces: list[str] = []
    start = 0
    for term in _TERM.finditer(text):
        pieces += [escape(text[start : term.start()]), abbreviation(term)]
        start = term.end()
    return Markup("").join([*pieces, escape(text[start:])])


def terms_line(names: Iterable[str], texts: Texts) -> str:
    """Return one line that explains the short names in some titles; empty if there are none."""
    used = {term.lower() for name in names for term in _TERM.findall(name)}
    return " ".join(texts(f"terms.{term}") for term in TERMS if term in used)
