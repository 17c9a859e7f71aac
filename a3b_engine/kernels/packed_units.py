"""Device code: packed rows times one vector on the matrix units, exact to float32. See matrix_units, which this is beside.

Codes of few bits become float16 values exactly: or-ed into the mantissa of 1024, from which a number is taken away. Every group of columns has
a scale of its own, so sums of different groups must not mix; yet an instruction sums over 16 columns that lie in four lanes. So the
eight columns of the other factor are one pair for each of the four lanes t: the vector in two float16 pieces (22 bits and a sign, as exact as
float32) at the columns of that lane, and zeros at those of the others. Lane 4 g + t then finds the sums over its own columns, of rows g and
g + 8, in its own registers, and multiplies them with its own scales.

A warp takes 16 rows and 512 columns, a lane 32 columns (a chunk) of each 128 (four bits), or 128 of them side by side (three bits).
In shared memory stand both pieces and, where matrix_units has its third one, some zeros. Two numbers that share a register are columns j and j + 4
of eight (four bits) or j and j + 16 of 32 (three bits): masks then take the codes apart.
"""

import triton
import triton.language as tl

from .matrix_units import PITCH
from .rows import fp8_values

_STEP = """{
.reg .b32 x<8>;
.reg .b32 p, q, r, s, a, b;
.reg .f32 c<4>;
mov.f32 c0, $4;
mov.f32 c1, $5;
mov.f32 c2, $6;
mov.f32 c3, $7;
%s
mov.f32 $0, c0;
mov.f32 $1, c1;
mov.f32 $2, c2;
mov.f32 $3, c3;
}"""
_MULTIPLY = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {p, q, r, s}, {x%d, x%d}, {c0, c1, c2, c3};"


def _load(address: str, offset: int) -> list[str]:
    """32 bytes of the vector: 16 columns."""
    return [f"ld.shared.v4.b32 {{x0, x1, x2, x3}}, [{address} + {offset}];", f"ld.shared.v4.b32 {{x4, x5, x6, x7}}, [{address} + {offset + 16}];"]


def _int4(out: str, word: str, place: int, bias: tuple[str, str]) -> list[str]:
    """Codes `place` and `place` + 4 of a word, less their zero: those in the lower half of a byte stand for themselves above 1024, the
    others for 16 times themselves."""
    source = [f"shr.b32 a, {word}, 8;"] if place == 2 else []
    word = "a" if place >= 2 else word
    source.append(f"lop3.b32 {out}, {word}, {'0x00f000f0' if place % 2 else '0x000f000f'}, 0x64006400, 0xEA;")
    if place % 2:  # 0x2c00 is 1 / 16
        return source + [f"fma.rn.f16x2 {out}, {out}, b, {bias[1]};"]
    return source + [f"add.rn.f16x2 {out}, {out}, {bias[0]};"]


def _e2m1(out: str, word: str, place: int) -> list[str]:
    """Codes `place` and `place` + 4 of a word, times 2 ** -14: sign, exponent and mantissa go where float16 has them."""
    up = [f"shl.b32 a, {word}, {12 - 4 * place};"] if place < 3 else [f"mov.b32 a, {word};"]
    down = f"shl.b32 b, {word}, {9 - 4 * place};" if place < 3 else f"shr.b32 b, {word}, 3;"
    return up + [down, "and.b32 a, a, 0x80008000;", f"lop3.b32 {out}, b, 0x0e000e00, a, 0xEA;"]


def _int3(out: str, low: str, high: str, place: int, bias: str) -> list[str]:
    """Codes `place` % 8 and that + 16 of a chunk: low holds two bits of eight codes in each half, high a bit of sixteen; less their zero."""
    shift = place - 2
    high_bit = f"shr.b32 a, {high}, {shift};" if shift > 0 else f"shl.b32 a, {high}, {-shift};"
    return [
        f"shr.b32 b, {low}, {2 * (place % 8)};", f"lop3.b32 {out}, b, 0x00030003, 0x64006400, 0xEA;",
        high_bit, f"lop3.b32 {out}, a, 0x00040004, {out}, 0xEA;", f"add.rn.f16x2 {out}, {out}, {bias};",
    ]  # fmt: skip


def _half_chunk(take) -> str:
    """16 columns of four bits: words $8, $9 of row g and $10, $11 of row g + 8, the vector at $12."""
    lines = _load("$12", 0)
    for word in range(2):
        for pair in range(2):
            for row, names in enumerate(("pr", "qs")):
                for half in range(2):
                    lines += take(names[half], f"${8 + 2 * row + word}", 2 * pair + half, row)
            lines.append(_MULTIPLY % (4 * word + 2 * pair, 4 * word + 2 * pair + 1))
    return _STEP % "\n".join(lines)


