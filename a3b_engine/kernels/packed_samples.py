"""Random packed weights for self-tests and measurements."""

from __future__ import annotations

import torch

from ..checkpoint.packed import PackedWeight


def random_packed(
    shape: tuple[int, ...], form: str, group: int, device: torch.device, *, scale: torch.dtype = torch.float16, zero: bool = False,
    factor: bool = False, divides: bool = False, seed: int = 0,
) -> PackedWeight:  # fmt: skip
    """A weight [..., N, K] of form "int4", "int3" or "e2m1" with random codes; values have about the spread of trained ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    *lead, rows, columns = shape
    bits = 3 if form == "int3" else 4
    codes = torch.randint(0, 256, (*lead, rows, columns * bits // 8), dtype=torch.uint8, device=device, generator=generator)
    groups = (*lead, rows, columns // group)
    spread = torch.rand(groups, device=device, generator=generator) + 0.5
    whole = None
    if factor:
        whole = (torch.rand((*lead, 1, 1), device=device, generator=generator) + 0.5) * 8e-3
        whole = 1 / whole if divides else whole
    else:
        spread *= 8e-3
    zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8, device=device, generator=generator) if zero else None
    return PackedWeight(codes, spread.to(scale), zeros, whole, "e2m1" if form == "e2m1" else "int", group, bits, divides)
