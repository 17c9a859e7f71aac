"""One token through all layers by kernels, in buffers that never move: launched one by one, or captured as one CUDA graph.

A layer is five launches: projections with the input norm inside; attention or DeltaNet; output projection onto the
residual stream; router; experts (two) onto the residual stream. The stream is float32 throughout. Everything a launch
needs is settled when the step is made; the token, the length of the sequence and its rotary position are read on the
device, so that a captured step is replayed for every token.
"""

from __future__ import annotations

from typing import Callable

import torch

from ..checkpoint.packed import PackedWeight
from ..kernels import packed_experts, packed_gemv
from ..kernels.attention_decode import AttentionScratch, attention_decode, plan_attention
from ..kernels.begin_step import begin_step
from ..kernels.deltanet_decode import DeltaNetScratch, conv_from_ring, deltanet_decode, plan_deltanet, ring_from_conv
from ..kernels.expert_slots import Fetch, TakeSlots
from ..kernels.expert_table import matrices_of
from ..kernels.gemv import Product
from ..kernels.moe_decode import ExpertsPlan
from ..kernels.packed_gemv import product
from ..kernels.router import router_of
from ..kernels.support import Target
from ..memory.pool import SlotPool
from ..memory.pooled import PooledExperts
from ..model.attention import AttentionWeights
from ..model.deltanet import DeltaNetWeights
from ..model.moe import MoEWeights
from ..model.text import LayerWeights, TextModel
from .cache import SequenceState
from .capture import Launch, captured

# Whose self-tests speak for this module.
KERNELS = ("begin_step", "fp8_gemv", "dense_gemv", "router", "moe_decode", "attention_decode", "deltanet_decode", "sampler")
# Faster forms of some of them, which are taken by themselves where they work.
FASTER = ("fp8_gemv.matrix_units", "moe_decode.matrix_units")


def packed_kernels(model: TextModel) -> tuple[str, ...]:
    """Whose self-tests speak for the packed weights of `model`; their plans ask for them, one after another."""
    names: dict[str, None] = {}
    for layer in model.layers:
        if any(isinstance(matrix, PackedWeight) for matrix in matrices_of(layer.moe)):
            tests = packed_experts.self_tests(layer.moe)
            names |= dict.fromkeys(tests[0] + tests[1])
        tests = packed_gemv.self_tests([*vars(layer.mixer).values(), model.head])
        names |= dict.fromkeys(tests[0] + tests[1])
    return tuple(names)


# Replaces the experts that a router chose: layer, then ids int32 [top_k] to write into, in one launch.
Reroute = Callable[[int, torch.Tensor], None]


def trial_step(model: TextModel, where: Target) -> None:
    """Plan a step for `model` and throw it away: `UnsupportedByKernel` for a model the kernels cannot take."""
    state = SequenceState(model.config, 1, where.device, model.embedding.dtype, capacity=1)
    DecodeStep(model, state, torch.zeros(1, dtype=torch.int64, device=where.device), where).close()


