"""Device code shared by the kernels that read weights: rows of a weight matrix times one vector.

A batch of one token is bound by memory: every weight is read once, decoded in registers, multiplied in float32 and
summed. FP8 columns are summed in groups that share a scale, and the scale multiplies the sum: one multiplication a
group where dequantizing first would take one a weight.

Weights never depend on the kernel before. With programmatic dependent launch the first piece of them is therefore on
its way before the kernel waits for the vector they are multiplied with.
"""

import triton
import triton.language as tl


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
def group_sums(codes, x, scales, FORMAT: tl.constexpr):
    """codes [R, G, C], x float32 broadcastable to it, scales float32 [R, G] (None where FORMAT is "dense") -> float32 [R]."""
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
    """float32 scales; those of "e4m3_bytes" times 256 (see fp8_values). 0.0 where FORMAT is "dense"."""
    if FORMAT == "dense":
        return 0.0
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
def rows_times_x(
    x, norm, rows, scales, live, first_group,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    PER_SCALE: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums over columns first_group*GROUP and on of R rows times x: float32 [R], and the sum of squares of x.

    x: pointer to [K], any float type. rows, scales: pointers [R] to the first code and the first scale of each row;
    live: bool [R], rows to read. Columns are read in PIECES of GROUPS groups of GROUP; a scale covers PER_SCALE groups.
    NORM: x is multiplied by 1 + norm (float32 [K]); dividing by the root mean square is left to the caller, who has the
    sum of squares. Waits for x after the first piece of the weights was asked for.
    """
    group = first_group + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    codes = load_codes(rows[:, None, None] + column[None, :, :], live[:, None, None] & (column < K)[None, :, :], MASKED)
    factors = load_scales(
        scales[:, None] + (group // PER_SCALE)[None, :], live[:, None] & (group * GROUP < K)[None, :], FORMAT, MASKED
    )
    wait_for_inputs(PDL)
    total = tl.zeros((rows.shape[0],), tl.float32)
    squares = tl.zeros((GROUPS,), tl.float32)
    for piece in tl.static_range(PIECES):
        if piece > 0:
            group = first_group + piece * GROUPS + tl.arange(0, GROUPS)
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            codes = load_codes(
                rows[:, None, None] + column[None, :, :], live[:, None, None] & (column < K)[None, :, :], MASKED
            )
            factors = load_scales(
                scales[:, None] + (group // PER_SCALE)[None, :], live[:, None] & (group * GROUP < K)[None, :], FORMAT, MASKED
            )
        values = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(values * values, 1)
            values = values * (1.0 + tl.load(norm + column, mask=column < K, other=0.0))
        total += group_sums(codes, values[None, :, :], factors, FORMAT)
    return total, tl.sum(squares, 0)


@triton.jit
def gemv_kernel(
    x, norm, residual, out,
    w0, w1, w2, w3, s0, s1, s2, s3, n0, n1, n2, n3,
    tail0, tail1, m0, m1, eps,
    K: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    PER_SCALE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, MATRICES: tl.constexpr,
    TAIL: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices [n_i, K] of one format, then up to two dense ones [m_i, K] (the tail), times one x.

    Grid (row tiles of all matrices, splits of the columns). Row tiles never span two matrices. out: one vector with the
    rows of all matrices behind each other; with several splits [splits, rows], float32, for sum_partials_kernel.
    ROW_BLOCK: rows a scale covers, 0 where it covers all. ALIGNED: every matrix begins at a multiple of 16 bytes.
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    w, s, n, base = w0, s0, n0, 0
    ahead = tl.cdiv(n0, ROWS)  # tiles of the matrices before the next one
    if MATRICES > 1:
        further = tl.program_id(0) >= ahead
        w, s, n, base = tl.where(further, w1, w), tl.where(further, s1, s), tl.where(further, n1, n), tl.where(further, n0, 0)
        tile = tl.where(further, tl.program_id(0) - ahead, tile)
        ahead += tl.cdiv(n1, ROWS)
    if MATRICES > 2:
        further = tl.program_id(0) >= ahead
        w, s, n, base = tl.where(further, w2, w), tl.where(further, s2, s), tl.where(further, n2, n), tl.where(further, n0 + n1, base)
        tile = tl.where(further, tl.program_id(0) - ahead, tile)
        ahead += tl.cdiv(n2, ROWS)
    if MATRICES > 3:
        further = tl.program_id(0) >= ahead
        w, s, n, base = tl.where(further, w3, w), tl.where(further, s3, s), tl.where(further, n3, n), tl.where(further, n0 + n1 + n2, base)
        tile = tl.where(further, tl.program_id(0) - ahead, tile)
        ahead += tl.cdiv(n3, ROWS)
    if ALIGNED:
        w = tl.multiple_of(w, 16)
    first_group = split * (PIECES * GROUPS)
    total_rows = n0 + n1 + n2 + n3 + m0 + m1
    if tl.program_id(0) < ahead:
        row = tile * ROWS + tl.arange(0, ROWS)
        block = row * 0
        if ROW_BLOCK > 0:
            block = row // ROW_BLOCK
        total, squares = rows_times_x(
            x, norm, w + row.to(tl.int64) * K, s + block * SCALE_COLUMNS, row < n, first_group,
            K, FORMAT, GROUP, GROUPS, PIECES, PER_SCALE, MASKED, NORM, PDL,
        )  # fmt: skip
        finish(total, squares, residual, out + split * total_rows, base + row, row < n, eps, K, NORM, RESIDUAL)
    else:
        if TAIL > 0:
            place = tl.program_id(0) - ahead
            v, m, above = tail0, m0, n0 + n1 + n2 + n3
            if TAIL > 1:
                second = place >= tl.cdiv(m0, ROWS)
                v, m, above = tl.where(second, tail1, v), tl.where(second, m1, m), tl.where(second, above + m0, above)
                place = tl.where(second, place - tl.cdiv(m0, ROWS), place)
            if ALIGNED:
                v = tl.multiple_of(v, 16)
            row = place * ROWS + tl.arange(0, ROWS)
            total, squares = rows_times_x(
                x, norm, v + row.to(tl.int64) * K, s0 + row * 0, row < m, first_group,
                K, "dense", GROUP, GROUPS, PIECES, PER_SCALE, MASKED, NORM, PDL,
            )  # fmt: skip
            finish(total, squares, residual, out + split * total_rows, above + row, row < m, eps, K, NORM, RESIDUAL)


@triton.jit
def finish(total, squares, residual, out, index, live, eps, K: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """What follows the sums: the root mean square of x, the residual, the store."""
    if NORM:
        total = total * tl.rsqrt(squares / K + eps)
    if RESIDUAL:
        total += tl.load(residual + index, mask=live, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=live)


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
