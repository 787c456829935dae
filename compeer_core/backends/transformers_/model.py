"""One set of weights, and the way between a conversation and its tokens.

Policies and judges stand on the same `ChatModel`, each with a LoRA adapter of its own or none. It
turns messages into tokens (with what its chat template, processor and tokenizer do), leaves out old
turns that a model cannot read any more, and runs the weights from where a `Track` stands.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import PROBE, ChatTemplate
from compeer_core.backends.transformers_.control_tokens import control_tokens
from compeer_core.backends.transformers_.label_tokens import LabelTokens
from compeer_core.backends.transformers_.owner_thread import OwnerThread
from compeer_core.backends.transformers_.sequence_state import Encoded, Track
from compeer_core.errors import BackendError, ImageError, InputError
from compeer_core.images import Image
from compeer_core.reasoning import TAGS

logger = logging.getLogger(__name__)


class ChatModel:
    """One set of weights, the chat template that belongs to it, and its owner thread.

    Attributes:
        name: The folder's or the hub's name.
        owner: The thread on which all methods run, here and in the template.
        reserved: The tokenizer's `control_tokens`.
        limit: Tokens that the model can read and write in one conversation; None if unlimited.
        hidden: Tokens that are not text: the special ones, unless they are tags of our grammar.
        end_tokens: Those that end an assistant's turn.
        placeholder: The token that stands where a picture is.
        label_tokens: Finds the tokens of labels.
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
        self.template = ChatTemplate(name, processor)
        self.label_tokens = LabelTokens(name, self.template, self.tokenizer)
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
        self.end_tokens = self._end_tokens()
        # The checkpoint's own sampling habits (top_k = 1, penalties) would be merged into ours.
        model.generation_config = GenerationConfig()

    def _end_tokens(self) -> frozenset[int]:
        """The tokens that end a turn.

        Those are what the checkpoint says, what its template writes behind an answer, and what can
        never stand inside one: the beginning of the next message, of a text, or padding.
        """
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        ends = {*declared, self.tokenizer.eos_token_id} - {None}
        question = Message("user", ("Hi",))
        answered = self.template.tried([question, Message("assistant", (PROBE,))], reply=False)
        behind = answered.rpartition(PROBE)[2] if PROBE in answered else ""
        opening = self.template.tried([question]).removeprefix(
            self.template.tried([question], reply=False)
        )
        outside = {self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        for text in (behind, opening):
            outside.update(self._tokens(text.lstrip())[:1])
        return frozenset(int(token) for token in ends | (outside & self._special))

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

    def encode(
        self, messages: Sequence[Message], *, reply: bool = True, like: Encoded | None = None
    ) -> Encoded:
        """Turn a conversation into what the model takes.

        Args:
            messages: The conversation.
            reply: Whether it ends where an assistant's turn begins.
            like: An earlier state of the same conversation: its pictures are not prepared again.

        Raises:
            BackendError: See `ChatTemplate.render`.
            ImageError: A picture has a shape that the model cannot take.
        """
        text = self.template.render(messages, reply=reply)
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
                self.template.render(messages, reply=True)
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
        max_new_tokens: int,
        processors: Sequence[LogitsProcessor] = (),
        criteria: Sequence[StoppingCriteria] = (),
        *,
        logits: bool = False,
    ) -> Any:
        """Generate from where a track stands, and leave its new state in it.

        The tokens in `track.ids` are the track's own business: a criterion of the caller's adds
        what is generated, or nobody does.

        Args:
            track: The conversation; its adapter is put in force.
            max_new_tokens: Tokens to generate at most.
            processors: What changes or chooses among the logits; without any, the likeliest wins.
            criteria: What may end it earlier.
            logits: Whether the output holds the logits of each new token.
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
        # Ends of turns are found by a criterion, and sampling is a processor: see `writing`.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=logits,
        )
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

    @property
    def has_offsets(self) -> bool:
        """Whether positions have three axes (time, height, width), as Qwen's models count them."""
        return bool(self._offset_modules)

    def warm_up(self) -> None:
        """Write two tokens, so that the first visitor does not pay for what is set up on first use.

        A model that cannot be used in the way of this module fails here, with whatever error.
        """
        track = Track(self.encode([Message("user", ("Hello",))]), None)
        for _ in range(2):  # once from the beginning, once from a cache
            track.ids.append(int(self.run(track, 1).sequences[0, -1]))
