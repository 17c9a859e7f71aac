"""Device code shared by the kernels of many tokens: tiles of stored weights times tiles of activations.

A tile of weights is the left operand, its rows the rows of the product, so that on sm_90 it goes from registers to the
tensor cores and few tokens fill the narrow side. FP8 codes become float16 there, exactly and in one instruction for two
of them; activations that meet them are therefore float16, which also rounds them less than bfloat16. Products of a
column block are summed in float32 and multiplied by the block's scale.
"""

import triton
import triton.language as tl

from .rows import fp8_values

# Two numbers of two codes each: the low codes to one pair of float16, the high ones to another.
_PAIRS = tl.constexpr("""
{
.reg .b16 a, b;
.reg .b32 sorted;
prmt.b32 sorted, $2, 0, 0x3120;
mov.b32 {a, b}, sorted;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}
""")


@triton.jit
def decoded(codes, FORMAT: tl.constexpr, D: tl.constexpr):
    """Weights as stored -> values of type D, exactly up to the factor of `factors`. FORMAT: "dense", or as in rows.fp8_values;
    D is float16 or float32 for FP8."""
    if FORMAT == "dense":
        return codes.to(D)
    elif FORMAT == "e4m3":
        return codes.to(tl.float16).to(D)
    else:
        return fp8_values(codes, FORMAT).to(D)


@triton.jit
def factors(scales, FORMAT: tl.constexpr):
    """Scales [.] at these pointers, with what `decoded` leaves out."""
    found = tl.load(scales)
    if FORMAT == "e4m3_bytes":
        found = found * 256.0
    return found


@triton.jit
def product_of_pairs(pairs, x, D: tl.constexpr):
    """Weights [BN, K] times activations [BT, K] transposed, the weights' e4m3 codes given as two a whole number, uint16 [BN, K / 2]:
    columns of even number in the low byte. Their copies to shared memory are 16 bytes wide where those of single codes are 8."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    if D == tl.float16:
        low, high = tl.inline_asm_elementwise(_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(D)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(D)
    acc = dot(low, tl.trans(even), tl.zeros((pairs.shape[0], x.shape[0]), tl.float32))
    return dot(high, tl.trans(odd), acc)


@triton.jit
def saturated(x, D: tl.constexpr):
    """float32 -> D, and what float16 cannot hold as its largest number; NaN stays NaN."""
    if D == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(D)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b for operands of one type, float32 exactly so."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def split(x, D: tl.constexpr):
    """float32 -> (nearest value of type D, what is missing, also as D); with D float32 the second part is zero."""
    high = x.to(D)
    return high, (x - high.to(tl.float32)).to(D)


@triton.jit
def dot_left(a, high, low, acc):
    """acc + a @ (high + low): a exact in its type, the other operand split."""
    if a.dtype == tl.float32:
        return dot(a, high, acc)
    else:
        return dot(a, high, dot(a, low, acc))


@triton.jit
def dot_both(a_high, a_low, b_high, b_low, acc):
    """acc + (a_high + a_low) @ (b_high + b_low) up to the product of the low parts: relative error about 2^-16."""
    if a_high.dtype == tl.float32:
        return dot(a_high, b_high, acc)
    else:
        return dot(a_high, b_high, dot(a_high, b_low, dot(a_low, b_high, acc)))


@triton.jit
def weights_times_tokens(
    rows, scales, tokens, first, last,
    K: tl.constexpr, FORMAT: tl.constexpr, PER_SCALE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BT] = weight rows times activation rows over the column blocks first to last (of BK columns).

    rows: pointers [BN] to the first column of weights of K columns; scales: pointers [BN] to the first scale of the row,
    which covers PER_SCALE blocks; tokens: pointers [BT] to rows of K values. All pointers are valid: the caller repeats
    one where there are fewer rows. BY_PAIRS: read e4m3 codes as product_of_pairs wants them, where whole blocks allow.
    """
    D: tl.constexpr = tokens.dtype.element_ty
    PAIRS: tl.constexpr = BY_PAIRS and FORMAT == "e4m3" and K % BK == 0
    column = tl.arange(0, BK)
    acc = tl.zeros((BN, BT), tl.float32)
    if FORMAT == "dense":
        factor = acc
    else:
        factor = factors(scales + first // PER_SCALE, FORMAT)
    for step in range(first, last):
        at = step * BK + column
        if PAIRS:
            two = step * (BK // 2) + tl.arange(0, BK // 2)
            codes = tl.load(rows.to(tl.pointer_type(tl.uint16))[:, None] + two[None, :])
            x = tl.load(tokens[:, None] + at[None, :])
        elif K % BK == 0:
            codes = tl.load(rows[:, None] + at[None, :])
            x = tl.load(tokens[:, None] + at[None, :])
        else:
            codes = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
            x = tl.load(tokens[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
        if FORMAT == "dense":
            acc = dot(decoded(codes, FORMAT, D), tl.trans(x), acc)
        else:
            # the next scale is on its way while the tensor cores work
            following = factors(scales + tl.minimum(step + 1, last - 1) // PER_SCALE, FORMAT)
            if PAIRS:
                acc += product_of_pairs(codes, x, D) * factor[:, None]
            else:
                acc += dot(decoded(codes, FORMAT, D), tl.trans(x), tl.zeros((BN, BT), tl.float32)) * factor[:, None]
            factor = following
    return acc
