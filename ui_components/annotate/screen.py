"""The annotation desk on the page: an empty frame that its script fills.

What is shown and what is saved goes over plain requests (`annotate_routes`) instead of gradio's events,
since a script has to know whether a draft arrived: only then may it say so, and else it keeps the words
and tries again.
"""

import gradio as gr

from ui_components.shared.services import Services
from ui_components.shared.templating import render
from ui_components.shared.texts import ASSETS, LANGUAGES, load_texts


def build_annotate(services: Services, i18n: gr.I18n) -> None:
    """Lay out the desk."""
    languages = [load_texts(language) for language in LANGUAGES]
    gr.HTML(
        render("annotate_frame.html", languages=languages),
        elem_id="annotate",
        js_on_load=(ASSETS / "style" / "annotate.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )
