"""Models that run in this process, through `transformers`.

`ChatModel` is one set of weights with its processor and the one thread that runs it. On top of it,
`TransformersBackend` writes turns and `TransformersScorer` reads label probabilities, each with a
LoRA adapter of its own or none. `model_pool` makes them.

How visitors share a model. Everything that touches torch is a job on the owner thread, in the order
of arrival. A turn is written in slices: when somebody else waits, a slice ends after a tenth of a
second and the turn queues up again. What a conversation has read so far lives in a `Track` (tokens,
key-value cache, and the position offset that Qwen's models keep on the module), which is put in
place before each job and taken back after it. So no turn can tell whether it was alone.

Generation is `model.generate`, with two pieces of ours plugged in: a stopping criterion that sees
every token at once (it decodes, streams, and finds the end of a part) and, for sampling, a logits
processor that draws from a random generator of the turn's own, so that a seed gives the same turn
whoever else is served. `generate` costs about 1 ms to enter and 0.8 ms a token beside the forward
pass of COMPEER-nano (7 ms on one busy core); that did not justify a decoding loop of our own.
"""

import contextlib
import logging
import queue
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import (
    BackendError,
    CheckpointError,
    CompeerError,
    ConfigError,
    ImageError,
    InputError,
)
from compeer_core.images import Image
from compeer_core.reasoning import Part

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.1
"""How long a turn may keep the owner thread while somebody else waits for it."""

PROBE = "words to try the template with"

TEMPLATE_ERRORS = (TemplateError, KeyError, TypeError, ValueError)
"""What a chat template fails with on messages that it was not written for."""