def _int4_half_chunk() -> str:
    """Biases: $13, $14 of row g, $15, $16 of row g + 8. A word's upper codes are shifted anew for each pair, so that rows need not be kept."""

    def take(out: str, word: str, place: int, row: int) -> list[str]:
        lines = _int4(out, word, place, (f"${13 + 2 * row}", f"${14 + 2 * row}"))
        return lines

    return _half_chunk(take).replace(".reg .f32 c<4>;", ".reg .f32 c<4>;\nmov.b32 b, 0x2c002c00;", 1)


def _int3_chunk() -> str:
    """32 columns of three bits: words $8, $9, $10 of row g, $11, $12, $13 of row g + 8, the vector at $14, biases $15 and $16."""
    lines = [".reg .b32 l<4>;"]
    for row in range(2):  # columns 0 to 7 beside 16 to 23, then 8 to 15 beside 24 to 31
        low, other = f"${8 + 3 * row}", f"${9 + 3 * row}"
        lines += [f"prmt.b32 l{2 * row}, {low}, {other}, 0x5410;", f"prmt.b32 l{2 * row + 1}, {low}, {other}, 0x7632;"]
    for eight in range(2):
        lines += _load("$14", 32 * eight)
        for pair in range(4):
            for row, names in enumerate(("pr", "qs")):
                for half in range(2):
                    place = 8 * eight + 2 * pair + half
                    lines += _int3(names[half], f"l{2 * row + eight}", f"${10 + 3 * row}", place, f"${15 + row}")
            lines.append(_MULTIPLY % (2 * pair, 2 * pair + 1))
    return _STEP % "\n".join(lines)


_OUT = "=f,=f,=f,=f,f,f,f,f,"
INT4 = tl.constexpr(_int4_half_chunk())
E2M1 = tl.constexpr(_half_chunk(lambda out, word, place, row: _e2m1(out, word, place)))
INT3 = tl.constexpr(_int3_chunk())
INT4_ARGUMENTS = tl.constexpr(_OUT + ",".join("r" * 9))
E2M1_ARGUMENTS = tl.constexpr(_OUT + ",".join("r" * 5))
INT3_ARGUMENTS = tl.constexpr(_OUT + ",".join("r" * 9))


