"""The language model over many tokens with compiled kernels: the same face and the same states as `model.text.TextModel`.

A layer takes thirteen launches (two more where weights are multiplied out first, two where routed and shared experts are of
different layouts), whose sizes depend on the number of
tokens alone: the host waits for nothing. The residual stream is float32, activations are bfloat16, every sum is float32
and in a fixed order, so that the same call gives the same bits. Where activations meet FP8 weights that are decoded on the
way, they are float16 (kernels/weight_tiles.py).
"""

from __future__ import annotations

from typing import Sequence

import torch

from ..checkpoint.packed import PackedWeight
from ..kernels.attention_prefill import AttentionPrefillPlan
from ..kernels.deltanet_prefill import DeltaRulePlan
from ..kernels.expert_slots import Fetch, Visit, VisitScratch
from ..kernels.expert_table import matrices_of
from ..kernels.fp8_gemm import ProjectionPlan
from ..kernels.launcher import Launchers
from ..kernels.moe_prefill import ExpertsPrefillPlan
from ..kernels.prefill_rows import RowKernels
from ..kernels.route_prefill import RoutePlan
from ..kernels.support import Target, UnsupportedByKernel, on_device
from ..memory.pooled import PooledExperts
from ..model.attention import AttentionWeights, KeyValueStore
from ..model.deltanet import DeltaNetState, DeltaNetWeights
from ..model.rotary import mrope_cos_sin
from ..model.text import LayerWeights, TextModel

KERNELS = ("fp8_gemm", "prefill_rows", "deltanet_prefill", "attention_prefill", "moe_prefill")  # whose self-tests speak for this module
PACKED_KERNELS = ("packed_prefill", "moe_prefill.packed")  # packed projections need the first one, packed experts the second one


def packed_kernels(model: TextModel) -> tuple[str, ...]:
    """Those of PACKED_KERNELS that speak for the packed weights of `model`; its plans ask for them, one after another."""
    projections = any(isinstance(weight, PackedWeight) for layer in model.layers for weight in vars(layer.mixer).values())
    experts = any(isinstance(weight, PackedWeight) for layer in model.layers for weight in matrices_of(layer.moe))
    return tuple(name for name, needed in zip(PACKED_KERNELS, (projections, experts)) if needed)


class Scratch:
    """The buffers of one call, made when first asked for and shared by all layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple, torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        key = (name, dtype, shape)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = torch.empty(shape, dtype=dtype, device=self._device)
        return found


class Delta:
    """What the residual stream grows by: `slices` parts to be added in order. Steps in rows of the stream's width."""

    __slots__ = ("values", "slices", "row_step", "slice_step")

    def __init__(self, values: torch.Tensor, slices: int, row_step: int, slice_step: int) -> None:
        self.values, self.slices, self.row_step, self.slice_step = values, slices, row_step, slice_step


class FastText:
    """`TextModel.forward` in compiled kernels. Planned once for the weights where they are; holds no state of a sequence.

    Raises `UnsupportedByKernel` for weights, types or sizes the kernels cannot take. Whether the kernels compute the right
    numbers on this device is for `support.usable` to say, for each of KERNELS.
    """

    def __init__(self, model: TextModel, target: Target) -> None:
        config, dtype = model.config, model.embedding.dtype
        if dtype != (torch.float32 if target.interpreted else torch.bfloat16):
            raise UnsupportedByKernel(f"activations of {dtype}; the kernels of many tokens are written for bfloat16")
        self.model, self.config, self.target, self.dtype = model, config, target, dtype
        launchers = Launchers(target)
        rows, rule, attention = RowKernels(config, launchers), DeltaRulePlan(config, launchers), AttentionPrefillPlan(config, launchers)
        self._rows = rows
        self._norm = vector(model.norm)
        visits = Visits(model, target) if isinstance(model.layers[0].moe.experts, PooledExperts) else None
        self._layers = [_Layer(index, layer, model, rows, rule, attention, launchers, visits) for index, layer in enumerate(model.layers)]
        plans = [plan for layer in self._layers for plan in layer.mixer.projections]
        self._dequantized = [(plan, plan.rows * plan.columns) for plan in plans if not plan.whole]

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.embedding

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As TextModel.embed."""
        return self.model.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As TextModel.logits."""
        return self.model.logits(hidden)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, states: Sequence[KeyValueStore | DeltaNetState]) -> torch.Tensor:
        """Embedded tokens x [T, D] at positions int64 [3, T] -> hidden [T, D] after the final norm, T >= 1.

        `states` holds one entry a layer and is advanced by T tokens; a DeltaNet state's tensors are written in place
        (replaced first where they have gaps). Only launches: no value is read back by the host.
        """
        tokens, width = x.shape
        scratch = Scratch(x.device)
        residual, inverse = scratch.get("residual", torch.float32, tokens, width), scratch.get("inverse", torch.float32, tokens)
        matrix = max((size for plan, size in self._dequantized if plan.many(tokens)), default=0)
        if matrix:
            scratch.get("matrix", self.dtype, matrix)
        first, delta = True, Delta(aligned(x.to(self.dtype)), 1, 1, 0)
        with on_device(self.target.device):
            angles = mrope_cos_sin(positions, self.config) if self.config.full_attention_layers else None
            call = Call(scratch, tokens, self.dtype, angles, matrix)
            for layer, state in zip(self._layers, states, strict=True):
                normed = scratch.get("normed", layer.mixer.projections[0].input_type(tokens), tokens, width)
                self._add(delta, residual, layer.input_norm, normed, inverse, first)
                delta, first = layer.mixer(call, normed, state), False
                normed = scratch.get("normed", layer.product, tokens, width)
                self._add(delta, residual, layer.post_norm, normed, inverse)
                delta = layer.experts(call, normed, residual, inverse)
            hidden = torch.empty((tokens, width), dtype=self.dtype, device=x.device)
            self._add(delta, residual, self._norm, hidden, inverse, first)
        return hidden

    def _add(self, delta: Delta, residual: torch.Tensor, norm: torch.Tensor, out: torch.Tensor, inverse: torch.Tensor, first: bool = False) -> None:
        self._rows.add_norm(delta.values, delta.slices, delta.row_step, delta.slice_step, residual, norm, out, inverse, first=first)


