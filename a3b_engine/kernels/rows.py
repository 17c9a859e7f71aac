"""Device code shared by the kernels that read weights: rows of a weight matrix times one vector.

A batch of one token is bound by memory: every weight is read once, decoded in registers, multiplied in float32 and
summed. FP8 columns are summed in groups that share a scale, and the scale multiplies the sum: one multiplication a
group where dequantizing first would take one a weight.

Weights never depend on the kernel before. With programmatic dependent launch a program that has one tile of rows asks for
it before it waits for the vector. One that has several keeps the vector in registers, and Triton loads its tiles ahead.
"""

import triton
import triton.language as tl

from .configs import TABLE_COLUMNS as _TABLE_COLUMNS

TABLE_COLUMNS = tl.constexpr(_TABLE_COLUMNS)


@triton.jit
def fp8_values(codes, FORMAT: tl.constexpr):
    """FP8 codes as float32, exactly. FORMAT "e4m3": a tensor of that type. "e4m3_bytes": uint8 codes of e4m3, returned
    as 1/256 of their value (the caller's scale makes up for it); the two NaN codes become +-480. "e5m2_bytes": uint8
    codes of e5m2, which are the upper half of float16."""
    if FORMAT == "e4m3":
        return codes.to(tl.float16).to(tl.float32)
    elif FORMAT == "e4m3_bytes":
        wide = codes.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def row_sums(codes, x, scales, FORMAT: tl.constexpr):
    """codes [R, G, C], x float32 broadcastable to it, scales float32 [R or 1, G] (ignored where FORMAT is "dense") -> float32 [R]."""
    if FORMAT == "dense":
        return tl.sum(tl.sum(codes.to(tl.float32) * x, 2), 1)
    else:
        return tl.sum(tl.sum(fp8_values(codes, FORMAT) * x, 2) * scales, 1)


@triton.jit
def load_codes(pointers, mask, MASKED: tl.constexpr):
    """Weights, read once and first to leave the cache, so that x and the scales stay."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def load_scales(pointers, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """float32 scales; those of "e4m3_bytes" times 256 (see fp8_values). Zeros, never read, where FORMAT is "dense"."""
    if FORMAT == "dense":
        return tl.zeros((1, 1), tl.float32)
    else:
        if MASKED:
            found = tl.load(pointers, mask=mask, other=0.0)
        else:
            found = tl.load(pointers)
        if FORMAT == "e4m3_bytes":
            found = found * 256.0
        return found


if hasattr(tl.extra.cuda, "gdc_wait"):

    @triton.jit
    def wait_for_inputs(PDL: tl.constexpr):
        """Until the kernel ahead has ended and what it wrote is visible. Every program of every kernel launched with PDL
        must come through here, also one that reads nothing: the end of a chain of kernels rests on it."""
        if PDL:
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def let_next_start(PDL: tl.constexpr):
        """The kernel behind may start and load its weights once every program of this one has come here."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()

else:  # Triton 3.3, where even an unused mention of them does not compile; Target.pdl is False there

    @triton.jit
    def wait_for_inputs(PDL: tl.constexpr):
        """Nothing to wait for: kernels run one after another."""
        tl.static_assert(not PDL)

    @triton.jit
    def let_next_start(PDL: tl.constexpr):
        """Kernels run one after another."""
        tl.static_assert(not PDL)


@triton.jit
def load_x(x, column, K: tl.constexpr):
    """x as float32."""
    return tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def inverse_rms(x, eps, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr):
    """1 / root mean square of x [K]."""
    squares = tl.zeros((GROUPS, GROUP), tl.float32)
    for piece in tl.static_range(PIECES):
        values = load_x(x, (piece * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :], K)
        squares += values * values
    return tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)


