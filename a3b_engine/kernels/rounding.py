"""Rounding inside kernels, which hold everything in float32, to the type the plain path computes in."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, D: tl.constexpr):
    """float32 values moved to the nearest value of type D (ties to even), still float32.

    The reference rounds after every step in D, and so do the kernels. bfloat16 is rounded by hand: Triton's interpreter cuts.
    """
    if D == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    elif D == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x
