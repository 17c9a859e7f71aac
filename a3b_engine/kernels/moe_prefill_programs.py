"""The device code of moe_prefill: tiles of tokens that go to one expert, times the expert's gate and up, or its down."""

import triton
import triton.language as tl

from .rows import TABLE_COLUMNS, let_next_start, wait_for_inputs
from .weight_tiles import decoded, dot, factors, product_of_pairs, saturated

# What `up` leaves for `down` is this much smaller, so that float16 holds up to a million; 2^-24 of that is its finest step.
HIDDEN = tl.constexpr(1 / 16)


@triton.jit
def tile_of(tiles, order, slot, shared_tiles, count, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr):
    """What tile `slot` holds: expert (EXPERTS is the shared one, -1 none), places of its rows in the order of experts, pair
    numbers (choice + token * TOP_K; of the shared expert token * TOP_K), and which rows there are. Shared tiles come first."""
    lane = tl.arange(0, BM)
    if slot < shared_tiles:
        expert = EXPERTS + slot * 0
        token = slot * BM + lane
        live = token < count
        place = count * TOP_K + token
        pair = tl.minimum(token, count - 1) * TOP_K
    else:
        entry = tiles + (slot - shared_tiles) * 3
        expert = tl.load(entry)
        first, size = tl.load(entry + 1), tl.load(entry + 2)
        live = lane < size
        place = first + lane
        pair = tl.load(order + place, mask=live & (expert >= 0), other=0)
    return expert, place, pair, live


