"""Gated DeltaNet over many tokens: the chunked delta rule of model.deltanet in two launches.

`prepare_kernel` does what chunks can do on their own, all at once: gates, the products inside a chunk, and the inverse of
its unit triangular matrix. `scan_kernel` walks the chunks with the state in registers. With T the inverse (times beta)
and S the state before a chunk, the values the rule writes are T (v - decay * k S): no product of T with keys is needed.
Queries and keys are exact in the type they are stored in; every other operand is given to the tensor cores as the sum of
two numbers of that type, so that products keep about 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..config import TextConfig
from ..model.deltanet import CHUNK, delta_rule_chunked
from .deltanet_decode import _softplus
from .launcher import Launchers
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test
from .weight_tiles import dot, dot_both, dot_left, split


@triton.jit
def _product(a, b, D: tl.constexpr):
    """a @ b of float32 matrices, to about float32 accuracy."""
    if D == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(lower, D: tl.constexpr, SIZE: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangular float32 [SIZE, SIZE]: substitution inside blocks of 16 rows, all
    blocks at once, then the blocks are joined by products whose powers end after SIZE / 16 factors (SIZE is 64)."""
    PART: tl.constexpr = 16
    COUNT: tl.constexpr = SIZE // PART
    block, line = tl.arange(0, COUNT), tl.arange(0, PART)
    same = block[:, None, None, None] == block[None, None, :, None]
    inside = tl.sum(tl.where(same, tl.reshape(lower, (COUNT, PART, COUNT, PART)), 0.0), 2)  # [block, row, column]
    solved = tl.where(line[None, :, None] == line[None, None, :], 1.0, 0.0) + inside * 0.0
    for i in range(1, PART):
        row = tl.sum(tl.where((line == i)[None, :, None], inside, 0.0), 1)  # [block, column]
        row = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where((line == i)[None, :, None], solved - row[:, None, :], solved)
    diagonal = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    index = tl.arange(0, SIZE)
    below = tl.where((index // PART)[:, None] > (index // PART)[None, :], lower, 0.0)
    # (1 + M)^-1 = (1 - M)(1 + M^2) for M^4 = 0
    once = _product(diagonal, below, D)
    twice = _product(once, once, D)
    joined = diagonal + _product(twice, diagonal, D)
    return joined - _product(once, joined, D)


@triton.jit(do_not_specialize=["count", "stride", "offset"])
def prepare_kernel(
    mixed, u, a_log, dt_bias, history, decay, solve, inside, count, stride, offset, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KERNEL: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per value head and chunk of SIZE tokens: decay [VALUE_HEADS, chunks * SIZE] (log, summed from the chunk's start),
    solve and inside [VALUE_HEADS, chunks, SIZE, SIZE], float32. Grid (chunks, VALUE_HEADS).

    mixed: as conv_kernel leaves it. u: rows `stride` apart, b | a of the heads at `offset`, the convolution's inputs at 0.
    The programs of the first chunk also write the last inputs to history [CHANNELS, KERNEL - 1], BLOCK channels at a time.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = mixed.dtype.element_ty
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    chunk, head = tl.program_id(0), tl.program_id(1)
    index, column = tl.arange(0, SIZE), tl.arange(0, DK)
    token = chunk * SIZE + index
    live = token < count
    valid = tl.minimum(token, count - 1).to(tl.int64)
    at = mixed + valid[:, None] * CHANNELS + (head // (VALUE_HEADS // KEY_HEADS)) * DK + column[None, :]
    query = tl.load(at)
    key = tl.load(at + KEY_HEADS * DK)
    gates = u + valid * stride + offset + head
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-tl.load(gates).to(tl.float32))), 0.0)
    bias = tl.load(dt_bias + head).to(tl.float32)
    growth = tl.exp(tl.load(a_log + head).to(tl.float32))
    log = tl.where(live, -growth * _softplus(tl.load(gates + VALUE_HEADS).to(tl.float32) + bias), 0.0)
    total = tl.cumsum(log, 0)
    tl.store(decay + (head * tl.num_programs(0) + chunk).to(tl.int64) * SIZE + index, total)
    reached = index[:, None] >= index[None, :]
    between = tl.where(reached, tl.exp(tl.where(reached, total[:, None] - total[None, :], 0.0)), 0.0)
    zero = tl.zeros((SIZE, SIZE), tl.float32)
    spot = (head * tl.num_programs(0) + chunk).to(tl.int64) * (SIZE * SIZE) + index[:, None] * SIZE + index[None, :]
    tl.store(inside + spot, dot(query, tl.trans(key), zero) * between * scale)
    lower = dot(key, tl.trans(key), zero) * between * beta[:, None]
    lower = tl.where(index[:, None] > index[None, :], lower, 0.0)
    tl.store(solve + spot, _inverse(lower, D, SIZE) * beta[None, :])
    if chunk == 0:  # the convolution, which read the old inputs, was the launch before
        HEAD_CHANNELS: tl.constexpr = (CHANNELS + VALUE_HEADS - 1) // VALUE_HEADS
        for first in range(0, HEAD_CHANNELS, BLOCK):
            here = first + tl.arange(0, BLOCK)
            channel = head * HEAD_CHANNELS + here
            mine = (here < HEAD_CHANNELS) & (channel < CHANNELS)
            for slot in tl.static_range(KERNEL - 1):
                source = count - (KERNEL - 1) + slot
                # Fewer tokens than taps: the old inputs move up, and none is overwritten before every thread has read it.
                moved = tl.load(history + channel * (KERNEL - 1) + slot + count, mask=mine & (source < 0), other=0.0)
                fresh = tl.load(u + source.to(tl.int64) * stride + channel, mask=mine & (source >= 0), other=0.0)
                tl.debug_barrier()
                tl.store(history + channel * (KERNEL - 1) + slot, tl.where(source < 0, moved, fresh.to(moved.dtype)), mask=mine)


@triton.jit(do_not_specialize=["count"])
def scan_kernel(
    mixed, decay, solve, inside, state, out, count, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [count, VALUE_HEADS, DV]; state float32 [VALUE_HEADS, DK, DV] is advanced in place. Grid (DV / BV, VALUE_HEADS)."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = mixed.dtype.element_ty
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    head = tl.program_id(1)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    index, rows = tl.arange(0, SIZE), tl.arange(0, DK)
    chunks = tl.cdiv(count, SIZE)
    place = state + head * (DK * DV) + rows[:, None] * DV + column[None, :]
    memory = tl.load(place)
    keys = mixed + (head // (VALUE_HEADS // KEY_HEADS)) * DK + rows[None, :]
    values = mixed + 2 * KEY_HEADS * DK + head * DV + column[None, :]
    square = index[:, None] * SIZE + index[None, :]
    zero = tl.zeros((SIZE, BV), tl.float32)
    for chunk in range(0, chunks):
        token = chunk * SIZE + index
        # Rows behind the last token repeat it; beta is 0 there, so that they write nothing.
        valid = tl.minimum(token, count - 1).to(tl.int64)[:, None] * CHANNELS
        query = tl.load(keys + valid)
        key = tl.load(keys + KEY_HEADS * DK + valid)
        value = tl.load(values + valid).to(tl.float32)
        number = (head * chunks + chunk).to(tl.int64)
        total = tl.load(decay + number * SIZE + index)
        last = tl.load(decay + number * SIZE + SIZE - 1)
        solve_high, solve_low = split(tl.load(solve + number * (SIZE * SIZE) + square), D)
        inside_high, inside_low = split(tl.load(inside + number * (SIZE * SIZE) + square), D)
        grown = tl.exp(total)[:, None]
        high, low = split(memory, D)
        missing_high, missing_low = split(value - grown * dot_left(key, high, low, zero), D)
        written = dot_both(solve_high, solve_low, missing_high, missing_low, zero)
        result = dot_left(query, high, low, zero) * (grown * scale)
        high, low = split(written, D)
        result = dot_both(inside_high, inside_low, high, low, result)
        tl.store(out + (token.to(tl.int64)[:, None] * VALUE_HEADS + head) * DV + column[None, :], result, mask=(token < count)[:, None])
        high, low = split(written * tl.exp(last - total)[:, None], D)
        memory = dot_left(tl.trans(key), high, low, memory * tl.exp(last))
    tl.store(place, memory)


class ScanTiles(NamedTuple):
    """Value columns a program of the scan takes, its warps and stages; warps of the preparation."""

    columns: int
    warps: int
    stages: int
    prepare_warps: int


def scan_tiles(config: TextConfig, target: Target) -> ScanTiles:
    """About one program a multiprocessor on the large cards; two stages of a chunk's operands where shared memory is large."""
    if target.interpreted:
        return ScanTiles(16, 4, 1, 4)
    if target.capability in ((9, 0), (10, 0)):
        return ScanTiles(min(config.linear_value_head_dim, 32), 4, 2, 4)
    return ScanTiles(16, 8, 2 if target.capability == (8, 0) else 1, 8)


class DeltaRulePlan:
    """The two launches for one model's sizes; scratch sizes as `scratch` says."""

    def __init__(self, config: TextConfig, launchers: Launchers, *, tiles: ScanTiles | None = None) -> None:
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
        for name, size in (("linear_key_head_dim", dk), ("linear_value_head_dim", dv)):
            if size & (size - 1) or not 16 <= size <= 128:
                raise UnsupportedByKernel(f"{name} {size} is not a power of two from 16 to 128")
        tiles = tiles or scan_tiles(config, launchers.target)
        self.config, self._launchers = config, launchers
        self.heads, self.dk, self.dv = config.linear_num_value_heads, dk, dv
        sizes = dict(KEY_HEADS=config.linear_num_key_heads, VALUE_HEADS=self.heads, DK=dk, DV=dv, SIZE=CHUNK)
        self._prepare = launchers.get(prepare_kernel, **sizes, KERNEL=config.linear_conv_kernel_dim, BLOCK=256, num_warps=tiles.prepare_warps)
        self._scan = launchers.get(scan_kernel, **sizes, BV=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages)
        self._parts = dv // tiles.columns

    def scratch(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 buffers for T tokens: decay, solve, inside."""
        chunks = -(-tokens // CHUNK)
        return {"decay": (self.heads, chunks * CHUNK), **dict.fromkeys(("solve", "inside"), (self.heads, chunks, CHUNK, CHUNK))}

    def __call__(
        self, mixed: torch.Tensor, u: torch.Tensor, stride: int, offset: int, a_log: torch.Tensor, dt_bias: torch.Tensor,
        history: torch.Tensor, state: torch.Tensor, decay: torch.Tensor, solve: torch.Tensor, inside: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """mixed [T, C] from RowKernels.conv; u: the projections it read, with b | a of the heads at `offset` of each row. history [C, kernel - 1]
        and state float32 [heads, dk, dv] are advanced in place; out float32 [T, heads, dv]."""
        tokens, scale = mixed.shape[0], self.dk**-0.5
        grid = (-(-tokens // CHUNK), self.heads, 1)
        self._prepare(grid, mixed, u, a_log, dt_bias, history, decay, solve, inside, tokens, stride, offset, scale)
        self._scan((self._parts, self.heads, 1), mixed, decay, solve, inside, state, out, tokens, scale)


@self_test("deltanet_prefill", limit=3e-4)
def check(target: Target) -> float:
    """Against delta_rule_chunked in float64 on the same unit vectors; keys that resemble each other, so that the inverse is no small
    correction. Two pieces in a row; the history of the convolution must be exact."""
    config = self_test_sizes(target)
    device, dtype, worst = target.device, torch.float32 if target.interpreted else torch.bfloat16, 0.0
    plan = DeltaRulePlan(config, Launchers(target))
    generator = torch.Generator(device=device).manual_seed(1)
    heads, channels, kernel = config.linear_num_value_heads, config.conv_dim, config.linear_conv_kernel_dim
    stride = channels + 2 * heads

    def random(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    a_log, dt_bias = random(heads), random(heads) - 2.0
    state, history = random(heads, config.linear_key_head_dim, config.linear_value_head_dim), random(channels, kernel - 1, kind=dtype)
    expected_state, common = state.double(), random(1, config.linear_num_key_heads, config.linear_key_head_dim)
    for tokens in (1, 70) if target.interpreted else (1, 200, 2):
        u = random(tokens, stride, kind=dtype)
        parts = [random(tokens, config.linear_num_key_heads, config.linear_key_head_dim) for _ in range(2)]
        units = [torch.nn.functional.normalize(part + common, dim=-1).flatten(1) for part in parts]
        mixed = torch.cat((*units, random(tokens, config.linear_value_dim)), dim=1).to(dtype)
        expected, expected_state = rule_reference(mixed, u[:, channels:], a_log, dt_bias, expected_state, config)
        expected_history = torch.cat((history, u[:, :channels].t()), dim=1)[:, tokens:].clone()
        buffers = {name: torch.full(shape, torch.nan, device=device) for name, shape in plan.scratch(tokens).items()}
        out = torch.full((tokens, heads, config.linear_value_head_dim), torch.nan, device=device)
        plan(mixed, u, stride, channels, a_log, dt_bias, history, state, **buffers, out=out)
        worst = max(worst, relative_error(out, expected), relative_error(state, expected_state))
        if not torch.equal(history, expected_history):
            return float("inf")
    return worst


def rule_reference(
    mixed: torch.Tensor, gates: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor, config: TextConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """delta_rule_chunked of model.deltanet on what DeltaRulePlan reads, in the dtype of `state`; gates = b | a [T, 2 * heads]."""
    tokens, heads, key_heads, key_dim = mixed.shape[0], config.linear_num_value_heads, config.linear_num_key_heads, config.linear_key_dim
    query, key, value = mixed.to(state.dtype).split((key_dim, key_dim, config.linear_value_dim), dim=-1)
    query, key = (part.view(tokens, key_heads, -1).repeat_interleave(heads // key_heads, dim=1) for part in (query, key))
    b, a = gates.to(state.dtype).split(heads, dim=-1)
    log = -a_log.to(state.dtype).exp() * torch.nn.functional.softplus(a + dt_bias.to(state.dtype))
    return delta_rule_chunked(query * config.linear_key_head_dim**-0.5, key, value.view(tokens, heads, -1), log, torch.sigmoid(b), state)
