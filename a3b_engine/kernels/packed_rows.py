"""Device code of the kernels for packed and for mixed weights: rows of a matrix of any layout times a vector.

Every layout goes one way here, on every card: codes of a group times their columns of the vector, summed, times the scale. The kernels
on the matrix units (packed_units) take the layouts that matter most for speed.

The two columns (four bits) or four columns (three bits) that begin in one byte are multiplied one after another with every second or every
fourth number of the vector, so that a byte is read once and nothing is shuffled.
"""

import triton
import triton.language as tl

from .rows import fp8_values, normed


@triton.jit
def packed_number(byte, high, shift, place: tl.constexpr, LAYOUT: tl.constexpr):
    """float32 of the code at `place` in each byte int32: the whole number itself (four bits), or FP4 times 2 ** -14. Three bits: two in
    `byte`, the third in `high` from bit `shift` on."""
    if LAYOUT.form == "int4":  # 2 ** 23 + code, whose last bits are the code
        return (((byte >> (4 * place)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif LAYOUT.form == "int3":
        code = ((byte >> (2 * place)) & 3) | (((high >> (shift + place)) & 1) << 2)
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:  # sign, two bits of exponent, one of mantissa: where those of a float16 are
        code = byte >> (4 * place)
        return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_scales(scales, zeros, place, there, LAYOUT: tl.constexpr):
    """Scales float32 [R, S] of groups, and the numbers [R, S] that their codes are lowered by."""
    scale = tl.load(scales.to(tl.pointer_type(LAYOUT.scale)) + place, mask=there, other=0.0)
    if LAYOUT.scale == tl.uint8:
        scale = fp8_values(scale, "e4m3_bytes") * 256.0
    else:
        scale = scale.to(tl.float32)
    if LAYOUT.form == "e4m3_bytes":
        scale *= 256.0
    if LAYOUT.form == "e2m1":
        scale *= 16384.0
    if LAYOUT.zero:
        zero = tl.load(zeros.to(tl.pointer_type(tl.uint8)) + place, mask=there, other=0).to(tl.float32)
    elif LAYOUT.form == "int4":
        zero = scale * 0.0 + 8.0
    else:
        zero = scale * 0.0 + 4.0
    return scale, zero


@triton.jit
def group_sums(
    x, norm, inverse, codes, scales, zeros, row, live, group, taken,
    COLUMNS: tl.constexpr, LAYOUT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """float32 [R, S]: rows `row` int32 [R] (where `live`) of matrices [.., COLUMNS], over column group `group` int32 [S] (where
    `taken`), times that group of the vector. Each of the S may have a matrix and a vector of its own: x pointers [S]; codes, scales, zeros
    addresses int64 [S], those of codes multiples of 16. The matrix's factor is left to the caller."""
    inside = taken & (group * LAYOUT.group < COLUMNS)
    there = live[:, None] & inside[None, :]
    wide_row = row.to(tl.int64)
    if LAYOUT.form == "int4" or LAYOUT.form == "int3" or LAYOUT.form == "e2m1":
        place = wide_row[:, None] * LAYOUT.scale_columns + (group // LAYOUT.per_scale)[None, :]
        scale, zero = group_scales(scales[None, :], zeros[None, :], place, there, LAYOUT)
        first = tl.multiple_of(codes.to(tl.pointer_type(tl.uint8)), 16)[None, :]
        total = scale * 0.0
        if LAYOUT.form == "int3":
            column = group[:, None] * LAYOUT.group + tl.arange(0, LAYOUT.group // 4)[None, :] * 4
            rows = (first + wide_row[:, None] * (COLUMNS // 8 * 3))[:, :, None]
            run = column // 32 * 12
            byte = tl.load(rows + (run + column % 32 // 4)[None, :, :], mask=there[:, :, None], other=0).to(tl.int32)
            high = tl.load(rows + (run + 8 + column % 32 // 8)[None, :, :], mask=there[:, :, None], other=0).to(tl.int32)
            for place_in in tl.static_range(4):
                values = tl.load(x[:, None] + column + place_in, mask=inside[:, None], other=0.0).to(tl.float32)
                values = normed(values, norm, inverse, column + place_in, COLUMNS, NORM)
                numbers = packed_number(byte, high, (column % 8)[None, :, :], place_in, LAYOUT) - zero[:, :, None]
                total += tl.sum(numbers * values[None, :, :], 2)
        else:
            half = tl.arange(0, LAYOUT.group // 2)[None, :]
            column = group[:, None] * LAYOUT.group + half * 2
            rows = (first + wide_row[:, None] * (COLUMNS // 2))[:, :, None]
            at = group[:, None] * (LAYOUT.group // 2) + half
            byte = tl.load(rows + at[None, :, :], mask=there[:, :, None], other=0, eviction_policy="evict_first").to(tl.int32)
            for place_in in tl.static_range(2):
                values = tl.load(x[:, None] + column + place_in, mask=inside[:, None], other=0.0).to(tl.float32)
                values = normed(values, norm, inverse, column + place_in, COLUMNS, NORM)
                numbers = packed_number(byte, byte, 0, place_in, LAYOUT)
                if LAYOUT.form == "int4":
                    numbers -= zero[:, :, None]
                total += tl.sum(numbers * values[None, :, :], 2)
        return total * scale
    else:
        column = group[:, None] * LAYOUT.group + tl.arange(0, LAYOUT.group)[None, :]
        within = inside[:, None] & (column < COLUMNS)
        values = tl.load(x[:, None] + column, mask=within, other=0.0).to(tl.float32)
        values = normed(values, norm, inverse, column, COLUMNS, NORM)
        first = tl.multiple_of(codes.to(tl.pointer_type(LAYOUT.code)), 16)[None, :]
        rows = (first + wide_row[:, None] * COLUMNS)[:, :, None]
        found = tl.load(rows + column[None, :, :], mask=live[:, None, None] & within[None, :, :], other=0.0, eviction_policy="evict_first")
        if LAYOUT.form == "dense":
            return tl.sum(found.to(tl.float32) * values[None, :, :], 2)
        else:
            block = row * 0
            if LAYOUT.row_block > 0:
                block = row // LAYOUT.row_block
            place = block[:, None] * LAYOUT.scale_columns + (group // LAYOUT.per_scale)[None, :]
            scale, zero = group_scales(scales[None, :], zeros[None, :], place, there, LAYOUT)
            FORM: tl.constexpr = LAYOUT.form  # an argument must be one
            return tl.sum(fp8_values(found, FORM) * values[None, :, :], 2) * scale


@triton.jit
def times_factor(total, factors, mask, LAYOUT: tl.constexpr):
    """`total` float32 times its matrices' factors, or over them. factors: addresses int64 of the same shape."""
    if LAYOUT.factor == 0:
        return total
    else:
        factor = tl.load(factors.to(tl.pointer_type(tl.float32)), mask=mask, other=1.0)
        if LAYOUT.factor == 1:
            return total * factor
        else:
            return total / factor


@triton.jit
def row_products(
    x, norm, inverse, codes, scales, zeros, row, live,
    COLUMNS: tl.constexpr, LAYOUT: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """float32 [R]: rows of one matrix times one vector x, without the matrix's factor. codes, scales, zeros: addresses int64."""
    same = tl.zeros((GROUPS,), tl.int64)
    taken = same == 0
    total = tl.zeros((row.shape[0],), tl.float32)
    for piece in range(PIECES):
        group = piece * GROUPS + tl.arange(0, GROUPS)
        sums = group_sums(
            x + same, norm, inverse, codes + same, scales + same, zeros + same, row, live, group, taken, COLUMNS, LAYOUT, NORM
        )  # fmt: skip
        total += tl.sum(sums, 1)
    return total


@triton.jit
def one_of(which, p0, p1, p2, p3):
    """Address int64 of one of four tensors."""
    a0, a1, a2, a3 = p0.to(tl.int64), p1.to(tl.int64), p2.to(tl.int64), p3.to(tl.int64)
    return tl.where(which < 2, tl.where(which == 0, a0, a1), tl.where(which == 2, a2, a3))


@triton.jit
def tile_of(tile, n0, n1, n2, n3, ROWS: tl.constexpr):
    """Of tile number `tile` of ROWS rows, of which none spans two of the four matrices: which matrix, which of its tiles, the matrix's rows,
    and the rows of those before it."""
    first1 = tl.cdiv(n0, ROWS)
    first2 = first1 + tl.cdiv(n1, ROWS)
    first3 = first2 + tl.cdiv(n2, ROWS)
    which = (tile >= first1).to(tl.int32) + (tile >= first2).to(tl.int32) + (tile >= first3).to(tl.int32)
    ahead = tl.where(which < 2, tl.where(which == 0, 0, first1), tl.where(which == 2, first2, first3))
    size = tl.where(which < 2, tl.where(which == 0, n0, n1), tl.where(which == 2, n2, n3))
    base = tl.where(which < 2, tl.where(which == 0, 0, n0), tl.where(which == 2, n0 + n1, n0 + n1 + n2))
    return which, tile - ahead, size, base
