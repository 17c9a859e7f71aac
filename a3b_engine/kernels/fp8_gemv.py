"""FP8 weights times one vector: e4m3 or e5m2 codes with float32 scales a block, a channel or a tensor.

y [N] = (codes [N, K] * scale [ceil(N/bn), ceil(K/bk)]) @ x [K] in float32. The 128-column partial sums are scaled
afterwards (rows.row_sums). Its reference is GemvPlan.reference, which multiplies out the weights. Where the layout allows
and the self-test passed, the matrix units do the work (matrix_gemv).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import torch

from ..checkpoint.scaled import ScaledWeight
from .configs import MANY_ROWS, TileConfig, configuration, fitted
from .gemv import GemvPlan
from .matrix_gemv import matrix_gemv_kernel
from .support import Target, relative_error, self_test, usable

_TAIL_ROWS = 2  # rows of the dense tail a program takes beside the matrix units


class Fp8Gemv(GemvPlan):
    """GemvPlan of one to four FP8 matrices that share x, and up to two dense ones behind them.

    In the 35B model: qkv | z with tail b | a, [12288 + 64, 2048]; q | k | v, [9216, 2048]; the two output projections
    [2048, 4096] with the residual added. matrix_units: None where the layout, the card and its self-test decide; a `config`
    is one of rows.gemv_kernel and decides against them.
    """

    def __init__(
        self, matrices: Sequence[ScaledWeight], target: Target, *, tail: Sequence[torch.Tensor] = (),
        norm: torch.Tensor | None = None, eps: float = 1e-6, pdl: bool = False, late: bool = False, config: TileConfig | None = None,
        matrix_units: bool | None = None,
    ) -> None:  # fmt: skip
        if matrix_units is None:
            matrix_units = config is None and fits_matrix_units(matrices, target) and usable("fp8_gemv.matrix_units", target.device)
        if config is None:
            rows = sum(matrix.shape[0] for matrix in (*matrices, *tail))
            config = configuration("fp8_many_rows" if rows >= MANY_ROWS else "fp8_few_rows", target)
            config = fitted(config, rows, matrices[0].shape[1], target, group=16)
        super().__init__(matrices, config, target, tail=tail, norm=norm, eps=eps, pdl=pdl, late=late)
        self._matrix_units = matrix_units
        if matrix_units:
            options = row_tiles([matrix.shape[0] for matrix in matrices], self.columns // 512, target)
            self._tiles = sum(matrix.shape[0] for matrix in matrices) // (16 * options["TILES"])
            self._matrix_grid = (self._tiles + sum(-(-part.shape[0] // _TAIL_ROWS) for part in tail),)
            self._matrix_options = dict(
                K=self.columns, MATRICES=len(matrices), TAIL=len(tail), TAIL_ROWS=_TAIL_ROWS, NORM=norm is not None,
                LATE=late, **options,
            )  # fmt: skip

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """As GemvPlan; x begins at a multiple of 16 bytes."""
        if not self._matrix_units:
            return super().__call__(x, out, residual)
        if x.data_ptr() % 16:
            raise ValueError("x must begin at a multiple of 16 bytes")
        matrix_gemv_kernel[self._matrix_grid](
            x, self._norm, x if residual is None else residual, out, *self._pointers, self.eps, self._tiles,
            RESIDUAL=residual is not None, **self._matrix_options, **self._pdl,
        )  # fmt: skip


def fits_matrix_units(matrices: Sequence[ScaledWeight], target: Target) -> bool:
    """Whether matrix_gemv can multiply these with a vector: e4m3 in blocks of 128 x 128, tiles of 16 whole rows, 512, 1,024,
    2,048 or 4,096 columns (a warp for each 512); sm_89 and later convert the codes in one instruction."""
    return target.fp8_native and not target.interpreted and all(
        matrix.data.dtype == torch.float8_e4m3fn and matrix.block == (128, 128) and matrix.shape[-2] % 16 == 0
        and matrix.shape[-1] in (512, 1024, 2048, 4096) and matrix.data.data_ptr() % 16 == 0
        for matrix in matrices
    )  # fmt: skip


def row_tiles(sizes: Sequence[int], warps: int, target: Target) -> dict[str, int]:
    """One or two tiles of 16 rows a program of the matrix units. A multiprocessor holds four programs of one tile, or three of
    two with at most 168 registers a thread: two where that saves a second round of few programs."""
    rounds = sum(sizes) / (16 * 4 * target.multiprocessors)
    if warps == 4 and 1 < rounds <= 1.5 and all(size % 32 == 0 for size in sizes):
        return dict(TILES=2, maxnreg=168, WARPS=warps, num_warps=warps)
    return dict(TILES=1, WARPS=warps, num_warps=warps)


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
        (Fp8Gemv([first, second], target, norm=norm, config=TileConfig(1, 512, 4, programs=1)), None),
        (Fp8Gemv([per_channel], target, config=small), residual[:200]),
    ):
        out = torch.full((plan.rows,), torch.nan, device=device)
        plan(x, out, added)
        worst = max(worst, relative_error(out, plan.reference(x, added, torch.float64)))
    return worst


@self_test("fp8_gemv.matrix_units", limit=1e-5)
def check_matrix_units(target: Target) -> float:
    """Three matrices with a tail and the norm, one and two tiles a program; one of 4,096 columns with the residual in place; x
    large, small and mixed; a NaN in x shows in every row."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    matrices = [random_fp8((rows, 2048), (128, 128), device, seed=rows) for rows in (256, 128, 32)]
    tail = [torch.randn(rows, 2048, device=device, generator=generator).to(torch.bfloat16) for rows in (32, 5)]
    norm = torch.randn(2048, device=device, generator=generator) * 0.1
    wide = random_fp8((272, 4096), (128, 128), device)
    for size in (1.0, 1e-4, 1e4):
        x, residual = torch.randn(4096, device=device, generator=generator) * size, torch.randn(272, device=device, generator=generator)
        x[::7] *= 1e-3
        for plan, added in (
            (Fp8Gemv(matrices, target, tail=tail, norm=norm, matrix_units=True), None),
            (Fp8Gemv(matrices, replace(target, multiprocessors=5), tail=tail, norm=norm, matrix_units=True), None),
            (Fp8Gemv([wide], target, matrix_units=True), residual),
        ):
            expected = plan.reference(x[: plan.columns], added, torch.float64)
            out = torch.full((plan.rows,), torch.nan, device=device) if added is None else added
            plan(x[: plan.columns], out, added)
            worst = max(worst, relative_error(out, expected))
    x[5] = torch.nan
    out = torch.zeros(272, device=device)
    Fp8Gemv([wide], target, matrix_units=True)(x, out)
    return worst if out.isnan().all() else float("inf")
