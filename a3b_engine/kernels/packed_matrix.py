"""Kernels on the matrix units (packed_units) for the experts' two launches, routed experts packed in groups of 16 or multiples of 32."""

import triton
import triton.language as tl

from .matrix_units import (
    load_step, load_steps, multiply_step, multiply_steps, power_of_two_for, shared_memory, sum_and_largest, touch,
)  # fmt: skip
from .packed_programs import pair_of_rows
from .packed_rows import row_products, times_factor
from .packed_units import (
    add_scaled, half_chunk, int3_chunk, lane_of_columns, lane_of_fp8, lane_scales, load_six, load_two, place_of, store_two_pieces,
    store_two_pieces_in_order, store_zeros, sums_over_lanes,
)  # fmt: skip
from .rows import TABLE_COLUMNS, let_next_start, wait_for_inputs

# What the shared expert is, for these kernels.
SHARED_PACKED, SHARED_FP8, SHARED_OTHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_lane(first, below, LAYOUT: tl.constexpr):
    """The codes of a lane's 128 columns of rows g and g + 8: four steps of eight int32 [T], or three bits' four of six."""
    if LAYOUT.form == "int3":
        return load_six(first, below)
    else:
        return load_steps(first, below)


@triton.jit
def chunk_column(warp, t, step: tl.constexpr, LAYOUT: tl.constexpr):
    """The first column of a lane's chunk."""
    if LAYOUT.form == "int3":
        return warp * 512 + t * 128 + step * 32
    else:
        return warp * 512 + step * 128 + t * 32


@triton.jit
def step_scales(scales, zeros, place, below_place, warp, t, step: tl.constexpr, LAYOUT: tl.constexpr):
    """Scales and biases (lane_scales) of a chunk in rows g and g + 8; where groups have 16 columns, then of its second half.
    place, below_place: where the scales of these rows begin."""
    group = chunk_column(warp, t, step, LAYOUT) // (LAYOUT.group * LAYOUT.per_scale)
    above = lane_scales(scales[0], zeros[0], place + group, LAYOUT)
    below = lane_scales(scales[1], zeros[1], below_place + group, LAYOUT)
    if LAYOUT.group == 16:
        second = lane_scales(scales[0], zeros[0], place + group + 1, LAYOUT)
        return above, below, second, lane_scales(scales[1], zeros[1], below_place + group + 1, LAYOUT)
    else:
        return above, below, above, below


@triton.jit
def add_step(total, codes, lane, found, zero, step: tl.constexpr, LAYOUT: tl.constexpr):
    """total (rows g and g + 8) plus a lane's chunk; found: of step_scales."""
    above, below, second, second_below = found
    c = (zero, zero, zero, zero)
    if LAYOUT.form == "int3":
        c = int3_chunk(c, codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], lane + step * 64, above[1], below[1])
    else:
        FORM: tl.constexpr = LAYOUT.form
        c = half_chunk(c, codes[0], codes[1], codes[4], codes[5], lane + step * 256, above[1], below[1], FORM)
        if LAYOUT.group == 16:
            total = add_scaled(total, c, above[0], below[0])
            c = (zero, zero, zero, zero)
        c = half_chunk(c, codes[2], codes[3], codes[6], codes[7], lane + (step * 256 + 32), second[1], second_below[1], FORM)
    return add_scaled(total, c, second[0], second_below[0])


@triton.jit
def sum_lane(codes, found0, found1, found2, found3, lane, thread, LAYOUT: tl.constexpr):
    """A lane's 128 columns in rows g and g + 8: codes of load_lane, times their scales."""
    zero = thread * 0.0
    total = add_step((zero, zero), codes[0], lane, found0, zero, 0, LAYOUT)
    total = add_step(total, codes[1], lane, found1, zero, 1, LAYOUT)
    total = add_step(total, codes[2], lane, found2, zero, 2, LAYOUT)
    return add_step(total, codes[3], lane, found3, zero, 3, LAYOUT)


@triton.jit
def prepare_two(values, gain, address, place, eps, K: tl.constexpr, NORM: tl.constexpr):
    """The vector's two pieces into shared memory, normed; the factor its products have to be multiplied with, and the inverse of the
    root mean square."""
    inverse = 1.0
    if NORM:
        plain, values = values, values * gain
        squares, largest = tl.reduce((plain * plain, tl.abs(values)), 0, sum_and_largest)
        high, low = power_of_two_for(largest)
        inverse = tl.rsqrt(squares / K + eps)
        low = low * inverse
    else:
        high, low = power_of_two_for(tl.max(tl.abs(values), 0))
    store_two_pieces(values * high, address + place)
    tl.debug_barrier()
    return low, inverse


