"""Random experts of few bits, made on the device: what the engine's own quantisation and NVFP4 files would hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..checkpoint.packed import PackedWeight

STORED = "stored"
SPREAD = 0.02  # standard deviation of the weights, as of the dense ones


@dataclass(frozen=True)
class PackedForm:
    """How a format keeps a weight: see `PackedWeight`.

    code_spread: standard deviation of the numbers that evenly drawn codes stand for. factor: whether each matrix has one.
    """

    values: str
    bits: int
    group: int
    scale: torch.dtype
    code_spread: float
    factor: bool = False

    def group_of(self, columns: int) -> int:
        """Columns that share a scale: fewer than usual where a row is shorter, or no multiple of them."""
        return math.gcd(columns, self.group)


FORMS = {
    "int4": PackedForm("int", 4, 64, torch.float16, 4.61),
    "int3": PackedForm("int", 3, 64, torch.float16, 2.29),
    "nvfp4": PackedForm("e2m1", 4, 16, torch.float8_e4m3fn, 2.93, factor=True),
}
FORMATS = (STORED, *FORMS)


def packed_bytes(form: PackedForm, shape: tuple[int, ...]) -> int:
    """Bytes of a stack [E, N, K] in that form."""
    count, columns = math.prod(shape), shape[-1]
    factors = 4 * math.prod(shape[:-2]) if form.factor else 0
    return count * form.bits // 8 + form.scale.itemsize * (count // form.group_of(columns)) + factors


def random_packed(form: PackedForm, shape: tuple[int, ...], generator: torch.Generator) -> PackedWeight:
    """A stack [E, N, K] on the generator's device: all codes equally often, scales spread evenly over half to one and a
    half of what gives the weights their usual spread, of whole codes half of them negative: from -8 to 7 alone, they would
    not lie around zero."""
    *lead, rows, columns = shape
    device = generator.device
    codes = torch.randint(0, 256, (*lead, rows, columns * form.bits // 8), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand((*lead, rows, columns // form.group_of(columns)), device=device, generator=generator) + 0.5
    if form.values == "int":
        scale *= 1 - 2 * torch.randint(0, 2, scale.shape, device=device, generator=generator)
    # E4M3 has its finest steps far above 0.02: the factor of the matrix brings the numbers down, as in files.
    factor = torch.full((*lead, 1, 1), SPREAD / form.code_spread / 128, device=device) if form.factor else None
    scale *= 128 if form.factor else SPREAD / form.code_spread
    return PackedWeight(codes, scale.to(form.scale), None, factor, form.values, form.group_of(columns), form.bits)
