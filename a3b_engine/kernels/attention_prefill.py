"""Causal attention of many tokens over everything stored, with the sigmoid gate on the way out: one launch.

The rows of a tile are (token, query head of one kv head), so that a tile of keys and values is read once for the heads
that share it, few tokens fill a tile too, and tokens that begin behind a long history need no mask in memory. The softmax
is computed as the keys pass ("online", arXiv 2205.14135).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..config import TextConfig
from ..model.attention import causal_attention
from .launcher import TRITON_TYPES, Launcher, Launchers
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test
from .weight_tiles import dot, saturated

_LOG2E = 1.4426950408889634


@triton.jit
def _keys_passed(
    query, keys, values, seen, start, stop, total, best, weight_sum, acc, key_stride, value_stride, scale,
    HEAD: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values from `start` to `stop` taken into the running softmax; row r sees the first seen[r] of them."""
    column = tl.arange(0, HEAD)
    for first in range(start, stop, BK):
        index = first + tl.arange(0, BK)
        valid = index
        if MASKED:
            valid = tl.minimum(index, total - 1)  # finite where nobody looks
        scores = dot(query, tl.trans(tl.load(keys + valid.to(tl.int64)[:, None] * key_stride + column[None, :])), tl.zeros((query.shape[0], BK), tl.float32))
        scores = scores * scale
        if MASKED:
            scores = tl.where(index[None, :] < seen[:, None], scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        value = tl.load(values + valid.to(tl.int64)[:, None] * value_stride + column[None, :])
        acc = dot(weights.to(value.dtype), value, acc * shrink[:, None])
        best = higher
    return best, weight_sum, acc


@triton.jit(do_not_specialize=["count", "total", "key_stride", "value_stride"])
def attend_kernel(
    query, keys, values, qkv, out, count, total, key_stride, value_stride, scale,
    OUT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [count, HEADS, HEAD] = sigmoid(gate) * attention of the last `count` of `total` tokens. Grid (tiles of BQ rows, KV_HEADS).

    query [count, HEADS, HEAD]; keys, values [total, KV_HEADS, HEAD] with rows key_stride and value_stride * 16 elements
    apart; the gates stand in qkv [count, 2 * (HEADS + KV_HEADS) * HEAD] behind each head's query. scale includes log2(e).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    kv_head = tl.program_id(1)
    row, column = tile * BQ + tl.arange(0, BQ), tl.arange(0, HEAD)
    token = row // GROUP
    live = (token < count)[:, None]
    token = tl.minimum(token, count - 1)
    head = (token * HEADS + kv_head * GROUP + row % GROUP).to(tl.int64)[:, None] * HEAD
    seen = total - count + token + 1
    every = total - count + tl.minimum(tile * BQ // GROUP, count - 1) + 1  # keys that all rows see
    stop = total - count + tl.minimum((tile * BQ + BQ - 1) // GROUP, count - 1) + 1
    q = tl.load(query + head + column[None, :])
    best = tl.full((BQ,), -float("inf"), tl.float32)
    weight_sum = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, HEAD), tl.float32)
    keys += kv_head * HEAD
    values += kv_head * HEAD
    whole = every // BK * BK
    best, weight_sum, acc = _keys_passed(
        q, keys, values, seen, 0, whole, total, best, weight_sum, acc, key_stride * 16, value_stride * 16, scale, HEAD, BK, False
    )
    best, weight_sum, acc = _keys_passed(
        q, keys, values, seen, whole, stop, total, best, weight_sum, acc, key_stride * 16, value_stride * 16, scale, HEAD, BK, True
    )
    STRIDE: tl.constexpr = 2 * (HEADS + KV_HEADS) * HEAD
    gates = token.to(tl.int64) * STRIDE + (kv_head * GROUP + row % GROUP) * (2 * HEAD) + HEAD
    gate = tl.load(qkv + gates[:, None] + column[None, :]).to(tl.float32)
    value = acc / weight_sum[:, None] / (1.0 + tl.exp(-gate))
    tl.store(out + head + column[None, :], saturated(value, OUT), mask=live)


class AttentionTiles(NamedTuple):
    """Rows (tokens times heads of a group) and keys a program takes at once, warps and stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def attention_tiles(config: TextConfig, tokens: int, target: Target) -> AttentionTiles:
    """At head_dim 256 a row of keys and values takes 1 KiB of shared memory a stage."""
    if target.interpreted:
        return AttentionTiles(16, 16, 4, 1)
    if target.capability in ((9, 0), (10, 0)) and tokens > 128:
        return AttentionTiles(128, 64, 8, 2)
    if target.capability in ((8, 0), (9, 0), (10, 0)):
        return AttentionTiles(64, 64, 8, 2)
    return AttentionTiles(64, 32, 8, 2)


class AttentionPrefillPlan:
    """The launch for one model's sizes."""

    def __init__(self, config: TextConfig, launchers: Launchers, *, tiles: AttentionTiles | None = None) -> None:
        head = config.head_dim
        if head & (head - 1) or not 16 <= head <= 256:
            raise UnsupportedByKernel(f"head_dim {head} is not a power of two from 16 to 256")
        self.config, self._launchers, self._tiles = config, launchers, tiles
        self._launches: dict[tuple[AttentionTiles, torch.dtype], Launcher] = {}
        self._sizes = dict(HEADS=config.num_attention_heads, KV_HEADS=config.num_key_value_heads, HEAD=head)

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """query [T, heads, d]; keys, values [S, kv_heads, d] whose rows may have gaps, the last T of them this call's; qkv: the projections that
        hold the gates; out [T, heads, d]."""
        config, tokens = self.config, query.shape[0]
        keys, values = on_grid(keys), on_grid(values)
        tiles = self._tiles or attention_tiles(config, tokens, self._launchers.target)
        launch = self._launches.get((tiles, out.dtype))
        if launch is None:
            launch = self._launches[tiles, out.dtype] = self._launchers.get(
                attend_kernel, OUT=TRITON_TYPES[out.dtype], **self._sizes, BQ=tiles.rows, BK=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages
            )
        group = config.num_attention_heads // config.num_key_value_heads
        grid = (-(-tokens * group // tiles.rows), config.num_key_value_heads, 1)
        scale = config.head_dim**-0.5 * _LOG2E
        launch(grid, query, keys, values, qkv, out, tokens, keys.shape[0], keys.stride(0) // 16, values.stride(0) // 16, scale)


def on_grid(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [S, kv_heads, d] as the kernel reads it; copied where its rows do not begin at multiples of 16 elements or are not whole."""
    fits = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.contiguous().clone()


@self_test("attention_prefill", limit=8e-3)
def check(target: Target) -> float:
    """Against causal_attention in float64, alone and behind a history; the cache is a part of a larger one full of NaN."""
    config, worst = self_test_sizes(target), 0.0
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    plan = AttentionPrefillPlan(config, Launchers(target))
    generator = torch.Generator(device=device).manual_seed(1)
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for tokens, total in ((1, 1), (5, 40)) if target.interpreted else ((1, 1), (70, 70), (130, 700), (9, 300)):
        query, qkv, keys, values = (
            torch.randn(shape, device=device, generator=generator).to(dtype)
            for shape in ((tokens, heads, head), (tokens, 2 * (heads + kv_heads) * head), *((total, kv_heads, head),) * 2)
        )
        cache = torch.full((2, total + 70, kv_heads, head), torch.nan, device=device, dtype=dtype)
        cache[0, :total], cache[1, :total] = keys, values
        out = torch.full((tokens, heads, head), torch.nan, device=device, dtype=dtype)
        plan(query, cache[0, :total], cache[1, :total], qkv, out)
        gate = qkv[:, : heads * 2 * head].view(tokens, heads, 2 * head)[..., head:]
        expected = causal_attention(query.double(), keys.double(), values.double()) * torch.sigmoid(gate.double())
        worst = max(worst, relative_error(out, expected))
    return worst