@triton.jit
def packed_pair(
    entry, hidden, tile, thread, address, low, K: tl.constexpr, WARPS: tl.constexpr, LAYOUT: tl.constexpr, DOWN: tl.constexpr
):  # fmt: skip
    """hidden = SiLU(gate x) * (up x) in 8 rows of the expert whose row of the table is `entry`; low: of prepare_two."""
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    gate, up = tl.load(entry, cache_modifier=".cg"), tl.load(entry + 1, cache_modifier=".cg")
    scales = tl.load(entry + 3, cache_modifier=".cg"), tl.load(entry + 4, cache_modifier=".cg")
    zeros = scales
    if LAYOUT.zero:
        zeros = tl.load(entry + 6, cache_modifier=".cg"), tl.load(entry + 7, cache_modifier=".cg")
    BITS: tl.constexpr = 3 if LAYOUT.form == "int3" else 4
    offset = (tile * 8 + g) * (K // 8 * BITS) + warp * (64 * BITS) + t * (16 if BITS == 4 else 48)
    codes = load_lane(gate + offset, up + offset, LAYOUT)
    first = (tile * 8 + g) * LAYOUT.scale_columns
    found0 = step_scales(scales, zeros, first, first, warp, t, 0, LAYOUT)
    found1 = step_scales(scales, zeros, first, first, warp, t, 1, LAYOUT)
    found2 = step_scales(scales, zeros, first, first, warp, t, 2, LAYOUT)
    found3 = step_scales(scales, zeros, first, first, warp, t, 3, LAYOUT)
    tl.debug_barrier()  # or the compiler puts the scales off until they are needed
    lane = lane_of_columns(thread, address, warp * 1024, 32 if BITS == 4 else 128)
    above, below = sum_lane(codes, found0, found1, found2, found3, lane, thread, LAYOUT)
    if LAYOUT.factor > 0:
        one = thread.to(tl.int64) * 0
        above = times_factor(above, tl.load(entry + 9, cache_modifier=".cg") + one, thread >= 0, LAYOUT)
        below = times_factor(below, tl.load(entry + 10, cache_modifier=".cg") + one, thread >= 0, LAYOUT)
    store_pair(hidden, above, below, tile, thread, low, WARPS, DOWN)


@triton.jit
def fp8_pair(entry, hidden, tile, thread, address, low, K: tl.constexpr, WARPS: tl.constexpr, DOWN: tl.constexpr):
    """The same for e4m3 codes with scales of 128 x 128."""
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    offset = tile * (8 * K) + (g * K + warp * 512 + t * 16)
    gate, up = tl.load(entry, cache_modifier=".cg") + offset, tl.load(entry + 1, cache_modifier=".cg") + offset
    codes, more = load_steps(gate, up), load_steps(gate + 256, up + 256)
    block = tile // 16 * (K // 128) + warp * 4
    gate_scale = tl.load(entry + 3, cache_modifier=".cg").to(tl.pointer_type(tl.float32)) + block
    up_scale = tl.load(entry + 4, cache_modifier=".cg").to(tl.pointer_type(tl.float32)) + block
    gate0, gate1, gate2, gate3 = tl.load(gate_scale), tl.load(gate_scale + 1), tl.load(gate_scale + 2), tl.load(gate_scale + 3)
    up0, up1, up2, up3 = tl.load(up_scale), tl.load(up_scale + 1), tl.load(up_scale + 2), tl.load(up_scale + 3)
    tl.debug_barrier()
    lane, zero = lane_of_fp8(thread, address, warp * 1024), thread * 0.0
    total = multiply_steps((zero, zero, zero, zero), codes, lane, zero, gate0, up0, gate1, up1)
    total = multiply_steps(total, more, lane + 512, zero, gate2, up2, gate3, up3)
    store_pair(hidden, total[0] + total[1], total[2] + total[3], tile, thread, low, WARPS, DOWN)


@triton.jit
def store_pair(hidden, above, below, tile, thread, low, WARPS: tl.constexpr, DOWN: tl.constexpr):
    gated, straight = tl.split(sums_over_lanes(above, below, thread, WARPS) * low)
    row = tile * 8 + tl.arange(0, 8)
    if DOWN is not None:
        row = place_of(row, DOWN) // 2
    tl.store(hidden + row, gated / (1.0 + tl.exp(-gated)) * straight)


@triton.jit
def packed_matrix_up_kernel(
    x, norm, table, ids, hidden, eps,
    K: tl.constexpr, WARPS: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr, SHARED_IS: tl.constexpr,
    SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr,
    DOWN: tl.constexpr, SHARED_DOWN: tl.constexpr, NORM: tl.constexpr, EARLY_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As packed_programs.packed_up_kernel, for K = 512 * WARPS and experts all of INNER rows. Grid (INNER / 8, TOP_K + 1): 8 rows of gate
    above 8 of up. DOWN, SHARED_DOWN: layouts of the matrices that packed_matrix_down_kernel multiplies `hidden` with, which is then written in
    the order that it takes (packed_units.place_of); None for a row of `hidden` in order."""
    tile, choice = tl.program_id(0), tl.program_id(1)
    thread, column = tl.arange(0, 32 * WARPS), tl.arange(0, K)
    gain = 1.0
    if NORM:
        gain += tl.load(norm + column)
    address = shared_memory(tile)
    place = place_of(column, ROUTED)
    if SHARED_IS == SHARED_FP8:
        place = tl.where(choice < TOP_K, place, column * 2)
    store_zeros(thread, address, 32 * WARPS)
    if tile == 0:  # the table was last read a token ago: without this, the way to the weights begins in memory
        touch(table.to(tl.int64) + tl.minimum((choice * (32 * WARPS) + thread) * 128, EXPERTS * (8 * TABLE_COLUMNS)))
    if EARLY_X:  # past this multiprocessor's cache, which nobody has emptied since x was written
        low, inverse = prepare_two(tl.load(x + column, cache_modifier=".cg").to(tl.float32), gain, address, place, eps, K, NORM)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: the next kernel reads the ids before it waits itself
    if not EARLY_X:
        low, inverse = prepare_two(tl.load(x + column).to(tl.float32), gain, address, place, eps, K, NORM)
    expert = tl.load(ids + choice, mask=choice < TOP_K, other=EXPERTS)
    entry = table + expert.to(tl.int64) * TABLE_COLUMNS
    hidden += choice * INNER
    if choice < TOP_K:
        packed_pair(entry, hidden, tile, thread, address, low, K, WARPS, ROUTED, DOWN)
    else:
        if SHARED_IS == SHARED_PACKED:
            packed_pair(entry, hidden, tile, thread, address, low, K, WARPS, ROUTED, SHARED_DOWN)
        else:
            if SHARED_IS == SHARED_FP8:
                fp8_pair(entry, hidden, tile, thread, address, low, K, WARPS, SHARED_DOWN)
            else:
                pair_of_rows(x, norm, inverse, entry, hidden, tile, INNER, K, SHARED, 8, SHARED_GROUPS, SHARED_PIECES, NORM)


@triton.jit
def packed_matrix_down_kernel(
    hidden, shares, residual, table, ids, out,
    ROUTED: tl.constexpr, SHARED: tl.constexpr, SHARED_IS: tl.constexpr, SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As packed_programs.packed_down_kernel, for eight experts of 512 columns, one a warp; the warps share the columns of the shared
    expert, 64 each. Grid (outputs / 16,). hidden: as packed_matrix_up_kernel writes it for these matrices."""
    let_next_start(PDL)
    tile, thread = tl.program_id(0), tl.arange(0, 32 * TOP_K)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    # Past this multiprocessor's cache, which nobody has emptied since the ids were written.
    entry = table + tl.load(ids + warp, cache_modifier=".cg").to(tl.int64) * TABLE_COLUMNS
    shared_entry = table + EXPERTS * TABLE_COLUMNS
    BITS: tl.constexpr = 3 if ROUTED.form == "int3" else 4
    row_bytes: tl.constexpr = INNER // 8 * BITS
    first = tl.load(entry + 2, cache_modifier=".cg") + ((tile * 16 + g) * row_bytes + t * (16 if BITS == 4 else 48))
    codes = load_lane(first, first + 8 * row_bytes, ROUTED)
    scale = tl.load(entry + 5, cache_modifier=".cg")
    scales, zeros = (scale, scale), (scale, scale)
    if ROUTED.zero:
        zero_address = tl.load(entry + 8, cache_modifier=".cg")
        zeros = zero_address, zero_address
    place = (tile * 16 + g) * ROUTED.scale_columns
    below_place = place + 8 * ROUTED.scale_columns
    nothing = warp * 0
    found0 = step_scales(scales, zeros, place, below_place, nothing, t, 0, ROUTED)
    found1 = step_scales(scales, zeros, place, below_place, nothing, t, 1, ROUTED)
    found2 = step_scales(scales, zeros, place, below_place, nothing, t, 2, ROUTED)
    found3 = step_scales(scales, zeros, place, below_place, nothing, t, 3, ROUTED)
    if SHARED_IS == SHARED_FP8:
        shared_first = tl.load(shared_entry + 2) + (tile * (16 * INNER) + (g * INNER + t * 16) + warp * 64)
        shared_codes = load_step(shared_first, shared_first + 8 * INNER)
        shared_scale = tl.load(tl.load(shared_entry + 5).to(tl.pointer_type(tl.float32)) + tile // 8 * (INNER // 128) + warp // 2)
    if SHARED_IS == SHARED_PACKED:  # 16 columns a lane
        shared_first = tl.load(shared_entry + 2) + ((tile * 16 + g) * (INNER // 2) + warp * 32 + t * 8)
        shared_codes = load_two(shared_first, shared_first + 8 * (INNER // 2))
        shared_group = (tile * 16 + g) * SHARED.scale_columns + (warp * 64 + t * 16) // (SHARED.group * SHARED.per_scale)
        shared_zero = shared_entry + 5
        if SHARED.zero:
            shared_zero = shared_entry + 8
        shared_above = lane_scales(tl.load(shared_entry + 5), tl.load(shared_zero), shared_group, SHARED)
        shared_below = lane_scales(tl.load(shared_entry + 5), tl.load(shared_zero), shared_group + 8 * SHARED.scale_columns, SHARED)
    address = shared_memory(tile)
    column, shared_column = tl.arange(0, TOP_K * INNER), tl.arange(0, INNER)
    store_zeros(thread, address, 32 * TOP_K)
    wait_for_inputs(PDL)
    values = tl.load(hidden + column) * tl.load(shares + column // INNER)
    shared_values = tl.load(hidden + TOP_K * INNER + shared_column) * tl.load(shares + TOP_K)
    row = tile * 16 + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    if RESIDUAL:
        added = tl.load(residual + row).to(tl.float32)
    high, low = power_of_two_for(tl.maximum(tl.max(tl.abs(values), 0), tl.max(tl.abs(shared_values), 0)))
    # In the order they came in: that of these matrices, which `up` has seen to.
    store_two_pieces_in_order(values * high, address + column * 2)
    store_two_pieces_in_order(shared_values * high, address + (TOP_K * INNER + shared_column) * 2)
    tl.debug_barrier()
    lane = lane_of_columns(thread, address, warp * 1024, 32 if BITS == 4 else 128)
    above, below = sum_lane(codes, found0, found1, found2, found3, lane, thread, ROUTED)
    if ROUTED.factor > 0:
        factor = tl.load(entry + 11, cache_modifier=".cg")
        above, below = times_factor(above, factor, thread >= 0, ROUTED), times_factor(below, factor, thread >= 0, ROUTED)
    zero = thread * 0.0
    if SHARED_IS == SHARED_FP8:
        shared_lane = lane_of_fp8(thread, address, TOP_K * INNER * 2 + warp * 128)
        c = multiply_step((zero, zero, zero, zero), shared_codes, shared_lane)
        above += (c[0] + c[1]) * shared_scale
        below += (c[2] + c[3]) * shared_scale
    if SHARED_IS == SHARED_PACKED:
        shared_lane = lane_of_columns(thread, address, TOP_K * INNER * 2 + warp * 128, 16)
        FORM: tl.constexpr = SHARED.form
        c = half_chunk(
            (zero, zero, zero, zero), shared_codes[0], shared_codes[1], shared_codes[2], shared_codes[3], shared_lane,
            shared_above[1], shared_below[1], FORM,
        )  # fmt: skip
        more, more_below = add_scaled((zero, zero), c, shared_above[0], shared_below[0])
        if SHARED.factor > 0:
            shared_factor = tl.load(shared_entry + 11) + thread.to(tl.int64) * 0
            more, more_below = times_factor(more, shared_factor, thread >= 0, SHARED), times_factor(more_below, shared_factor, thread >= 0, SHARED)
        above += more
        below += more_below
    sums = sums_over_lanes(above, below, thread, TOP_K) * low
    if SHARED_IS == SHARED_OTHER:
        shared_row = tile * 16 + tl.arange(0, 16)
        products = row_products(
            hidden + TOP_K * INNER, hidden, 1.0, tl.load(shared_entry + 2), tl.load(shared_entry + 5), tl.load(shared_entry + 8),
            shared_row, shared_row >= 0, INNER, SHARED, SHARED_GROUPS, SHARED_PIECES, False,
        )  # fmt: skip
        products *= tl.load(shares + TOP_K)
        if SHARED.factor > 0:
            products = times_factor(products, tl.load(shared_entry + 11) + shared_row.to(tl.int64) * 0, shared_row >= 0, SHARED)
        sums += tl.permute(tl.reshape(products, (2, 8)), (1, 0))
    if RESIDUAL:
        sums += added
    tl.store(out + row, sums.to(out.dtype.element_ty))
