"""The look of the page: gradio's components use the same colour variables as ours."""

import json

import gradio as gr

from ui_components.shared.texts import ASSETS, LANGUAGES, load_texts

STYLE = ASSETS / "style"
SANS = (
    "system-ui", "-apple-system", "Segoe UI", "Roboto", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "Noto Sans CJK SC", "Noto Sans SC", "sans-serif",
)  # fmt: skip
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "Noto Sans Mono CJK SC", "monospace")


def build_theme() -> gr.themes.Base:
    """Return gradio's theme in the colours of ``assets/style/page.css``."""
    theme = gr.themes.Base(font=SANS, font_mono=MONO, radius_size="lg", text_size="md")
    names = {
        "body_background_fill": "--paper",
        "body_text_color": "--ink",
        "body_text_color_subdued": "--ink-soft",
        "background_fill_primary": "--card",
        "background_fill_secondary": "--paper",
        "block_background_fill": "--card",
        "block_border_color": "--line",
        "block_label_text_color": "--ink-soft",
        "block_title_text_color": "--ink-soft",
        "block_info_text_color": "--ink-soft",
        "border_color_primary": "--line",
        "border_color_accent": "--accent",
        "color_accent_soft": "--accent-soft",
        "input_background_fill": "--card",
        "input_border_color": "--line-strong",
        "input_border_color_focus": "--accent",
        "input_placeholder_color": "--ink-soft",
        "link_text_color": "--accent",
        "button_primary_background_fill": "--accent",
        "button_primary_background_fill_hover": "--accent-strong",
        "button_primary_text_color": "--on-accent",
        "button_secondary_background_fill": "--card",
        "button_secondary_background_fill_hover": "--accent-soft",
        "button_secondary_text_color": "--ink",
        "button_secondary_border_color": "--line-strong",
    }
    values = {key: f"var({name})" for key, name in names.items()}
    dark = {f"{key}_dark": value for key, value in values.items()}
    return theme.set(input_border_width="1px", **values, **dark)


def load_css() -> str:
    """Return the page's style sheet: the frame, then each screen."""
    sheets = [STYLE / "page.css", *sorted(STYLE.glob("screen_*.css"))]
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)


def load_js() -> str:
    """Return the script that runs on page load, with the labels it needs."""
    keys = ("send", "stop", "attach", "remove")
    words = {
        language: {key: load_texts(language)(f"chat.{key}") for key in keys}
        for language in LANGUAGES
    }
    script = (STYLE / "page.js").read_text(encoding="utf-8")
    return script.replace("WORDS[", f"({json.dumps(words, ensure_ascii=False)})[")
