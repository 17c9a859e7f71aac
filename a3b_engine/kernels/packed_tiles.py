"""Device code shared by the kernels of many tokens that read packed weights (checkpoint/packed.py): tiles of four- or three-bit
codes times tiles of activations.

Codes become float16 in registers, exactly: whole numbers up to 15 less a zero, and FP4 times 2^-14 (FP4). Two bytes of four-bit
codes, or one of low bits of three-bit codes, hold four columns: a tile of them makes four tiles of weights, each of which meets every
fourth column of the activations. A tile of weights must be 16 columns wide for the matrix units, so a step is 64 columns at least.
Scales of groups enter in one of two ways:

* behind the product: a step lies within one group, is summed in float32 and multiplied by the scale. Nothing is rounded.
* SCALED, in front of it, where groups are smaller: the scale multiplies the float16 numbers. With e4m3 scales that is exact too: four
  digits of the scale times four of the number are fewer than eleven, and the products of FP4 are multiples of 2^-24 below 1/4. Other
  scales are rounded to float16, and so is the product: 2^-11 each, like the activations, which adds about 3e-4 of the result where
  the plain path's rounding to bfloat16 adds 2e-3. LIFT (256) keeps scales from 2.4e-7 to 17 within the full precision of float16.
"""

import triton
import triton.language as tl

from .rows import fp8_values
from .weight_tiles import dot

# Two numbers of four codes each to four pairs of float16, first codes to the first pair. 0x6400 is 1024, whose last digit is 1;
# 0x5400 is 64, whose last digit but four is 1. The number in front is taken off again, with 8 or nothing beside it.
_FOUR_CODES = """
{
.reg .b32 upper, low, high, code;
mov.b32 low, LOW;
mov.b32 high, HIGH;
shr.u32 upper, $4, 8;
lop3.b32 code, $4, 0x000f000f, 0x64006400, 0xea;
sub.f16x2 $0, code, low;
lop3.b32 code, $4, 0x00f000f0, 0x54005400, 0xea;
sub.f16x2 $1, code, high;
lop3.b32 code, upper, 0x000f000f, 0x64006400, 0xea;
sub.f16x2 $2, code, low;
lop3.b32 code, upper, 0x00f000f0, 0x54005400, 0xea;
sub.f16x2 $3, code, high;
}
"""
_LESS_EIGHT = tl.constexpr(_FOUR_CODES.replace("LOW", "0x64086408").replace("HIGH", "0x54805480"))
_AS_STORED = tl.constexpr(_FOUR_CODES.replace("LOW", "0x64006400").replace("HIGH", "0x54005400"))
# The sign and the other three bits of FP4 codes to their places in float16, where they are 2^-14 of the number.
_FOUR_FP4 = tl.constexpr("""
{
.reg .b32 sign, rest;
shl.b32 rest, $4, 9;
shl.b32 sign, $4, 12;
and.b32 rest, rest, 0x0e000e00;
lop3.b32 $0, sign, 0x80008000, rest, 0xea;
shl.b32 rest, $4, 5;
shl.b32 sign, $4, 8;
and.b32 rest, rest, 0x0e000e00;
lop3.b32 $1, sign, 0x80008000, rest, 0xea;
shl.b32 rest, $4, 1;
shl.b32 sign, $4, 4;
and.b32 rest, rest, 0x0e000e00;
lop3.b32 $2, sign, 0x80008000, rest, 0xea;
shr.u32 rest, $4, 3;
and.b32 rest, rest, 0x0e000e00;
lop3.b32 $3, $4, 0x80008000, rest, 0xea;
}
""")


