"""Device code of the experts' two launches (moe_decode), for every layout the plan takes.

Experts are found through a device table of addresses (expert_table).
"""

import triton
import triton.language as tl

from .rows import (
    TABLE_COLUMNS, inverse_rms, let_next_start, load_codes, load_piece, load_scales, load_x, normed, row_sums, scale_rows,
    wait_for_inputs,
)  # fmt: skip


@triton.jit
def load_pairs(
    tile, gate, up, gate_scale, up_scale, inner_rows,
    K: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PER_SCALE: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of PAIRS rows of gate and the same rows of up: the pointers and the first piece of both, as rows.load_tile."""
    row = tile * PAIRS + tl.arange(0, PAIRS)
    live = row < inner_rows
    scales = scale_rows(tile, PAIRS, ROW_BLOCK) * SCALE_COLUMNS
    gates, ups, gate_scales, up_scales = gate + row * K, up + row * K, gate_scale + scales, up_scale + scales
    gate_codes, gate_factors = load_piece(gates, gate_scales, live, 0, 0, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
    up_codes, up_factors = load_piece(ups, up_scales, live, 0, 0, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
    return gates, ups, gate_scales, up_scales, live, row, gate_codes, gate_factors, up_codes, up_factors


@triton.jit
def sum_pairs(
    x, norm, inverse, values, hidden, gates, ups, gate_scales, up_scales, live, row, gate_codes, gate_factors, up_codes, up_factors,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    PIECES: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Finish the tile that load_pairs began and store SiLU(gate x) * (up x)."""
    gated = row_sums(gate_codes, values[None, :, :], gate_factors, FORMAT)
    plain = row_sums(up_codes, values[None, :, :], up_factors, FORMAT)
    for piece in tl.static_range(1, PIECES):
        column = (piece * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, factors = load_piece(gates, gate_scales, live, piece, 0, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
        more_codes, more_factors = load_piece(ups, up_scales, live, piece, 0, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
        further = normed(load_x(x, column, K), norm, inverse, column, K, NORM)[None, :, :]
        gated += row_sums(codes, further, factors, FORMAT)
        plain += row_sums(more_codes, further, more_factors, FORMAT)
    tl.store(hidden + row, gated / (1.0 + tl.exp(-gated)) * plain, mask=live)


@triton.jit
def expert_up_kernel(
    x, norm, table, ids, hidden, eps,
    K: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PER_SCALE: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, EARLY_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [TOP_K + 1, WIDTH] = SiLU(gate x) * (up x) of the chosen experts and, last, the shared one.

    Grid (tiles of PAIRS inner rows, TOP_K + 1).
    EARLY_X: x was complete when the kernel ahead let this one start.
    """
    part, choice = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if NORM:
        gain = 1.0 + tl.load(norm + column, mask=column < K, other=0.0)
    if EARLY_X:  # past this multiprocessor's cache, which nobody has emptied since x was written
        values = tl.load(x + column, mask=column < K, other=0.0, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: the next kernel reads the ids before it waits itself
    expert = tl.load(ids + choice, mask=choice < TOP_K, other=EXPERTS)
    entry = table + expert.to(tl.int64) * TABLE_COLUMNS
    gate = tl.multiple_of(tl.load(entry, cache_modifier=".cg").to(tl.pointer_type(CODE)), 16)
    up = tl.multiple_of(tl.load(entry + 1, cache_modifier=".cg").to(tl.pointer_type(CODE)), 16)
    gate_scale = tl.load(entry + 3, cache_modifier=".cg").to(tl.pointer_type(tl.float32))
    up_scale = tl.load(entry + 4, cache_modifier=".cg").to(tl.pointer_type(tl.float32))
    if not EARLY_X:
        values = load_x(x, column, K)
    inner_rows = tl.where(choice < TOP_K, INNER, SHARED_INNER)
    gates, ups, gate_scales, up_scales, live, row, gate_codes, gate_factors, up_codes, up_factors = load_pairs(
        part, gate, up, gate_scale, up_scale, inner_rows,
        K, FORMAT, ROW_BLOCK, SCALE_COLUMNS, GROUP, PER_SCALE, PAIRS, GROUPS, MASKED,
    )  # fmt: skip
    inverse = 1.0
    if NORM:
        if PIECES == 1:
            inverse = tl.rsqrt(tl.sum(tl.reshape(values * values, (GROUPS * GROUP,)), 0) / K + eps)
        else:
            inverse = inverse_rms(x, eps, K, GROUP, GROUPS, PIECES)
        values = values * (gain * inverse)
    sum_pairs(
        x, norm, inverse, values, hidden + choice * WIDTH, gates, ups, gate_scales, up_scales, live, row,
        gate_codes, gate_factors, up_codes, up_factors, K, FORMAT, GROUP, PER_SCALE, GROUPS, PIECES, MASKED, NORM,
    )  # fmt: skip


@triton.jit
def expert_down_kernel(
    hidden, shares, residual, table, ids, out,
    OUTPUTS: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    SHARED_SCALE_COLUMNS: tl.constexpr, SHARED_GROUP: tl.constexpr, SHARED_PER_SCALE: tl.constexpr,
    SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, SHARED_MASKED: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [OUTPUTS] = residual + sum over choices of share * (down @ hidden[choice]), always summed in one order.

    Each program takes ROWS outputs of all experts: the chosen ones side by side, GROUPS column groups of each at a time.
    The ids were written two kernels back, and the kernel in between let this one start only after it had waited for them.
    """
    let_next_start(PDL)
    slot = tl.arange(0, TOP_WIDTH * GROUPS)
    choice = slot // GROUPS
    taken = choice < TOP_K
    # Past this multiprocessor's cache, which nobody has emptied since the ids were written.
    expert = tl.load(ids + choice, mask=taken, other=0, cache_modifier=".cg")
    entry = table + expert.to(tl.int64) * TABLE_COLUMNS
    down = tl.load(entry + 2, cache_modifier=".cg")
    scale = tl.load(entry + 5, cache_modifier=".cg")
    shared = tl.multiple_of(tl.load(table + EXPERTS * TABLE_COLUMNS + 2).to(tl.pointer_type(CODE)), 16)
    shared_scale = tl.load(table + EXPERTS * TABLE_COLUMNS + 5).to(tl.pointer_type(tl.float32))
    row, live, rows, scales, codes, factors, shared_rows, shared_scales, shared_codes, shared_factors = load_outputs(
        tl.program_id(0), down, scale, shared, shared_scale, taken, slot % GROUPS,
        OUTPUTS, CODE, FORMAT, ROW_BLOCK, SCALE_COLUMNS, GROUP, PER_SCALE, GROUPS, SHARED_SCALE_COLUMNS, SHARED_GROUP,
        SHARED_PER_SCALE, SHARED_GROUPS, ROWS, INNER, SHARED_INNER, MASKED, SHARED_MASKED,
    )  # fmt: skip
    wait_for_inputs(PDL)
    share = tl.load(shares + choice, mask=taken, other=0.0)
    shared_share = tl.load(shares + TOP_K)
    column = (slot % GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(hidden + choice[:, None] * WIDTH + column, mask=taken[:, None] & (column < INNER), other=0.0) * share[:, None]
    column = tl.arange(0, SHARED_GROUPS)[:, None] * SHARED_GROUP + tl.arange(0, SHARED_GROUP)[None, :]
    shared_values = load_x(hidden + TOP_K * WIDTH, column, SHARED_INNER) * shared_share
    sum_outputs(
        hidden, residual, out, values, shared_values, choice, taken, slot % GROUPS, share, shared_share,
        row, live, rows, scales, codes, factors, shared_rows, shared_scales, shared_codes, shared_factors,
        FORMAT, GROUP, PER_SCALE, GROUPS, PIECES, SHARED_GROUP, SHARED_PER_SCALE, SHARED_GROUPS, SHARED_PIECES,
        TOP_K, INNER, SHARED_INNER, WIDTH, MASKED, SHARED_MASKED, RESIDUAL,
    )  # fmt: skip


@triton.jit
def load_outputs(
    tile, down, scale, shared, shared_scale, taken, group,
    OUTPUTS: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr, SHARED_SCALE_COLUMNS: tl.constexpr,
    SHARED_GROUP: tl.constexpr, SHARED_PER_SCALE: tl.constexpr, SHARED_GROUPS: tl.constexpr, ROWS: tl.constexpr,
    INNER: tl.constexpr, SHARED_INNER: tl.constexpr, MASKED: tl.constexpr, SHARED_MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS outputs: pointers to their rows in the chosen and in the shared experts, and the first piece of both."""
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < OUTPUTS
    block = scale_rows(tile, ROWS, ROW_BLOCK)
    rows = tl.multiple_of(down.to(tl.pointer_type(CODE)), 16)[None, :] + row[:, None] * INNER
    scales = scale.to(tl.pointer_type(tl.float32))[None, :] + block[:, None] * SCALE_COLUMNS
    shared_rows, shared_scales = shared + row * SHARED_INNER, shared_scale + block * SHARED_SCALE_COLUMNS
    codes, factors = load_chosen(rows, scales, live, taken, group, FORMAT, INNER, GROUP, PER_SCALE, MASKED)
    shared_codes, shared_factors = load_piece(
        shared_rows, shared_scales, live, 0, 0, SHARED_INNER, FORMAT, SHARED_GROUP, SHARED_GROUPS, SHARED_PER_SCALE, SHARED_MASKED
    )
    return row, live, rows, scales, codes, factors, shared_rows, shared_scales, shared_codes, shared_factors


@triton.jit
def sum_outputs(
    hidden, residual, out, values, shared_values, choice, taken, first_group, share, shared_share,
    row, live, rows, scales, codes, factors, shared_rows, shared_scales, shared_codes, shared_factors,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    SHARED_GROUP: tl.constexpr, SHARED_PER_SCALE: tl.constexpr, SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr,
    TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    SHARED_MASKED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish the tile that load_outputs began: its other pieces, the sums, the residual, the store."""
    if RESIDUAL:
        added = tl.load(residual + row, mask=live, other=0.0).to(tl.float32)
    total = row_sums(codes, values[None, :, :], factors, FORMAT)
    total += row_sums(shared_codes, shared_values[None, :, :], shared_factors, FORMAT)
    for piece in tl.static_range(1, PIECES):
        group = piece * GROUPS + first_group
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, factors = load_chosen(rows, scales, live, taken, group, FORMAT, INNER, GROUP, PER_SCALE, MASKED)
        further = tl.load(hidden + choice[:, None] * WIDTH + column, mask=taken[:, None] & (column < INNER), other=0.0)
        total += row_sums(codes, (further * share[:, None])[None, :, :], factors, FORMAT)
    for piece in tl.static_range(1, SHARED_PIECES):
        column = (piece * SHARED_GROUPS + tl.arange(0, SHARED_GROUPS))[:, None] * SHARED_GROUP + tl.arange(0, SHARED_GROUP)[None, :]
        codes, factors = load_piece(
            shared_rows, shared_scales, live, piece, 0,
            SHARED_INNER, FORMAT, SHARED_GROUP, SHARED_GROUPS, SHARED_PER_SCALE, SHARED_MASKED,
        )  # fmt: skip
        further = load_x(hidden + TOP_K * WIDTH, column, SHARED_INNER) * shared_share
        total += row_sums(codes, further[None, :, :], factors, FORMAT)
    if RESIDUAL:
        total += added
    tl.store(out + row, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def load_chosen(
    rows, scales, live, taken, group,
    FORMAT: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Codes [R, S, GROUP] and scales [R or 1, S] of a column group `group` [S] in each slot's expert; rows [R, S] and scales
    [R or 1, S]: pointers to its rows and their first scales."""
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = taken[:, None] & (column < INNER)
    codes = load_codes(rows[:, :, None] + column[None, :, :], live[:, None, None] & inside[None, :, :], MASKED)
    there = (tl.max(live.to(tl.int32), 0) > 0) & taken & (group * GROUP < INNER)
    return codes, load_scales(scales + (group // PER_SCALE)[None, :], there[None, :], FORMAT, MASKED)
