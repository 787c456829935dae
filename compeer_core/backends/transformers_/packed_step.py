"""The decoding step of one row with compressed weights, by torch's FBGEMM kernels.

A small model decodes as fast as it reads its weights. This step multiplies with copies of them:

- "int8": each output has its own scale, and its weights are integers of 8 bits. The input is rounded
  to 7 bits of its own range at each product, so that AVX2's 16-bit sums cannot overflow.
- "fp16": weights of 16 bits, sums of 32 bits: twice the bytes, and hardly any rounding.

Adapters, norms, attention and the cache stay in 32 bits. The step is compiled by TorchScript: from
Python, a call of these kernels takes 20 us, from TorchScript 4 us, and a token needs 121.

FBGEMM needs AVX2 or AVX-512. Torch's other kernels were slower for one row on a CPU with AVX2 only
(all products of COMPEER-small for a token, one core, from Python, milliseconds): int8 11.5 and fp16
16.2 here; `_weight_int4pack_mm_for_cpu` 16.6 (bf16); `_weight_int8pack_mm` 19.5 (bf16; 340 in fp32);
`mv` 20.8 (fp16) and 24.0 (bf16); fp32 25.7; `linear_dynamic` of oneDNN 29.4.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

Kind = Literal["int8", "fp16"]

KINDS: Mapping[str, Kind] = {
    "qkv": "int8",
    "out": "int8",
    "gate_up": "int8",
    "down": "int8",
    "head": "int8",
}
"""How each group of matrices is compressed."""


def is_supported() -> bool:
    """Return whether torch has FBGEMM and this CPU can run it."""
    return (
        "fbgemm" in torch.backends.quantized.supported_engines
        and torch.backends.quantized.engine in {"x86", "fbgemm"}
        and torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
    )


def compiled(module: nn.Module) -> Any:
    """Return a module's forward pass as TorchScript."""
    with warnings.catch_warnings():
        # Its successors need a C++ compiler at run time.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return torch.jit.script(module.eval()).forward


class PackedLinear(nn.Module):
    """A copy of a linear layer for one row; later changes of its weights are not seen."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: Kind) -> None:
        """Pack weights.

        Args:
            weight: Shape (outputs, inputs), 32 bits.
            bias: Shape (outputs,), or None.
            kind: The format of the copy.
        """
        super().__init__()
        self.is_int8 = kind == "int8"
        weight = weight.detach().contiguous()
        operators: Any = torch.ops.quantized
        if not self.is_int8:
            self.packed = operators.linear_prepack_fp16(weight, bias)
            return
        scales = weight.abs().amax(1).clamp_(min=1e-30).double() / 127
        with warnings.catch_warnings():
            # Torch deprecates quantized tensors, but its kernels take weights in no other form.
            warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor")
            whole = torch.quantize_per_channel(
                weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
            )
        self.packed = operators.linear_prepack(whole, bias)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """Return the outputs of shape (1, outputs) for an input of shape (1, inputs)."""
        if self.is_int8:
            outputs: torch.Tensor = torch.ops.quantized.linear_dynamic(
                row, self.packed, True
            )  # 7 bits
        else:
            outputs = torch.ops.quantized.linear_dynamic_fp16(row, self.packed)
        return outputs


def normalised(states: torch.Tensor, weight: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return states after root mean square normalisation, without writing squares to memory.

    With the length |x| of a vector of n numbers, x / sqrt(|x|^2 / n + eps) is
    x * sqrt(n) / hypot(|x|, sqrt(n * eps)).

    Args:
        states: Shape (..., n).
        weight: The weight times sqrt(n), shape (n,).
        least: sqrt(n * eps), a scalar.
    """
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return (states * weight).div_(torch.hypot(length, least))


class PackedNorm(nn.Module):
    """The norm of a `PackedLayer`; see `normalised`."""

    def __init__(self, weight: torch.Tensor, least: torch.Tensor) -> None:
        """Take the arguments of `normalised`."""
        super().__init__()
        self.weight = weight
        self.least = least

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return normalised(states, self.weight, self.least)


class PackedLayer(nn.Module):
    """One layer of a `PackedStep`."""

    def __init__(
        self,
        norms: Sequence[PackedNorm],
        linears: Mapping[str, PackedLinear],
        heads: tuple[int, int, int],
    ) -> None:
        """Combine the parts of a layer.

        Args:
            norms: Those before attention and MLP.
            linears: By group: "qkv", "out", "gate_up", "down".
            heads: Number of heads, of key-value heads, and their size.
        """
        super().__init__()
        self.norm_before_attention, self.norm_before_mlp = norms
        self.qkv, self.out = linears["qkv"], linears["out"]
        self.gate_up, self.down = linears["gate_up"], linears["down"]
        self.heads, self.key_heads, self.size = heads

    def forward(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: int,
        pairs: list[torch.Tensor | None],
        scales: list[float],
        first: int,
    ) -> torch.Tensor:
        normed = self.norm_before_attention(states)
        qkv = _adapted(self.qkv(normed), normed, pairs, scales, first)
        rotated = self.heads + self.key_heads
        every = qkv.view(rotated + self.key_heads, self.size)
        unrotated = every[:rotated]
        turned = torch.addcmul(unrotated * cos, unrotated.roll(self.size // 2, -1), sin)
        keys.select(2, held).copy_(turned[self.heads :])
        values.select(2, held).copy_(every[rotated:])
        # Heads that share a key become positions of one head, so keys need no repetition.
        query = turned[: self.heads].view(1, self.key_heads, -1, self.size)
        read = scaled_dot_product_attention(
            query, keys.narrow(2, 0, held + 1), values.narrow(2, 0, held + 1)
        ).reshape(1, -1)
        states = states + _adapted(self.out(read), read, pairs, scales, first + 1)
        normed = self.norm_before_mlp(states)
        gate_up = _adapted(self.gate_up(normed), normed, pairs, scales, first + 2)
        gate, up = gate_up.chunk(2, -1)
        inner = silu(gate).mul_(up)
        return states.add_(_adapted(self.down(inner), inner, pairs, scales, first + 3))


def _adapted(
    product: torch.Tensor,
    row: torch.Tensor,
    pairs: list[torch.Tensor | None],
    scales: list[float],
    number: int,
) -> torch.Tensor:
    """Add an adapter's change to a product, in place."""
    if len(pairs) > 0:
        down, up = pairs[2 * number], pairs[2 * number + 1]
        if down is not None and up is not None:
            product.addmm_(row.mm(down), up, alpha=scales[number])
    return product


class PackedStep(nn.Module):
    """A decoding step of one row through all layers."""

    def __init__(self, layers: Sequence[PackedLayer], last_norm: PackedNorm) -> None:
        """Combine the layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.last_norm = last_norm

    def forward(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        held: int,
        pairs: list[torch.Tensor | None],
        scales: list[float],
    ) -> torch.Tensor:
        """Read one token.

        Args:
            states: Its embedding, shape (1, width).
            cos: Of the rotary embedding, shape (1, head size).
            sin: Likewise, its first half negated.
            keys: Memory of each layer, shape (1, key-value heads, room, head size); written.
            values: Likewise.
            held: Tokens in the memory.
            pairs: Matrices down (inputs, rank) and up (rank, outputs) of an adapter, for the four
                groups of each layer; empty without an adapter.
            scales: The factor of each pair.

        Returns:
            The normalised last state, shape (1, width).
        """
        for number, layer in enumerate(self.layers):
            states = layer(
                states, cos, sin, keys[number], values[number], held, pairs, scales, 4 * number
            )
        normalised: torch.Tensor = self.last_norm(states)
        return normalised
