"""Packed weights as the kernels of many tokens see them: the layout, how wide their steps are, and whole matrices multiplied out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Sequence

import torch
import triton.language as tl

from ..checkpoint.packed import PackedWeight
from . import packed_samples
from .launcher import TRITON_TYPES, Launchers
from .packed_prefill_programs import packed_dequantize_kernel
from .support import Target, UnsupportedByKernel, relative_error, self_test, usable

_SHORTEST_STEP, _LONGEST_STEP = 64, 128  # columns


@dataclass(frozen=True)
class PackedForm:
    """The layout of a PackedWeight [..., N, K] without its sizes. scale: torch's type. factor: "", "times" or "over"."""

    values: str
    bits: int
    group: int
    scale: torch.dtype
    zero: bool
    factor: str

    def constants(self, target: Target) -> dict[str, object]:
        """For a kernel; e4m3 scales are bytes where the device has no such type."""
        bytewise = self.scale == torch.float8_e4m3fn and not target.fp8_native
        scale = tl.uint8 if bytewise else TRITON_TYPES[self.scale]
        return dict(VALUES=self.values, BITS=self.bits, GROUP=self.group, SCALE=scale, ZERO=self.zero, FACTOR=self.factor)

    def step(self, columns: int, scaled: bool | None = None) -> dict[str, object]:
        """BK, SCALED and LIFT for rows of so many columns: see packed_tiles. By the group unless `scaled` says which."""
        by_group, wide = math.gcd(self.group, _LONGEST_STEP), math.gcd(columns, _LONGEST_STEP)
        scaled = by_group < _SHORTEST_STEP if scaled is None else scaled
        step = wide if scaled else by_group
        if step < _SHORTEST_STEP or self.group % 16:
            raise UnsupportedByKernel(f"{self.bits} bits in groups of {self.group} of {columns} columns")
        lift = 1.0
        if scaled and self.scale != torch.float8_e4m3fn:
            lift = 2.0**8 if self.values == "int" else 2.0**16  # FP4 numbers are 2^-14 of what they should be
        return dict(BK=step, SCALED=scaled, LIFT=lift)


def packed_form(weights: Sequence[PackedWeight], target: Target) -> PackedForm:
    """The one layout of all of these; UnsupportedByKernel where they differ or lie where kernels cannot read them. A weight on the
    meta device stands for its layout alone."""
    forms = []
    for weight in weights:
        parts = [part for part in (weight.codes, weight.scale, weight.zero, weight.factor) if part is not None]
        if any(not part.is_contiguous() for part in parts):
            raise UnsupportedByKernel("weights with gaps between their rows")
        if weight.device.type != "meta" and weight.device != target.device:
            raise UnsupportedByKernel(f"weights on {weight.device} for a kernel on {target.device}")
        if weight.device.type != "meta" and weight.codes.data_ptr() % 16:
            raise UnsupportedByKernel("weights off the grid of 16 bytes")
        factor = "" if weight.factor is None else "over" if weight.factor_divides else "times"
        forms.append(PackedForm(weight.values, weight.bits, weight.group, weight.scale.dtype, weight.zero is not None, factor))
    if any(form != forms[0] for form in forms):
        raise UnsupportedByKernel("packed weights of different layouts in one launch")
    return forms[0]


class PackedMatrix:
    """One packed matrix [N, K], multiplied out into a plain one by a launch."""

    def __init__(self, weight: PackedWeight, launchers: Launchers) -> None:
        form = packed_form([weight], launchers.target)
        rows, columns = weight.shape
        parts = [weight.codes, weight.scale, weight.zero, weight.factor]
        if weight.ndim != 2 or columns % 8 or any(part is not None and part.data_ptr() % 16 for part in parts):
            raise UnsupportedByKernel(f"a packed matrix of {list(weight.shape)} off the grid of 16 bytes")
        self.weight = weight
        scale = weight.scale
        constants = form.constants(launchers.target)
        if constants.pop("SCALE") == tl.uint8:
            scale = scale.view(torch.uint8)
        self._parts = [weight.codes, scale, *(weight.codes if part is None else part for part in parts[2:])]
        self._grid = (-(-rows // 16), -(-columns // 256), 1)
        self._launch = launchers.get(packed_dequantize_kernel, N=rows, K=columns, **constants, BN=16, WIDTH=256, num_warps=4)

    def __call__(self, out: torch.Tensor) -> None:
        """out [N, K], contiguous, from a multiple of 16 bytes on."""
        self._launch(self._grid, *self._parts, out)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The same in plain PyTorch."""
        return self.weight.dequantize(dtype)


def require(kernel: str, target: Target) -> None:
    """UnsupportedByKernel unless the self-test of `kernel`, which only models with packed weights need, passed on this device."""
    if not usable(kernel, target.device):
        raise UnsupportedByKernel(f"{kernel} failed its self-test")


SAMPLES = (
    PackedForm("int", 4, 64, torch.float16, False, ""),
    PackedForm("int", 4, 32, torch.bfloat16, True, ""),
    PackedForm("int", 3, 64, torch.float32, True, ""),
    PackedForm("int", 3, 32, torch.float16, False, ""),
    PackedForm("e2m1", 4, 16, torch.float8_e4m3fn, False, "times"),
    PackedForm("e2m1", 4, 16, torch.float8_e4m3fn, False, "over"),
)


def random_packed(form: PackedForm, shape: tuple[int, ...], device: torch.device, seed: int = 0) -> PackedWeight:
    """A random weight [..., N, K] of this layout, for self-tests and measurements."""
    kind = "e2m1" if form.values == "e2m1" else f"int{form.bits}"
    factor = dict(factor=form.factor != "", divides=form.factor == "over")
    return packed_samples.random_packed(shape, kind, form.group, device, scale=form.scale, zero=form.zero, seed=seed, **factor)


@self_test("packed_prefill", limit=3e-3)
def check(target: Target) -> float:
    """Every kind of codes and scales, groups of a whole row, ragged tiles."""
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    launchers, errors = Launchers(target), []
    rows, columns = (20, 320) if target.interpreted else (1000, 2048 + 64)
    for number, form in enumerate((*SAMPLES, replace(SAMPLES[0], group=columns))):
        weight = random_packed(form, (rows, columns), device, number)
        out = torch.full((rows, columns), torch.nan, device=device, dtype=dtype)
        PackedMatrix(weight, launchers)(out)
        errors.append(relative_error(out, weight.dequantize(torch.float64)))
    return max(errors)
