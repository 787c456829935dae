"""A faster forward pass on CPU.

A small model in 32 bits spends its time on reading weights, on hundreds of small operations, and on
copying its cache. This pass

1. fuses the products with query, key and value, and those with gate and up;
2. stores these weights (and the output layer's) with one row per *input*: MKL multiplies a single
   vector by such a matrix up to twice as fast. The modules' own weights are views of them, so
   nothing is stored twice and the modules look unchanged;
3. adds residuals inside the product, and skips the modules in between;
4. writes into a preallocated cache, where transformers copies the whole cache for every token;
5. fuses the LoRA matrices of an adapter in the same way;
6. reads copies in oneDNN's blocked layout where there are several tokens. MKL needs nearly as long for four rows as for
   each alone, oneDNN little longer than for one (AVX2, two cores; the products of COMPEER-small's layers take 36, 105
   and 50 ms for one row, four by MKL and four by oneDNN; a whole prompt of 25 tokens 107 and 68 ms with AVX-512). The
   copies are made for the first step of several rows; they take as much memory as the layers;
7. optionally reads compressed copies of the weights for a single row (`packed_step`). Adapters stay in
   32 bits beside them, so all policies and judges share one copy.

Without the compressed copies the logits are those of transformers up to rounding. Every other case is left to
transformers: training, long prompts, several tokens after padding, rows with different adapters, adapters that are merged or have
more than two matrices, other caches. The adapters are checked at every step, so they may be added,
removed and switched at any time; the norms are scaled copies, made at load time.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import DynamicCache, Qwen2_5_VLForConditionalGeneration
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLTextModel,
)

from compeer_core.backends.transformers_.kv_cache import PreallocatedLayer
from compeer_core.backends.transformers_.packed_step import (
    KINDS,
    PackedLayer,
    PackedLinear,
    PackedNorm,
    PackedStep,
    compiled,
    is_supported,
    normalised,
)

ROOM = 64
"""Tokens by which a full cache grows."""
BLOCKED_ROWS = 8
"""Rows that oneDNN chooses its layout for."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_reorder_linear_weight"
)
LONGEST = 1000
"""Most tokens of a row. From about here on, attention without a mask, as transformers computes it, is faster (two cores with
AVX-512: 2,000 tokens 5.7 and 5.0 s, means of two runs, 300 tokens as fast)."""
PLANS = 8
"""Most adapters whose fused matrices are stored."""


def speed_up(model: Any, *, compress: bool = False) -> None:
    """Speed up a loaded model, if it is a Qwen2.5-VL in 32 bits on CPU.

    Its weights get another memory layout. Moving or converting the model afterwards restores
    transformers' own forward pass.

    Args:
        model: The model, before adapters are added.
        compress: Whether single rows read compressed copies of the weights, if the CPU is fast at
            it. The copies of COMPEER-small take 116 MB.
    """
    if type(model) is not Qwen2_5_VLForConditionalGeneration:
        return
    text = model.model.language_model
    if type(text) is not Qwen2_5_VLTextModel or not _is_supported_model(text):
        return
    compress = compress and is_supported()
    if type(model.lm_head) is nn.Linear:
        if compress:
            model.lm_head.__class__ = _Head
            cast(_Head, model.lm_head).pack()
        _store_by_input([model.lm_head])
    text.__class__ = FusedTextModel
    cast(FusedTextModel, text).fuse(compress=compress)


def _is_supported_model(text: Qwen2_5_VLTextModel) -> bool:
    config = text.config
    return (
        config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and not text.has_sliding_layers
        and all(
            parameter.dtype == torch.float32 and parameter.device.type == "cpu"
            for parameter in text.parameters()
        )
        and all(
            type(projection) is nn.Linear and (projection.bias is not None) == (group == "qkv")
            for layer in text.layers
            for group, names in GROUPS.items()
            for projection in (_parent(layer, group)._modules[name] for name in names)
        )
    )


GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections of a layer; those of one group have the same input."""


def _parent(layer: Any, group: str) -> nn.Module:
    parent: nn.Module = layer.self_attn if group in {"qkv", "out"} else layer.mlp
    return parent


def _store_by_input(projections: Sequence[nn.Linear]) -> torch.Tensor:
    """Concatenate the weights to (inputs, all outputs), and make each one a view of the result."""
    columns = [projection.weight.data.t() for projection in projections]
    whole = torch.cat(columns, dim=1).contiguous()
    begin = 0
    for projection in projections:
        outputs = projection.out_features
        projection.weight.data = whole[:, begin : begin + outputs].t()
        begin += outputs
    return whole


# --- weights -----------------------------------------------------------------------------------


class _Norm:
    """The norm of a layer; see `normalised`."""

    def __init__(self, norm: Qwen2_5_VLRMSNorm) -> None:
        size = norm.weight.numel()
        self._weight = norm.weight.detach() * math.sqrt(size)
        self._least = torch.tensor(math.sqrt(size * norm.variance_epsilon))

    def packed(self) -> PackedNorm:
        return PackedNorm(self._weight, self._least)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return normalised(states, self._weight, self._least)


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer. Shapes are (inputs, outputs)."""

    norm_before_attention: _Norm
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    norm_before_mlp: _Norm
    gate_up: torch.Tensor
    down: torch.Tensor

    def blocked(self) -> dict[str, torch.Tensor]:
        """Return copies in oneDNN's layout, by group."""
        matrices = {group: getattr(self, group) for group in GROUPS}
        return {
            group: torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), BLOCKED_ROWS)
            for group, matrix in matrices.items()
        }


def _plus_product(
    added: torch.Tensor | None,
    states: torch.Tensor,
    matrix: torch.Tensor,
    blocked: torch.Tensor | None,
) -> torch.Tensor:
    """Return states @ matrix + added, by the blocked copy of the matrix if there is one."""
    if blocked is None:
        return states @ matrix if added is None else torch.addmm(added, states, matrix)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        states, blocked, None, "none", [], ""
    )
    return product if added is None else product.add_(added)


