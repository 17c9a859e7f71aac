"""Device code: FP8 rows times one vector on the matrix units, exact to float32.

A weight costs ordinary float32 code about three instructions with its conversion and its share of the sums; with what a
short program needs beside them, an H200's multiprocessors cannot keep up with its memory. The matrix units take 16 rows and
16 columns in one instruction, but multiply float16. The codes are float16 values; the vector is cut into three of them,
x = high + middle + low (33 bits, after it was scaled by a power of two), which fill three of the eight columns that the
instruction has for the other factor. Sums are float32.

Written thread by thread: tensors of [T] hold one value a thread, and inline assembly does what Triton has no words for.
A warp takes 16 rows and 512 columns, in steps of 64. Lane 4 g + t holds rows g and g + 8, columns 16 t to 16 t + 15 of each
64: which of them the instruction calls which column does not matter, as long as both factors agree.
"""

import triton
import triton.language as tl

PITCH = tl.constexpr(9232)  # bytes from one piece of the vector to the next in shared memory; 16 more than whole lines


@triton.jit
def shared_memory(any):
    """Address int32 of shared memory for three pieces of up to 4,608 values; once a kernel. any: any int32."""
    return tl.inline_asm_elementwise(
        """{
        .shared .align 16 .b8 pieces[27696];
        mov.u32 $0, pieces;
        }""",
        "=r,r", [any], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_step(first, second):
    """16 codes from each of two addresses [T]: eight int32 [T]. Ordinary loads, which the assembler leaves before the wait
    (those of constant memory it puts off). A step reads half a line of 128 bytes; the L2 cache is told to fetch all of it."""
    return tl.inline_asm_elementwise(
        """ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$8];
        ld.global.L1::no_allocate.L2::128B.v4.b32 {$4, $5, $6, $7}, [$9];""",
        "=r,=r,=r,=r,=r,=r,=r,=r,l,l", [first, second],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def touch(address):
    """Ask the L2 cache for the line at each address int64 [T]; nothing waits for it."""
    return tl.inline_asm_elementwise(
        """prefetch.global.L2 [$1];
        mov.u32 $0, 0;""",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_steps(first, second):
    """Four steps of 64 columns."""
    return (
        load_step(first, second),
        load_step(first + 64, second + 64),
        load_step(first + 128, second + 128),
        load_step(first + 192, second + 192),
    )


@triton.jit
def store_pieces(values, address):
    """values float32, two neighbours at a time, cut into three float16 pieces each; address int32: where the first piece of
    each goes."""
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
        mov.b32 {l, h}, p;
        cvt.f32.f16 f, l;
        cvt.f32.f16 e, h;
        sub.f32 u, u, f;
        sub.f32 v, v, e;
        cvt.rn.f16x2.f32 p, v, u;
        st.shared.b32 [$4 + 18464], p;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        "=r,=r,f,f,r,r", [values, address], dtype=tl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def multiply_step(c, codes, address):
    """c: four float32 [T], the sums of row g (first two) and row g + 8, plus 64 columns; codes: as load_step gives them;
    address int32 [T] of the lane's piece of the vector."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x<8>;
        .reg .b32 p, q, r, s;
        .reg .b16 l, h;
        .reg .f32 c<4>;
        mov.f32 c0, $4;
        mov.f32 c1, $5;
        mov.f32 c2, $6;
        mov.f32 c3, $7;
        ld.shared.v4.b32 {x0, x1, x2, x3}, [$16];
        ld.shared.v4.b32 {x4, x5, x6, x7}, [$16 + 16];
        mov.b32 {l, h}, $8;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 r, h;
        mov.b32 {l, h}, $12;
        cvt.rn.f16x2.e4m3x2 q, l;
        cvt.rn.f16x2.e4m3x2 s, h;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {p, q, r, s}, {x0, x1}, {c0, c1, c2, c3};
        mov.b32 {l, h}, $9;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 r, h;
        mov.b32 {l, h}, $13;
        cvt.rn.f16x2.e4m3x2 q, l;
        cvt.rn.f16x2.e4m3x2 s, h;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {p, q, r, s}, {x2, x3}, {c0, c1, c2, c3};
        mov.b32 {l, h}, $10;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 r, h;
        mov.b32 {l, h}, $14;
        cvt.rn.f16x2.e4m3x2 q, l;
        cvt.rn.f16x2.e4m3x2 s, h;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {p, q, r, s}, {x4, x5}, {c0, c1, c2, c3};
        mov.b32 {l, h}, $11;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 r, h;
        mov.b32 {l, h}, $15;
        cvt.rn.f16x2.e4m3x2 q, l;
        cvt.rn.f16x2.e4m3x2 s, h;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {c0, c1, c2, c3}, {p, q, r, s}, {x6, x7}, {c0, c1, c2, c3};
        mov.f32 $0, c0;
        mov.f32 $1, c1;
        mov.f32 $2, c2;
        mov.f32 $3, c3;
        }""",
        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r,r,r,r",
        [c[0], c[1], c[2], c[3], codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], codes[6], codes[7], address],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_steps(total, four, address, zero, first_scale, first_scale_below, second_scale, second_scale_below):
    """Four steps, 256 columns: two blocks of 128 with a scale each for row g and for row g + 8."""
    c = multiply_step((zero, zero, zero, zero), four[0], address)
    c = multiply_step(c, four[1], address + 128)
    d = multiply_step((zero, zero, zero, zero), four[2], address + 256)
    d = multiply_step(d, four[3], address + 384)
    return (
        total[0] + c[0] * first_scale + d[0] * second_scale,
        total[1] + c[1] * first_scale + d[1] * second_scale,
        total[2] + c[2] * first_scale_below + d[2] * second_scale_below,
        total[3] + c[3] * first_scale_below + d[3] * second_scale_below,
    )


@triton.jit
def power_of_two_for(largest):
    """A power of two that brings `largest` to between 2**13 and 2**14, and its inverse: of numbers that float16 holds with
    all their pieces. Clamped where float32 ends."""
    exponent = tl.minimum(267 - ((largest.to(tl.int32, bitcast=True) >> 23) & 255), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def over_pieces(total, thread):
    """float32 [T, 2]: a lane's part of the sums of rows g and g + 8. The pieces' columns are in lanes t = 0 (two), t = 1 (one)."""
    t = thread % 4
    above = tl.where(t == 0, total[0] + total[1], tl.where(t == 1, total[0], 0.0))
    below = tl.where(t == 0, total[2] + total[3], tl.where(t == 1, total[2], 0.0))
    return tl.join(above, below)


@triton.jit
def over_lanes(total, other, thread, WARPS: tl.constexpr):
    """Sums float32 [8, 2, 2] over all lanes and warps: row g, then that or row g + 8, then of the first or the other tile."""
    both = tl.join(over_pieces(total, thread), over_pieces(other, thread))
    return tl.sum(tl.sum(tl.reshape(both, (WARPS, 8, 4, 2, 2)), 2), 0)


@triton.jit
def over_lanes_one(total, thread, WARPS: tl.constexpr):
    """over_lanes of one tile: [8, 2]."""
    return tl.sum(tl.sum(tl.reshape(over_pieces(total, thread), (WARPS, 8, 4, 2)), 2), 0)


@triton.jit
def sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def lane_of(thread, address):
    """The lane's part of the vector in shared memory, of the columns of its warp's 512: pieces 0, 1, 2 for g = 0, 1, 2."""
    return address + tl.minimum(thread % 32 // 4, 2) * PITCH + thread % 4 * 32 + thread // 32 * 1024
