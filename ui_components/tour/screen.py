"""The tour: six steps for people who want to know what this is, without a model and without a network.

All of it is rendered once for each language and sent when the page is opened; afterwards only the number
of votes is asked for, and the tour does without where nobody answers.
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
"""Where the page finds the files behind the claims, see `tour_routes`."""


@dataclass(frozen=True)
class Frame:
    """What the small parts of the templates need, on the screen and on paper."""

    t: Texts
    files: str
    """What stands in front of a file below ``assets``."""
    paper_address: str
    printed: bool = False

    @property
    def home(self) -> str:
        """What stands in front of an address of the server."""
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
    """Return the tour that comes with the code; it does not change while a server runs."""
    return load_tour()


def tour_html(texts: Texts) -> str:
    """Return the screen in one language, or why there is none."""
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
    """Return what the templates of the six steps are filled with.

    Args:
        tour: The contents.
        texts: The language.
        files: What stands in front of a file below ``assets``.
        printed: For paper: nothing to press or unfold.
        live: The count of votes as HTML, where it is known already.
    """
    return {
        "t": texts,
        "v": tour_view(tour, texts),
        "frame": Frame(texts, files, tour.paper_address, printed),
        "live": Markup(live),  # made by our own template
    }
