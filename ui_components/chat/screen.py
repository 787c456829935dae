"""The layout of Chat: conversation, message box and inspector, and their handlers."""

from functools import partial

import gradio as gr

from ui_components.chat.conversation import build_conversation
from ui_components.chat.conversation_list import Conversations, build_conversation_list
from ui_components.chat.handlers import Chat, ChatParts, build_message
from ui_components.chat.inspector import build_inspector
from ui_components.chat.steering import Steering
from ui_components.shared.events import on
from ui_components.shared.models import Models
from ui_components.shared.services import Services

STORAGE_KEY = "compeer-conversation"
CHOICES_KEY = "compeer-models"


def build_chat(services: Services, i18n: gr.I18n, page: gr.Blocks) -> None:
    """Lay out the chat and wire it."""
    # The secret protects nothing; without one the entry would be unreadable after a restart.
    conversation_id = gr.BrowserState("", storage_key=STORAGE_KEY, secret=STORAGE_KEY)
    choices = gr.BrowserState(storage_key=CHOICES_KEY, secret=CHOICES_KEY)
    with gr.Row(elem_id="main", equal_height=False):
        with gr.Column(scale=2, min_width=200, elem_id="side"):
            conversations = build_conversation_list()
        with gr.Column(scale=6, min_width=320, elem_id="left"):
            policy, judge = _build_pickers(services.models, i18n)
            conversation = build_conversation()
            message, alt, error = build_message(i18n)
            note = gr.HTML(elem_id="note", js_on_load=None, apply_default_css=False)
            seed = _build_settings(i18n)
        with gr.Column(scale=5, min_width=320, elem_id="right"):
            inspector = build_inspector()
    parts = ChatParts(
        conversation=conversation,
        inspector=inspector,
        message=message,
        alt=alt,
        error=error,
        policy=policy,
        judge=judge,
        seed=seed,
        note=note,
        conversation_id=conversation_id,
        conversations=conversations,
        choices=choices,
    )
    chat = Chat(services, parts)
    _wire(page, chat, parts)
    _wire_steering(Steering(services, parts, chat), parts)
    _wire_list(Conversations(services, parts, chat), parts)


def _build_pickers(models: Models, i18n: gr.I18n) -> tuple[gr.Dropdown, gr.Dropdown]:
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
    return policy, judge


def _build_settings(i18n: gr.I18n) -> gr.Textbox:
    with gr.Accordion(i18n("model.settings"), open=False, elem_id="settings"):
        # A number field would turn an empty value into 0.
        return gr.Textbox(
            label=i18n("model.seed"), info=i18n("model.seed_info"), max_lines=1, elem_id="seed"
        )


def _wire(page: gr.Blocks, chat: Chat, parts: ChatParts) -> None:
    settings = [parts.policy, parts.judge, parts.seed, parts.conversation_id]
    everything = [
        parts.conversation,
        parts.inspector,
        parts.message,
        parts.alt,
        parts.error,
        parts.note,
        parts.conversation_id,
        parts.conversations,
    ]
    message, talk, conversation = parts.message, parts.conversation, parts.conversation_id
    on(message.submit, chat.send, [message, parts.alt, *settings], everything, streams=True)
    on(talk.ask_again, chat.ask_again, settings, everything, streams=True)
    loaded = [*everything, parts.policy, parts.judge]
    on(page.load, chat.load, [parts.policy, parts.choices, conversation], loaded, streams=True)
    on(talk.refresh, chat.refresh, [conversation], everything, streams=True)
    on(message.stop, chat.stop, [conversation], [])
    on(message.change, chat.attach, [message], [parts.alt])
    on(message.change, chat.typed, [message, conversation], [], trigger_mode="always_last")
    for picker in (parts.policy, parts.judge):
        on(picker.input, chat.remember, [parts.policy, parts.judge], [parts.choices])
    on(parts.policy.change, chat.choose_model, [parts.policy], [parts.note])
    on(talk.edit_turn, chat.edit, [conversation], everything)
    on(talk.stop_edit, chat.stop_edit, [conversation], everything)
    on(talk.save_edit, chat.save_edit, settings, everything, streams=True)
    on(talk.clear_all, chat.clear, [conversation], everything)
    on(talk.undo_last, chat.undo, [conversation], everything)
    on(talk.pick_turn, chat.pick, [conversation], everything)
    on(talk.use_starter, chat.use_starter, [message], [message, parts.alt])
    on(parts.inspector.pick_turn, chat.pick, [conversation], everything)


def _wire_steering(steering: Steering, parts: ChatParts) -> None:
    inspector, conversation = parts.inspector, parts.conversation_id
    settings = [parts.policy, parts.judge, parts.seed, conversation]
    drawn = [parts.conversation, inspector, parts.error]
    streamed = [*drawn, parts.message]
    on(inspector.edit_step, steering.edit_step, settings, streamed, streams=True)
    on(inspector.keep_step, steering.keep_step, settings, streamed, streams=True)
    on(inspector.try_strategy, steering.try_strategy, settings, streamed, streams=True)
    on(inspector.best_of, steering.best_of, settings, streamed, streams=True)
    on(inspector.each_strategy, steering.each_strategy, settings, streamed, streams=True)
    for component in (inspector, parts.conversation):
        on(component.switch_reply, steering.switch, [conversation], drawn)
    on(inspector.compare_reply, steering.compare, [conversation], drawn)


def _wire_list(conversations: Conversations, parts: ChatParts) -> None:
    listed, conversation = parts.conversations, parts.conversation_id
    with_message = [parts.message, conversation]
    drawn = [parts.conversation, parts.inspector, listed]
    shown = [*drawn, parts.message, parts.error, conversation]
    # The page may leave a conversation whose reply is still being streamed.
    leaving = partial(on, inputs=with_message, outputs=shown, streams=True, trigger_mode="multiple")
    leaving(listed.open_conversation, conversations.open)
    leaving(listed.new_conversation, conversations.new)
    on(listed.rename_conversation, conversations.rename, [conversation], [listed])
    on(listed.delete_conversation, conversations.delete, [conversation], [*drawn, parts.message])
    search = listed.search_conversations
    on(search, conversations.search, [conversation], [listed], trigger_mode="always_last")
