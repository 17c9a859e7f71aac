"""Gated attention of one token in two launches that serve every length up to the capacity of the cache.

`_attend` appends the new key and value and attends to slices of the cache (split-KV, "flash-decoding"), one program a
slice and one for the new token; `_combine` joins the slices in fixed order and applies the sigmoid gate. Length and
rotary position are read on the device, so that one captured graph is replayed token after token; a short cache is cut into
fewer slices. In decode all three rotary axes stand at the same position, which makes M-RoPE plain rotary.

With programmatic dependent launch everything that was there before this token is read ahead of the wait for the
projections: length, position, the weights of the norms, and the first rows of every slice.
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
from .rounding import rounded
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HEAD_TILE = 16  # rows of a tensor-core tile: the query heads of one kv head, padded
COMBINED = 64  # columns of a head that a program of the second launch joins


@triton.jit
def _turns(inverse, position, HEAD: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr):
    """Cosine and sine for every column of a head, on the grid of D; sine has the sign that its partner is added with."""
    columns = tl.arange(0, HEAD)
    angle = position * tl.load(inverse + columns % (ROTARY // 2), mask=columns < ROTARY, other=0.0)
    sine = rounded(tl.sin(angle), D)
    return rounded(tl.cos(angle), D), tl.where(columns < ROTARY // 2, -sine, sine)


@triton.jit
def _partners(HEAD: tl.constexpr, ROTARY: tl.constexpr):
    """The column that each column of a head is turned with."""
    columns = tl.arange(0, HEAD)
    return tl.where(columns < ROTARY, tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2), columns)


@triton.jit
def _normed_rotated(base, rows, live, factor, factor_of_partner, cosine, sine, eps, HEAD: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr):
    """Norm and rotate rows of HEAD values that begin at base + rows; [len(rows), HEAD] float32 on the grid of D."""
    columns = tl.arange(0, HEAD)
    mask = live[:, None] & (columns >= 0)[None, :]
    x = tl.load(base + rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + rows[:, None] + _partners(HEAD, ROTARY)[None, :], mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
    x = rounded(x * root * factor[None, :], D)
    other = rounded(other * root * factor_of_partner[None, :], D)
    moved = rounded(rounded(x * cosine[None, :], D) + rounded(other * sine[None, :], D), D)
    return tl.where((columns < ROTARY)[None, :], moved, x)


@triton.jit
def _dot(a, b, DOT: tl.constexpr, FITS: tl.constexpr):
    """a @ b with float32 sums. Two-byte types take the tensor cores: b is exact there, and so is a where it FITS; else a is
    given as high + low part."""
    if DOT == tl.float32:
        result = tl.dot(a, b.to(tl.float32), input_precision="ieee")
    elif FITS:
        result = tl.dot(a.to(DOT), b.to(DOT))
    else:
        high = a.to(DOT)
        result = tl.dot((a - high.to(tl.float32)).to(DOT), b.to(DOT))
        result = tl.dot(high, b.to(DOT), result)
    return result


@triton.jit
def _absorb(query, keys, values, seen, best, weight_sum, value_sum, scale, DOT: tl.constexpr, FITS: tl.constexpr):
    """Attend to some more rows: the running maximum, sum of weights and weighted sum of values."""
    scores = tl.where(seen[None, :], _dot(query, tl.trans(keys), DOT, FITS) * scale, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp(best - higher)
    weights = tl.exp(scores - higher[:, None])
    weight_sum = weight_sum * shrink + tl.sum(weights, 1)
    value_sum = value_sum * shrink[:, None] + _dot(weights, values, DOT, False)
    return higher, weight_sum, value_sum


@triton.jit
def _slice_rows(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of the cache a program looks at: whole blocks, so that short caches have fewer slices than SPLITS."""
    return tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK


