"""A learned check for signs of danger in English messages, on the base of COMPEER-small.

`RiskNet` runs the base's first layers as they are and a few more with low-rank updates of its own, averages
the hidden states of a message and classifies the average. It reads the base's weights and changes nothing in
it, so it shares them with running turns. `RiskClassifier` offers the call of `compeer_core.safety.find_risk`.
Stage ``risk`` trains it (`training.risk.train`); ``assets/risk/README.md`` states recall and false alarms.

It finds hints that no listed phrase covers, and misses many. None means nothing about safety. It supplements
`find_risk` and does not replace it: phrases cover Chinese, and wording that this model has not learnt.
"""

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, rms_norm, scaled_dot_product_attention, silu

from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError
from compeer_core.safety import RiskKind, RiskSign

FILE = Path(__file__).resolve().parent.parent / "assets" / "risk" / "risk.safetensors"
"""The shipped weights and settings, for the base of COMPEER-small."""
KINDS: tuple[RiskKind | None, ...] = (
    None,
    RiskKind.MEDICAL_EMERGENCY,
    RiskKind.SUICIDE,
    RiskKind.SELF_HARM,
    RiskKind.VIOLENCE_SUFFERED,
    RiskKind.VIOLENCE,
    RiskKind.OTHER_IN_DANGER,
)
"""The classes, in the order of the logits; None is no danger. Past self-harm is not told apart."""
PREFIX = "<|im_start|>user\n"
"""Precedes each message; its tokens are read but not averaged."""
FEWEST_WORDS = 4
"""Shorter messages give no hint: "bye" alone says nothing."""
LONGEST = 128
"""Tokens of a message that are read together; a longer one is read in pieces."""
MOST_PIECES = 8
"""Of a longer message only the first and last pieces are read, this many in total. 4,000 characters of English have
nine; as many emoji have a hundred, which would take a CPU a minute."""
PATIENCE_SECONDS = 2.0
"""How long a message waits for the messages before it; then it gets no hint."""
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class RiskShape(FrozenModel):
    """Which layers of the base are used, and how they are updated."""

    first: int = Field(default=8, ge=0)
    """Layers that run as they are."""
    last: int = Field(default=14, ge=1)
    """Layers that run in total; those from `first` on have updates and attend in both directions."""
    rank: int = Field(default=4, ge=1)
    """Rank of the updates."""


