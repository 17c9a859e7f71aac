"""bfloat16, float16 or float32 weights times one vector: the head, the small projections, models without FP8.

y [N] = w [N, K] @ x [K], summed in float32. The head [248320, 2048] streams about a gigabyte and leaves float32 logits.
Its reference is GemvPlan.reference.
"""

from __future__ import annotations

from typing import Sequence

import torch

from .configs import MANY_ROWS, TileConfig, configuration, fitted
from .gemv import GemvPlan
from .support import Target, relative_error, self_test


class DenseGemv(GemvPlan):
    """GemvPlan of one to four dense matrices of one dtype that share x."""

    def __init__(
        self, matrices: Sequence[torch.Tensor], target: Target, *, norm: torch.Tensor | None = None, eps: float = 1e-6,
        pdl: bool = False, config: TileConfig | None = None,
    ) -> None:  # fmt: skip
        if config is None:
            rows = sum(matrix.shape[0] for matrix in matrices)
            config = configuration("dense_many_rows" if rows >= MANY_ROWS else "dense_few_rows", target)
            config = fitted(config, rows, matrices[0].shape[1], target)
        super().__init__(matrices, config, target, norm=norm, eps=eps, pdl=pdl)


@self_test("dense_gemv", limit=1e-5)
def check(target: Target) -> float:
    """Every dtype, ragged sizes, two matrices in one launch, the norm and the residual."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(392, device=device, generator=generator)
    norm = torch.randn(392, device=device, generator=generator) * 0.1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first, second = (torch.randn(rows, 392, device=device, generator=generator).to(dtype) for rows in (67, 5))
        plan = DenseGemv([first, second], target, norm=norm, config=TileConfig(8, 256, 4))
        residual = torch.randn(72, device=device, generator=generator)
        out = torch.full((72,), torch.nan, device=device)
        plan(x, out, residual)
        worst = max(worst, relative_error(out, plan.reference(x, residual, torch.float64)))
    return worst
