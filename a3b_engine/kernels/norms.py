"""Residual add and zero-centred RMS norm of one token in one launch, with the split-K sum of the product before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..model.linear import rms_norm
from .rows import let_next_start, wait_for_inputs
from .support import Target, UnsupportedByKernel, relative_error, self_test

MAX_WIDTH = 8192  # one program holds the row in registers


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


@triton.jit
def _add_rms_norm(delta, residual, weight, out, eps, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    columns = tl.arange(0, BLOCK)
    live = columns < width
    scale = 1.0 + tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)  # does not wait for the kernel before
    wait_for_inputs(PDL)
    dtype: tl.constexpr = residual.dtype.element_ty
    x = tl.load(residual + columns, mask=live, other=0.0).to(tl.float32)
    if SPLITS > 0:
        total = tl.load(delta + columns, mask=live, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(delta + split * width + columns, mask=live, other=0.0).to(tl.float32)
        x = rounded(x + rounded(total, dtype), dtype)
        tl.store(residual + columns, x.to(dtype), mask=live)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * scale
    tl.store(out + columns, rounded(y, out.dtype.element_ty).to(out.dtype.element_ty), mask=live)


def check_width(width: int) -> None:
    """`UnsupportedByKernel` where a row does not fit one program; ask while planning."""
    if width > MAX_WIDTH:
        raise UnsupportedByKernel(f"rows of {width} are wider than the {MAX_WIDTH} one program holds")


def add_rms_norm(delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, pdl: bool = False) -> None:
    """residual += sum of delta over its splits; out = residual / rms(residual) * (1 + weight).

    delta: [D] in any float type, or split-K partial sums [S, D] (float32), added in the order of S; None leaves the
    residual as it is. residual [D]: updated in place; the sum and the addition are each rounded to its type, as the
    reference does. weight [D]; out [D] (its own float type). All contiguous, on one device. One program of one launch.
    """
    width = residual.shape[-1]
    splits = 0 if delta is None else delta.numel() // width
    block = triton.next_power_of_2(width)
    options = {"launch_pdl": True} if pdl else {}
    _add_rms_norm[(1,)](
        residual if delta is None else delta, residual, weight, out, eps, width,
        SPLITS=splits, BLOCK=block, PDL=pdl, num_warps=_warps(block), **options,
    )  # fmt: skip


def add_rms_norm_reference(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `add_rms_norm` leaves in (residual, out), in PyTorch; `dtype` is the type of out."""
    if delta is not None:
        residual = residual + delta.view(-1, residual.shape[-1]).float().sum(0).to(residual.dtype)
    return residual, rms_norm(residual.float(), weight, eps).to(dtype)


def _warps(block: int) -> int:
    """Eight elements a thread: a 2,048 wide row takes 8 warps on every card."""
    return max(1, min(16, block // 256))


@self_test("norms", limit=4e-3)
def _check(where: Target) -> float:
    worst = 0.0
    for width, splits in ((2048, 4), (96, 1)):
        generator = torch.Generator().manual_seed(width)
        delta = torch.randn((splits, width), generator=generator).to(where.device)
        residual, weight = (torch.randn(width, generator=generator).to(where.device, torch.bfloat16) for _ in range(2))
        expected = add_rms_norm_reference(delta, residual, weight, 1e-6, torch.bfloat16)
        out = torch.empty_like(residual)
        add_rms_norm(delta, residual, weight, 1e-6, out, pdl=where.pdl)
        worst = max(worst, relative_error(residual, expected[0]), relative_error(out, expected[1]))
    return worst