def _fused(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    bias = torch.cat([projection.bias.data for projection in three])
    parts = bias.split([projection.out_features for projection in three])
    for projection, part in zip(three, parts, strict=True):
        projection.bias.data = part
    # With few outputs and many inputs the usual layout is faster.
    return _Layer(
        norm_before_attention=_Norm(layer.input_layernorm),
        qkv=_store_by_input(three),
        qkv_bias=bias,
        out=attention.o_proj.weight.detach().t(),
        norm_before_mlp=_Norm(layer.post_attention_layernorm),
        gate_up=_store_by_input([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach().t(),
    )


class _Head(nn.Linear):
    """An output layer with a compressed copy for single rows."""

    def pack(self) -> None:
        self._packed = compiled(PackedLinear(self.weight, self.bias, KINDS["head"]))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        del self._packed
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self._apply(fn, recurse)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[:-1].numel() != 1 or torch.is_grad_enabled():
            return super().forward(states)
        logits: torch.Tensor = self._packed(states.view(1, -1))
        return logits.view(*states.shape[:-1], -1)


# --- adapters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """The LoRA matrices of a group of projections: states @ down @ up * scale is added."""

    down: torch.Tensor
    up: torch.Tensor
    """Block-diagonal for several projections."""
    scale: float

    def add_to(self, result: torch.Tensor, states: torch.Tensor) -> None:
        result.addmm_(states @ self.down, self.up, alpha=self.scale)


@dataclass(frozen=True)
class _Part:
    """A module in its parent, at the time the plan was made."""

    siblings: dict[str, Any]
    name: str
    module: Any
    is_lora: bool = False
    matrix: nn.Module | None = None
    """Its LoRA matrix A in the plan, if any."""
    matrix_b: nn.Module | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class _Plan:
    """The fused LoRA matrices of one adapter, or of none.

    Attributes:
        active: peft's name of it; None if adapters are disabled or there are none.
        parts: All modules that the step replaces.
        pairs: For each layer, the groups that the adapter changes.
    """

    active: list[str] | None
    parts: list[_Part]
    pairs: list[dict[str, _Pair]]

    @cached_property
    def matrices(self) -> list[torch.Tensor | None]:
        """The pairs in the form of `PackedStep`."""
        if not any(self.pairs):
            return []
        every = [pairs.get(group) for pairs in self.pairs for group in GROUPS]
        return [m for pair in every for m in ((pair.down, pair.up) if pair else (None, None))]

    @cached_property
    def scales(self) -> list[float]:
        """The factor of each pair, 1 where there is none."""
        every = [pairs.get(group) for pairs in self.pairs for group in GROUPS]
        return [pair.scale if pair else 1.0 for pair in every]

    def exists(self) -> bool:
        """Whether all modules are still those that it was made from."""
        for part in self.parts:
            if part.siblings[part.name] is not part.module:
                return False
            if part.matrix is not None and self.active is not None:
                matrices = part.module.lora_A._modules
                name = self.active[0]
                if matrices.get(name) is not part.matrix:
                    return False
                if part.module.lora_B._modules.get(name) is not part.matrix_b:
                    return False
                if part.module.scaling[name] != part.scale:
                    return False
        return True

    def is_active(self) -> bool:
        for part in self.parts:
            module = part.module
            # Hooks are set, for example, if each row has its own adapter.
            if module._forward_pre_hooks or module._forward_hooks:
                return False
            if part.is_lora:
                if module.merged_adapters or module.training:
                    return False
                if module._disable_adapters:
                    if self.active is not None:
                        return False
                elif module._active_adapter != self.active:
                    return False
        return self.exists()


def _is_lora(module: Any) -> bool:
    lora = sys.modules.get("peft.tuners.lora.layer")  # an adapter exists only if it is imported
    return lora is not None and type(module) is lora.Linear


def _plan(text: "FusedTextModel") -> _Plan | None:
    """Fuse the matrices of the active adapter; None if the modules are not supported."""
    wrapped: list[Any] = [module for module in text.modules() if _is_lora(module)]
    active: list[str] | None = None
    if wrapped and not wrapped[0]._disable_adapters:
        active = wrapped[0]._active_adapter
        if not isinstance(active, list) or len(active) != 1:
            return None
    parts: list[_Part] = []
    pairs: list[dict[str, _Pair]] = []
    for layer in text.layers:
        of_layer: dict[str, _Pair] = {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            parts.append(_Part(layer._modules, name, layer._modules[name]))
        for group, names in GROUPS.items():
            siblings = _parent(layer, group)._modules
            of_group = [_part(siblings, name, active) for name in names]
            if not all(_is_supported(part, active) for part in of_group):
                return None
            parts += of_group
            if len({part.scale for part in of_group if part.matrix is not None}) > 1:
                return None
            if active and any(part.matrix is not None for part in of_group):
                of_layer[group] = _joined_pair(of_group, active[0])
        pairs.append(of_layer)
    parts.append(_Part(text._modules, "norm", text._modules["norm"]))
    if not all(
        type(part.module) in {nn.Linear, Qwen2_5_VLRMSNorm} or part.is_lora for part in parts
    ):
        return None
    plan = _Plan(None if active is None else list(active), parts, pairs)
    return plan if plan.is_active() else None


def _part(siblings: dict[str, nn.Module | None], name: str, active: list[str] | None) -> _Part:
    module: Any = siblings[name]
    if not _is_lora(module):
        return _Part(siblings, name, module)
    if active is None or active[0] not in module.lora_A:
        return _Part(siblings, name, module, is_lora=True)
    matrix, scale = module.lora_A[active[0]], module.scaling[active[0]]
    matrix_b = module.lora_B[active[0]]
    return _Part(siblings, name, module, True, matrix, matrix_b, scale)


def _is_supported(part: _Part, active: list[str] | None) -> bool:
    """Whether a projection is plain, or plain with plain LoRA matrices."""
    if not part.is_lora:
        return type(part.module) is nn.Linear
    if type(part.module.base_layer) is not nn.Linear:
        return False
    if part.matrix is None or active is None:
        return True
    matrices = (part.matrix, part.module.lora_B[active[0]])
    return active[0] not in part.module.lora_variant and all(
        type(matrix) is nn.Linear and matrix.weight.dtype == torch.float32 and matrix.bias is None
        for matrix in matrices
    )


def _joined_pair(group: Sequence[_Part], adapter: str) -> _Pair:
    """Fuse the matrices of one group; those of the modules become views of the fused ones."""
    changed = [part for part in group if part.matrix is not None]
    down = _store_by_input([cast(nn.Linear, part.matrix) for part in changed])
    outputs = [part.module.out_features for part in group]
    up = down.new_zeros(down.shape[1], sum(outputs))
    row = column = 0
    for part, width in zip(group, outputs, strict=True):
        if part.matrix is not None:
            weight = part.module.lora_B[adapter].weight
            block = up[row : row + weight.shape[1], column : column + width]
            block.copy_(weight.data.t())
            weight.data = block.t()
            row += weight.shape[1]
        column += width
    return _Pair(down, up, changed[0].scale)


# --- the step ----------------------------------------------------------------------------------


class FusedTextModel(Qwen2_5_VLTextModel):
    """A language model with the fused pass."""

    def fuse(self, *, compress: bool) -> None:
        """Fuse the weights. Called once, by `speed_up` on a supported model."""
        self._layers = [_fused(layer) for layer in self.layers]
        self._last_norm = _Norm(self.norm)
        self._plans: list[_Plan] = []
        self._blocked: list[dict[str, torch.Tensor]] | None = None
        self._packed = self._packed_step() if compress else None

    def _packed_step(self) -> Any:
        heads = int(self.config.num_attention_heads)
        key_heads = int(self.config.num_key_value_heads or heads)
        shape = heads, key_heads, int(self.config.hidden_size) // heads
        layers = []
        for layer in self._layers:
            linears = {
                group: PackedLinear(weight.t(), bias, KINDS[group])
                for group, weight, bias in (
                    ("qkv", layer.qkv, layer.qkv_bias),
                    ("out", layer.out, None),
                    ("gate_up", layer.gate_up, None),
                    ("down", layer.down, None),
                )
            }
            norms = [layer.norm_before_attention.packed(), layer.norm_before_mlp.packed()]
            layers.append(PackedLayer(norms, linears, shape))
        return compiled(PackedStep(layers, self._last_norm.packed()))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert the model; this loses the fusion, so the class becomes the plain one."""
        del self._layers, self._last_norm, self._plans, self._blocked, self._packed
        self.__class__ = Qwen2_5_VLTextModel  # type: ignore[assignment]
        return self._apply(fn, recurse)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like transformers' own method; see there."""
        if (
            inputs_embeds is not None
            and inputs_embeds.shape[1] <= LONGEST
            and input_ids is None
            and (position_ids is None or position_ids.ndim == 3)
            and use_cache is not False
            and not self.training
            and not torch.is_grad_enabled()
            and all(
                value is None or value is False or name == "return_dict"
                for name, value in kwargs.items()
            )
            and kwargs.get("return_dict") is not False
            and _is_writable(past_key_values)
        ):
            held, tokens = int(past_key_values.get_seq_length()), inputs_embeds.shape[1]
            mask = _mask(attention_mask, tokens, held)
            plan = self._active_plan() if mask is not UNKNOWN else None
            if plan is not None:
                if position_ids is None:
                    places = torch.arange(held, held + tokens)
                    position_ids = places.expand(3, len(inputs_embeds), tokens)
                positions = position_ids[-3:]  # a row of plain positions may come first
                layers = past_key_values.layers
                states = self._step(inputs_embeds, positions, mask, layers, plan)
                return BaseModelOutputWithPast(
                    last_hidden_state=states, past_key_values=past_key_values
                )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _active_plan(self) -> _Plan | None:
        for place, plan in enumerate(self._plans):
            if plan.is_active():
                if place:
                    self._plans.insert(0, self._plans.pop(place))
                return plan
        with torch.inference_mode(False):  # a weight must not be an inference tensor
            made = _plan(self)
        if made is not None:
            existing = [plan for plan in self._plans if plan.exists()]
            self._plans = [made, *existing][:PLANS]
        return made

    def _step(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Sequence[CacheLayerMixin],
        plan: _Plan,
    ) -> torch.Tensor:
        rows, tokens, width = embedded.shape
        heads = int(self.config.num_attention_heads)
        key_heads = int(self.config.num_key_value_heads or heads)
        size, groups = width // heads, heads // key_heads
        if mask is not None and tokens > 1:
            mask = mask.repeat(1, 1, groups, 1)
        rotated = (heads + key_heads) * size
        cos, sin = self.rotary_emb(embedded, positions)
        sin[..., : size // 2].neg_()  # for halves that are swapped without a sign
        cos, sin = (angles.reshape(rows * tokens, 1, size) for angles in (cos, sin))
        states = embedded.reshape(rows * tokens, width)
        if self._packed is not None and len(states) == 1 and mask is None and _is_plain(cache):
            return self._packed_states(states, cos[0], sin[0], cache, plan)[:, None]
        if rows > 1 and tokens == 1 and HAS_ONEDNN and self._blocked is None:
            self._blocked = [layer.blocked() for layer in self._layers]
        copies = (self._blocked if len(states) > 1 else None) or [{}] * len(self._layers)
        for layer, blocked, pairs, memory in zip(
            self._layers, copies, plan.pairs, cache, strict=True
        ):
            normed = layer.norm_before_attention(states)
            qkv = _plus_product(layer.qkv_bias, normed, layer.qkv, blocked.get("qkv"))
            if pair := pairs.get("qkv"):
                pair.add_to(qkv, normed)
            unrotated = qkv[:, :rotated].view(len(states), heads + key_heads, size)
            rotated_heads = torch.addcmul(unrotated * cos, unrotated.roll(size // 2, -1), sin)
            keys, values = _appended(
                memory,
                rotated_heads[:, heads:].view(rows, tokens, key_heads, size).transpose(1, 2),
                qkv[:, rotated:].view(rows, tokens, key_heads, size).transpose(1, 2),
            )
            # Heads that share a key become positions of one head, so keys need no repetition.
            query = rotated_heads[:, :heads].view(rows, tokens, key_heads, groups, size)
            query = query.permute(0, 2, 3, 1, 4).reshape(rows, key_heads, groups * tokens, size)
            read = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            read = read.view(rows, key_heads, groups, tokens, size).permute(0, 3, 1, 2, 4)
            read = read.reshape(len(states), width)
            states = _plus_product(states, read, layer.out, blocked.get("out"))
            if pair := pairs.get("out"):
                pair.add_to(states, read)
            normed = layer.norm_before_mlp(states)
            gate_up = _plus_product(None, normed, layer.gate_up, blocked.get("gate_up"))
            if pair := pairs.get("gate_up"):
                pair.add_to(gate_up, normed)
            gate, up = gate_up.chunk(2, dim=-1)
            inner = silu(gate).mul_(up)
            states = _plus_product(states, inner, layer.down, blocked.get("down"))
            if pair := pairs.get("down"):
                pair.add_to(states, inner)
        return self._last_norm(states).view(rows, tokens, width)

    def _packed_states(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: Sequence[Any],
        plan: _Plan,
    ) -> torch.Tensor:
        held = int(cache[0].keys.shape[2])
        rooms = [_room(layer) for layer in cache]
        assert self._packed is not None
        last: torch.Tensor = self._packed(
            *(states, cos, sin),
            *([keys for keys, _ in rooms], [values for _, values in rooms], held),
            *(plan.matrices, plan.scales),
        )
        for layer, (keys, values) in zip(cache, rooms, strict=True):
            layer.keys, layer.values = keys[:, :, : held + 1], values[:, :, : held + 1]
        return last


UNKNOWN = object()
"""A mask that only transformers can handle."""


def _mask(given: Any, tokens: int, held: int) -> Any:
    """Return the mask for scaled_dot_product_attention, None for no mask, or UNKNOWN.

    Args:
        given: What transformers was given.
        tokens: New tokens of each row.
        held: Tokens in the cache before them.
    """
    if isinstance(given, dict):
        given = given.get("full_attention", UNKNOWN)
    if torch.is_tensor(given) and given.ndim == 4:
        return given if given.shape[2:] == (tokens, held + tokens) else UNKNOWN
    if given is not None:
        if not torch.is_tensor(given) or given.ndim != 2 or given.shape[1] != held + tokens:
            return UNKNOWN
        seen = given.bool()
        if not bool(seen.all()):
            return seen[:, None, None] if tokens == 1 else UNKNOWN
    if tokens == 1:
        return None
    return torch.ones((1, 1, tokens, held + tokens), dtype=torch.bool).tril(held)


def _is_writable(cache: Any) -> bool:
    """Whether a step can append to a cache: its layers are plain, or joined for a batch."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and bool(cache.layers)
        and all(type(layer) in {DynamicLayer, PreallocatedLayer} for layer in cache.layers)
    )


def _is_plain(cache: Sequence[Any]) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache)


def _appended(
    layer: Any, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append tokens to a cache layer like its `update`, but into preallocated memory.

    `layer.keys` and `layer.values` are views of the start of that memory. If other code has
    replaced them, new memory is allocated.
    """
    if isinstance(layer, PreallocatedLayer):
        return layer.update(keys, values)
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :0], values[:, :, :0]
    held, count = layer.keys.shape[2], keys.shape[2]
    room = _room(layer, count)
    room[0][:, :, held : held + count] = keys
    room[1][:, :, held : held + count] = values
    layer.keys = room[0][:, :, : held + count]
    layer.values = room[1][:, :, : held + count]
    return layer.keys, layer.values


def _room(layer: Any, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a plain layer's memory for keys and values, with room for `count` more tokens."""
    room: tuple[torch.Tensor, torch.Tensor] | None = getattr(layer, "room", None)
    if room is None or not (
        _begins(layer.keys, room[0], count) and _begins(layer.values, room[1], count)
    ):
        room = layer.room = (_preallocated(layer.keys, count), _preallocated(layer.values, count))
    return room


def _begins(states: torch.Tensor, memory: torch.Tensor, count: int) -> bool:
    """Whether states are the start of memory that has room for `count` more."""
    return (
        states.data_ptr() == memory.data_ptr()
        and states.stride() == memory.stride()
        and states.shape[0] == memory.shape[0]
        and states.shape[2] + count <= memory.shape[2]
    )


def _preallocated(states: torch.Tensor, count: int) -> torch.Tensor:
    rows, heads, held, size = states.shape
    memory = states.new_empty((rows, heads, held + count - 1 + ROOM, size))
    memory[:, :, :held] = states
    return memory
