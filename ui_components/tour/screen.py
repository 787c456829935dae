"""The tour: six steps that explain the project without a model or a network.

It is rendered once per language and sent when the page is opened; afterwards only the count of
votes is requested, and the tour works without it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import gradio as gr
from markupsafe import Markup

from compeer_core.errors import ConfigError
from compeer_core.tour.contents import Tour, load_tour
from ui_components.shared.events import on
from ui_components.shared.services import Services
from ui_components.shared.templating import render
from ui_components.shared.texts import Texts
from ui_components.shared.theme import STYLE
from ui_components.tour.view import tour_view

logger = logging.getLogger(__name__)

FILES = "tour/files/"
"""The URL prefix of the source files, see `tour.routes`."""


@dataclass(frozen=True)
class Frame:
    """The values that the template macros need, on screen and on paper."""

    t: Texts
    files: str
    """The URL prefix of files below ``assets``."""
    paper_address: str
    printed: bool = False

    @property
    def home(self) -> str:
        """The URL prefix of the server."""
        return "../" if self.printed else ""


def build_tour(services: Services, i18n: gr.I18n, page: gr.Blocks) -> None:
    """Lay out the tour and wire it."""
    script = (STYLE / "tour.js").read_text(encoding="utf-8")
    shown = gr.HTML(elem_id="tour", js_on_load=script, apply_default_css=False)

    def show(request: gr.Request) -> str:
        return tour_html(services.texts(request))

    on(page.load, show, [], [shown])


@cache
def the_tour() -> Tour:
    """Return the shipped tour; it is read once."""
    return load_tour()


def tour_html(texts: Texts) -> str:
    """Return the screen in one language, or an error message."""
    try:
        values = steps_in(the_tour(), texts, files=FILES)
    except ConfigError as error:
        logger.exception("the tour cannot be shown")
        return render("error.html", text=texts("tour.damaged", reason=error))
    language = texts.language
    return render(
        "tour.html",
        **values,
        print_address=f"tour/print?lang={language}",
        live_address=f"tour/votes?lang={language}",
    )


def steps_in(
    tour: Tour, texts: Texts, *, files: str, printed: bool = False, live: str = ""
) -> Mapping[str, Any]:
    """Return the values for the templates of the six steps.

    Args:
        tour: The contents.
        texts: The language.
        files: The URL prefix of files below ``assets``.
        printed: For paper: no controls.
        live: The count of votes as HTML, if already known.
    """
    return {
        "t": texts,
        "v": tour_view(tour, texts),
        "frame": Frame(texts, files, tour.paper_address, printed),
        "live": Markup(live),  # from our own template
    }