def _three_bits(zero: bool) -> str:
    """Four bytes of low bits, four of high bits (in their lower halves) to float16: the first columns of the bytes, then the second ... The
    two low bits of column c stay at bit 2 c, where the last digits of 1024 / 4^c are."""
    lines = [".reg .b32 low0, low1, high0, high1, rest;"]
    for half, order in enumerate(("0x4140", "0x4342")):
        lines += [f"prmt.b32 low{half}, $8, 0, {order};", f"prmt.b32 high{half}, $9, 0, {order};"]
    for place in range(4):
        number, less = 0x6400 - 0x800 * place, 0 if zero else 4 << (2 * place)
        twice = [f"0x{part * 0x10001:08x}" for part in (3 << (2 * place), number, 4 << (2 * place), number | less)]
        for half in range(2):
            out = f"${2 * place + half}"
            lines += [
                f"shl.b32 rest, high{half}, {place + 2};", f"lop3.b32 {out}, low{half}, {twice[0]}, {twice[1]}, 0xea;",
                f"lop3.b32 {out}, rest, {twice[2]}, {out}, 0xea;", f"mov.b32 rest, {twice[3]};", f"sub.f16x2 {out}, {out}, rest;",
            ]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


_THREE_BITS, _THREE_AS_STORED = tl.constexpr(_three_bits(False)), tl.constexpr(_three_bits(True))
FP4 = tl.constexpr(16384.0)  # what `nibble` leaves out of e2m1 codes


@triton.jit
def scale_values(scales):
    """Scales as stored -> float32. uint8 stands for e4m3 where the device has no such type."""
    if scales.dtype == tl.uint8:
        return fp8_values(scales, "e4m3_bytes") * 256.0
    elif scales.dtype == tl.float8e4nv:
        return scales.to(tl.float16).to(tl.float32)
    else:
        return scales.to(tl.float32)


@triton.jit
def nibble(code, VALUES: tl.constexpr, ZERO: tl.constexpr):
    """Codes below 16 -> float32: "int" less 8 unless there is a ZERO to come, "e2m1" divided by FP4."""
    if VALUES == "e2m1":
        wide = code.to(tl.uint16)
        return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
    elif ZERO:
        return code.to(tl.float32)
    else:
        return code.to(tl.float32) - 8.0


@triton.jit
def of_four_bits(codes, VALUES: tl.constexpr, ZERO: tl.constexpr, D: tl.constexpr):
    """uint16 [BN, n], four codes each -> numbers of the first, second, third and fourth columns of each four, [BN, n] of type D, as
    `nibble` has them."""
    if D == tl.float16:
        if VALUES == "e2m1":
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                _FOUR_FP4, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )
        elif ZERO:
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                _AS_STORED, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                _LESS_EIGHT, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )
        return n0, n1, n2, n3
    else:
        n0, n1 = nibble(codes & 15, VALUES, ZERO).to(D), nibble((codes >> 4) & 15, VALUES, ZERO).to(D)
        n2, n3 = nibble((codes >> 8) & 15, VALUES, ZERO).to(D), nibble(codes >> 12, VALUES, ZERO).to(D)
        return n0, n1, n2, n3


@triton.jit
def of_three_bits(low, high, ZERO: tl.constexpr, D: tl.constexpr):
    """low uint8 [BN, n]: two low bits of four columns each; high uint8 [BN, n]: their high bits, and anything above -> numbers as of_four_bits,
    less 4 unless there is a ZERO to come."""
    if D == tl.float16:
        if ZERO:
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                _THREE_AS_STORED, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [low, high],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                _THREE_BITS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [low, high],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        return n0, n1, n2, n3
    else:
        LESS: tl.constexpr = 0.0 if ZERO else 4.0
        n0, n1 = ((low & 3) | ((high & 1) << 2)).to(D) - LESS, (((low >> 2) & 3) | ((high & 2) << 1)).to(D) - LESS
        n2, n3 = (((low >> 4) & 3) | (high & 4)).to(D) - LESS, ((low >> 6) | ((high & 8) >> 1)).to(D) - LESS
        return n0, n1, n2, n3