@triton.jit
def load_piece(
    rows, scales, live, piece, first_group,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER_SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Codes [R, GROUPS, GROUP] and scales [R or 1, GROUPS] of one piece of the columns."""
    group = first_group + piece * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    codes = load_codes(rows[:, None, None] + column[None, :, :], live[:, None, None] & (column < K)[None, :, :], MASKED)
    there = tl.max(live.to(tl.int32), 0) > 0
    factors = load_scales(scales[:, None] + (group // PER_SCALE)[None, :], there & (group * GROUP < K)[None, :], FORMAT, MASKED)
    return codes, factors


@triton.jit
def load_tile(
    tile, tiles, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3, first_group,
    K: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PER_SCALE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MATRICES: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of rows among up to four matrices: pointers to its rows and their scales, the rows that exist, their places
    among all rows, and the first piece of its codes with its scales. Row tiles never span two matrices. Beyond the last
    tile that one again, with no row to store: cheaper than masks."""
    there = tile < tiles
    tile = tl.minimum(tile, tiles - 1)
    place, w, s, n, base = tile, w0, s0, n0, 0
    ahead = tl.cdiv(n0, ROWS)  # tiles of the matrices before the next one
    if MATRICES > 1:
        further = tile >= ahead
        w, s, n, base = tl.where(further, w1, w), tl.where(further, s1, s), tl.where(further, n1, n), tl.where(further, n0, 0)
        place = tl.where(further, tile - ahead, place)
        ahead += tl.cdiv(n1, ROWS)
    if MATRICES > 2:
        further = tile >= ahead
        w, s, n, base = tl.where(further, w2, w), tl.where(further, s2, s), tl.where(further, n2, n), tl.where(further, n0 + n1, base)
        place = tl.where(further, tile - ahead, place)
        ahead += tl.cdiv(n2, ROWS)
    if MATRICES > 3:
        further = tile >= ahead
        w, s, n, base = tl.where(further, w3, w), tl.where(further, s3, s), tl.where(further, n3, n), tl.where(further, n0 + n1 + n2, base)
        place = tl.where(further, tile - ahead, place)
    if ALIGNED:
        w = tl.multiple_of(w, 16)
    row = place * ROWS + tl.arange(0, ROWS)
    live = row < n
    rows = w + row.to(tl.int64) * K
    scales = s + scale_rows(place, ROWS, ROW_BLOCK) * SCALE_COLUMNS
    codes, factors = load_piece(rows, scales, live, 0, first_group, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
    return rows, scales, live & there, base + row, codes, factors


@triton.jit
def scale_rows(tile, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Rows of the scales for a tile of ROWS rows, [1] where one row of them covers the tile, else [ROWS]."""
    if ROW_BLOCK == 0:
        return tl.arange(0, 1)
    elif ROW_BLOCK % ROWS == 0:
        return tile * ROWS // ROW_BLOCK + tl.arange(0, 1)
    else:
        return (tile * ROWS + tl.arange(0, ROWS)) // ROW_BLOCK


@triton.jit
def sum_tile(
    x, norm, inverse, values, residual, out, rows, scales, live, index, codes, factors, first_group,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr,
    PIECES: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish a tile that load_tile began: its other pieces, the sums, the residual, the store."""
    if RESIDUAL:
        added = tl.load(residual + index, mask=live, other=0.0).to(tl.float32)
    total = row_sums(codes, values[None, :, :], factors, FORMAT)
    for piece in tl.static_range(1, PIECES):
        group = first_group + piece * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, factors = load_piece(rows, scales, live, piece, first_group, K, FORMAT, GROUP, GROUPS, PER_SCALE, MASKED)
        total += row_sums(codes, normed(load_x(x, column, K), norm, inverse, column, K, NORM)[None, :, :], factors, FORMAT)
    if RESIDUAL:
        total += added
    tl.store(out + index, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def normed(values, norm, inverse, column, K: tl.constexpr, NORM: tl.constexpr):
    """values of x times 1 + norm over the root mean square."""
    if NORM:
        return values * ((1.0 + tl.load(norm + column, mask=column < K, other=0.0)) * inverse)
    else:
        return values


@triton.jit
def multiply(
    x, norm, residual, out, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3,
    eps, program, tiles, first_group, above,
    K: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PER_SCALE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    MATRICES: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    START_NEXT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's STEPS tiles, behind those of the programs before it, of up to four matrices times x.

    x: [K], any float type. norm float32 [K]: x is multiplied by 1 + norm over its root mean square first. above: rows of
    `out` before the first matrix's. A single tile is asked for before the wait for x; START_NEXT: the kernel behind may
    start after the wait.
    """
    if STEPS == 1:
        rows, scales, live, index, codes, factors = load_tile(
            program, tiles, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3, first_group,
            K, FORMAT, ROW_BLOCK, SCALE_COLUMNS, GROUP, PER_SCALE, ROWS, GROUPS, MATRICES, ALIGNED, MASKED,
        )  # fmt: skip
    column = (first_group + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inverse = 1.0
    if NORM:  # fetched before the wait as well
        gain = 1.0 + tl.load(norm + column, mask=column < K, other=0.0)
    wait_for_inputs(PDL)
    let_next_start(START_NEXT)
    values = load_x(x, column, K)
    if NORM:
        if PIECES == 1:
            inverse = tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / K + eps)
        else:
            inverse = inverse_rms(x, eps, K, GROUP, GROUPS, PIECES)
        values = values * (gain * inverse)
    if STEPS == 1:
        sum_tile(
            x, norm, inverse, values, residual, out, rows, scales, live, above + index, codes, factors, first_group,
            K, FORMAT, GROUP, PER_SCALE, GROUPS, PIECES, MASKED, NORM, RESIDUAL,
        )  # fmt: skip
    else:
        for step in tl.range(STEPS, num_stages=3):
            rows, scales, live, index, codes, factors = load_tile(
                program * STEPS + step, tiles, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3, first_group,
                K, FORMAT, ROW_BLOCK, SCALE_COLUMNS, GROUP, PER_SCALE, ROWS, GROUPS, MATRICES, ALIGNED, MASKED,
            )  # fmt: skip
            sum_tile(
                x, norm, inverse, values, residual, out, rows, scales, live, above + index, codes, factors, first_group,
                K, FORMAT, GROUP, PER_SCALE, GROUPS, PIECES, MASKED, NORM, RESIDUAL,
            )  # fmt: skip


@triton.jit
def gemv_kernel(
    x, norm, residual, out,
    w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3,
    tail0, tail1, m0, m1, eps, programs, tiles, tail_tiles,
    K: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PER_SCALE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, STEPS: tl.constexpr,
    MATRICES: tl.constexpr, TAIL: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices [n_i, K] of one format, then up to two dense ones [m_i, K] (the tail), times one x.

    Grid (programs for the tiles of all matrices, STEPS each, then one for each tile of the tail; splits of the columns). out: one
    vector with the rows of all matrices behind each other; with several splits [splits, rows], float32, for
    sum_partials_kernel. ROW_BLOCK: rows a scale covers, 0 where it covers all. ALIGNED: every matrix begins at a multiple
    of 16 bytes. LATE: the next kernel may start only after this one has waited.
    """
    if not LATE:
        let_next_start(PDL)
    split = tl.program_id(1)
    first_group = split * (PIECES * GROUPS)
    total_rows = n0 + n1 + n2 + n3 + m0 + m1
    if tl.program_id(0) < programs:
        multiply(
            x, norm, residual, out + split * total_rows, w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3,
            eps, tl.program_id(0), tiles, first_group, 0,
            K, FORMAT, ROW_BLOCK, SCALE_COLUMNS, GROUP, PER_SCALE, ROWS, GROUPS, PIECES, STEPS, MATRICES, ALIGNED, MASKED, NORM,
            RESIDUAL, PDL and LATE, PDL,
        )  # fmt: skip
    else:
        if TAIL > 0:
            multiply(
                x, norm, residual, out + split * total_rows, tail0, tail1, tail0, tail0, s0, s0, s0, s0, m0, m1, 0, 0,
                eps, tl.program_id(0) - programs, tail_tiles, first_group, n0 + n1 + n2 + n3,
                K, "dense", 0, 0, GROUP, PER_SCALE, ROWS, GROUPS, PIECES, 1, TAIL, ALIGNED, MASKED, NORM, RESIDUAL, PDL and LATE, PDL,
            )  # fmt: skip


@triton.jit
def sum_partials_kernel(
    partials, residual, out, n,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [n] = residual [n] + partials float32 [SPLITS, n] summed in the order of the splits."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = index < n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + split * n + index, mask=live, other=0.0)
    if RESIDUAL:
        total += tl.load(residual + index, mask=live, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=live)