@triton.jit
def load_two(first, second):
    """8 bytes from each of two addresses [T]: four int32 [T]."""
    return tl.inline_asm_elementwise(
        """ld.global.L1::no_allocate.L2::128B.v2.b32 {$0, $1}, [$4];
        ld.global.L1::no_allocate.L2::128B.v2.b32 {$2, $3}, [$5];""",
        "=&r,=&r,=&r,=&r,l,l", [first, second], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_48_bytes(address):
    """Twelve int32 [T] from each address [T]. Lanes read 16 of every 48 bytes at a time: what they leave of a line is kept in the
    cache for the next read."""
    return tl.inline_asm_elementwise(
        """ld.global.L2::128B.v4.b32 {$0, $1, $2, $3}, [$12];
        ld.global.L2::128B.v4.b32 {$4, $5, $6, $7}, [$12 + 16];
        ld.global.L2::128B.v4.b32 {$8, $9, $10, $11}, [$12 + 32];""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l", [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_six(first, second):
    """Four chunks of three bits: for each of them three int32 [T] of the first address [T], then three of the second."""
    a, b = load_48_bytes(first), load_48_bytes(second)
    return (
        (a[0], a[1], a[2], b[0], b[1], b[2]), (a[3], a[4], a[5], b[3], b[4], b[5]),
        (a[6], a[7], a[8], b[6], b[7], b[8]), (a[9], a[10], a[11], b[9], b[10], b[11]),
    )  # fmt: skip


@triton.jit
def half_chunk(c, first, second, below_first, below_second, address, bias, below_bias, FORM: tl.constexpr):
    """c: four float32 [T], the sums of row g (the two pieces) and row g + 8, plus 16 columns of each lane; words int32 [T] of row g, then of
    row g + 8; address int32 [T] of the lane's piece of the vector; bias: see `biases`."""
    if FORM == "int4":
        return tl.inline_asm_elementwise(
            INT4, INT4_ARGUMENTS,
            [c[0], c[1], c[2], c[3], first, second, below_first, below_second, address, bias[0], bias[1], below_bias[0], below_bias[1]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            E2M1, E2M1_ARGUMENTS, [c[0], c[1], c[2], c[3], first, second, below_first, below_second, address],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def int3_chunk(c, w0, w1, w2, v0, v1, v2, address, bias, below_bias):
    """As half_chunk, for 32 columns of three bits: words of row g, then of row g + 8."""
    return tl.inline_asm_elementwise(
        INT3, INT3_ARGUMENTS, [c[0], c[1], c[2], c[3], w0, w1, w2, v0, v1, v2, address, bias[0], below_bias[0]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def biases(zero):
    """zero float32 [T] -> what takes 1024 + zero, and 64 + zero, from both numbers of a register."""
    whole = (-1024.0 - zero).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    small = (-64.0 - zero).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return whole | (whole << 16), small | (small << 16)


@triton.jit
def lane_scales(scales, zeros, place, LAYOUT: tl.constexpr):
    """float32 [T] scales, and biases, of one group each; scales, zeros: addresses int64 [T]."""
    scale = tl.load(scales.to(tl.pointer_type(LAYOUT.scale)) + place)
    if LAYOUT.scale == tl.uint8:
        scale = fp8_values(scale, "e4m3_bytes") * 256.0
    else:
        scale = scale.to(tl.float32)
    if LAYOUT.form == "e2m1":
        scale *= 16384.0
    zero = place * 0.0 + (8.0 if LAYOUT.form == "int4" else 4.0)
    if LAYOUT.zero:
        zero = tl.load(zeros.to(tl.pointer_type(tl.uint8)) + place).to(tl.float32)
    return scale, biases(zero)


@triton.jit
def place_of(column, LAYOUT: tl.constexpr):
    """Bytes from the beginning of a piece of the vector to where its number of this column goes."""
    if LAYOUT.form == "int3":
        return column // 32 * 64 + column % 16 * 4 + column // 16 % 2 * 2
    else:
        return column // 8 * 16 + column % 4 * 4 + column // 4 % 2 * 2


@triton.jit
def store_two_pieces(values, address):
    """values float32 cut into two float16 pieces; address int32: where the first piece of each goes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p;
        .reg .b16 l, h;
        .reg .f32 f, e, u, v;
        cvt.rn.f16x2.f32 p, $3, $2;
        mov.b32 {l, h}, p;
        st.shared.b16 [$4], l;
        st.shared.b16 [$5], h;
        cvt.f32.f16 f, l;
        cvt.f32.f16 e, h;
        sub.f32 u, $2, f;
        sub.f32 v, $3, e;
        cvt.rn.f16x2.f32 p, v, u;
        mov.b32 {l, h}, p;
        st.shared.b16 [$4 + 9232], l;
        st.shared.b16 [$5 + 9232], h;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        "=r,=r,f,f,r,r", [values, address], dtype=tl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def store_two_pieces_in_order(values, address):
    """The same where the pieces of two neighbours go behind each other."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p;
        .reg .b16 l, h;
        .reg .f32 f, e, u, v;
        cvt.rn.f16x2.f32 p, $3, $2;
        st.shared.b32 [$4], p;
        mov.b32 {l, h}, p;
        cvt.f32.f16 f, l;
        cvt.f32.f16 e, h;
        sub.f32 u, $2, f;
        sub.f32 v, $3, e;
        cvt.rn.f16x2.f32 p, v, u;
        st.shared.b32 [$4 + 9232], p;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        "=r,=r,f,f,r,r", [values, address], dtype=tl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def store_zeros(thread, address, THREADS: tl.constexpr):
    """The zeros that lanes read in place of each other's columns: as many bytes as a lane goes through, 1,024."""
    for part in tl.static_range(256 // THREADS):
        tl.inline_asm_elementwise(
            """{
            .reg .b32 z;
            mov.b32 z, 0;
            st.shared.b32 [$1], z;
            mov.b32 $0, 0;
            }""",
            "=r,r", [address + 2 * PITCH + (thread + part * THREADS) * 4], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def lane_of_columns(thread, address, first, COLUMNS: tl.constexpr):
    """The lane's part of the vector in shared memory, from byte `first` on, where lane t begins COLUMNS columns behind lane t - 1; zeros,
    for which any of them will do, where this lane holds another's columns of the other factor."""
    g, t = thread % 32 // 4, thread % 4
    return address + tl.where(g // 2 == t, g % 2 * PITCH + first + t * (2 * COLUMNS), 2 * PITCH)


@triton.jit
def lane_of_fp8(thread, address, first):
    """The same for the 16 columns a lane of FP8 codes, whose sums may mix: both pieces are for all lanes."""
    g, t = thread % 32 // 4, thread % 4
    return address + tl.where(g < 2, g * PITCH + first + t * 32, 2 * PITCH)


@triton.jit
def sums_over_lanes(above, below, thread, WARPS: tl.constexpr):
    """Sums float32 [8, 2] over all lanes and warps: row g, then that or row g + 8."""
    return tl.sum(tl.sum(tl.reshape(tl.join(above, below), (WARPS, 8, 4, 2)), 2), 0)


@triton.jit
def add_scaled(total, c, scale, below_scale):
    return total[0] + (c[0] + c[1]) * scale, total[1] + (c[2] + c[3]) * below_scale
