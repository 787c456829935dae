"""One set of weights, with its chat template, processor and tokenizer.

Policies and judges share a `ChatModel`, each with its own LoRA adapter or none. It encodes messages
as tokens, leaves out the oldest turns if they exceed the context, and runs the weights on a
`SequenceState`.
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

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.chat_template import PROBE, ChatTemplate
from compeer_core.backends.transformers_.exact_quotations import ExactQuotations, TokenTexts
from compeer_core.backends.transformers_.fresh_sentences import FreshSentences
from compeer_core.backends.transformers_.owner_thread import OwnerThread
from compeer_core.backends.transformers_.sequence_state import Encoded, SequenceState, StateCache
from compeer_core.backends.transformers_.tokens import LabelTokens, control_tokens
from compeer_core.backends.transformers_.turn_constraints import Constraint, TurnConstraints
from compeer_core.errors import BackendError, ImageError, InputError
from compeer_core.images import Image
from compeer_core.reasoning import TAGS

logger = logging.getLogger(__name__)


class ChatModel:
    """One set of weights, its chat template, and its owner thread.

    Attributes:
        name: Folder name or Hub ID.
        owner: The thread that runs all methods, here and in the template.
        reserved: The tokenizer's `control_tokens`.
        limit: Context length in tokens; None if unlimited.
        hidden: Tokens that are not text: the special ones, except tags of our grammar.
        end_tokens: Those that end an assistant's turn.
        placeholder: The token that represents an image.
        label_tokens: Returns the tokens of labels.
        adapted: The peft model around the weights, once adapters are loaded.
        stored: The prompts of earlier turns, of all adapters.
        threads: Torch's threads for a pass over several tokens or rows; a single token is read by
            one. None leaves torch's setting alone.
    """

    def __init__(self, name: str, model: Any, processor: Any, owner: OwnerThread) -> None:
        """Wrap a loaded model. Call this on the owner thread.

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
        self.stored = StateCache()
        self.threads: int | None = None
        self._active: str | None = None
        self._lora: list[Any] = []
        self._token_texts: TokenTexts | None = None
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
        # The checkpoint's own sampling settings (top_k = 1, penalties) would be merged into ours.
        model.generation_config = GenerationConfig()

    def _end_tokens(self) -> frozenset[int]:
        """Return the tokens that end a turn.

        These are the checkpoint's own, what its template writes after an answer, and what can never
        be inside one: the beginning of the next message or of a text, and padding.
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
        """Return the tokens of text that follows other text.

        Some tokenizers put a space in front of their input, but not after a line break, whose tokens
        are then removed.
        """
        before = self._tokens("\n")
        tokens = self._tokens("\n" + text)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self._tokens(text)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        reply: bool = True,
        like: Encoded | None = None,
        thinking: bool | None = None,
    ) -> Encoded:
        """Encode a conversation as input of the model.

        Args:
            messages: The conversation.
            reply: Whether it ends where an assistant's turn begins.
            like: An earlier encoding of the same conversation, whose images are reused.
            thinking: See `Sampling`.

        Raises:
            BackendError: See `ChatTemplate.render`.
            ImageError: An image has a shape that the model does not accept.
        """
        text = self.template.render(messages, reply=reply, thinking=thinking)
        # The text of one image; the processor replaces it with as many tokens as it needs.
        placeholder = getattr(self.processor, "image_token", None) or ""
        if like is not None and like.fixed is not None and text.startswith(like.fixed_text):
            rest = text[len(like.fixed_text) :]
            if not placeholder or placeholder not in rest:
                return replace(like, ids=(*like.ids[: like.fixed], *self._tokens(rest)))
        images = [
            part.to_pil()
            for message in messages
            for part in message.content
            if isinstance(part, Image)
        ]
        start = self.tokenizer.bos_token
        arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if start is not None and text.startswith(start):
            arguments["add_special_tokens"] = False
        if images:
            arguments["images"] = [images]
        try:
            inputs = dict(self.processor(**arguments))
        except ValueError as error:
            if not images:
                raise BackendError(f"{self.name} cannot read the messages: {error}") from error
            raise ImageError(
                f"{self.name} cannot read this image: {error}", "image_unreadable"
            ) from error
        ids = tuple(inputs.pop("input_ids")[0].tolist())
        inputs.pop("attention_mask", None)
        # Text after the last placeholder, which is a token of its own, is tokenized separately.
        at = text.rfind(placeholder) if images and placeholder else -1
        begin = at + len(placeholder) if at >= 0 else 0
        tail = self._tokens(text[begin:])
        certain = ids[len(ids) - len(tail) :] == tuple(tail) and (at >= 0 or not images)
        return Encoded(
            ids=ids,
            inputs={key: value for key, value in inputs.items() if torch.is_tensor(value)},
            fixed_text=text[:begin],
            fixed=len(ids) - len(tail) if certain else None,
        )

    def encode_fitting(
        self, messages: Sequence[Message], budget: int, thinking: bool | None = None
    ) -> tuple[Encoded, int]:
        """Encode a conversation, without its oldest turns if it exceeds the context.

        System message and last message always stay. The rest begins with a user message, since
        templates and models expect that.

        Args:
            messages: The conversation.
            budget: New tokens to leave room for; capped at half of the context length.
            thinking: See `Sampling`.

        Returns:
            The encoding, and the number of messages left out.

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
                starts.insert(0, 0)  # the template accepts an assistant's message first
        encoded = self.encode([*system, *turns[starts[0] :]], thinking=thinking)
        if self.limit is None:
            return encoded, starts[0]
        room = self.limit - min(budget, self.limit // 2)
        if len(encoded.ids) <= room:
            return encoded, starts[0]
        # Binary search: the more turns are left out, the fewer tokens.
        low, high = 1, len(starts) - 1
        best: tuple[Encoded, int] | None = None
        while low <= high:
            middle = (low + high) // 2
            encoded = self.encode([*system, *turns[starts[middle] :]], thinking=thinking)
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
                f"{self.name} reads at most {room} tokens here, and its instructions alone are "
                "longer; use a model with a longer context"
            )
        logger.info(
            "%s: %d old messages left out, the conversation is too long", self.name, best[1]
        )
        return best

    def too_long(self, text: str, length: int, room: int) -> InputError:
        """Return the error for a conversation that is too long.

        Its limit is in characters, for people: the same share of the last text as of its tokens.

        Args:
            text: The last text.
            length: Tokens of the whole conversation.
            room: Tokens that fit.
        """
        tokens = max(1, len(self._tokens(text)))
        fitting = max(0, len(text) * (room - (length - tokens)) // tokens)
        return InputError(
            f"{self.name} reads at most {room} tokens here, this makes {length}",
            "message_too_long",
            {"limit": fitting, "length": len(text)},
        )

    def constraints(
        self, messages: Sequence[Message], dropped: int, sampling: Sampling
    ) -> TurnConstraints | None:
        """Return the constraints of a turn, None if there are none.

        Args:
            messages: The conversation.
            dropped: How many of its oldest messages were left out, as `encode_fitting` counts them; they
                cannot be quoted.
            sampling: Names the constraints.

        Raises:
            ConfigError: See `TokenTexts`.
        """
        if not sampling.exact_quotations and not sampling.fresh_sentences:
            return None
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.name, self.tokenizer)
        turns = [message for message in messages if message.role != "system"]
        constraints: list[Constraint] = []
        if sampling.exact_quotations:
            read = [turn.text for turn in turns[dropped:] if turn.role == "user"]
            constraints.append(ExactQuotations(self._token_texts, read))
        if sampling.fresh_sentences:
            replies = [turn.text for turn in turns if turn.role == "assistant"]
            constraints.append(FreshSentences(self._token_texts, replies))
        return TurnConstraints(constraints)

    # --- the weights ---------------------------------------------------------------------------

    def adopt(self, adapted: Any) -> None:
        """Set the peft model around these weights, after an adapter was added to it."""
        self.adapted = adapted
        self._active = ""  # no adapter's name, so that the next run activates its own
        modules = [module for module in adapted.modules() if hasattr(module, "_active_adapter")]
        is_lora = all(".lora." in type(module).__module__ for module in modules)
        self._lora = modules if is_lora else []

    def activate(self, adapter: str | None) -> None:
        """Activate an adapter, or disable all."""
        if adapter == self._active or self.adapted is None:
            return
        if adapter is None:
            self.adapted.base_model.disable_adapter_layers()
        else:
            if not self._active or not self._lora:
                self.adapted.base_model.enable_adapter_layers()
                self.adapted.set_adapter(adapter, inference_mode=True)
            # peft visits all modules and all weights for this, which takes as long as a token of a small model.
            for module in self._lora:
                module._active_adapter = [adapter]
        self._active = adapter

    def set_threads(self, tokens: int) -> None:
        """Set torch's threads for a pass over that many tokens, of all rows together."""
        if self.threads is not None:
            torch.set_num_threads(self.threads if tokens > 1 else 1)

    def run(
        self,
        state: SequenceState,
        max_new_tokens: int,
        processors: Sequence[LogitsProcessor] = (),
        criteria: Sequence[StoppingCriteria] = (),
        *,
        logits: bool = False,
    ) -> Any:
        """Generate from a state, and update its cache.

        `state.ids` is not updated: a criterion of the caller may append the new tokens.

        Args:
            state: The conversation; its adapter is activated. Where it has several unread tokens, all
                threads generate as well, so that a caller may want one token first.
            max_new_tokens: Most tokens to generate.
            processors: Logits processors; without any, decoding is greedy.
            criteria: Stopping criteria.
            logits: Whether to return the logits of each new token.
        """
        self.activate(state.adapter)
        # At least one token must be left to read: the next one comes from its logits.
        state.forget(state.read - (len(state.ids) - 1))
        self.set_threads(state.unread)
        device = self.model.device
        ids = torch.tensor([state.ids], device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if state.cache is None:
            inputs |= {
                key: self._placed(key, value, ids) for key, value in state.encoded.inputs.items()
            }
        else:
            inputs["past_key_values"] = state.cache
        offsets = state.offsets or [None] * len(self._offset_modules)
        for module, offset in zip(self._offset_modules, offsets, strict=True):
            module.rope_deltas = offset
        # A criterion finds the end of a turn, and a processor samples: see `generation`.
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
        state.cache = outputs.past_key_values
        state.offsets = [module.rope_deltas for module in self._offset_modules]
        return outputs

    def _placed(self, key: str, value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return an input on the model's device, in its dtype, padded to the current tokens."""
        if key.endswith("token_type_ids"):
            longer = value.new_zeros((1, ids.shape[1]))  # 0 is text, as are all added tokens
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
        """Generate two tokens, so that the first visitor does not wait for one-time set-up.

        A model that this module cannot run fails here, with any error.
        """
        state = SequenceState(self.encode([Message("user", ("Hello",))]), None)
        for _ in range(2):  # once from the beginning, once from a cache
            state.ids.append(int(self.run(state, 1).sequences[0, -1]))
