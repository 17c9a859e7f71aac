"""FP8 weights times one vector: e4m3 or e5m2 codes with float32 scales a block, a channel or a tensor.

y [N] = (codes [N, K] * scale [ceil(N/bn), ceil(K/bk)]) @ x [K] in float32. The 128-column partial sums are scaled
afterwards (rows.group_sums). Its reference is GemvPlan.reference, which multiplies out the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import torch

from ..checkpoint.scaled import ScaledWeight
from .configs import MANY_ROWS, TileConfig, configuration, fitted
from .gemv import GemvPlan
from .support import Target, relative_error, self_test


class Fp8Gemv(GemvPlan):
    """GemvPlan of one to four FP8 matrices that share x, and up to two dense ones behind them.

    In the 35B model: qkv | z with tail b | a, [12288 + 64, 2048]; q | k | v, [9216, 2048]; the two output projections
    [2048, 4096] with the residual added.
    """

    def __init__(
        self, matrices: Sequence[ScaledWeight], target: Target, *, tail: Sequence[torch.Tensor] = (),
        norm: torch.Tensor | None = None, eps: float = 1e-6, pdl: bool = False, config: TileConfig | None = None,
    ) -> None:  # fmt: skip
        if config is None:
            rows = sum(matrix.shape[0] for matrix in (*matrices, *tail))
            config = configuration("fp8_many_rows" if rows >= MANY_ROWS else "fp8_few_rows", target)
            config = fitted(config, rows, matrices[0].shape[1], target, group=16)
        super().__init__(matrices, config, target, tail=tail, norm=norm, eps=eps, pdl=pdl)


def random_fp8(
    shape: tuple[int, ...], block: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0
) -> ScaledWeight:
    """A weight of random finite codes, scaled to about the spread of trained ones: for self-tests and measurements."""
    generator = torch.Generator(device=device).manual_seed(seed)
    highest = 0x70 if dtype == torch.float8_e4m3fn else 0x54  # at most 128 and 64 in size
    codes = torch.randint(0, highest, shape, dtype=torch.uint8, device=device, generator=generator)
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator) << 7
    scale_shape = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scale = torch.rand(scale_shape, device=device, generator=generator) * 1e-3
    return ScaledWeight(codes.view(dtype), scale, block)


@self_test("fp8_gemv", limit=1e-5)
def check(target: Target) -> float:
    """Every feature once: ragged rows and columns, two matrices and a tail, the norm, the residual, split columns, e5m2."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    x, residual = torch.randn(2, 456, device=device, generator=generator)
    first, second = random_fp8((200, 456), (128, 128), device), random_fp8((72, 456), (128, 128), device, seed=2)
    tail = torch.randn(10, 456, device=device, generator=generator).to(torch.bfloat16)
    norm = torch.randn(456, device=device, generator=generator) * 0.1
    per_channel = random_fp8((200, 456), (1, 456), device, torch.float8_e5m2)
    small = TileConfig(rows=16, columns=256, warps=4)
    for plan, added in (
        (Fp8Gemv([first, second], target, tail=[tail], norm=norm, config=small), None),
        (Fp8Gemv([first], target, config=replace(small, splits=2)), residual[:200]),
        (Fp8Gemv([per_channel], target, config=small), residual[:200]),
    ):
        out = torch.full((plan.rows,), torch.nan, device=device)
        plan(x, out, added)
        worst = max(worst, relative_error(out, plan.reference(x, added, torch.float64)))
    return worst