@triton.jit
def _attend(
    qkv, q_weight, k_weight, inverse, cache, length_at, position_at, top, total, mixed, eps, scale, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROTARY: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    STORED: tl.constexpr = cache.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_at).to(tl.int32)
    heads, columns = tl.arange(0, TILE), tl.arange(0, HEAD)
    live = heads < GROUP
    head = kv_head * GROUP + heads
    partners = _partners(HEAD, ROTARY)
    step = _slice_rows(length, SPLITS, BLOCK)
    start = split * step
    stop = tl.minimum(start + step, length)
    plane = capacity.to(tl.int64) * (KV_HEADS * HEAD)
    if split == SPLITS:  # the new token: this program alone writes it, the others end before it
        cosine, sine = _turns(inverse, tl.load(position_at).to(tl.float32), HEAD, ROTARY, D)
        factor, factor_of_partner = 1.0 + tl.load(q_weight + columns).to(tl.float32), 1.0 + tl.load(q_weight + partners).to(tl.float32)
        k_factor, k_factor_of_partner = 1.0 + tl.load(k_weight + columns).to(tl.float32), 1.0 + tl.load(k_weight + partners).to(tl.float32)
        wait_for_inputs(PDL)
        query = _normed_rotated(qkv, head * (2 * HEAD), live, factor, factor_of_partner, cosine, sine, eps, HEAD, ROTARY, D)
        row = tl.zeros((1,), tl.int32) + HEADS * 2 * HEAD + kv_head * HEAD
        key = _normed_rotated(qkv, row, row >= 0, k_factor, k_factor_of_partner, cosine, sine, eps, HEAD, ROTARY, D)
        key = rounded(tl.sum(key, 0), STORED)
        value = tl.load(qkv + HEADS * 2 * HEAD + KV_HEADS * HEAD + kv_head * HEAD + columns).to(tl.float32)
        at = cache + length.to(tl.int64) * (KV_HEADS * HEAD) + kv_head * HEAD + columns
        fits = (columns >= 0) & (length < capacity)
        tl.store(at, key.to(STORED), mask=fits)
        tl.store(at + plane, rounded(value, STORED).to(STORED), mask=fits)
        tl.store(top + head * (SPLITS + 1) + SPLITS, tl.sum(query * key[None, :], 1) * scale, mask=live)
    elif start < stop:
        cosine, sine = _turns(inverse, tl.load(position_at).to(tl.float32), HEAD, ROTARY, D)
        factor, factor_of_partner = 1.0 + tl.load(q_weight + columns).to(tl.float32), 1.0 + tl.load(q_weight + partners).to(tl.float32)
        rows = start + tl.arange(0, BLOCK)
        at = cache + rows.to(tl.int64)[:, None] * (KV_HEADS * HEAD) + kv_head * HEAD + columns[None, :]
        seen = rows < stop
        mask = seen[:, None] & (columns >= 0)[None, :]
        keys = tl.load(at, mask=mask, other=0.0)
        values = tl.load(at + plane, mask=mask, other=0.0)
        wait_for_inputs(PDL)
        query = _normed_rotated(qkv, head * (2 * HEAD), live, factor, factor_of_partner, cosine, sine, eps, HEAD, ROTARY, D)
        best, weight_sum = tl.full((TILE,), -float("inf"), tl.float32), tl.zeros((TILE,), tl.float32)
        value_sum = tl.zeros((TILE, HEAD), tl.float32)
        best, weight_sum, value_sum = _absorb(query, keys, values, seen, best, weight_sum, value_sum, scale, DOT, D == DOT)
        for first in range(start + BLOCK, stop, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            at = cache + rows.to(tl.int64)[:, None] * (KV_HEADS * HEAD) + kv_head * HEAD + columns[None, :]
            seen = rows < stop
            mask = seen[:, None] & (columns >= 0)[None, :]
            keys = tl.load(at, mask=mask, other=0.0)
            values = tl.load(at + plane, mask=mask, other=0.0)
            best, weight_sum, value_sum = _absorb(query, keys, values, seen, best, weight_sum, value_sum, scale, DOT, D == DOT)
        tl.store(top + head * (SPLITS + 1) + split, best, mask=live)
        tl.store(total + head * SPLITS + split, weight_sum, mask=live)
        spot = (head * SPLITS + split)[:, None] * HEAD + columns[None, :]
        tl.store(mixed + spot, value_sum, mask=live[:, None] & (columns >= 0)[None, :])
    else:
        wait_for_inputs(PDL)


@triton.jit
def _combine(
    qkv, length_at, top, total, mixed, out,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    STORED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    head, splits = tl.program_id(0), tl.arange(0, SPLITS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(length_at).to(tl.int32)
    used = splits * _slice_rows(length, SPLITS, BLOCK) < length  # what belongs to an unused slice was never written
    wait_for_inputs(PDL)
    own_score = tl.load(top + head * (SPLITS + 1) + SPLITS)
    best = tl.load(top + head * (SPLITS + 1) + splits, mask=used, other=-float("inf"))
    weight = tl.load(total + head * SPLITS + splits, mask=used, other=0.0)
    parts = tl.load(mixed + (head * SPLITS + splits)[:, None] * HEAD + columns[None, :], mask=used[:, None], other=0.0)
    kv_head = head // (HEADS // KV_HEADS)
    own = rounded(tl.load(qkv + HEADS * 2 * HEAD + KV_HEADS * HEAD + kv_head * HEAD + columns).to(tl.float32), STORED)
    gate = tl.load(qkv + head * (2 * HEAD) + HEAD + columns).to(tl.float32)
    highest = tl.maximum(tl.max(best, 0), own_score)
    factor, own_factor = tl.exp(best - highest), tl.exp(own_score - highest)
    value = (tl.sum(parts * factor[:, None], 0) + own * own_factor) / (tl.sum(weight * factor, 0) + own_factor)
    gate = rounded(1.0 / (1.0 + tl.exp(-gate)), D)
    tl.store(out + head * HEAD + columns, rounded(rounded(value, D) * gate, D).to(D))


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
    """The fixed launch of a card for a cache of `dtype`. `UnsupportedByKernel` for what it cannot take."""
    head, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    if head & (head - 1) or not 16 <= head <= 256:
        raise UnsupportedByKernel(f"head_dim {head} is not a power of two from 16 to 256")
    if group > HEAD_TILE:
        raise UnsupportedByKernel(f"{group} query heads a kv head, at most {HEAD_TILE} fit a tile")
    if where.interpreted:
        return AttentionPlan(splits=4, block=16, warps=4, stages=1, products=torch.float32)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedByKernel(f"a cache of {dtype} fills the registers of every card")
    # Measured on an H200, us at 512, 8k and 32k tokens: 5.9 / 10.1 / 23.4 with one large program a multiprocessor, 5.4 /
    # 11.3 / 24.3 with two small ones. The number of slices is a power of two, which may leave many multiprocessors idle.
    splits = _splits(where.multiprocessors // config.num_key_value_heads)
    if where.capability in ((9, 0), (10, 0)) and splits * config.num_key_value_heads >= 0.9 * where.multiprocessors:
        return AttentionPlan(splits=splits, block=64, warps=4, stages=3, products=dtype)
    # sm_86, sm_89 and sm_120 have 100 KiB of shared memory a multiprocessor: room for two programs of two stages
    large = where.capability in ((8, 0), (9, 0), (10, 0))
    splits = _splits(2 * where.multiprocessors // config.num_key_value_heads)
    return AttentionPlan(splits=splits, block=32, warps=4, stages=3 if large else 2, products=dtype)


def _splits(programs: int) -> int:
    """The largest power of two up to that, and to 128."""
    return min(128, 1 << (max(1, programs).bit_length() - 1))


class AttentionScratch:
    """Buffers between the two launches, one set for all layers, float32: maxima [heads, splits + 1], the new token's score
    behind those of the slices; sums [heads, splits]; values [heads, splits, head_dim]."""

    def __init__(self, config: TextConfig, plan: AttentionPlan, device: torch.device) -> None:
        shape = (config.num_attention_heads, plan.splits)
        self.top = torch.empty((shape[0], plan.splits + 1), dtype=torch.float32, device=device)
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
    With pdl, all of these but qkv are read ahead of the wait for the kernel before: a launch that is an ordinary one must
    stand between this one and whatever moves length or position or writes earlier rows.
    """
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head, "SPLITS": plan.splits, "BLOCK": plan.block, "PDL": pdl}
    options = {"launch_pdl": True} if pdl else {}
    _attend[(kv_heads, plan.splits + 1)](
        qkv, q_norm, k_norm, scratch.inverse, cache, length, position, scratch.top, scratch.total, scratch.mixed,
        config.rms_norm_eps, head**-0.5, cache.shape[1],
        ROTARY=config.rotary_dim, TILE=HEAD_TILE, DOT=_TRITON_TYPES[plan.products],
        num_warps=plan.warps, num_stages=plan.stages, **shape, **options,
    )  # fmt: skip
    columns = min(head, COMBINED)
    _combine[(heads, head // columns)](
        qkv, length, scratch.top, scratch.total, scratch.mixed, out,
        STORED=_TRITON_TYPES[cache.dtype], COLUMNS=columns, num_warps=4, **shape, **options,
    )  # fmt: skip


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