@triton.jit
def load_codes_of_step(rows, step, BITS: tl.constexpr, BK: tl.constexpr):
    """Codes of BK columns of rows [BN] (pointers to their first byte): uint16 [BN, BK / 4], and again, for four bits; for three the
    bytes of low bits, [BN, BK / 4], and those of high bits, [BN, BK / 8]."""
    if BITS == 4:
        at = step * (BK // 4) + tl.arange(0, BK // 4)
        codes = tl.load(rows.to(tl.pointer_type(tl.uint16))[:, None] + at[None, :])
        return codes, codes
    else:
        byte, upper = tl.arange(0, BK // 4), tl.arange(0, BK // 8)
        first = step * (BK // 32 * 12)
        low = tl.load(rows[:, None] + (first + byte // 8 * 12 + byte % 8)[None, :])
        high = tl.load(rows[:, None] + (first + upper // 4 * 12 + 8 + upper % 4)[None, :])
        return low, high


@triton.jit
def load_scales_of_step(
    scales, zeros, step, K: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr, LIFT: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of BK columns of rows [BN]: float32 and D [BN] of the one group they are in; SCALED: D [BN, BK / 16],
    those of each 16 columns, times LIFT (wider groups repeat theirs: with four numbers a scale, Triton keeps the numbers where the
    tensor cores want them). One step past the end reads the last."""
    step = tl.minimum(step, K // BK - 1)
    if SCALED:
        at = ((step * BK + 16 * tl.arange(0, BK // 16)) // GROUP)[None, :]
        scale = (scale_values(tl.load(scales[:, None] + at)) * LIFT).to(D)
        if ZERO:
            return scale, tl.load(zeros[:, None] + at).to(D)
        else:
            return scale, scale
    else:
        at = step * BK // GROUP
        scale = scale_values(tl.load(scales + at))
        if ZERO:
            return scale, tl.load(zeros + at).to(D)
        else:
            return scale, scale


@triton.jit
def every_fourth(x):
    """Activations [BT, BK] -> their columns 0, 4, 8 ..., 1, 5, 9 ..., 2, 6, 10 ... and 3, 7, 11 ..., [BT, BK / 4] each."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def spread(values, columns: tl.constexpr):
    """[BN, n] -> [BN, columns], each for columns / n of them."""
    EACH: tl.constexpr = columns // values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], EACH)), (values.shape[0], columns))


@triton.jit
def finished(numbers, scale, zero, ZERO: tl.constexpr, SCALED: tl.constexpr):
    """Numbers less their zeros and, where SCALED, times their scales; zero and scale as wide as the numbers."""
    if ZERO:
        numbers = numbers - zero
    if SCALED:
        numbers = numbers * scale
    return numbers


@triton.jit
def packed_product(
    codes, more, x0, x1, x2, x3, scale, zero, acc, VALUES: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """acc float32 [BN, BT] + weights of one step times activations. codes, more: of load_codes_of_step; x0 to x3: of every_fourth;
    scale, zero: of load_scales_of_step."""
    D: tl.constexpr = x0.dtype
    WIDE: tl.constexpr = x0.shape[1]
    if BITS == 4:
        n0, n1, n2, n3 = of_four_bits(codes, VALUES, ZERO, D)
    else:
        n0, n1, n2, n3 = of_three_bits(codes, tl.interleave(more, more >> 4), ZERO, D)
    wide_scale, wide_zero = scale, zero
    if SCALED:
        wide_scale = spread(scale, WIDE)
        if ZERO:
            wide_zero = spread(zero, WIDE)
        total = acc
    else:
        if ZERO:
            wide_zero = zero[:, None]
        total = tl.zeros((codes.shape[0], x0.shape[0]), tl.float32)
    total = dot(finished(n0, wide_scale, wide_zero, ZERO, SCALED), tl.trans(x0), total)
    total = dot(finished(n1, wide_scale, wide_zero, ZERO, SCALED), tl.trans(x1), total)
    total = dot(finished(n2, wide_scale, wide_zero, ZERO, SCALED), tl.trans(x2), total)
    total = dot(finished(n3, wide_scale, wide_zero, ZERO, SCALED), tl.trans(x3), total)
    if SCALED:
        return total
    else:
        return acc + total * scale[:, None]


@triton.jit
def matrix_factor(factor, VALUES: tl.constexpr, FACTOR: tl.constexpr, LIFT: tl.constexpr):
    """What the sums of a matrix are still to be multiplied by. FACTOR: "", "times" or "over"; factor: address of the float32."""
    value = 1.0 / LIFT
    if VALUES == "e2m1":
        value = FP4 / LIFT
    if FACTOR == "times":
        return tl.load(factor.to(tl.pointer_type(tl.float32))) * value
    elif FACTOR == "over":
        return value / tl.load(factor.to(tl.pointer_type(tl.float32)))
    else:
        return value
