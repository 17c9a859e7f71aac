"""Device code of the experts' two launches where weights are packed, or routed and shared experts are of different kinds.

Experts are found through a device table of addresses (expert_table). Its rows may have been rewritten a few launches back, so they are
read past the multiprocessor's own cache.
"""

import triton
import triton.language as tl

from .packed_rows import group_sums, row_products, times_factor
from .rows import TABLE_COLUMNS, inverse_rms, let_next_start, wait_for_inputs


@triton.jit
def pair_of_rows(
    x, norm, inverse, entry, hidden, part, rows,
    K: tl.constexpr, LAYOUT: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """hidden [rows] = SiLU(gate x) * (up x) in a tile of PAIRS rows of the expert whose row of the table is `entry`."""
    row = part * PAIRS + tl.arange(0, PAIRS)
    live = row < rows
    gate, up = tl.load(entry, cache_modifier=".cg"), tl.load(entry + 1, cache_modifier=".cg")
    gate_scale, up_scale = tl.load(entry + 3, cache_modifier=".cg"), tl.load(entry + 4, cache_modifier=".cg")
    gate_zero, up_zero = tl.load(entry + 6, cache_modifier=".cg"), tl.load(entry + 7, cache_modifier=".cg")
    gated = row_products(x, norm, inverse, gate, gate_scale, gate_zero, row, live, K, LAYOUT, GROUPS, PIECES, NORM)
    plain = row_products(x, norm, inverse, up, up_scale, up_zero, row, live, K, LAYOUT, GROUPS, PIECES, NORM)
    if LAYOUT.factor > 0:
        one = tl.zeros((PAIRS,), tl.int64)
        gated = times_factor(gated, tl.load(entry + 9, cache_modifier=".cg") + one, live, LAYOUT)
        plain = times_factor(plain, tl.load(entry + 10, cache_modifier=".cg") + one, live, LAYOUT)
    tl.store(hidden + row, gated / (1.0 + tl.exp(-gated)) * plain, mask=live)


@triton.jit
def packed_up_kernel(
    x, norm, table, ids, hidden, eps,
    K: tl.constexpr, ROUTED: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    SHARED: tl.constexpr, SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr, PAIRS: tl.constexpr, NORM_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [TOP_K + 1, WIDTH] = SiLU(gate x) * (up x) of the chosen experts and, last, the shared one.

    Grid (tiles of PAIRS inner rows, TOP_K + 1). ROUTED, SHARED: packed_layouts.Layout of their gate and up.
    """
    part, choice = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: the next kernel reads the ids before it waits itself
    inverse = 1.0
    if NORM:
        inverse = inverse_rms(x, eps, K, 128, NORM_GROUPS, 1)
    if choice < TOP_K:
        entry = table + tl.load(ids + choice).to(tl.int64) * TABLE_COLUMNS
        pair_of_rows(x, norm, inverse, entry, hidden + choice * WIDTH, part, INNER, K, ROUTED, PAIRS, GROUPS, PIECES, NORM)
    else:
        pair_of_rows(
            x, norm, inverse, table + EXPERTS * TABLE_COLUMNS, hidden + TOP_K * WIDTH, part, SHARED_INNER,
            K, SHARED, PAIRS, SHARED_GROUPS, SHARED_PIECES, NORM,
        )  # fmt: skip


@triton.jit
def packed_down_kernel(
    hidden, shares, residual, table, ids, out,
    OUTPUTS: tl.constexpr, ROUTED: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    SHARED: tl.constexpr, SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [OUTPUTS] = residual + sum over choices of share * (down @ hidden[choice]), always summed in one order.

    Each program takes ROWS outputs of all experts: the chosen ones side by side, GROUPS column groups of each at a time.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < OUTPUTS
    slot = tl.arange(0, TOP_WIDTH * GROUPS)
    choice = slot // GROUPS
    taken = choice < TOP_K
    entry = table + tl.load(ids + choice, mask=taken, other=0).to(tl.int64) * TABLE_COLUMNS
    down, scale = tl.load(entry + 2, cache_modifier=".cg"), tl.load(entry + 5, cache_modifier=".cg")
    zero = tl.load(entry + 8, cache_modifier=".cg")
    share = tl.load(shares + choice, mask=taken, other=0.0)
    if ROUTED.factor > 0:
        share = times_factor(share, tl.load(entry + 11, cache_modifier=".cg"), taken, ROUTED)
    total = tl.zeros((ROWS,), tl.float32)
    for piece in range(PIECES):
        sums = group_sums(
            hidden + choice * WIDTH, hidden, 1.0, down, scale, zero, row, live, piece * GROUPS + slot % GROUPS, taken, INNER, ROUTED, False
        )  # fmt: skip
        total += tl.sum(sums * share[None, :], 1)
    entry = table + EXPERTS * TABLE_COLUMNS
    sums = row_products(
        hidden + TOP_K * WIDTH, hidden, 1.0, tl.load(entry + 2, cache_modifier=".cg"), tl.load(entry + 5, cache_modifier=".cg"),
        tl.load(entry + 8, cache_modifier=".cg"), row, live, SHARED_INNER, SHARED, SHARED_GROUPS, SHARED_PIECES, False,
    )  # fmt: skip
    shared = tl.load(shares + TOP_K)
    if SHARED.factor > 0:
        one = tl.zeros((ROWS,), tl.int64)
        sums = times_factor(sums, tl.load(entry + 11, cache_modifier=".cg") + one, live, SHARED)
    total += sums * shared
    if RESIDUAL:
        total += tl.load(residual + row, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=live)
