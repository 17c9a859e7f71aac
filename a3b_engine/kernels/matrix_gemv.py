"""Kernels on the matrix units (matrix_units): FP8 projections, and the experts' two launches."""

import triton
import triton.language as tl

from .matrix_units import (
    lane_of, load_step, load_steps, multiply_step, multiply_steps, over_lanes, over_lanes_one, power_of_two_for, shared_memory,
    store_pieces, sum_and_largest, touch,
)  # fmt: skip
from .rows import TABLE_COLUMNS, let_next_start, multiply, wait_for_inputs


@triton.jit
def prepare(values, gain, address, column, eps, K: tl.constexpr, NORM: tl.constexpr):
    """The vector's pieces into shared memory, normed; the factor its products have to be multiplied with."""
    if NORM:
        plain, values = values, values * gain
        squares, largest = tl.reduce((plain * plain, tl.abs(values)), 0, sum_and_largest)
        high, low = power_of_two_for(largest)
        low = low * tl.rsqrt(squares / K + eps)
    else:
        high, low = power_of_two_for(tl.max(tl.abs(values), 0))
    store_pieces(values * high, address + column * 2)
    tl.debug_barrier()
    return low


@triton.jit
def matrix_gemv_kernel(
    x, norm, residual, out, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3, tail0, tail1, m0, m1, eps, tiles,
    K: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, MATRICES: tl.constexpr, TAIL: tl.constexpr, TAIL_ROWS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As rows.gemv_kernel, for e4m3 codes with scales of 128 x 128, K = 512 * WARPS and whole tiles of 16 * TILES rows."""
    if not LATE:
        let_next_start(PDL)
    tile = tl.program_id(0)
    if tile < tiles:
        w, s, base = w0, s0, 0
        ahead = n0 // (16 * TILES)
        if MATRICES > 1:
            further = tl.program_id(0) >= ahead
            w, s, base = tl.where(further, w1, w), tl.where(further, s1, s), tl.where(further, n0, 0)
            tile = tl.where(further, tl.program_id(0) - ahead, tile)
            ahead += n1 // (16 * TILES)
        if MATRICES > 2:
            further = tl.program_id(0) >= ahead
            w, s, base = tl.where(further, w2, w), tl.where(further, s2, s), tl.where(further, n0 + n1, base)
            tile = tl.where(further, tl.program_id(0) - ahead, tile)
            ahead += n2 // (16 * TILES)
        if MATRICES > 3:
            further = tl.program_id(0) >= ahead
            w, s, base = tl.where(further, w3, w), tl.where(further, s3, s), tl.where(further, n0 + n1 + n2, base)
            tile = tl.where(further, tl.program_id(0) - ahead, tile)
        thread = tl.arange(0, 32 * WARPS)
        first = w.to(tl.int64) + (tile * (16 * TILES)).to(tl.int64) * K + (thread % 32 // 4 * K + thread // 32 * 512 + thread % 4 * 16)
        codes = load_steps(first, first + 8 * K)
        more = load_steps(first + 256, first + (256 + 8 * K))
        if TILES == 2:
            first += 16 * K
            other_codes, other_more = load_steps(first, first + 8 * K), load_steps(first + 256, first + (256 + 8 * K))
        scale = s + tile * TILES // 8 * (K // 128) + thread // 32 * 4
        scale0, scale1, scale2, scale3 = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2), tl.load(scale + 3)
        column = tl.arange(0, K)
        gain = 1.0
        if NORM:
            gain += tl.load(norm + column)
        address = shared_memory(tile)
        wait_for_inputs(PDL)
        let_next_start(PDL and LATE)
        values = tl.load(x + column).to(tl.float32)
        row = base + tile * (16 * TILES) + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
        if TILES == 2:
            row = row[:, :, None] + tl.arange(0, 2)[None, None, :] * 16
        if RESIDUAL:
            added = tl.load(residual + row).to(tl.float32)
        low = prepare(values, gain, address, column, eps, K, NORM)
        lane, zero = lane_of(thread, address), thread * 0.0
        total = multiply_steps((zero, zero, zero, zero), codes, lane, zero, scale0, scale0, scale1, scale1)
        total = multiply_steps(total, more, lane + 512, zero, scale2, scale2, scale3, scale3)
        if TILES == 2:
            other = multiply_steps((zero, zero, zero, zero), other_codes, lane, zero, scale0, scale0, scale1, scale1)
            other = multiply_steps(other, other_more, lane + 512, zero, scale2, scale2, scale3, scale3)
            sums = over_lanes(total, other, thread, WARPS) * low
        else:
            sums = over_lanes_one(total, thread, WARPS) * low
        if RESIDUAL:
            sums += added
        tl.store(out + row, sums.to(out.dtype.element_ty))
    else:
        if TAIL > 0:
            tail_tiles = tl.num_programs(0) - tiles
            multiply(
                x, norm, residual, out, tail0, tail1, tail0, tail0, s0, s0, s0, s0, m0, m1, 0, 0,
                eps, tile - tiles, tail_tiles, 0, n0 + n1 + n2 + n3,
                K, "dense", 0, 0, 128, 1, TAIL_ROWS, K // 128, 1, 1, TAIL, True, True, NORM, RESIDUAL, PDL and LATE, PDL,
            )  # fmt: skip


@triton.jit
def matrix_up_kernel(
    x, norm, table, ids, hidden, eps,
    K: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr,
    NORM: tl.constexpr, EARLY_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As moe_decode.expert_up_kernel, for e4m3 codes with scales of 128 x 128, K = 512 * WARPS, all experts of INNER rows.
    Grid (INNER / 8 / TILES, TOP_K + 1): 8 rows of gate above 8 of up."""
    tile, choice = tl.program_id(0), tl.program_id(1)
    thread, column = tl.arange(0, 32 * WARPS), tl.arange(0, K)
    gain = 1.0
    if NORM:
        gain += tl.load(norm + column)
    address = shared_memory(tile)
    if tile == 0:  # the table was last read a token ago: without this, the way to the weights begins in memory
        touch(table.to(tl.int64) + tl.minimum((choice * (32 * WARPS) + thread) * 128, EXPERTS * (8 * TABLE_COLUMNS)))
    if EARLY_X:  # past this multiprocessor's cache, which nobody has emptied since x was written
        low = prepare(tl.load(x + column, cache_modifier=".cg").to(tl.float32), gain, address, column, eps, K, NORM)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: the next kernel reads the ids before it waits itself
    expert = tl.load(ids + choice, mask=choice < TOP_K, other=EXPERTS)
    entry = table + expert.to(tl.int64) * TABLE_COLUMNS
    offset = tile * (8 * TILES * K) + (thread % 32 // 4 * K + thread // 32 * 512 + thread % 4 * 16)
    gate, up = tl.load(entry, cache_modifier=".cg") + offset, tl.load(entry + 1, cache_modifier=".cg") + offset
    codes, more = load_steps(gate, up), load_steps(gate + 256, up + 256)
    if TILES == 2:
        gate, up = gate + 8 * K, up + 8 * K
        other_codes, other_more = load_steps(gate, up), load_steps(gate + 256, up + 256)
    place = tile * TILES // 16 * (K // 128) + thread // 32 * 4
    gate_scale = tl.load(entry + 3, cache_modifier=".cg").to(tl.pointer_type(tl.float32)) + place
    up_scale = tl.load(entry + 4, cache_modifier=".cg").to(tl.pointer_type(tl.float32)) + place
    gate0, gate1, gate2, gate3 = tl.load(gate_scale), tl.load(gate_scale + 1), tl.load(gate_scale + 2), tl.load(gate_scale + 3)
    up0, up1, up2, up3 = tl.load(up_scale), tl.load(up_scale + 1), tl.load(up_scale + 2), tl.load(up_scale + 3)
    if EARLY_X:
        tl.debug_barrier()  # or the compiler puts the scales off until they are needed
    else:
        low = prepare(tl.load(x + column).to(tl.float32), gain, address, column, eps, K, NORM)
    lane, zero = lane_of(thread, address), thread * 0.0
    total = multiply_steps((zero, zero, zero, zero), codes, lane, zero, gate0, up0, gate1, up1)
    total = multiply_steps(total, more, lane + 512, zero, gate2, up2, gate3, up3)
    row = tile * (8 * TILES) + tl.arange(0, 8)
    if TILES == 2:
        other = multiply_steps((zero, zero, zero, zero), other_codes, lane, zero, gate0, up0, gate1, up1)
        other = multiply_steps(other, other_more, lane + 512, zero, gate2, up2, gate3, up3)
        sums = tl.permute(over_lanes(total, other, thread, WARPS) * low, (0, 2, 1))
        row = row[:, None] + tl.arange(0, 2)[None, :] * 8
    else:
        sums = over_lanes_one(total, thread, WARPS) * low
    gated, straight = tl.split(sums)
    tl.store(hidden + choice * INNER + row, gated / (1.0 + tl.exp(-gated)) * straight)


@triton.jit
def matrix_down_kernel(
    hidden, shares, residual, table, ids, out,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As moe_decode.expert_down_kernel, for e4m3 codes with scales of 128 x 128, eight experts of 512 columns, one a warp;
    the warps share the columns of the shared expert, 64 each. Grid (outputs / 16,)."""
    let_next_start(PDL)
    tile, thread = tl.program_id(0), tl.arange(0, 32 * TOP_K)
    warp = thread // 32
    # Past this multiprocessor's cache, which nobody has emptied since the ids were written.
    entry = table + tl.load(ids + warp, cache_modifier=".cg").to(tl.int64) * TABLE_COLUMNS
    offset = tile * (16 * INNER) + (thread % 32 // 4 * INNER + thread % 4 * 16)
    first = tl.load(entry + 2, cache_modifier=".cg") + offset
    codes, more = load_steps(first, first + 8 * INNER), load_steps(first + 256, first + (256 + 8 * INNER))
    scale = tl.load(entry + 5, cache_modifier=".cg").to(tl.pointer_type(tl.float32)) + tile // 8 * (INNER // 128)
    scale0, scale1, scale2, scale3 = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2), tl.load(scale + 3)
    shared = tl.load(table + (EXPERTS * TABLE_COLUMNS + 2)) + offset + warp * 64
    shared_codes = load_step(shared, shared + 8 * INNER)
    shared_scale = tl.load(tl.load(table + (EXPERTS * TABLE_COLUMNS + 5)).to(tl.pointer_type(tl.float32)) + tile // 8 * (INNER // 128) + warp // 2)
    address = shared_memory(tile)
    wait_for_inputs(PDL)
    column, shared_column = tl.arange(0, TOP_K * INNER), tl.arange(0, INNER)
    values = tl.load(hidden + column) * tl.load(shares + column // INNER)
    shared_values = tl.load(hidden + TOP_K * INNER + shared_column) * tl.load(shares + TOP_K)
    row = tile * 16 + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    if RESIDUAL:
        added = tl.load(residual + row).to(tl.float32)
    high, low = power_of_two_for(tl.maximum(tl.max(tl.abs(values), 0), tl.max(tl.abs(shared_values), 0)))
    store_pieces(values * high, address + column * 2)
    store_pieces(shared_values * high, address + (TOP_K * INNER + shared_column) * 2)
    tl.debug_barrier()
    lane, zero = lane_of(thread, address), thread * 0.0
    c = multiply_step((zero, zero, zero, zero), shared_codes, lane + (TOP_K * INNER * 2 - warp * (1024 - 128)))
    total = (c[0] * shared_scale, c[1] * shared_scale, c[2] * shared_scale, c[3] * shared_scale)
    total = multiply_steps(total, codes, lane, zero, scale0, scale0, scale1, scale1)
    total = multiply_steps(total, more, lane + 512, zero, scale2, scale2, scale3, scale3)
    sums = over_lanes_one(total, thread, TOP_K) * low
    if RESIDUAL:
        sums += added
    tl.store(out + row, sums.to(out.dtype.element_ty))
