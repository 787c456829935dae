"""The page: its parts side by side, and which handler answers which event."""

from collections.abc import Callable, Sequence

import gradio as gr
from gradio.components import Component

from ui_components.api import publish
from ui_components.chat import Chat, ChatParts, build_message
from ui_components.conversation import build_conversation
from ui_components.help import build_top
from ui_components.inspector import build_inspector
from ui_components.models import Models
from ui_components.services import Services
from ui_components.templating import render
from ui_components.texts import LANGUAGES, gradio_texts, load_texts

STORAGE_KEY = "compeer-conversation"
FORGET_UPLOADS_SECONDS = 3600


def build_page(services: Services, version: str) -> gr.Blocks:
    """Lay out the page and its API."""
    i18n = gradio_texts()
    page = gr.Blocks(
        title="COMPEER",
        analytics_enabled=False,
        delete_cache=(FORGET_UPLOADS_SECONDS, FORGET_UPLOADS_SECONDS),
        fill_width=True,
    )
    with page:
        # The secret keeps nothing secret; without one the entry would be unreadable after a restart.
        conversation_id = gr.BrowserState("", storage_key=STORAGE_KEY, secret=STORAGE_KEY)
        build_top()
        with gr.Row(elem_id="main", equal_height=False):
            with gr.Column(scale=6, min_width=320, elem_id="left"):
                note = gr.HTML(elem_id="note", js_on_load=None, apply_default_css=False)
                conversation = build_conversation()
                message, alt, error = build_message(i18n)
                policy, judge, seed = _build_pickers(services.models, i18n)
            with gr.Column(scale=5, min_width=320, elem_id="right"):
                inspector = build_inspector()
        languages = [load_texts(language) for language in LANGUAGES]
        footer = render("footer.html", languages=languages, version=version)
        gr.HTML(footer, elem_id="foot", js_on_load=None, apply_default_css=False)
        parts = ChatParts(
            conversation, inspector, message, alt, error, policy, judge, seed, note, conversation_id
        )
        _wire(page, Chat(services, parts), parts)
        publish(services)
    return page


def build_bare(services: Services) -> gr.Blocks:
    """Return the API without a page."""
    blocks = gr.Blocks(title="COMPEER", analytics_enabled=False)
    with blocks:
        publish(services)
    return blocks


def _build_pickers(models: Models, i18n: gr.I18n) -> tuple[gr.Dropdown, gr.Dropdown, gr.Textbox]:
    policies = [(entry.title or entry.name, entry.name) for entry in models.entries("policy")]
    judges = [(entry.title or entry.name, entry.name) for entry in models.entries("judge")]
    nobody = (str(i18n("model.no_judge")), "")
    with gr.Row(elem_id="pickers"):
        policy = gr.Dropdown(
            policies,
            value=models.default("policy"),
            label=i18n("model.policy"),
            elem_id="policy",
            min_width=140,
            filterable=False,
        )
        judge = gr.Dropdown(
            [*judges, nobody],
            value=models.default("judge"),
            label=i18n("model.judge"),
            elem_id="judge",
            min_width=140,
            filterable=False,
        )
    with gr.Accordion(i18n("model.settings"), open=False, elem_id="settings"):
        # A number field would turn "nothing" into 0.
        seed = gr.Textbox(
            label=i18n("model.seed"), info=i18n("model.seed_info"), max_lines=1, elem_id="seed"
        )
    return policy, judge, seed


def _wire(page: gr.Blocks, chat: Chat, parts: ChatParts) -> None:
    order = [parts.policy, parts.judge, parts.seed, parts.conversation_id]
    everything = [
        parts.conversation,
        parts.inspector,
        parts.message,
        parts.alt,
        parts.error,
        parts.note,
        parts.conversation_id,
    ]
    message, talk, conversation = parts.message, parts.conversation, parts.conversation_id
    with_message = [message, conversation]
    _on(message.submit, chat.send, [message, parts.alt, *order], everything, streams=True)
    _on(talk.ask_again, chat.ask_again, order, everything, streams=True)
    _on(page.load, chat.load, [parts.policy, conversation], everything, streams=True)
    _on(message.stop, chat.stop, [conversation], [])
    _on(message.change, chat.attach, [message], [parts.alt])
    _on(parts.policy.change, chat.choose_model, [parts.policy], [parts.note])
    _on(talk.edit_turn, chat.edit, with_message, everything)
    _on(talk.stop_edit, chat.stop_edit, with_message, everything)
    _on(talk.clear_all, chat.clear, [conversation], everything)
    _on(talk.undo_last, chat.undo, [conversation], everything)
    _on(talk.pick_turn, chat.pick, [conversation], everything)
    _on(talk.use_starter, chat.use_starter, [message], [message])
    _on(parts.inspector.pick_turn, chat.pick, [conversation], everything)


def _on(
    event: Callable[..., object],
    handler: Callable[..., object],
    inputs: Sequence[Component],
    outputs: Sequence[Component],
    *,
    streams: bool = False,
) -> None:
    """Let a handler answer an event.

    Gradio's queue lets everyone in at once: who waits for a model waits in `waiting.Line`.
    """
    event(
        handler,
        list(inputs),
        list(outputs),
        queue=streams,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=None,
    )
