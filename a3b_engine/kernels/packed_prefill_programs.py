"""The device code of packed weights for many tokens: experts' gate and up, their down, and whole matrices multiplied out.

The experts' kernels do what those of moe_prefill_programs do, for routed experts, the shared one, or both where they are of one layout.
"""

import triton
import triton.language as tl

from .moe_prefill_programs import HIDDEN, tile_of
from .packed_tiles import FP4, every_fourth, load_codes_of_step, load_scales_of_step, matrix_factor, nibble, packed_product, scale_values
from .rows import TABLE_COLUMNS, let_next_start, wait_for_inputs
from .weight_tiles import saturated


@triton.jit
def _matrix(entry, INDEX: tl.constexpr, SCALE: tl.constexpr):
    """Codes, scales, zeros and the address of the factor of gate (0), up (1) or down (2) in a row of ExpertTable."""
    codes = tl.multiple_of(tl.load(entry + INDEX).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(entry + 3 + INDEX).to(tl.pointer_type(SCALE))
    zeros = tl.load(entry + 6 + INDEX).to(tl.pointer_type(tl.uint8))
    return codes, scales, zeros, tl.load(entry + 9 + INDEX)


@triton.jit(do_not_specialize=["count", "shared_tiles"])
def packed_up_kernel(
    x, table, tiles, order, hidden, count, shared_tiles,
    K: tl.constexpr, VALUES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    FACTOR: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, LIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As experts_up_kernel, for packed experts of INNER rows."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = x.dtype.element_ty
    STEPS: tl.constexpr = K // BK
    expert, place, pair, live = tile_of(tiles, order, tl.program_id(1), shared_tiles, count, EXPERTS, TOP_K, BM)
    if expert >= 0:
        entry = table + expert.to(tl.int64) * TABLE_COLUMNS
        gate, gate_scales, gate_zeros, gate_factor = _matrix(entry, 0, SCALE)
        up, up_scales, up_zeros, up_factor = _matrix(entry, 1, SCALE)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        valid = tl.minimum(row, INNER - 1)
        gate, up = gate + valid * (K * BITS // 8), up + valid * (K * BITS // 8)
        group = valid * (K // GROUP)
        gate_scales, up_scales, gate_zeros, up_zeros = gate_scales + group, up_scales + group, gate_zeros + group, up_zeros + group
        tokens = x + (pair // TOP_K).to(tl.int64) * K
        column = tl.arange(0, BK)
        gated, plain = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
        gate_scale, gate_zero = load_scales_of_step(gate_scales, gate_zeros, 0, K, GROUP, BK, ZERO, SCALED, LIFT, D)
        up_scale, up_zero = load_scales_of_step(up_scales, up_zeros, 0, K, GROUP, BK, ZERO, SCALED, LIFT, D)
        for step in range(0, STEPS):
            gate_codes, gate_more = load_codes_of_step(gate, step, BITS, BK)
            up_codes, up_more = load_codes_of_step(up, step, BITS, BK)
            x0, x1, x2, x3 = every_fourth(tl.load(tokens[:, None] + (step * BK + column)[None, :]))
            # the next scales are on their way while the tensor cores work
            gate_scale_next, gate_zero_next = load_scales_of_step(gate_scales, gate_zeros, step + 1, K, GROUP, BK, ZERO, SCALED, LIFT, D)
            up_scale_next, up_zero_next = load_scales_of_step(up_scales, up_zeros, step + 1, K, GROUP, BK, ZERO, SCALED, LIFT, D)
            gated = packed_product(gate_codes, gate_more, x0, x1, x2, x3, gate_scale, gate_zero, gated, VALUES, BITS, ZERO, SCALED)
            plain = packed_product(up_codes, up_more, x0, x1, x2, x3, up_scale, up_zero, plain, VALUES, BITS, ZERO, SCALED)
            gate_scale, gate_zero, up_scale, up_zero = gate_scale_next, gate_zero_next, up_scale_next, up_zero_next
        gated = gated * matrix_factor(gate_factor, VALUES, FACTOR, LIFT)
        plain = plain * matrix_factor(up_factor, VALUES, FACTOR, LIFT)
        value = gated / (1.0 + tl.exp(-gated)) * plain
        at = hidden + place.to(tl.int64)[None, :] * WIDTH + row[:, None]
        tl.store(at, saturated(value * HIDDEN, D), mask=(row < INNER)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["count", "shared_tiles"])
def packed_down_kernel(
    hidden, table, tiles, order, shares, out, count, shared_tiles,
    OUTPUTS: tl.constexpr, VALUES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    FACTOR: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, LIFT: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As experts_down_kernel, for packed experts of INNER columns."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = hidden.dtype.element_ty
    STEPS: tl.constexpr = INNER // BK
    expert, place, pair, live = tile_of(tiles, order, tl.program_id(1), shared_tiles, count, EXPERTS, TOP_K, BM)
    if expert >= 0:
        entry = table + expert.to(tl.int64) * TABLE_COLUMNS
        codes, scales, zeros, factor = _matrix(entry, 2, SCALE)
        first = tl.program_id(0) * (BN * RUN)
        # Places behind the last row of a tile hold rows of the next expert or of nobody: the first row stands in.
        rows = hidden + tl.where(live, place, tl.min(place, 0)).to(tl.int64) * WIDTH
        token = pair // TOP_K
        choice = tl.where(expert == EXPERTS, TOP_K, pair % TOP_K)
        share = tl.load(shares + token * (TOP_K + 1) + choice, mask=live, other=0.0) / HIDDEN
        share = share * matrix_factor(factor, VALUES, FACTOR, LIFT)
        places = out + (token * (TOP_K + 1) + choice).to(tl.int64) * OUTPUTS
        lane, column = tl.arange(0, BN), tl.arange(0, BK)
        acc = tl.zeros((BN, BM), tl.float32)
        valid = tl.minimum(first + lane, OUTPUTS - 1)
        scale, zero = load_scales_of_step(
            scales + valid * (INNER // GROUP), zeros + valid * (INNER // GROUP), 0, INNER, GROUP, BK, ZERO, SCALED, LIFT, D
        )
        # RUN tiles of rows in one loop: see moe_prefill_programs._down.
        for index in range(0, RUN * STEPS):
            step = index % STEPS
            row = first + index // STEPS * BN + lane
            valid = tl.minimum(row, OUTPUTS - 1)
            found, more = load_codes_of_step(codes + valid * (INNER * BITS // 8), step, BITS, BK)
            x0, x1, x2, x3 = every_fourth(tl.load(rows[:, None] + (step * BK + column)[None, :]))
            following = tl.minimum(first + (index + 1) // STEPS * BN + lane, OUTPUTS - 1) * (INNER // GROUP)
            scale_next, zero_next = load_scales_of_step(
                scales + following, zeros + following, (index + 1) % STEPS, INNER, GROUP, BK, ZERO, SCALED, LIFT, D
            )
            acc = packed_product(found, more, x0, x1, x2, x3, scale, zero, acc, VALUES, BITS, ZERO, SCALED)
            scale, zero = scale_next, zero_next
            if step == STEPS - 1:
                value = (acc * share[None, :]).to(places.dtype.element_ty)
                tl.store(places[None, :] + row[:, None], value, mask=(row < OUTPUTS)[:, None] & live[None, :])
                acc = tl.zeros((BN, BM), tl.float32)


@triton.jit
def packed_dequantize_kernel(
    codes, scales, zeros, factor, out,
    N: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    BN: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N, K] = the weight, computed in float32 as PackedWeight.dequantize does and rounded once. Grid (tiles of BN rows, tiles
    of WIDTH columns)."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, column = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (row < N)[:, None] & (column < K)[None, :]
    wide = row.to(tl.int64)[:, None]
    if BITS == 4:
        byte = tl.load(codes + wide * (K // 2) + (column // 2)[None, :], mask=mask, other=0)
        code = (byte >> (column % 2 * 4).to(tl.uint8)[None, :]) & 15
        number = nibble(code, VALUES, True)
        if VALUES == "e2m1":
            number = number * FP4
    else:
        start, place = column // 32 * 12, column % 32
        low = tl.load(codes + wide * (K * 3 // 8) + (start + place // 4)[None, :], mask=mask, other=0)
        high = tl.load(codes + wide * (K * 3 // 8) + (start + 8 + place // 8)[None, :], mask=mask, other=0)
        code = ((low >> (place % 4 * 2).to(tl.uint8)[None, :]) & 3) | (((high >> (place % 8).to(tl.uint8)[None, :]) & 1) << 2)
        number = code.to(tl.float32)
    group = wide * (K // GROUP) + (column // GROUP)[None, :]
    scale = scale_values(tl.load(scales + group, mask=mask, other=0.0))
    if FACTOR == "times":
        scale = scale * tl.load(factor)
    elif FACTOR == "over":
        scale = tl.div_rn(scale, tl.load(factor) + scale * 0.0)
    if ZERO:
        number = number - tl.load(zeros + group, mask=mask, other=0).to(tl.float32)
    elif VALUES == "int":
        number = number - (8.0 if BITS == 4 else 4.0)
    tl.store(out + wide * K + column[None, :], (number * scale).to(out.dtype.element_ty), mask=mask)
