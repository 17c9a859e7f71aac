"""Packed projections on the matrix units (packed_units)."""

import triton
import triton.language as tl

from .matrix_units import shared_memory
from .packed_matrix import load_lane, prepare_two, step_scales, sum_lane
from .packed_rows import one_of, tile_of, times_factor
from .packed_units import lane_of_columns, place_of, store_zeros, sums_over_lanes
from .rows import let_next_start, wait_for_inputs


@triton.jit
def packed_matrix_gemv_kernel(
    x, norm, residual, out, w0, w1, w2, w3, s0, s1, s2, s3, z0, z1, z2, z3, f0, f1, f2, f3, n0, n1, n2, n3, eps,
    K: tl.constexpr, WARPS: tl.constexpr, LAYOUT: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As packed_gemv.packed_gemv_kernel, for K = 512 * WARPS and whole tiles of 16 rows."""
    let_next_start(PDL)
    which, tile, size, base = tile_of(tl.program_id(0), n0, n1, n2, n3, 16)
    thread, column = tl.arange(0, 32 * WARPS), tl.arange(0, K)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    BITS: tl.constexpr = 3 if LAYOUT.form == "int3" else 4
    row_bytes: tl.constexpr = K // 8 * BITS
    row = tile * 16 + g
    first = one_of(which, w0, w1, w2, w3) + (row.to(tl.int64) * row_bytes + warp * (64 * BITS) + t * (16 if BITS == 4 else 48))
    codes = load_lane(first, first + 8 * row_bytes, LAYOUT)
    scale, zero = one_of(which, s0, s1, s2, s3), one_of(which, z0, z1, z2, z3)
    scales, zeros = (scale, scale), (zero, zero)
    place = row.to(tl.int64) * LAYOUT.scale_columns
    below_place = place + 8 * LAYOUT.scale_columns
    found0 = step_scales(scales, zeros, place, below_place, warp, t, 0, LAYOUT)
    found1 = step_scales(scales, zeros, place, below_place, warp, t, 1, LAYOUT)
    found2 = step_scales(scales, zeros, place, below_place, warp, t, 2, LAYOUT)
    found3 = step_scales(scales, zeros, place, below_place, warp, t, 3, LAYOUT)
    gain = 1.0
    if NORM:
        gain += tl.load(norm + column)
    address = shared_memory(tl.program_id(0))
    where = place_of(column, LAYOUT)
    store_zeros(thread, address, 32 * WARPS)
    wait_for_inputs(PDL)
    values = tl.load(x + column).to(tl.float32)
    out_row = base + tile * 16 + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    if RESIDUAL:
        added = tl.load(residual + out_row).to(tl.float32)
    low, inverse = prepare_two(values, gain, address, where, eps, K, NORM)
    lane = lane_of_columns(thread, address, warp * 1024, 32 if BITS == 4 else 128)
    above, below = sum_lane(codes, found0, found1, found2, found3, lane, thread, LAYOUT)
    sums = sums_over_lanes(above, below, thread, WARPS) * low
    if LAYOUT.factor > 0:
        sums = times_factor(sums, one_of(which, f0, f1, f2, f3) + out_row.to(tl.int64) * 0, out_row >= 0, LAYOUT)
    if RESIDUAL:
        sums += added
    tl.store(out + out_row, sums.to(out.dtype.element_ty))
