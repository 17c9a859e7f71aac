"""Gated attention of one token in two launches that serve every length up to the capacity of the cache.

`_attend` makes queries and the new key (norm, rotary), appends key and value, and attends to a fixed number of slices of
the cache (split-KV, "flash-decoding"); `_combine` joins the slices in fixed order and applies the sigmoid gate. Length
and rotary position are read on the device, so that one captured graph is replayed token after token. In decode all three
rotary axes stand at the same position, which makes M-RoPE plain rotary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..config import TextConfig
from ..model.attention import causal_attention
from ..model.linear import rms_norm
from ..model.rotary import mrope_cos_sin, rotate
from .norms import rounded
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HEAD_TILE = 16  # rows of a tensor-core tile: the query heads of one kv head, padded


@triton.jit
def _normed_rotated(base, rows, live, weight, inverse, position, eps, HEAD: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr):
    """Norm and rotate rows of HEAD values that begin at base + rows; [len(rows), HEAD] float32 on the grid of D."""
    columns = tl.arange(0, HEAD)
    turned = columns < ROTARY
    lower = columns < ROTARY // 2
    partner = tl.where(turned, tl.where(lower, columns + ROTARY // 2, columns - ROTARY // 2), columns)
    mask = live[:, None] & (columns >= 0)[None, :]
    x = tl.load(base + rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
    x = rounded(x * root * (1.0 + tl.load(weight + columns).to(tl.float32))[None, :], D)
    other = rounded(other * root * (1.0 + tl.load(weight + partner).to(tl.float32))[None, :], D)
    angle = position * tl.load(inverse + columns % (ROTARY // 2), mask=turned, other=0.0)
    cosine, sine = rounded(tl.cos(angle), D), rounded(tl.sin(angle), D)
    other = tl.where(lower[None, :], -other, other)
    moved = rounded(rounded(x * cosine[None, :], D) + rounded(other * sine[None, :], D), D)
    return tl.where(turned[None, :], moved, x)


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    """a @ b with float32 sums. Two-byte types take the tensor cores: b is exact there, and a is given as high + low part."""
    if DOT == tl.float32:
        result = tl.dot(a, b, input_precision="ieee")
    else:
        high = a.to(DOT)
        result = tl.dot((a - high.to(tl.float32)).to(DOT), b.to(DOT))
        result = tl.dot(high, b.to(DOT), result)
    return result


@triton.jit
def _attend(
    qkv, q_weight, k_weight, inverse, cache, length_at, position_at, top, total, mixed, eps, scale, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROTARY: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    STORED: tl.constexpr = cache.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_at).to(tl.int32)
    slice_rows = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * slice_rows
    stop = tl.minimum(start + slice_rows, length)
    heads = tl.arange(0, TILE)
    live = heads < GROUP
    head = kv_head * GROUP + heads
    if (start < stop) | (split == 0):
        position = tl.load(position_at).to(tl.float32)
        columns = tl.arange(0, HEAD)
        query = _normed_rotated(qkv, head * (2 * HEAD), live, q_weight, inverse, position, eps, HEAD, ROTARY, D)
        plane = capacity.to(tl.int64) * (KV_HEADS * HEAD)
        best = tl.full((TILE,), -float("inf"), tl.float32)
        weight_sum = tl.zeros((TILE,), tl.float32)
        value_sum = tl.zeros((TILE, HEAD), tl.float32)
        for first in range(start, stop, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            at = cache + rows.to(tl.int64)[:, None] * (KV_HEADS * HEAD) + kv_head * HEAD + columns[None, :]
            seen = (rows < stop)[:, None] & (columns >= 0)[None, :]
            keys = tl.load(at, mask=seen, other=0.0).to(tl.float32)
            values = tl.load(at + plane, mask=seen, other=0.0).to(tl.float32)
            scores = _dot(query, tl.trans(keys), DOT) * scale
            scores = tl.where((rows < stop)[None, :], scores, -float("inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            shrink = tl.exp(best - higher)
            weights = tl.exp(scores - higher[:, None])
            weight_sum = weight_sum * shrink + tl.sum(weights, 1)
            value_sum = value_sum * shrink[:, None] + _dot(weights, values, DOT)
            best = higher
        if split == 0:  # the new token: this program alone writes it, the others end before it
            kv_row = tl.zeros((1,), tl.int32) + HEADS * 2 * HEAD + kv_head * HEAD
            key = _normed_rotated(qkv, kv_row, kv_row >= 0, k_weight, inverse, position, eps, HEAD, ROTARY, D)
            key = rounded(tl.sum(key, 0), STORED)
            value = tl.load(qkv + HEADS * 2 * HEAD + KV_HEADS * HEAD + kv_head * HEAD + columns).to(tl.float32)
            value = rounded(value, STORED)
            at = cache + length.to(tl.int64) * (KV_HEADS * HEAD) + kv_head * HEAD + columns
            fits = (columns >= 0) & (length < capacity)
            tl.store(at, key.to(STORED), mask=fits)
            tl.store(at + plane, value.to(STORED), mask=fits)
            score = tl.sum(query * key[None, :], 1) * scale
            higher = tl.maximum(best, score)
            shrink = tl.exp(best - higher)
            weight = tl.exp(score - higher)
            weight_sum = weight_sum * shrink + weight
            value_sum = value_sum * shrink[:, None] + weight[:, None] * value[None, :]
            best = higher
        tl.store(top + head * SPLITS + split, best, mask=live)
        tl.store(total + head * SPLITS + split, weight_sum, mask=live)
        spot = (head * SPLITS + split)[:, None] * HEAD + columns[None, :]
        tl.store(mixed + spot, value_sum, mask=live[:, None] & (columns >= 0)[None, :])
    else:
        tl.store(total + head * SPLITS + split, tl.zeros((TILE,), tl.float32), mask=live)


@triton.jit
def _combine(qkv, top, total, mixed, out, HEAD: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    head = tl.program_id(0)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, HEAD)
    weight = tl.load(total + head * SPLITS + splits)
    used = weight > 0.0  # the rest of an unused slice was never written
    best = tl.load(top + head * SPLITS + splits, mask=used, other=-float("inf"))
    factor = tl.exp(best - tl.max(best, 0))
    parts = tl.load(mixed + (head * SPLITS + splits)[:, None] * HEAD + columns[None, :], mask=used[:, None], other=0.0)
    value = rounded(tl.sum(parts * factor[:, None], 0) / tl.sum(weight * factor, 0), D)
    gate = tl.load(qkv + head * (2 * HEAD) + HEAD + columns).to(tl.float32)
    gate = rounded(1.0 / (1.0 + tl.exp(-gate)), D)
    tl.store(out + head * HEAD + columns, rounded(value * gate, D).to(D))


@dataclass(frozen=True)
class AttentionPlan:
    """How attention is launched on one card: slices of the cache a kv head, rows a step, warps and load stages; and the
    type the products are made in (float32 only under the interpreter, which knows no two-byte products)."""

    splits: int
    block: int
    warps: int
    stages: int
    products: torch.dtype


def plan_attention(config: TextConfig, dtype: torch.dtype, where: Target) -> AttentionPlan:
    """The fixed launch of a card for a cache of `dtype`: about one program a multiprocessor. `UnsupportedByKernel` for what it cannot take."""
    head, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    if head & (head - 1) or not 16 <= head <= 256:
        raise UnsupportedByKernel(f"head_dim {head} is not a power of two from 16 to 256")
    if group > HEAD_TILE:
        raise UnsupportedByKernel(f"{group} query heads a kv head, at most {HEAD_TILE} fit a tile")
    if where.interpreted:
        return AttentionPlan(splits=4, block=16, warps=4, stages=1, products=torch.float32)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedByKernel(f"a cache of {dtype} fills the registers of every card")
    wanted = max(1, where.multiprocessors // config.num_key_value_heads)
    splits = min(64, 1 << (wanted.bit_length() - 1))
    # sm_86, sm_89 and sm_120 have 100 KiB of shared memory a multiprocessor: two stages of 32 rows of keys and values
    large = where.capability in ((8, 0), (9, 0), (10, 0))
    return AttentionPlan(splits=splits, block=32, warps=4, stages=3 if large else 2, products=dtype)


class AttentionScratch:
    """Buffers between the two launches, one set for all layers: slice maxima and sums [heads, splits], values [heads, splits, head_dim], float32."""

    def __init__(self, config: TextConfig, plan: AttentionPlan, device: torch.device) -> None:
        shape = (config.num_attention_heads, plan.splits)
        self.top = torch.empty(shape, dtype=torch.float32, device=device)
        self.total = torch.empty(shape, dtype=torch.float32, device=device)
        self.mixed = torch.empty((*shape, config.head_dim), dtype=torch.float32, device=device)
        self.inverse = inverse_frequencies(config, device)


def inverse_frequencies(config: TextConfig, device: torch.device) -> torch.Tensor:
    """float32 [rotary_dim / 2], computed as `model.rotary` does."""
    exponent = torch.arange(config.rotary_dim // 2, dtype=torch.float32, device=device) * 2 / config.rotary_dim
    return 1.0 / config.rope_theta**exponent


def attention_decode(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, cache: torch.Tensor, length: torch.Tensor, position: torch.Tensor,
    out: torch.Tensor, scratch: AttentionScratch, plan: AttentionPlan, config: TextConfig, *, pdl: bool = False,
) -> None:  # fmt: skip
    """One token: append its key and value, attend to all, gate.

    qkv [heads*2*head_dim + 2*kv_heads*head_dim]: the projections q | k | v, in q per head query then gate. q_norm, k_norm
    [head_dim]. cache [2, capacity, kv_heads, head_dim]: keys and values; row `length` is written, rows behind it are never
    read. length, position: integer [1] on the device: tokens in the cache before this one (< capacity: the caller sees to
    it, a token too many is attended to but not stored), and the rotary position. out [heads*head_dim] in the type of qkv.
    """
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    options = {"launch_pdl": True} if pdl else {}
    _attend[(kv_heads, plan.splits)](
        qkv, q_norm, k_norm, scratch.inverse, cache, length, position, scratch.top, scratch.total, scratch.mixed,
        config.rms_norm_eps, head**-0.5, cache.shape[1],
        HEADS=heads, KV_HEADS=kv_heads, HEAD=head, ROTARY=config.rotary_dim, SPLITS=plan.splits,
        BLOCK=plan.block, TILE=HEAD_TILE, DOT=_TRITON_TYPES[plan.products], PDL=pdl, num_warps=plan.warps, num_stages=plan.stages, **options,
    )  # fmt: skip
    _combine[(heads,)](
        qkv, scratch.top, scratch.total, scratch.mixed, out, HEAD=head, SPLITS=plan.splits, PDL=pdl, num_warps=4, **options
    )


def attention_decode_reference(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, cache: torch.Tensor, length: int, position: int, config: TextConfig
) -> torch.Tensor:
    """What `attention_decode` computes, with the functions of `model`; row `length` of the cache is written. -> [heads*head_dim]"""
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query_gate, key, value = qkv.split((heads * 2 * head, kv_heads * head, kv_heads * head))
    query, gate = query_gate.view(1, heads, 2 * head).chunk(2, dim=-1)
    rotary = mrope_cos_sin(torch.full((3, 1), position, dtype=torch.int64, device=qkv.device), config)
    query = rotate(rms_norm(query, q_norm, config.rms_norm_eps), *rotary)
    cache[0, length] = rotate(rms_norm(key.view(1, kv_heads, head), k_norm, config.rms_norm_eps), *rotary)[0]
    cache[1, length] = value.view(kv_heads, head)
    mixed = causal_attention(query, cache[0, : length + 1], cache[1, : length + 1])
    return (mixed * torch.sigmoid(gate)).view(-1)


@self_test("attention_decode", limit=1e-2)
def _check(where: Target) -> float:
    """Three lengths of a cache whose unused rows hold NaN; the written row is compared too."""
    config, capacity, worst = self_test_sizes(where), 200, 0.0
    plan = plan_attention(config, torch.bfloat16, where)
    scratch = AttentionScratch(config, plan, where.device)
    generator = torch.Generator().manual_seed(2)
    width = 2 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(where.device, torch.bfloat16)

    q_norm, k_norm = random(config.head_dim) * 0.2, random(config.head_dim) * 0.2
    full = random(2, capacity, config.num_key_value_heads, config.head_dim)
    for length in (0, 130, capacity - 1):
        qkv, cache = random(width), full.clone()
        cache[:, length:] = torch.nan
        expected_cache = cache.clone()
        expected = attention_decode_reference(qkv, q_norm, k_norm, expected_cache, length, length + 9, config)
        out = torch.full_like(expected, torch.nan)
        counters = (torch.tensor([number], device=where.device) for number in (length, length + 9))
        attention_decode(qkv, q_norm, k_norm, cache, *counters, out, scratch, plan, config, pdl=where.pdl)
        worst = max(worst, relative_error(out, expected), relative_error(cache[:, length], expected_cache[:, length]))
    return worst
