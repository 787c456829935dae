"""The page: a frame with one tab per screen."""

from collections.abc import Callable
from functools import partial

import gradio as gr

from ui_components.annotate.screen import build_annotate
from ui_components.chat.screen import build_chat
from ui_components.compare.screen import build_compare, remember_comparison
from ui_components.results.screen import build_results
from ui_components.server.api import publish
from ui_components.server.quiet_blocks import QuietBlocks
from ui_components.shared.help import build_top
from ui_components.shared.services import Services
from ui_components.shared.templating import render
from ui_components.shared.texts import LANGUAGES, gradio_texts, load_texts
from ui_components.tour.screen import build_tour

FORGET_UPLOADS_SECONDS = 3600


def build_page(services: Services, version: str) -> gr.Blocks:
    """Lay out the page and its API.

    A screen's tab id is also its name in the URL (``?screen=chat``) and the key of its title in
    ``page.*``.
    """
    i18n = gradio_texts()
    page = QuietBlocks(
        title="COMPEER",
        analytics_enabled=False,
        delete_cache=(FORGET_UPLOADS_SECONDS, FORGET_UPLOADS_SECONDS),
        fill_width=True,
    )
    with page:
        build_top()
        comparison = remember_comparison()
        screens: dict[str, Callable[[Services, gr.I18n], None]] = {
            "chat": partial(build_chat, page=page),
            "compare": partial(build_compare, page=page, conversation_id=comparison),
            "results": build_results,
            "annotate": build_annotate,
            "tour": partial(build_tour, page=page),
        }
        with gr.Tabs(elem_id="screens"):
            for name, build in screens.items():
                with gr.Tab(i18n(f"page.{name}"), id=name, elem_id=f"screen-{name}"):
                    build(services, i18n)
        languages = [load_texts(language) for language in LANGUAGES]
        footer = render("footer.html", languages=languages, version=version)
        gr.HTML(footer, elem_id="foot", js_on_load=None, apply_default_css=False)
        publish(services)
    return page


def build_bare(services: Services) -> gr.Blocks:
    """Return the API without a page."""
    blocks = QuietBlocks(title="COMPEER", analytics_enabled=False)
    with blocks:
        publish(services)
    return blocks
