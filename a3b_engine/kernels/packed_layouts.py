"""How a weight of any kind lies in memory, as one constant that the kernels for packed and for mixed weights are compiled with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import torch
import triton.language as tl

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight
from .gemv import code_format, readable
from .support import Target, UnsupportedByKernel

CODE_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.uint8: tl.uint8, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.float32: tl.float32,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Layout:
    """Of a matrix [N, K].

    form: "dense", "e4m3", "e4m3_bytes", "e5m2_bytes" (see rows.fp8_values), "int4", "int3" or "e2m1" (see PackedWeight). code: type of an
    element, of a byte where several codes share one. scale: type of a scale; `tl.uint8` for e4m3 ones on a card that has no
    such type. row_block: rows a scale covers, 0 for all; scale_columns: scales in a row; group: columns summed before a scale
    multiplies; per_scale: groups a scale covers. zero: codes have zeros of their own, one a scale. factor: 0 none, 1 the sum is
    multiplied by the matrix's factor, 2 divided by it.
    """

    form: str
    code: tl.dtype
    scale: tl.dtype
    row_block: int
    scale_columns: int
    group: int
    per_scale: int
    zero: bool = False
    factor: int = 0

    def __repr__(self) -> str:
        """Becomes part of names in compiled code."""
        numbers = (self.row_block, self.scale_columns, self.group, self.per_scale, int(self.zero), self.factor)
        return "_".join(map(str, (self.form, self.code, self.scale, *numbers)))


def layout(weight: Weight, target: Target) -> Layout:
    """Of a weight [..., N, K]; `UnsupportedByKernel` where no kernel reads it. Only types and shapes are looked at."""
    if not isinstance(weight, PackedWeight):
        form = code_format(weight, target)
        code = CODE_TYPES[readable(weight, form).dtype]
        return Layout(form.name, code, tl.float32, form.row_block, form.scale_columns, form.group, form.per_scale)
    if not all(part is None or part.is_contiguous() for part in (weight.codes, weight.scale, weight.zero, weight.factor)):
        raise UnsupportedByKernel("weights with gaps between their rows")
    group = math.gcd(weight.group, 128)
    if group < 16:
        raise UnsupportedByKernel(f"scales over {weight.group} columns")
    scale = CODE_TYPES[weight.scale.dtype]
    if weight.scale.dtype == torch.float8_e4m3fn and not target.fp8_native:
        scale = tl.uint8
    factor = 0 if weight.factor is None else 2 if weight.factor_divides else 1
    return Layout(form_of(weight), tl.uint8, scale, 1, weight.scale.shape[-1], group, weight.group // group, weight.zero is not None, factor)


def form_of(weight: PackedWeight) -> str:
    """"int4", "int3" or "e2m1"."""
    return "e2m1" if weight.values == "e2m1" else f"int{weight.bits}"


def common_layout(weights: Sequence[Weight], target: Target) -> Layout:
    """The one layout of all of these; `UnsupportedByKernel` where they differ."""
    first, *others = (layout(weight, target) for weight in weights)
    if any(other != first for other in others):
        raise UnsupportedByKernel("weights of different layouts in one launch")
    return first


def lane_takes(form: Layout) -> bool:
    """Whether a lane of the matrix units finds groups of its own: whole runs of 32 columns, or of 16 in four bits."""
    return form.form in ("int4", "int3", "e2m1") and (form.group >= 32 or (form.group == 16 and form.per_scale == 1 and form.form != "int3"))


def parts_of(weight: Weight, form: Layout) -> list[torch.Tensor]:
    """Codes, scales, zeros and factor as the kernels take them; what a weight does not have is its codes again, and not read."""
    if isinstance(weight, PackedWeight):
        found = [weight.codes, weight.scale, weight.zero, weight.factor]
    elif isinstance(weight, ScaledWeight):
        found = [weight.data, weight.scale, None, None]
    else:
        found = [weight, None, None, None]
    as_bytes = [form.code == tl.uint8, form.scale == tl.uint8, False, False]
    parts = [found[0] if part is None else part for part in found]
    return [part.view(torch.uint8) if small and part.itemsize == 1 else part for part, small in zip(parts, as_bytes)]


def cut(columns: int, at_once: int, group: int) -> tuple[int, int]:
    """Groups read at once (a power of two) and pieces, so that `columns` are covered."""
    needed = -(-columns // group)
    groups = min(max(1, at_once // group), 1 << (needed - 1).bit_length())
    return groups, -(-needed // groups)