class DecodeStep:
    """The launches of one token over one `SequenceState` with fixed buffers.

    token: int64 [1] on the device, read by every step. After a step `logits` float32 [vocab] belong to the token behind
    it. Where experts are in slots there are two graphs: one for when all are on the device, and one that fetches those that
    are not. Experts that the device cannot fetch by itself are served by the host, launch by launch.
    Raises `UnsupportedByKernel` for a model the kernels cannot take.
    """

    def __init__(self, model: TextModel, state: SequenceState, token: torch.Tensor, where: Target, reroute: Reroute | None = None) -> None:
        config = model.config
        self._reroute = reroute
        self._pool = _pool_of(model)
        self._model, self._state, self._where = model, state, where
        device, dtype = where.device, model.embedding.dtype
        self._attention_plan = plan_attention(config, dtype, where)
        self._attention_scratch = AttentionScratch(config, self._attention_plan, device)
        self._deltanet_plan = plan_deltanet(config, where)
        self._deltanet_scratch = DeltaNetScratch(config, device)
        self._length, self._position = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._stream = torch.zeros(config.hidden_size, dtype=torch.float32, device=device)
        self._mixed = torch.zeros(max(config.linear_value_dim, config.num_attention_heads * config.head_dim), dtype=dtype, device=device)
        deltanet_rows = config.conv_dim + config.linear_value_dim + 2 * config.linear_num_value_heads
        attention_rows = 2 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
        self._projected = torch.zeros(max(deltanet_rows, attention_rows), dtype=dtype, device=device)
        self.logits = torch.zeros(config.vocab_size, dtype=torch.float32, device=device)
        ring = (len(config.linear_attention_layers), config.linear_conv_kernel_dim, config.conv_dim)
        self._rings = torch.zeros(ring, dtype=dtype, device=device)
        self._launches: list[Launch] = [lambda: begin_step(token, model.embedding, self._stream, self._length, self._position)]
        for index, layer in enumerate(model.layers):
            self._launches += self._layer(index, layer)
        head = product([model.head], where, norm=model.norm.float(), eps=config.rms_norm_eps, pdl=where.pdl)
        self._launches.append(lambda: head(self._stream, self.logits))
        self._head = product([model.head], where)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether all experts are on the device

    # Using it

    def enter(self) -> None:
        """Take over the sequence as prefill left it, before the first step and after every `leave`."""
        state = self._state
        ring_from_conv(state.conv, state.length, self._rings)
        self._length.fill_(state.length - 1)  # a step begins by counting
        self._position.fill_(state.next_position - 1)

    def begin_behind(self, hidden: torch.Tensor) -> None:
        """Make `logits` those of hidden [1, D], the last row of a prompt after the final norm, and `enter`."""
        self.enter()
        self._head(hidden[0], self.logits)

    def leave(self) -> None:
        """Hand the sequence back for prefill to go on with it."""
        conv_from_ring(self._rings, self._state.length, self._state.conv)

    def launch(self) -> None:
        """Queue one token on the current stream; nothing is waited for."""
        graph = None if self._pool is not None and self._pool.host_serves else self._graphs.get(self._all_here)
        if graph is not None:
            graph.replay()
        else:
            self.launch_one_by_one()
        self._state.advance(1)

    def launch_one_by_one(self) -> None:
        """The same kernels without a graph."""
        for launch in self._launches:
            launch()

    def capture(self) -> None:
        """Record the step as a graph, for the experts' places as they are. Runs a throw-away token first: call before `enter`."""
        if self._all_here in self._graphs or (self._pool is not None and self._pool.host_serves):
            return
        self._length.fill_(-1)
        self._position.fill_(-1)
        self._graphs[self._all_here] = captured(self.launch_one_by_one, self._where.device)

    @property
    def _all_here(self) -> bool:
        return self._pool is None or self._pool.full

    def close(self) -> None:
        """Let go of the model and the graphs at once. The launches refer to this object, so that it would wait for the garbage
        collector otherwise, and the weights with it."""
        self._launches.clear()
        self._graphs.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers beside the sequence's own."""
        scratch = self._attention_scratch
        tensors = (self._rings, self._projected, self._mixed, self._stream, self.logits, scratch.top, scratch.total, scratch.mixed)
        return sum(tensor.nbytes for tensor in tensors)

    # Making it

    def _layer(self, index: int, layer: LayerWeights) -> list[Launch]:
        config, where, stream = self._model.config, self._where, self._stream
        # Kernels further on read the counters early: the launch behind the one that moves them must wait for its end.
        first = dict(norm=layer.input_norm.float(), eps=config.rms_norm_eps, pdl=where.pdl and index > 0)
        post = dict(norm=layer.post_norm.float(), eps=config.rms_norm_eps, pdl=where.pdl)
        if isinstance(layer.mixer, AttentionWeights):
            launches, out = self._attention(index, layer.mixer, first)
        else:
            launches, out = self._deltanet(index, layer.mixer, first)
        router = router_of(layer.moe, config.num_experts_per_tok, where, **post)
        experts = ExpertsPlan(layer.moe, config.num_experts_per_tok, where, early_x=True, **post)  # the router was the launch ahead
        mixed = self._mixed[: out.columns]
        return launches + [
            lambda: out(mixed, stream, stream),
            lambda: router(stream),
            *([lambda: self._reroute(index, router.ids)] if self._reroute is not None else []),
            *self._fetching(index, layer.moe, router.ids),
            lambda: experts(stream, router.ids, router.shares, stream, stream),
        ]

    def _fetching(self, index: int, moe: MoEWeights, ids: torch.Tensor) -> list[Launch]:
        """What brings the experts that the router chose into slots, where they are not all there."""
        if self._pool is None:
            return []
        pool, where = self._pool, self._where
        take = TakeSlots(moe.experts.tables, len(ids), where, pdl=where.pdl)
        fetch = Fetch(take.copies, pool.layout.nbytes, where, pdl=where.pdl)

        def bring() -> None:
            if pool.full:
                return
            take(ids)
            if pool.host_serves:
                pool.serve(index, take.copies)
            fetch()

        return [bring]

    def _attention(self, index: int, weights: AttentionWeights, options: dict) -> tuple[list[Launch], Product]:
        config, where = self._model.config, self._where
        project = product([weights.q, weights.k, weights.v], where, **options)
        out = product([weights.o], where, pdl=where.pdl)
        projected, mixed = self._projected[: project.rows], self._mixed[: out.columns]
        q_norm, k_norm, cache = weights.q_norm, weights.k_norm, self._state.layers[index].buffer
        return [
            lambda: project(self._stream, projected),
            lambda: attention_decode(
                projected, q_norm, k_norm, cache, self._length, self._position, mixed,
                self._attention_scratch, self._attention_plan, config, pdl=where.pdl,
            ),
        ], out  # fmt: skip

    def _deltanet(self, index: int, weights: DeltaNetWeights, options: dict) -> tuple[list[Launch], Product]:
        config, where = self._model.config, self._where
        project = product([weights.qkv, weights.z], where, tail=[weights.a, weights.b], **options)
        out = product([weights.out], where, pdl=where.pdl)
        heads = config.linear_num_value_heads
        parts = self._projected[: project.rows].split([config.conv_dim, config.linear_value_dim, heads, heads])
        ring = self._rings[config.linear_attention_layers.index(index)]
        recurrent, mixed = self._state.layers[index].recurrent, self._mixed[: out.columns]
        return [
            lambda: project(self._stream, self._projected[: project.rows]),
            lambda: deltanet_decode(
                *parts, weights.conv, weights.a_log, weights.dt_bias, weights.norm, ring, recurrent, self._length, mixed,
                self._deltanet_scratch, self._deltanet_plan, config, pdl=where.pdl,
            ),
        ], out  # fmt: skip


def _pool_of(model: TextModel) -> SlotPool | None:
    experts = model.layers[0].moe.experts
    return experts.pool if isinstance(experts, PooledExperts) else None
