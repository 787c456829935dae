"""The chat template for training a reward model: its base's own, with generation marks.

`{% generation %}` and `{% endgeneration %}` enclose the tokens of the loss: a verdict and the end of its
turn. The text before a verdict must equal what the judge reads in use, where the base's own template
formats it. So a template is tested on a conversation before training.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.errors import BackendError, ConfigError
from compeer_core.images import Image
from training.finetune.sft_trainer import message_rows

CHATML = Path(__file__).with_name("chatml_training.jinja")
"""ChatML with Qwen's image tokens: the template of the small models, and of Qwen2.5-VL for conversations
that begin with a system message. trl's own for Qwen2.5-VL also puts the loss on the line break after
a turn, which no model generates."""

PICTURE = Image(b"", 28, 28)
"""Placeholder: a template sees only that there is a picture."""

TRIED = (
    Message("system", ("What to judge.",)),
    Message("user", ("Seeker: look", PICTURE, "at this", PICTURE, "Is it so?")),
    Message("assistant", ("True",)),
    Message("user", ("And this?",)),
    Message("assistant", ("False",)),
)
"""A conversation like those that train judges."""


def training_template(base: Path | str, processor: Any, given: Path | None = None) -> str:
    """Return a template with generation marks that fits a base.

    Args:
        base: Its name in errors.
        processor: Its processor, which has a chat template.
        given: A file that must fit; None tries the base's own, ours and trl's.

    Raises:
        ConfigError: The file cannot be read or does not fit, or no known template fits.
    """
    if given is not None:
        try:
            template = given.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"training_template: {given} cannot be read: {error.strerror}"
            ) from error
        if problem := misfit(base, processor, template):
            raise ConfigError(f"training_template: {given} {problem}")
        return template
    for template in _known(processor):
        if not misfit(base, processor, template):
            return template
    raise ConfigError(
        f"{base}: its chat template has no {{% generation %}} marks, and no known template has the same "
        "output; copy it, enclose the assistant's text in the marks, and name the copy in "
        "training_template"
    )


def misfit(
    base: Path | str, processor: Any, template: str, messages: Sequence[Message] = TRIED
) -> str:
    """Return why a template is unfit for training, or an empty text."""
    if not has_generation_markers(template):
        return "has no {% generation %} marks around the assistant's text"
    own = ChatTemplate(str(base), processor)
    rows, _ = message_rows(messages)
    try:
        rendered: Any = render_jinja_template(
            [rows],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **processor.tokenizer.special_tokens_map,
        )
        answers = [number for number, m in enumerate(messages) if m.role == "assistant"]
        read_in_use = [own.render(messages[:number], reply=True) for number in answers]
    except (TemplateError, BackendError, KeyError, TypeError, ValueError) as error:
        return f"or the template of {base} cannot format a judge's conversation: {error}"
    (text,), (spans,) = rendered
    marked = [(text[:start], text[start:end]) for start, end in spans]
    if len(marked) != len(answers):
        return f"marks {len(marked)} of {len(answers)} answers"
    for number, before, (trained_before, answer) in zip(answers, read_in_use, marked, strict=True):
        if trained_before != before:
            at = _first_difference(trained_before, before)
            return (
                f"writes {trained_before[at : at + 40]!r} where the template of {base} writes "
                f"{before[at : at + 40]!r}: a judge would be trained on what it never reads"
            )
        if not answer.startswith(messages[number].text):
            return f"begins an answer with {answer[:40]!r} instead of {messages[number].text!r}"
    return ""


def _known(processor: Any) -> Iterator[str]:
    yield processor.chat_template
    yield CHATML.read_text(encoding="utf-8")
    try:
        of_trl = get_training_chat_template(processor)
    except (ValueError, TemplateError):
        return  # trl has no template like this one
    if of_trl is not None:
        yield of_trl


def _first_difference(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
