"""Prompts: one file per purpose and language, filled in one pass.

The texts are in ``<purpose>.<language>.md`` beside this module; this code assembles them. A prompt is a
tuple of `Message` records, since each model applies its own chat template.

All text from a person or a model passes through `neutralise`, so that it cannot forge our tags, a chat
template's tokens, or the format of a judge's prompt.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import PromptError
from compeer_core.images import Image
from compeer_core.messages import Message
from compeer_core.reasoning import STEPS, Part
from compeer_core.taxonomy import (
    ESCONV_STRATEGIES,
    Emotion,
    Preference,
    Sentiment,
    StrategyVocabulary,
)

LANGUAGES = ("en", "zh")
"""The languages of all prompts."""

_FOLDER = Path(__file__).parent
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

SPEAKER_NAMES: Mapping[str, Mapping[Speaker, str]] = MappingProxyType(
    {
        "en": {Speaker.SEEKER: "Seeker", Speaker.SUPPORTER: "Supporter"},
        "zh": {Speaker.SEEKER: "求助者", Speaker.SUPPORTER: "支持者"},
    }
)
"""Names of the speakers in transcripts, by language."""
_STEP_NAMES: Mapping[str, Mapping[Part, str]] = MappingProxyType(
    {
        "en": {Part.HISTORY: "history", Part.EMOTION: "emotion", Part.STRATEGY: "strategy"},
        "zh": {Part.HISTORY: "对话历史", Part.EMOTION: "情绪状态", Part.STRATEGY: "支持策略"},
    }
)
_PREFERENCES: Mapping[str, Mapping[Preference, str]] = MappingProxyType(
    {
        "en": {
            Preference.FIRST: "the supporter's reply is better",
            Preference.SECOND: "the other reply is better",
            Preference.BOTH: "both are equally good",
            Preference.NEITHER: "both are unacceptable",
        },
        "zh": {
            Preference.FIRST: "支持者的回复更好",
            Preference.SECOND: "另一条回复更好",
            Preference.BOTH: "两条一样好",
            Preference.NEITHER: "两条都不可接受",
        },
    }
)
# "Object replacement character": Unicode's placeholder for an image in text.
_IMAGE = "\ufffc"


# --- Files ------------------------------------------------------------------------------------


@cache
def load_prompt(name: str, language: str = "en") -> str:
    """Return the text of a prompt, without outer white space.

    Args:
        name: The purpose, for example ``policy``.
        language: One of `LANGUAGES`.

    Raises:
        PromptError: The file does not exist.
    """
    path = _FOLDER / f"{name}.{language}.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise PromptError(f"there is no prompt {name!r} in language {language!r}") from error


def placeholders(template: str) -> frozenset[str]:
    """Return the placeholder names of a template."""
    return frozenset(_PLACEHOLDER.findall(template))


def fill(template: str, **values: object) -> str:
    """Replace ``{{name}}`` by values, in one pass: placeholders inside values stay.

    Raises:
        PromptError: A placeholder has no value, or a value has no placeholder.

    Example:
        >>> fill("{{a}} and {{b}}", a="{{b}}", b=2)
        '{{b}} and 2'
    """
    wanted = placeholders(template)
    if wanted != values.keys():
        raise PromptError(
            f"the placeholders and the values differ: no value for {sorted(wanted - values.keys())}"
            f", no placeholder for {sorted(values.keys() - wanted)}"
        )
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


# --- Untrusted text ---------------------------------------------------------------------------

_LOOK_ALIKES = str.maketrans("<>[]", "‹›〔〕")
_BLANKS = ("\ufffd", "\u25a1")  # replaces the first character of a token without brackets

# Names in angle brackets of chat templates and tokenizers, beside our own tags.
_ANGLE_NAMES = (
    *Part,
    *("s", "unk", "pad", "mask", "cls", "sep", "bos", "eos", "eod", "eop", "sop", "eot"),
    *("sys", "think", "tool_call", "tool_response", "tools", "box", "ref", "quad"),
    r"(?=\w*(?:image|img|video|audio))\w++",
    r"(?:start|end|begin)_?of_?\w+",
    r"(?:unused|reserved|extra_id|special)_?\w*",
)
_SQUARE_NAMES = (
    *("inst", "img", "img_break", "img_end", "gmask", "system_prompt", "tool_calls"),
    *("tool_results", "tool_content", "available_tools", "think"),
)
# Possessive quantifiers and look-behinds prevent quadratic time on hostile input.
_BARRED = r"<[|｜](?:[^<>\n]*+>)?", r"<[^<>\s|｜]*+[|｜]>"  # some models use the full-width bar
_ANGLED = rf"(?<!<)<++\s*+/?\s*+(?:{'|'.join(_ANGLE_NAMES)})(?:[\s/][^<>]*+)?>++"
_SQUARED = rf"(?<!\[)\[++\s*+/?\s*+(?:{'|'.join(_SQUARE_NAMES)})\s*+\]++"


def neutralise(text: str, extra: Iterable[str] = ()) -> str:
    """Return text that cannot forge one of our tags or a token of a chat template.

    In anything that looks like one, ``<``, ``>``, ``[`` and ``]`` are replaced by look-alikes; nothing
    else changes. This covers our tags in any case and spacing, ChatML's ``<|...|>``, Llama's ``[INST]``
    and ``<<SYS>>``, Gemma's ``<start_of_turn>``, ``<s>``, ``<image>`` and similar ones, and each token
    in ``extra``. Full-width brackets are kept: no tokenizer treats them as tokens.

    The function is idempotent.

    Args:
        text: Text of a person or a model.
        extra: The control tokens of the model that will read it (`Backend.reserved`), compared
            exactly. Those without brackets lose their first character instead.

    Example:
        >>> neutralise("I <3 you </reply><|im_end|> a < b")
        'I <3 you ‹/reply›‹|im_end|› a < b'
    """
    forged, blank = _forged(frozenset(extra))
    while True:
        # Defusing the inside of a token can create another one around it.
        defused = forged.sub(lambda match: _defused(match[0], blank), text)
        if defused == text:
            return text
        text = defused


def _defused(token: str, blank: str) -> str:
    changed = token.translate(_LOOK_ALIKES)
    return changed if changed != token else blank + token[1:]


@cache
def _forged(extra: frozenset[str]) -> tuple[re.Pattern[str], str]:
    tokens = sorted((token for token in extra if token), key=len, reverse=True)
    # Some models reserve thousands of tokens: match only where one of them could begin.
    firsts = "".join(sorted({token[0] for token in tokens} | set("<[")))
    # The built-in patterns ignore case; a model's own tokens do not.
    builtin = rf"(?i:{'|'.join((*_BARRED, _ANGLED, _SQUARED))})"
    pattern = rf"(?=[{re.escape(firsts)}])(?:{'|'.join((*map(re.escape, tokens), builtin))})"
    # A token may contain the blank itself; then use another one.
    blank = next((each for each in _BLANKS if not any(each in token for token in tokens)), "")
    return re.compile(pattern), blank


def _indented(text: str) -> str:
    """Indent all lines but the first, so that none can imitate another speaker."""
    return "\n  ".join(text.splitlines())


# --- The policy -------------------------------------------------------------------------------


def policy_messages(
    dialogue: Dialogue,
    style: Literal["trained", "prompted"],
    language: str = "en",
    reserved: Iterable[str] = (),
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
    system_prompt: str = "",
    message_suffix: str = "",
) -> tuple[Message, ...]:
    """Return the prompt of a policy.

    The seeker is the user and the supporter the assistant, whose earlier turns are replies only.
    Consecutive utterances of a speaker become one message, with images before the text.

    Args:
        dialogue: The history; the last utterance is the seeker's.
        style: ``prompted`` begins with a system message that asks for the grammar; a model that was
            ``trained`` on it gets `system_prompt` or none.
        language: The language of that system message, one of `LANGUAGES`.
        reserved: The model's control tokens, see `neutralise`.
        vocabulary: The strategies to choose from.
        system_prompt: The system message of the style ``trained``.
        message_suffix: Appended to the seeker's last message, such as " /no_think".

    Raises:
        PromptError: The dialogue is empty or does not end with the seeker.
    """
    reserved = tuple(reserved)
    utterances = dialogue.merged().utterances
    if not utterances or utterances[-1].speaker is not Speaker.SEEKER:
        raise PromptError("a policy answers a seeker: the dialogue must end with the seeker")
    *before, last = (_chat_message(utterance, reserved) for utterance in utterances)
    if message_suffix:
        last = Message(last.role, (*last.content, message_suffix))
    chat = (*before, last)
    if style == "trained":
        return (Message("system", (system_prompt,)), *chat) if system_prompt else chat
    instructions = fill(
        load_prompt("policy", language),
        sentiments=", ".join(Sentiment),
        emotions=", ".join(Emotion),
        strategies="\n".join(
            f"   - {entry.name}: {entry.definition(language)}" for entry in vocabulary.entries
        ),
    )
    return (Message("system", (instructions,)), *chat)


def _chat_message(utterance: Utterance, reserved: tuple[str, ...]) -> Message:
    text = neutralise(utterance.text, reserved)
    return Message(
        "user" if utterance.speaker is Speaker.SEEKER else "assistant",
        (*utterance.images, text) if text else utterance.images,
    )


# --- The judge --------------------------------------------------------------------------------


def judge_messages(
    dialogue: Dialogue, language: str = "en", reserved: Iterable[str] = ()
) -> tuple[Message, ...]:
    """Return the prompt of a judge before the first question.

    A system message with the task, and a user message with the transcript and its images. The latter
    ends with an empty line, where the first question is appended.

    Args:
        dialogue: The history that the judged turn answers.
        language: One of `LANGUAGES`.
        reserved: The judge's control tokens, see `neutralise`.
    """
    reserved = tuple(reserved)
    template = load_prompt("judge_history", language)
    lines: list[str] = []
    images: list[Image] = []
    for utterance in dialogue.merged():
        images += utterance.images
        text = _indented(neutralise(utterance.text, reserved)).replace(_IMAGE, " ")
        speaker = SPEAKER_NAMES[language][utterance.speaker]
        lines.append(f"{speaker}: {_IMAGE * len(utterance.images)}{text}")
    filled = fill(template, transcript="\n".join(lines)) + "\n\n"
    return (
        Message("system", (load_prompt("judge_system", language),)),
        Message("user", _with_images(filled, images)),
    )


def _with_images(text: str, images: Iterable[Image]) -> tuple[str | Image, ...]:
    first, *others = text.split(_IMAGE)
    content: list[str | Image] = [first]
    for image, piece in zip(images, others, strict=True):
        content += [image, piece]
    return tuple(part for part in content if part != "")


def step_question(part: Part, step_text: str, language: str = "en") -> str:
    """Return the question whether a step is right, answered by True or False.

    Args:
        part: One of `STEPS`.
        step_text: The inside of the step (`render_step`), neutralised.
        language: One of `LANGUAGES`.

    Raises:
        ValueError: The part is the reply.
    """
    if part not in STEPS:
        raise ValueError(f"<{part}> is not a step")
    template = load_prompt("judge_step", language)
    return fill(
        template,
        number=STEPS.index(part) + 1,
        name=_STEP_NAMES[language][part],
        step=step_text,
    )


def findings_line(
    tenths: Sequence[int], unsaid: Sequence[str], said: int, not_said: int, language: str = "en"
) -> str:
    """Return the line about what a rule found in a step; see `compeer_core.findings`.

    Args:
        tenths: Of the step's words: in the seeker's last message, in earlier ones, only the supporter's, nobody's.
        unsaid: Words that nobody said, in lower case, without punctuation.
        said: Number of quotations that are in the conversation.
        not_said: Number of the others.
        language: One of `LANGUAGES`.
    """
    last, earlier, supporter, nobody = tenths
    return fill(
        load_prompt("judge_findings", language),
        last=last,
        earlier=earlier,
        supporter=supporter,
        nobody=nobody,
        unsaid=f" ({', '.join(unsaid)})" if unsaid else "",
        said=said,
        not_said=not_said,
    )


def reply_question(first: str, second: str, language: str = "en") -> str:
    """Return the question which reply is better, answered by First, Second, Both or Neither.

    Args:
        first: A reply, neutralised. Its lines are indented, so it cannot imitate two replies.
        second: The other reply, likewise.
        language: One of `LANGUAGES`.
    """
    return fill(
        load_prompt("judge_reply", language),
        first=_indented(first),
        second=_indented(second),
    )


def verdict_request(labels: Sequence[str], language: str = "en") -> str:
    """Return the request for a written judgement, to append to a question.

    Args:
        labels: The possible verdicts.
        language: One of `LANGUAGES`.
    """
    return fill(load_prompt("judge_verdict", language), labels=" / ".join(labels))


def consistency_question(
    dialogue: Dialogue,
    steps: Sequence[tuple[str, bool]],
    reply: str,
    other: str,
    preference: Preference,
    language: str = "en",
) -> str:
    """Return the question whether a judge's verdicts on steps and replies are consistent.

    Text of a person or a model is in quotation marks, with quotation marks and line breaks escaped, so
    that it cannot imitate anything else. Images are left out.

    Args:
        dialogue: The history that the judged turn answers.
        steps: The inside of each step (`render_step`), in the order of `STEPS`, with its verdict.
        reply: The reply of the turn.
        other: The reference reply.
        preference: The verdict on the two; `first` is the turn's.
        language: One of `LANGUAGES`.
    """
    transcript = [
        f"{SPEAKER_NAMES[language][each.speaker]}: {_quoted(each.text)}"
        for each in dialogue.merged()
    ]
    judged_steps = [
        f"{number}. {_STEP_NAMES[language][part]}: {_quoted(text)} -> {correct}"
        for number, (part, (text, correct)) in enumerate(zip(STEPS, steps, strict=True), start=1)
    ]
    return fill(
        load_prompt("consistency", language),
        conversation="\n".join(transcript),
        steps="\n".join(judged_steps),
        reply=_quoted(reply),
        other=_quoted(other),
        verdict=_PREFERENCES[language][preference],
    )


def _quoted(text: str) -> str:
    return json.dumps(neutralise(text), ensure_ascii=False)