class Call:
    """What layers need to know of one call: buffers, tokens, cosines and sines, elements of the largest multiplied-out matrix."""

    def __init__(self, scratch: Scratch, tokens: int, dtype: torch.dtype, angles: tuple[torch.Tensor, torch.Tensor] | None, matrix: int) -> None:
        self.scratch, self.tokens, self.dtype, self.angles, self._matrix = scratch, tokens, dtype, angles, matrix

    def project(self, name: str, plan: ProjectionPlan, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, rows]."""
        out = self.scratch.get(name, self.dtype, self.tokens, plan.rows)
        plan(x, out, self._room(plan))
        return out

    def project_delta(self, plan: ProjectionPlan, x: torch.Tensor) -> Delta:
        """The same for a product that only the residual stream reads, in parts where that is faster."""
        splits = plan.splits(self.tokens)
        if splits == 1:
            return Delta(self.project("projected", plan, x), 1, 1, 0)
        out = self.scratch.get("parts", torch.float32, splits, self.tokens, plan.rows)
        plan(x, out, None, splits)
        return Delta(out, splits, 1, self.tokens)

    def _room(self, plan: ProjectionPlan) -> torch.Tensor | None:
        if plan.whole or not plan.many(self.tokens):
            return None
        return self.scratch.get("matrix", self.dtype, self._matrix)[: plan.rows * plan.columns].view(plan.rows, plan.columns)


class Visits:
    """Brings experts that have no slot to places beside the slots, for as long as a layer works on many tokens."""

    def __init__(self, model: TextModel, target: Target) -> None:
        self._pool = pool = model.layers[0].moe.experts.pool
        self._scratch = VisitScratch(pool.experts, target.device)
        self._visits = [Visit(layer.moe.experts.tables, self._scratch, pool.layout.nbytes, target) for layer in model.layers]
        self._fetch = Fetch(self._scratch.copies, pool.layout.nbytes, target)

    def __call__(self, index: int, ids: torch.Tensor) -> torch.Tensor | None:
        """ids int32 [T, top_k] of layer `index` -> the table by which its experts are found; None: the layer's own."""
        pool = self._pool
        if pool.full:
            return None
        places = pool.places()
        self._visits[index](ids, places)
        if pool.host_serves:
            pool.serve(index, self._scratch.copies, places)
        self._fetch()
        return self._scratch.visiting


