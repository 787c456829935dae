"""The annotation desk on the page: an empty frame that its script fills.

It uses plain requests (`annotate.routes`) instead of gradio's events, because the script must know
whether a draft was saved: only then may it say so; otherwise it retries.
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