class RiskNet(nn.Module):
    """Layers of a base, with low-rank updates and a classifier. Only the latter are parameters."""

    def __init__(self, text: Any, shape: RiskShape) -> None:
        """Wrap the language model of a Qwen2.5-VL in 16 or 32 bits; adapters on it are ignored.

        Raises:
            CheckpointError: The model has fewer layers than `shape.last`, or its weights are quantized.
        """
        super().__init__()
        if not shape.first <= shape.last <= len(text.layers):
            raise CheckpointError(
                f"risk classifier: layers {shape.first} to {shape.last} of a base with "
                f"{len(text.layers)}; use the base it was trained on"
            )
        if not text.layers[0].self_attn.q_proj.weight.is_floating_point():
            raise CheckpointError(
                "risk classifier: the weights of the base are quantized; load it without --quantize 4bit or 8bit"
            )
        self.shape = shape
        self._base = (text,)  # in a tuple, so that its weights are not parameters of this module
        config = text.config
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for number in range(shape.first, shape.last):
            for group, names in PROJECTIONS.items():
                for name in names:
                    weight = getattr(getattr(text.layers[number], group), name).weight
                    key = f"{number}_{name}"
                    start = torch.randn(shape.rank, weight.shape[1]) / math.sqrt(weight.shape[1])
                    self.down[key] = nn.Parameter(start)
                    self.up[key] = nn.Parameter(torch.zeros(weight.shape[0], shape.rank))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, len(KINDS))

    def lower(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the unchanged layers, shape (batch, tokens, width).

        Attention is causal, so padding at the end changes no other position.
        """
        with torch.no_grad():
            text = self._base[0]
            return self._layers(text.embed_tokens(ids), 0, self.shape.first, None)

    def forward(self, hidden: Tensor, averaged: Tensor, read: Tensor) -> Tensor:
        """Return logits of `KINDS`, shape (batch, kinds).

        Args:
            hidden: From `lower`.
            averaged: Bool, shape (batch, tokens): the message's tokens.
            read: Bool, shape (batch, tokens): all tokens except padding.
        """
        hidden = self._layers(hidden, self.shape.first, self.shape.last, read[:, None, None, :])
        states = self.norm(dropout(hidden.float(), 0.1, self.training))
        weights = averaged / averaged.sum(1, keepdim=True).clamp(min=1)
        average = (states * weights[..., None]).sum(1)
        logits: Tensor = self.head(dropout(average, 0.2, self.training))
        return logits

    def _layers(self, x: Tensor, start: int, end: int, mask: Tensor | None) -> Tensor:
        text = self._base[0]
        config, length = text.config, x.shape[1]
        size = config.hidden_size // config.num_attention_heads
        groups = config.num_attention_heads // config.num_key_value_heads
        positions = torch.arange(length, device=x.device)[None, None].expand(3, 1, length)
        cos, sin = (part.reshape(length, size) for part in text.rotary_emb(x, positions))

        def rotated(heads: Tensor) -> Tensor:
            left, right = heads.chunk(2, dim=-1)
            turned: Tensor = heads * cos + torch.cat([-right, left], dim=-1) * sin
            return turned

        for number in range(start, end):
            layer = text.layers[number]
            attention, mlp = layer.self_attn, layer.mlp
            inputs = _normed(x, layer.input_layernorm)
            query, key, value = (
                self._projected(inputs, number, attention, name).reshape(*x.shape[:2], -1, size)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            mixed = scaled_dot_product_attention(
                rotated(query.transpose(1, 2)),
                rotated(key.transpose(1, 2)).repeat_interleave(groups, 1),
                value.transpose(1, 2).repeat_interleave(groups, 1),
                attn_mask=mask,
                is_causal=mask is None,
            )
            x = x + self._projected(mixed.transpose(1, 2).flatten(2), number, attention, "o_proj")
            inputs = _normed(x, layer.post_attention_layernorm)
            gate = silu(self._projected(inputs, number, mlp, "gate_proj"))
            inner = gate * self._projected(inputs, number, mlp, "up_proj")
            x = x + self._projected(inner, number, mlp, "down_proj")
        return x

    def _projected(self, x: Tensor, number: int, group: Any, name: str) -> Tensor:
        projection = getattr(group, name)
        output = linear(x, projection.weight, projection.bias)
        if number >= self.shape.first:
            down, up = (part[f"{number}_{name}"].to(x.dtype) for part in (self.down, self.up))
            output = output + 2 * linear(linear(x, down), up)
        return output


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def danger(logits: Tensor) -> Tensor:
    """Return the log odds of any danger, shape (batch)."""
    return torch.logsumexp(logits[:, 1:], dim=1) - logits[:, 0]


def pieces(tokenizer: Any, text: str) -> tuple[list[list[int]], int]:
    """Return a message's tokens in pieces that each begin with the prefix, and the prefix's length in tokens.

    A piece has at most `LONGEST` tokens of the message. An empty message has one piece.
    """
    prefix: list[int] = tokenizer(PREFIX, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(PREFIX + text, add_special_tokens=False)["input_ids"][len(prefix) :]
    starts = range(0, max(1, len(tokens)), LONGEST)
    return [prefix + tokens[start : start + LONGEST] for start in starts], len(prefix)


def padded(rows: Sequence[int], prefix: int) -> tuple[Tensor, Tensor]:
    """Return which tokens of padded rows are averaged, and which are read, each bool of shape (rows, longest row).

    Args:
        rows: The length of each row, in tokens, prefix included.
        prefix: The length of the prefix, in tokens.
    """
    places = torch.arange(max(rows))
    read = places < torch.tensor(rows)[:, None]
    return read & (places >= prefix), read


class RiskClassifier:
    """Returns a sign or a hint of danger in an English message. Thread-safe.

    It reads one message at a time, so that many senders occupy one core at most.
    """

    def __init__(self, model: Any, tokenizer: Any, file: Path = FILE) -> None:
        """Load the updates for a base that is already in memory.

        Args:
            model: The base, a Qwen2.5-VL as `ChatModel.model` holds it; it may have LoRA adapters.
            tokenizer: The base's tokenizer.
            file: Weights and settings.

        Raises:
            CheckpointError: The file is missing or damaged, or belongs to another base.
        """
        try:
            with safe_open(file, framework="pt") as opened:
                settings = json.loads(opened.metadata()["risk"])
                weights = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
            self.threshold = float(settings["threshold"])
            self.sure = float(settings["sure"])
            net = RiskNet(model.model.language_model, RiskShape(**settings["shape"]))
            net.load_state_dict(weights)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: no risk classifier for this base ({error}); restore the file, or train it "
                "again with `python -m training risk`"
            ) from error
        self._device = model.device
        self._net = net.to(self._device).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def log_odds(self, text: str) -> tuple[float, RiskKind]:
        """Return the log odds of danger of the message's gravest piece, and its likeliest kind."""
        rows, prefix = pieces(self._tokenizer, text)
        if len(rows) > MOST_PIECES:
            rows = rows[: MOST_PIECES // 2] + rows[-(MOST_PIECES // 2) :]
        averaged, read = padded([len(row) for row in rows], prefix)
        ids = torch.tensor([row + [0] * (read.shape[1] - len(row)) for row in rows])
        with torch.inference_mode():
            hidden = self._net.lower(ids.to(self._device))
            logits = self._net(hidden, averaged.to(self._device), read.to(self._device))
            gravest = int(danger(logits).argmax())
            kind = KINDS[1 + int(logits[gravest, 1:].argmax())]
            return float(danger(logits)[gravest]), cast("RiskKind", kind)

    def __call__(self, text: str, language: str = "und") -> RiskSign | None:
        """Return a sign if the log odds are above `sure`, a hint if only above `threshold`, or None.

        None also for Chinese, which the base does not read, for few words, and if other messages take too long.
        """
        text = text.encode("utf-8", "ignore").decode()  # tokenizers refuse lone surrogates
        if len(text.split()) < FEWEST_WORDS:
            return None
        letters = [character for character in text if character.isalpha()]
        if sum(letter.isascii() for letter in letters) <= len(letters) / 2:
            return None
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            return None
        try:
            odds, kind = self.log_odds(text)
        finally:
            self._lock.release()
        return RiskSign(kind, is_hint=odds <= self.sure) if odds > self.threshold else None