class _Layer:
    def __init__(
        self, index: int, layer: LayerWeights, model: TextModel, rows: RowKernels, rule: DeltaRulePlan, attention: AttentionPrefillPlan,
        launchers: Launchers, visits: Visits | None,
    ) -> None:  # fmt: skip
        self._index, self._visits = index, visits
        dtype = model.embedding.dtype
        self.input_norm, self.post_norm = vector(layer.input_norm), vector(layer.post_norm)
        if isinstance(layer.mixer, AttentionWeights):
            self.mixer: _Attention | _DeltaNet = _Attention(layer.mixer, model, rows, attention, launchers)
        else:
            self.mixer = _DeltaNet(layer.mixer, model, rows, rule, launchers)
        top_k, moe = model.config.num_experts_per_tok, layer.moe
        self._route = RoutePlan(moe.router, moe.shared_switch, self.post_norm, top_k, launchers, dtype)
        self._experts = ExpertsPrefillPlan(moe, top_k, launchers, dtype)
        self.product = self._experts.product

    def experts(self, call: Call, normed: torch.Tensor, residual: torch.Tensor, inverse: torch.Tensor) -> Delta:
        tokens, scratch, choices = call.tokens, call.scratch, self._experts.top_k + 1
        tile = self._experts.tiles(tokens).tokens
        ids, order = scratch.get("ids", torch.int32, tokens, choices - 1), scratch.get("order", torch.int32, tokens * (choices - 1))
        shares = scratch.get("shares", torch.float32, tokens, choices)
        tiles = scratch.get("tiles", torch.int32, self._route.tiles(tokens, tile), 3)
        hidden = scratch.get("hidden", self.product, tokens * choices, self._experts.width)
        out = scratch.get("experts", call.dtype, tokens, choices, normed.shape[1])
        logits = scratch.get("logits", torch.float32, self._route.splits(tokens), tokens, self._route.experts + 1)
        self._route(residual, inverse, logits, ids, shares, order, tiles, tile)
        table = None if self._visits is None else self._visits(self._index, ids)
        self._experts(normed, shares, order, tiles, hidden, out, table)
        return Delta(out, choices, choices, 1)


class _Attention:
    def __init__(self, weights: AttentionWeights, model: TextModel, rows: RowKernels, plan: AttentionPrefillPlan, launchers: Launchers) -> None:
        dtype, config = model.embedding.dtype, model.config
        self._qkv = ProjectionPlan([weights.q, weights.k, weights.v], launchers, dtype)
        self._o = ProjectionPlan([weights.o], launchers, dtype)
        self.projections = (self._qkv, self._o)
        self._q_norm, self._k_norm = vector(weights.q_norm), vector(weights.k_norm)
        self._rows, self._plan, self._config = rows, plan, config

    def __call__(self, call: Call, normed: torch.Tensor, store: KeyValueStore) -> Delta:
        config, tokens, scratch = self._config, call.tokens, call.scratch
        heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = call.project("qkv", self._qkv, normed)
        query, keys = scratch.get("query", call.dtype, tokens, heads, head), scratch.get("keys", call.dtype, tokens, kv_heads, head)
        self._rows.rotary(qkv, self._q_norm, self._k_norm, call.angles, query, keys)
        values = qkv[:, (2 * heads + kv_heads) * head :].view(tokens, kv_heads, head)
        all_keys, all_values = store.append(keys, values)
        mixed = scratch.get("mixed heads", self._o.input_type(tokens), tokens, heads * head)
        self._plan(query, all_keys, all_values, qkv, mixed.view(tokens, heads, head))
        return call.project_delta(self._o, mixed)


class _DeltaNet:
    def __init__(self, weights: DeltaNetWeights, model: TextModel, rows: RowKernels, rule: DeltaRulePlan, launchers: Launchers) -> None:
        dtype = model.embedding.dtype
        # b and a are 2 * heads rows in all: copied together, so that one product makes everything.
        gates = torch.cat([weight.to(dtype) for weight in (weights.b, weights.a)]).contiguous()
        self._in = ProjectionPlan([weights.qkv, weights.z], launchers, dtype, tail=gates)
        self._out = ProjectionPlan([weights.out], launchers, dtype)
        self.projections = (self._in, self._out)
        self._conv = aligned(weights.conv.to(dtype))
        self._a_log, self._dt_bias, self._norm = vector(weights.a_log), vector(weights.dt_bias), vector(weights.norm)
        self._rows, self._rule, self._config = rows, rule, model.config

    def __call__(self, call: Call, normed: torch.Tensor, state: DeltaNetState) -> Delta:
        config, tokens, scratch, rule = self._config, call.tokens, call.scratch, self._rule
        state.conv, state.recurrent = aligned(state.conv), aligned(state.recurrent)
        projected, stride = call.project("projected in", self._in, normed), self._in.rows
        mixed = scratch.get("mixed", call.dtype, tokens, config.conv_dim)
        self._rows.conv(projected, stride, self._conv, state.conv, mixed)
        buffers = {name: scratch.get(name, torch.float32, *shape) for name, shape in rule.scratch(tokens).items()}
        values = scratch.get("values", torch.float32, tokens, rule.heads, rule.dv)
        offset = config.conv_dim + config.linear_value_dim
        rule(mixed, projected, stride, offset, self._a_log, self._dt_bias, state.conv, state.recurrent, **buffers, out=values)
        gated = scratch.get("gated", self._out.input_type(tokens), tokens, config.linear_value_dim)
        self._rows.gated_norm(values, projected, stride, config.conv_dim, self._norm, gated)
        return call.project_delta(self._out, gated)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it as it is: without gaps, from a multiple of 16 bytes on; else a copy."""
    return tensor if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 else tensor.contiguous().clone()


def vector(weight: torch.Tensor) -> torch.Tensor:
    """A small weight in float32, as kernels read it."""
    return aligned(weight.float())