@triton.jit(do_not_specialize=["count", "shared_tiles"])
def experts_up_kernel(
    x, table, tiles, order, hidden, count, shared_tiles,
    K: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PER_SCALE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BY_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [count * (TOP_K + 1), WIDTH] = SiLU(gate x) * (up x) * HIDDEN, rows in the order of experts, the shared one's last.

    Grid (tiles of BN inner rows, tiles of tokens). x [count, K]; table as in ExpertTable.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = x.dtype.element_ty
    SCALE: tl.constexpr = CODE if FORMAT == "dense" else tl.float32
    expert, place, pair, live = tile_of(tiles, order, tl.program_id(1), shared_tiles, count, EXPERTS, TOP_K, BM)
    size = tl.where(expert == EXPERTS, SHARED_INNER, INNER)
    first = tl.program_id(0) * BN
    if (expert >= 0) & (first < size):
        entry = table + expert.to(tl.int64) * TABLE_COLUMNS
        gate = tl.multiple_of(tl.load(entry).to(tl.pointer_type(CODE)), 16)
        up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(CODE)), 16)
        gate_scale = tl.load(entry + 3).to(tl.pointer_type(SCALE))
        up_scale = tl.load(entry + 4).to(tl.pointer_type(SCALE))
        row = first + tl.arange(0, BN)
        valid = tl.minimum(row, size - 1)
        block = valid * 0
        if ROW_BLOCK > 0:
            block = valid // ROW_BLOCK
        tokens = x + (pair // TOP_K).to(tl.int64) * K
        STEPS: tl.constexpr = (K + BK - 1) // BK
        gated, plain = _pair_times_tokens(
            gate + valid * K, up + valid * K, gate_scale + block * SCALE_COLUMNS, up_scale + block * SCALE_COLUMNS, tokens, STEPS,
            K, FORMAT, PER_SCALE, BN, BM, BK, BY_PAIRS,
        )  # fmt: skip
        value = gated / (1.0 + tl.exp(-gated)) * plain
        at = hidden + place.to(tl.int64)[None, :] * WIDTH + row[:, None]
        tl.store(at, saturated(value * HIDDEN, D), mask=(row < size)[:, None] & live[None, :])


@triton.jit
def _pair_times_tokens(
    gate, up, gate_scales, up_scales, tokens, steps,
    K: tl.constexpr, FORMAT: tl.constexpr, PER_SCALE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """weights_times_tokens of two matrices at once, so that the activations are read once."""
    D: tl.constexpr = tokens.dtype.element_ty
    PAIRS: tl.constexpr = BY_PAIRS and FORMAT == "e4m3" and K % BK == 0
    column = tl.arange(0, BK)
    gated, plain = tl.zeros((BN, BT), tl.float32), tl.zeros((BN, BT), tl.float32)
    if FORMAT == "dense":
        gate_factor, up_factor = gated, plain
    else:
        gate_factor, up_factor = factors(gate_scales, FORMAT), factors(up_scales, FORMAT)
    for step in range(0, steps):
        at = step * BK + column
        if PAIRS:
            two = step * (BK // 2) + tl.arange(0, BK // 2)
            gate_codes = tl.load(gate.to(tl.pointer_type(tl.uint16))[:, None] + two[None, :])
            up_codes = tl.load(up.to(tl.pointer_type(tl.uint16))[:, None] + two[None, :])
            x = tl.load(tokens[:, None] + at[None, :])
        elif K % BK == 0:
            gate_codes = tl.load(gate[:, None] + at[None, :])
            up_codes = tl.load(up[:, None] + at[None, :])
            x = tl.trans(tl.load(tokens[:, None] + at[None, :]))
        else:
            inside = (at < K)[None, :]
            gate_codes = tl.load(gate[:, None] + at[None, :], mask=inside, other=0.0)
            up_codes = tl.load(up[:, None] + at[None, :], mask=inside, other=0.0)
            x = tl.trans(tl.load(tokens[:, None] + at[None, :], mask=inside, other=0.0))
        if FORMAT == "dense":
            gated = dot(decoded(gate_codes, FORMAT, D), x, gated)
            plain = dot(decoded(up_codes, FORMAT, D), x, plain)
        else:
            ahead = tl.minimum(step + 1, steps - 1) // PER_SCALE
            gate_next, up_next = factors(gate_scales + ahead, FORMAT), factors(up_scales + ahead, FORMAT)
            if PAIRS:
                gated += product_of_pairs(gate_codes, x, D) * gate_factor[:, None]
                plain += product_of_pairs(up_codes, x, D) * up_factor[:, None]
            else:
                zero = tl.zeros((BN, BT), tl.float32)
                gated += dot(decoded(gate_codes, FORMAT, D), x, zero) * gate_factor[:, None]
                plain += dot(decoded(up_codes, FORMAT, D), x, zero) * up_factor[:, None]
            gate_factor, up_factor = gate_next, up_next
    return gated, plain


@triton.jit(do_not_specialize=["count", "shared_tiles"])
def experts_down_kernel(
    hidden, table, tiles, order, shares, out, count, shared_tiles,
    OUTPUTS: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PER_SCALE: tl.constexpr, SHARED_SCALE_COLUMNS: tl.constexpr, SHARED_PER_SCALE: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [count, TOP_K + 1, OUTPUTS] = share * (down @ hidden) / HIDDEN, the shared expert's row last. Grid (RUN tiles of BN rows, tiles of tokens)."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    SCALE: tl.constexpr = CODE if FORMAT == "dense" else tl.float32
    expert, place, pair, live = tile_of(tiles, order, tl.program_id(1), shared_tiles, count, EXPERTS, TOP_K, BM)
    if expert >= 0:
        entry = table + expert.to(tl.int64) * TABLE_COLUMNS
        down = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(CODE)), 16)
        scale = tl.load(entry + 5).to(tl.pointer_type(SCALE))
        first = tl.program_id(0) * (BN * RUN)
        # Places behind the last row of a tile hold rows of the next expert or of nobody: the first row stands in.
        rows = hidden + tl.where(live, place, tl.min(place, 0)).to(tl.int64) * WIDTH
        token = pair // TOP_K
        choice = tl.where(expert == EXPERTS, TOP_K, pair % TOP_K)
        share = tl.load(shares + token * (TOP_K + 1) + choice, mask=live, other=0.0) / HIDDEN
        places = out + (token * (TOP_K + 1) + choice).to(tl.int64) * OUTPUTS
        if INNER == SHARED_INNER and SCALE_COLUMNS == SHARED_SCALE_COLUMNS and PER_SCALE == SHARED_PER_SCALE:
            _down(down, scale, rows, share, places, live, first, INNER, OUTPUTS, FORMAT, ROW_BLOCK, SCALE_COLUMNS, PER_SCALE, BN, BM, BK, RUN)
        else:
            if expert == EXPERTS:
                _down(
                    down, scale, rows, share, places, live, first,
                    SHARED_INNER, OUTPUTS, FORMAT, ROW_BLOCK, SHARED_SCALE_COLUMNS, SHARED_PER_SCALE, BN, BM, BK, RUN,
                )  # fmt: skip
            else:
                _down(down, scale, rows, share, places, live, first, INNER, OUTPUTS, FORMAT, ROW_BLOCK, SCALE_COLUMNS, PER_SCALE, BN, BM, BK, RUN)


@triton.jit
def _down(
    weights, scales, rows, share, places, live, first,
    K: tl.constexpr, OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PER_SCALE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Weight rows `first` to first + RUN * BN times BM rows [K], times share [BM], to places [BM] + row.

    RUN tiles of rows go through one loop, so that the loads of the next tile are on their way when one is stored: a tile
    of few columns is over before its loads have come up to speed.
    """
    D: tl.constexpr = rows.dtype.element_ty
    STEPS: tl.constexpr = (K + BK - 1) // BK
    lane, column = tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    factor = _scale_of(scales, first, 0, lane, OUTPUTS, FORMAT, ROW_BLOCK, SCALE_COLUMNS, PER_SCALE, BN, STEPS)
    for index in range(0, RUN * STEPS):
        step = index % STEPS
        row = first + index // STEPS * BN + lane
        at = step * BK + column
        pointers = weights + tl.minimum(row, OUTPUTS - 1)[:, None] * K + at[None, :]
        if K % BK == 0:
            codes = tl.load(pointers)
            x = tl.load(rows[:, None] + at[None, :])
        else:
            codes = tl.load(pointers, mask=(at < K)[None, :], other=0.0)
            x = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
        if FORMAT == "dense":
            acc = dot(decoded(codes, FORMAT, D), tl.trans(x), acc)
        else:
            following = _scale_of(scales, first, index + 1, lane, OUTPUTS, FORMAT, ROW_BLOCK, SCALE_COLUMNS, PER_SCALE, BN, STEPS)
            acc += dot(decoded(codes, FORMAT, D), tl.trans(x), tl.zeros((BN, BM), tl.float32)) * factor[:, None]
            factor = following
        if step == STEPS - 1:
            value = (acc * share[None, :]).to(places.dtype.element_ty)
            tl.store(places[None, :] + row[:, None], value, mask=(row < OUTPUTS)[:, None] & live[None, :])
            acc = tl.zeros((BN, BM), tl.float32)


@triton.jit
def _scale_of(
    scales, first, index, lane,
    OUTPUTS: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PER_SCALE: tl.constexpr,
    BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Scales [BN] of the index-th step of `_down`; one step past the end reads scales of the last row."""
    if FORMAT == "dense":
        return lane.to(tl.float32)
    else:
        row = tl.minimum(first + index // STEPS * BN + lane, OUTPUTS - 1)
        block = row * 0
        if ROW_BLOCK > 0:
            block = row // ROW_BLOCK
        return factors(scales + block * SCALE_COLUMNS + index % STEPS // PER_SCALE, FORMAT)