TAGS = frozenset(tag for part in Part for tag in (part.opening, part.closing))

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes to where bytes are not (or not yet) a character."""

Result = TypeVar("Result")


class OwnerThread:
    """The one thread that runs a set of weights: jobs in the order in which they came."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def somebody_waits(self) -> bool:
        """Whether a job has come that has not been begun."""
        return self._waiting > 0

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job.

        Raises:
            BackendError: The model was closed.
        """
        with self._lock:
            self._waiting += 1
        try:
            return self._executor.submit(self._run, job)
        except RuntimeError as error:
            with self._lock:
                self._waiting -= 1
            raise BackendError("the model was closed") from error

    def call(self, job: Callable[[], Result]) -> Result:
        """Queue a job and wait for its result."""
        return self.submit(job).result()

    def close(self) -> None:
        """End the turns that are being written, and the thread with them. May be called twice."""
        self.closed = True
        self._executor.shutdown(wait=False)

    def _run(self, job: Callable[[], Result]) -> Result:
        with self._lock:
            self._waiting -= 1
        return job()


@dataclass(frozen=True)
class Encoded:
    """A conversation as the model takes it.

    Attributes:
        ids: Its tokens, those of the pictures included.
        inputs: What the model needs beside the tokens when it reads the pictures.
        fixed_text: The start of the rendered text, up to the last picture.
        fixed: How many tokens that start makes; None where it cannot be told, because the
            tokenizer does not treat the text behind it on its own.
    """

    ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]
    fixed_text: str
    fixed: int | None


@dataclass
class Track:
    """What a model has read of one conversation."""

    encoded: Encoded
    adapter: str | None
    ids: list[int] = field(init=False)
    cache: Any = None
    offsets: list[Any] = field(default_factory=list)
    """Qwen's `rope_deltas`, one for each module that has them."""

    def __post_init__(self) -> None:
        self.ids = list(self.encoded.ids)

    @property
    def read(self) -> int:
        """Tokens that are in the cache."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    def become(self, encoded: Encoded) -> None:
        """Continue with other tokens, and keep of the cache what they share with the old ones."""
        shared = 0
        for old, new in zip(self.ids, encoded.ids, strict=False):
            if old != new:
                break
            shared += 1
        self.encoded = encoded
        self.truncate(shared)
        self.ids = list(encoded.ids)

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        del self.ids[length:]
        self.forget(self.read - length)

    def forget(self, excess: int) -> None:
        """Take the last `excess` tokens out of the cache, or empty it where it cannot do that."""
        if excess <= 0:
            return
        kept = self.read - excess
        fixed = self.encoded.fixed
        if fixed is not None and kept >= fixed and kept > 0:
            try:
                self.cache.crop(-excess)
            except (NotImplementedError, RuntimeError, ValueError):
                # A sliding window or a recurrent state has overwritten what would be needed.
                self.reset()
            else:
                if self.read == kept:
                    return
        self.reset()

    def reset(self) -> None:
        """Empty the cache; the next run reads everything again, pictures included."""
        self.cache = None
        self.offsets = []


class ChatModel:
    """One set of weights, the chat template that belongs to it, and its owner thread.

    Attributes:
        name: The folder's or the hub's name.
        owner: The thread on which all methods below run, `render` and `encode` included.
        reserved: The tokenizer's `control_tokens`.
        limit: Tokens that the model can read and write in one conversation; None if unlimited.
        hidden: Tokens that are not text: the special ones, unless they are tags of our grammar.
        end_tokens: Those that end an assistant's turn.
        placeholder: The token that stands where a picture is.
        adapted: The peft model around the weights, once there are adapters.
    """

    def __init__(self, name: str, model: Any, processor: Any, owner: OwnerThread) -> None:
        """Take a loaded model. Call this on the owner thread.

        Raises:
            CheckpointError: There is no chat template, or it cannot be used.
        """
        self.name = name
        self.owner = owner
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.has_images = getattr(processor, "image_processor", None) is not None
        self.adapted: Any = None
        self._active: str | None = None
        self._offset_modules = [m for m in model.modules() if "rope_deltas" in vars(m)]
        config = model.config.get_text_config()
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        added = self.tokenizer.added_tokens_decoder
        self.reserved = control_tokens(self.tokenizer)
        special = {token for token, added_token in added.items() if added_token.special}
        self._special = frozenset({*special, *self.tokenizer.all_special_ids})
        self.hidden = frozenset(
            token for token in self._special if self.tokenizer.decode([token]).strip() not in TAGS
        )
        self.placeholder: int | None = getattr(processor, "image_token_id", None)
        self._learn_template()
        self.end_tokens = self._end_tokens()
        # The checkpoint's own sampling habits (top_k = 1, penalties) would be merged into ours.
        model.generation_config = GenerationConfig()

    # --- the chat template ---------------------------------------------------------------------

    def _learn_template(self) -> None:
        """Find out how the template wants its messages, by trying."""
        if not getattr(self.processor, "chat_template", None):
            raise CheckpointError(
                f"{self.name}: there is no chat template (chat_template.jinja); COMPEER talks in "
                "messages and needs an instruction-tuned checkpoint, or a template put beside it"
            )
        question = Message("user", (PROBE,))
        # Newer templates take blocks of text and pictures; text-only ones would print the list.
        self._content_is_text = False
        text = self._tried([question])
        if PROBE not in text or "'type'" in text:
            self._content_is_text = True
            text = self._tried([question])
        if PROBE not in text:
            raise CheckpointError(
                f"{self.name}: the chat template cannot render one user message; "
                "check chat_template.jinja"
            )
        self._takes_system = PROBE in self._tried(
            [Message("system", (PROBE,)), Message("user", ("Hi",))]
        )

    def _tried(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """What the template makes of the messages, or nothing if it does not take them."""
        try:
            return self._apply(messages, reply=reply)
        except TEMPLATE_ERRORS:
            return ""

    def _end_tokens(self) -> frozenset[int]:
        """The tokens that end a turn.

        Those are what the checkpoint says, what its template writes behind an answer, and what can
        never stand inside one: the beginning of the next message, of a text, or padding.
        """
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        ends = {*declared, self.tokenizer.eos_token_id} - {None}
        question = Message("user", ("Hi",))
        answered = self._tried([question, Message("assistant", (PROBE,))], reply=False)
        behind = answered.rpartition(PROBE)[2] if PROBE in answered else ""
        opening = self._tried([question]).removeprefix(self._tried([question], reply=False))
        outside = {self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        for text in (behind, opening):
            outside.update(self._tokens(text.lstrip())[:1])
        return frozenset(int(token) for token in ends | (outside & self._special))

    def _apply(self, messages: Sequence[Message], *, reply: bool = False) -> str:
        conversation = [
            {
                "role": message.role,
                "content": message.text
                if self._content_is_text
                else [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                    for part in _joined(message.content)
                ],
            }
            for message in messages
        ]
        rendered: str = self.processor.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=reply
        )
        return rendered

    def render(self, messages: Sequence[Message], *, reply: bool) -> str:
        """Return the conversation as text, each picture one placeholder.

        Args:
            messages: The conversation.
            reply: Whether the text ends where an assistant's turn begins.

        Raises:
            BackendError: The template does not take such a conversation, or no pictures.
        """
        if not self._takes_system:
            messages = _without_system(messages)
        if any(isinstance(part, Image) for message in messages for part in message.content) and (
            not self.has_images or self._content_is_text
        ):
            raise BackendError(f"{self.name} cannot see pictures; send the message without one")
        try:
            return self._apply(messages, reply=reply)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            raise BackendError(
                f"{self.name}: the chat template does not take these messages ({roles}): {error}"
            ) from error

    # --- tokens --------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def continuation(self, text: str) -> list[int]:
        """Return the tokens of text that stands behind other text.

        Some tokenizers put a space in front of whatever they are given; behind a line break, whose
        tokens are then taken away, they do not.
        """
        before = self._tokens("\n")
        tokens = self._tokens("\n" + text)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self._tokens(text)

    def first_token(self, word: str) -> int | None:
        """Return the token that a word is as an assistant's whole turn, or None if it is several."""
        question = Message("user", ("Hi",))
        begun = self.encode([question]).ids
        whole = self.encode([question, Message("assistant", (word,))], reply=False).ids
        if whole[: len(begun)] == begun:
            token = whole[len(begun)] if len(whole) > len(begun) else None
            is_word = token is not None and self.tokenizer.decode([token]).strip() == word
            return token if is_word else None
        # The template writes something else before answers of the past than before the next one.
        tokens = self._tokens(word)
        return tokens[0] if len(tokens) == 1 else None

    def encode(
        self, messages: Sequence[Message], *, reply: bool = True, like: Encoded | None = None
    ) -> Encoded:
        """Turn a conversation into what the model takes.

        Args:
            messages: The conversation.
            reply: Whether it ends where an assistant's turn begins.
            like: An earlier state of the same conversation: its pictures are not prepared again.

        Raises:
            BackendError: See `render`.
            ImageError: A picture has a shape that the model cannot take.
        """
        text = self.render(messages, reply=reply)
        # The text that stands for one picture; a processor puts as many tokens as it needs there.
        placeholder = getattr(self.processor, "image_token", None) or ""
        if like is not None and like.fixed is not None and text.startswith(like.fixed_text):
            rest = text[len(like.fixed_text) :]
            if not placeholder or placeholder not in rest:
                return replace(like, ids=(*like.ids[: like.fixed], *self._tokens(rest)))
        pictures = [
            part.to_pil()
            for message in messages
            for part in message.content
            if isinstance(part, Image)
        ]
        start = self.tokenizer.bos_token
        arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if start is not None and text.startswith(start):
            arguments["add_special_tokens"] = False
        if pictures:
            arguments["images"] = [pictures]
        try:
            inputs = dict(self.processor(**arguments))
        except ValueError as error:
            if not pictures:
                raise BackendError(f"{self.name} cannot read the messages: {error}") from error
            raise ImageError(
                f"{self.name} cannot take this picture: {error}", "image_unreadable"
            ) from error
        ids = tuple(inputs.pop("input_ids")[0].tolist())
        inputs.pop("attention_mask", None)
        # Behind the last placeholder, a token of its own, text is tokenised by itself.
        at = text.rfind(placeholder) if pictures and placeholder else -1
        begin = at + len(placeholder) if at >= 0 else 0
        tail = self._tokens(text[begin:])
        certain = ids[len(ids) - len(tail) :] == tuple(tail) and (at >= 0 or not pictures)
        return Encoded(
            ids=ids,
            inputs={key: value for key, value in inputs.items() if torch.is_tensor(value)},
            fixed_text=text[:begin],
            fixed=len(ids) - len(tail) if certain else None,
        )

    def encode_fitting(self, messages: Sequence[Message], budget: int) -> tuple[Encoded, int]:
        """Encode a conversation, without its oldest turns if it is too long for the model.

        A system message and the last message always stay. What is left begins with a user message,
        since templates and models expect that.

        Args:
            messages: The conversation.
            budget: Tokens to leave room for; at most half of the model's limit is.

        Returns:
            What was encoded, and the number of messages left out.

        Raises:
            InputError: The last message alone is too long (code "message_too_long", with ``limit``
                and ``length`` in characters; the limit is an estimate).
            BackendError: See `encode`; or the system message alone is too long.
        """
        system = [message for message in messages if message.role == "system"]
        turns = [message for message in messages if message.role != "system"]
        starts = [at for at, turn in enumerate(turns) if turn.role == "user"] or [0]
        if starts[0] > 0:
            with contextlib.suppress(BackendError):
                self.render(messages, reply=True)
                starts.insert(0, 0)  # the template lets an assistant speak first
        encoded = self.encode([*system, *turns[starts[0] :]])
        if self.limit is None:
            return encoded, starts[0]
        room = self.limit - min(budget, self.limit // 2)
        if len(encoded.ids) <= room:
            return encoded, starts[0]
        # The more turns are left out, the fewer tokens: look for the longest that fits by halving.
        low, high = 1, len(starts) - 1
        best: tuple[Encoded, int] | None = None
        while low <= high:
            middle = (low + high) // 2
            encoded = self.encode([*system, *turns[starts[middle] :]])
            if len(encoded.ids) <= room:
                best = encoded, starts[middle]
                high = middle - 1
            else:
                low = middle + 1
        if best is None:
            error = self.too_long(turns[-1].text if turns else "", len(encoded.ids), room)
            if error.values["limit"] > 0:
                raise error
            raise BackendError(
                f"{self.name} reads at most {room} tokens here, and what it is told beside the "
                "message has more; use a model with a longer context"
            )
        logger.info(
            "%s: %d old messages left out, the conversation is too long", self.name, best[1]
        )
        return best

    def too_long(self, text: str, length: int, room: int) -> InputError:
        """The error for a conversation that is too long.

        People count in characters, so the limit it names is as large a share of the last text as
        of its tokens.

        Args:
            text: The text that was given last.
            length: Tokens of the whole conversation.
            room: Tokens that it may have.
        """
        tokens = max(1, len(self._tokens(text)))
        fitting = max(0, len(text) * (room - (length - tokens)) // tokens)
        return InputError(
            f"{self.name} reads at most {room} tokens here, this makes {length}",
            "message_too_long",
            {"limit": fitting, "length": len(text)},
        )

    # --- the weights ---------------------------------------------------------------------------

    def adopt(self, adapted: Any) -> None:
        """Take the peft model around these weights, after an adapter was added to it."""
        self.adapted = adapted
        self._active = ""  # the name of no adapter: the next run puts its own in force

    def activate(self, adapter: str | None) -> None:
        """Make an adapter the one in force, or none of them."""
        if adapter == self._active or self.adapted is None:
            return
        if adapter is None:
            self.adapted.base_model.disable_adapter_layers()
        else:
            self.adapted.base_model.enable_adapter_layers()
            self.adapted.set_adapter(adapter)
        self._active = adapter

    def run(
        self,
        track: Track,
        config: GenerationConfig,
        processors: Sequence[LogitsProcessor] = (),
        criteria: Sequence[StoppingCriteria] = (),
    ) -> Any:
        """Generate from where a track stands, and leave its new state in it.

        The tokens in `track.ids` are the track's own business: a criterion of the caller's adds
        what is generated, or nobody does.
        """
        self.activate(track.adapter)
        # At least one token has to be left to read: its logits are where the model continues.
        track.forget(track.read - (len(track.ids) - 1))
        device = self.model.device
        ids = torch.tensor([track.ids], device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if track.cache is None:
            inputs |= {
                key: self._placed(key, value, ids) for key, value in track.encoded.inputs.items()
            }
        else:
            inputs["past_key_values"] = track.cache
        offsets = track.offsets or [None] * len(self._offset_modules)
        for module, offset in zip(self._offset_modules, offsets, strict=True):
            module.rope_deltas = offset
        with torch.inference_mode():
            outputs = self.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList(processors),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        track.cache = outputs.past_key_values
        track.offsets = [module.rope_deltas for module in self._offset_modules]
        return outputs

    def _placed(self, key: str, value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """An input on the model's device, in its precision, as long as the tokens are now."""
        if key.endswith("token_type_ids"):
            longer = value.new_zeros((1, ids.shape[1]))  # 0 is text, and all that was added is text
            shared = min(value.shape[1], ids.shape[1])
            longer[:, :shared] = value[:, :shared]
            value = longer
        if value.is_floating_point():
            value = value.to(self.model.dtype)
        return value.to(self.model.device)

    def warm_up(self) -> None:
        """Write two tokens, so that the first visitor does not pay for what is set up on first use.

        A model that cannot be used in the way of this module fails here, with whatever error.
        """
        track = Track(self.encode([Message("user", ("Hello",))]), None)
        for _ in range(2):  # once from the beginning, once from a cache
            track.ids.append(int(self.run(track, _config(1)).sequences[0, -1]))


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that steer a model, which no text of somebody else's may contain.

    They are those that the tokenizer marks special, and all that were added to it but plain words.
    Words are added so that each is one token, as COMPEER-nano's verdicts are; "First" and "True"
    steer nothing, and a seeker must be able to say them.
    """
    added = tokenizer.added_tokens_decoder.values()
    steering = {str(token) for token in added if token.special or not _is_plain(str(token))}
    named = steering.union(tokenizer.all_special_tokens)
    return tuple(sorted(token for token in named if token.strip()))


def _is_plain(token: str) -> bool:
    """Whether a token is words alone, in any script: some write vowels as combining marks."""
    return all(
        character.isspace() or character in "'’-" or unicodedata.category(character)[0] in "LMN"
        for character in token
    )


def _config(max_new_tokens: int, *, logits: bool = False) -> GenerationConfig:
    # Ends of turns are found by the criterion, and sampling is a processor: see the module's text.
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=logits,
    )


def _joined(content: Sequence[str | Image]) -> list[str | Image]:
    """Runs of texts become one text, so that templates put nothing between them."""
    joined: list[str | Image] = []
    for part in content:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with the system's text in front of the first user message."""
    words = "\n\n".join(message.text for message in messages if message.role == "system")
    others = [message for message in messages if message.role != "system"]
    if not words:
        return others
    for at, message in enumerate(others):
        if message.role == "user":
            others[at] = replace(message, content=(f"{words}\n\n", *message.content))
            return others
    return [Message("user", (words,)), *others]


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


# --- writing -----------------------------------------------------------------------------------


class TextDecoder:
    """Tokens in, text out, as early as possible but never half a character.

    Text that ends in replacement characters may be the beginning of a character whose other bytes
    come with the next tokens; it is held back until they do.
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.restart([])

    def restart(self, context: Sequence[int]) -> None:
        """Begin anew behind some tokens, whose text is not repeated."""
        self._context = list(context)
        self._known = self._decode(self._context)
        self._group: list[int] = []
        self._emitted = ""
        self._pending = False

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if self._emitted and not self._pending:
            self._context, self._known = self._group, self._decode(self._group)
            self._group, self._emitted = [], ""
        self._group.append(token)
        text = self._decode(self._context + self._group)[len(self._known) :]
        certain = text.rstrip(REPLACEMENT)
        self._pending = len(certain) < len(text)
        new = certain[len(self._emitted) :]
        if new:
            self._emitted = certain
        return new

    @property
    def group(self) -> tuple[int, str]:
        """How many tokens the last piece of text came from, and that text."""
        return len(self._group), self._emitted

    def _decode(self, ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class Choice(LogitsProcessor):
    """Chooses the next token and leaves no other: temperature, top-p, penalty, and a seed.

    The steps are the library's own, in the order in which `generate` has them. They are one
    processor here because the draw comes from a generator that belongs to the turn, and because
    `generate` looks at the signature of every processor again for every token.
    """

    def __init__(self, sampling: Sampling, placeholder: int | None, device: torch.device) -> None:
        self._placeholder = placeholder
        self._chain: list[LogitsProcessor] = []
        self._generator: torch.Generator | None = None
        if sampling.repetition_penalty != 1:
            self._chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature == 0:
            return
        if sampling.temperature != 1:
            self._chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_p < 1:
            self._chain.append(TopPLogitsWarper(float(sampling.top_p)))
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)  # torch takes no larger ones

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._placeholder is not None:
            # A picture that the model invents could not be shown to it when it reads on.
            scores[:, self._placeholder] = -torch.inf
        for step in self._chain:
            scores = step(input_ids, scores)
        if self._generator is None:
            return scores
        drawn = torch.multinomial(torch.softmax(scores, -1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


@dataclass
class _Part:
    """One call of `generate`: what it waits for, and the way back to the caller."""

    until: str | None
    texts: "queue.SimpleQueue[str | Exception | None]" = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    seen: str = ""
    finished: bool = False


class _EveryToken(StoppingCriteria):
    """Hands each new token to the completion and stops when that says so."""

    def __init__(self, take: Callable[[int], bool]) -> None:
        self._take = take
        self._done = False

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        # Some devices are asked for one token more than the criterion wanted: it is not taken.
        self._done = self._done or self._take(int(input_ids[0, -1]))
        return torch.full((1,), self._done, dtype=torch.bool, device=input_ids.device)


class TransformersCompletion:
    """One turn while it is written. See `compeer_core.backends.protocol.Completion`.

    Attributes:
        dropped_turns: Messages at the beginning of the conversation that the model does not see,
            because the conversation is longer than it can read.
    """

    def __init__(
        self,
        chat: ChatModel,
        track: Track,
        sampling: Sampling,
        stop: threading.Event,
        dropped_turns: int,
    ) -> None:
        self._chat = chat
        self._track = track
        self._stop = stop
        self._budget = sampling.max_new_tokens
        self._choice = Choice(sampling, chat.placeholder, chat.model.device)
        self._decoder = TextDecoder(chat.tokenizer, chat.hidden)
        self._carried = ""
        self._tokens = 0
        self._ended = False
        self._closed = False
        self.dropped_turns = dropped_turns

    @property
    def ended(self) -> bool:
        return self._ended and not self._carried

    @property
    def tokens(self) -> int:
        return self._tokens

    def generate(self, until: str | None = None) -> Iterator[str]:
        part = _Part(until or None)
        if self._closed:
            raise BackendError(f"{self._chat.name}: the turn was closed")
        carried, self._carried = self._carried, ""
        if carried:
            self._show(part, carried)
        if part.finished or self._ended:
            part.texts.put(None)
        else:
            self._chat.owner.submit(lambda: self._slice(part))
        try:
            while (text := part.texts.get()) is not None:
                if isinstance(text, Exception):
                    raise text
                yield text
        finally:
            part.cancelled = True  # whoever stops listening stops the model

    def write(self, text: str) -> None:
        if self._closed:
            raise BackendError(f"{self._chat.name}: the turn was closed")
        self._chat.owner.call(lambda: self._write(text))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ended = True
        self._carried = ""

        # The slice that may be running ends at its next token; the cache goes after it.
        try:
            self._chat.owner.submit(self._track.reset)
        except BackendError:
            self._track.reset()

    # --- on the owner thread -------------------------------------------------------------------

    def _slice(self, part: _Part) -> None:
        """Write until the part ends, or somebody else has waited long enough."""
        if self._halted(part):
            part.texts.put(None)
            return
        begun = time.monotonic()

        def take(token: int) -> bool:
            over = self._take(part, token)
            late = time.monotonic() - begun > SLICE_SECONDS
            return over or (late and self._chat.owner.somebody_waits)

        try:
            config = _config(self._budget - self._tokens)
            self._chat.run(self._track, config, [self._choice], [_EveryToken(take)])
            if not part.finished and not self._halted(part):
                self._chat.owner.submit(lambda: self._slice(part))
                return
        except CompeerError as error:
            self._ended = True
            part.texts.put(error)
        except Exception as error:
            # Whatever a model runs into, this turn is over, and the thread must live on.
            logger.exception("%s failed while it wrote", self._chat.name)
            self._ended = True
            self._track.reset()
            failure = BackendError(f"{self._chat.name} failed while it wrote: {_brief(error)}")
            failure.__cause__ = error
            part.texts.put(failure)
        part.texts.put(None)

    def _halted(self, part: _Part) -> bool:
        given_up = part.cancelled or self._closed or self._chat.owner.closed
        return given_up or self._ended or self._stop.is_set()

    def _take(self, part: _Part, token: int) -> bool:
        """Add a token to the turn; say whether the part (or more) is over."""
        self._track.ids.append(token)
        self._tokens += 1
        if token in self._chat.end_tokens:
            self._ended = True
            return True
        self._show(part, self._decoder.push(token))
        if self._tokens >= self._budget or self._full:
            self._ended = True
        return part.finished or self._halted(part)

    @property
    def _full(self) -> bool:
        limit = self._chat.limit
        return limit is not None and len(self._track.ids) >= limit

    def _show(self, part: _Part, text: str) -> None:
        """Pass text on, and keep what follows the end of the part for the next one."""
        if not text:
            return
        if part.until is not None:
            window = part.seen + text
            at = window.find(part.until)
            if at >= 0:
                end = at + len(part.until) - len(part.seen)
                text, self._carried = text[:end], text[end:]
                part.finished = True
            part.seen = window[max(0, len(window) - len(part.until) + 1) :]
        part.texts.put(text)

    def _write(self, text: str) -> None:
        if self._carried:
            # The last token said more than the caller has seen. Take it back, and write the part
            # of it that was seen together with the new text.
            count, shown = self._decoder.group
            text = shown[: len(shown) - len(self._carried)] + text
            self._track.truncate(len(self._track.ids) - count)
            self._carried = ""
        self._track.ids += self._chat.continuation(text)
        self._decoder.restart(self._track.ids[-1:])
        if self._full:
            self._ended = True


class TransformersBackend:
    """A policy in this process. See `compeer_core.backends.protocol.Backend`."""

    can_write = True

    def __init__(
        self, name: str, chat: ChatModel, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = chat.reserved
        self._chat = chat
        self._adapter = adapter
        self._release = release

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> TransformersCompletion:
        def begin() -> TransformersCompletion:
            encoded, dropped = self._chat.encode_fitting(messages, sampling.max_new_tokens)
            track = Track(encoded, self._adapter)
            return TransformersCompletion(self._chat, track, sampling, stop, dropped)

        return self._chat.owner.call(begin)

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._release()


# --- scoring -----------------------------------------------------------------------------------


class TransformersScoringSession:
    """One conversation with a judge. See `compeer_core.backends.protocol.ScoringSession`.

    A question that was not answered is withdrawn by the next one, so that two wordings of a
    question (or two orders of the candidates) can be tried on the same history.

    Each question costs one forward pass over the tokens that are new: the whole conversation is
    rendered by the chat template and turned into tokens again, and the cache is kept as far as they
    are the same. So the model always sees exactly what the template writes, also where a template
    changes earlier turns.
    """

    def __init__(
        self, scorer: "TransformersScorer", messages: Sequence[Message], track: Track
    ) -> None:
        self._scorer = scorer
        self._chat = scorer.chat
        self._messages = list(messages)
        self._track = track
        self._asked: list[Message] | None = None
        self._failure: BackendError | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        return self._chat.owner.call(lambda: self._ask(text, labels))

    def answer(self, label: str) -> None:
        if self._asked is None:
            raise BackendError(f"{self._scorer.name}: nothing was asked")
        self._messages = [*self._asked, Message("assistant", (label,))]
        self._asked = None

    def close(self) -> None:
        try:
            self._chat.owner.submit(self._track.reset)
        except BackendError:
            self._track.reset()

    def read_prefix(self) -> None:
        """Let the model read what is known before the first question. Runs on the owner thread."""
        try:
            self._chat.run(self._track, _config(1))
        except Exception as error:
            logger.warning("%s failed while it read", self._scorer.name, exc_info=error)
            self._track.reset()  # the first question will meet the same failure, and report it

    def _ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        tokens = self._scorer.label_tokens(labels)
        last = self._messages[-1] if self._messages else None
        if last is not None and last.role == "user":
            asked = [*self._messages[:-1], replace(last, content=(*last.content, text))]
        else:
            asked = [*self._messages, Message("user", (text,))]
        try:
            encoded = self._chat.encode(asked, like=self._track.encoded)
            self._scorer.check_length(encoded, text)
            self._track.become(encoded)
            outputs = self._chat.run(self._track, _config(1, logits=True))
        except CompeerError:
            raise
        except Exception as error:
            self._track.reset()
            raise BackendError(f"{self._scorer.name} failed: {_brief(error)}") from error
        self._asked = asked
        logits = outputs.logits[0][0, list(tokens)].float()
        return tuple(torch.softmax(logits, dim=-1).tolist())


class TransformersScorer:
    """A judge in this process. See `compeer_core.backends.protocol.LabelScorer`."""

    def __init__(
        self, name: str, chat: ChatModel, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = chat.reserved
        self.chat = chat
        self._adapter = adapter
        self._release = release
        self._labels: dict[str, int] = {}

    def check_labels(self, labels: Sequence[str]) -> None:
        self.chat.owner.call(lambda: self.label_tokens(labels))

    def label_tokens(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return the token with which an assistant's turn begins that is this label.

        Runs on the owner thread. Raises as `check_labels` does.
        """
        unknown = [label for label in labels if label not in self._labels]
        offenders = []
        for label in unknown:
            token = self.chat.first_token(label)
            if token is None:
                offenders.append(repr(label))
            else:
                self._labels[label] = token
        if offenders:
            raise ConfigError(
                f"{self.name}: {', '.join(offenders)} must be one token each for this tokenizer, "
                "since a verdict is read from one position; choose other words or another model"
            )
        tokens = tuple(self._labels[label] for label in labels)
        if len(set(tokens)) < len(set(labels)):
            raise ConfigError(f"{self.name}: two of {', '.join(labels)} are the same token")
        return tokens

    def check_length(self, encoded: Encoded, text: str) -> None:
        """Make sure that the model can read a conversation whose last text is this one.

        Raises:
            InputError: It cannot (code "message_too_long").
        """
        limit = self.chat.limit
        if limit is not None and len(encoded.ids) >= limit:
            raise self.chat.too_long(text, len(encoded.ids), limit - 1)

    def open(self, messages: Sequence[Message]) -> TransformersScoringSession:
        def begin() -> TransformersScoringSession:
            # Read ahead: the first question is appended to these tokens, and few of them change.
            encoded = self.chat.encode(messages, reply=False)
            self.check_length(encoded, messages[-1].text if messages else "")
            return TransformersScoringSession(self, messages, Track(encoded, self._adapter))

        session = self.chat.owner.call(begin)
        self.chat.owner.submit(session.read_prefix)
        return session

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._release()
