"""Packed weights times one vector, and products of matrices of different kinds.

y [N] = ((codes [N, K] - zero) * scale) @ x [K] in float32; the sums of a group are scaled afterwards (packed_rows.group_sums). Its
reference is Product.reference, which multiplies out the weights.
"""

from __future__ import annotations

from functools import partial
from typing import Sequence

import torch
import triton
import triton.language as tl

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight
from .configs import MANY_ROWS, TileConfig, configuration, fitted
from .dense_gemv import DenseGemv
from .fp8_gemv import Fp8Gemv
from .gemv import Product, common_format
from .packed_layouts import Layout, common_layout, cut, form_of, lane_takes, parts_of
from .packed_matrix_gemv import packed_matrix_gemv_kernel
from .packed_rows import one_of, row_products, tile_of, times_factor
from .packed_samples import random_packed
from .rows import inverse_rms, let_next_start, wait_for_inputs
from .support import Target, UnsupportedByKernel, relative_error, self_test, usable


@triton.jit
def packed_gemv_kernel(
    x, norm, residual, out, w0, w1, w2, w3, s0, s1, s2, s3, z0, z1, z2, z3, f0, f1, f2, f3, n0, n1, n2, n3, eps,
    K: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, NORM_GROUPS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices [n_i, K] of one layout times x. Grid (tiles of ROWS rows, of which none spans two matrices,)."""
    let_next_start(PDL)
    which, place, size, base = tile_of(tl.program_id(0), n0, n1, n2, n3, ROWS)
    row = place * ROWS + tl.arange(0, ROWS)
    live = row < size
    wait_for_inputs(PDL)
    inverse = 1.0
    if NORM:
        inverse = inverse_rms(x, eps, K, 128, NORM_GROUPS, 1)
    total = row_products(
        x, norm, inverse, one_of(which, w0, w1, w2, w3), one_of(which, s0, s1, s2, s3), one_of(which, z0, z1, z2, z3),
        row, live, K, LAYOUT, GROUPS, PIECES, NORM,
    )  # fmt: skip
    total = times_factor(total, one_of(which, f0, f1, f2, f3) + tl.zeros((ROWS,), tl.int64), live, LAYOUT)
    if RESIDUAL:
        total += tl.load(residual + base + row, mask=live, other=0.0).to(tl.float32)
    tl.store(out + base + row, total.to(out.dtype.element_ty), mask=live)


class PackedGemv(Product):
    """Product of one to four packed matrices of one layout, in one launch. matrix_units: None where the layout, the card and its
    self-test decide; a `config` is one of packed_gemv_kernel and decides against them."""

    def __init__(
        self, matrices: Sequence[PackedWeight], target: Target, *, norm: torch.Tensor | None = None, eps: float = 1e-6, pdl: bool = False,
        config: TileConfig | None = None, matrix_units: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(matrices, (), norm, eps)
        columns = self.columns
        if not 1 <= len(matrices) <= 4 or any(matrix.ndim != 2 or matrix.shape[1] != columns for matrix in matrices):
            raise UnsupportedByKernel(f"{len(matrices)} packed matrices of {[tuple(matrix.shape) for matrix in matrices]} in one launch")
        if norm is not None and (norm.dtype != torch.float32 or norm.shape != (columns,)):
            raise UnsupportedByKernel(f"a norm of {norm.dtype} {list(norm.shape)}")
        form = common_layout(matrices, target)
        parts = [parts_of(matrix, form) for matrix in matrices]
        if any(codes.data_ptr() % 16 for codes, *_ in parts):
            raise UnsupportedByKernel("packed weights that do not begin at a multiple of 16 bytes")
        if matrix_units is None:
            takes = config is None and _fits_matrix_units(matrices, form, target)
            matrix_units = takes and usable(f"packed_gemv.{form.form}_matrix_units", target.device)
        self._matrix_units = matrix_units
        config = config or fitted(configuration("packed_many_rows" if self.rows >= MANY_ROWS else "packed_few_rows", target), self.rows, columns, target, 128)
        filled = parts + parts[:1] * (4 - len(parts))
        sizes = [matrix.shape[0] for matrix in matrices] + [0] * (4 - len(parts))
        self._arguments = [part[field] for field in range(4) for part in filled] + sizes + [eps]
        self._norm = norm if norm is not None else matrices[0].codes
        common = dict(K=columns, LAYOUT=form, NORM=norm is not None, **(dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)))
        if matrix_units:
            warps = columns // 512
            self._grid, self._options = (self.rows // 16,), dict(WARPS=warps, num_warps=warps, **common)
            return
        groups, pieces = cut(columns, config.columns, form.group)
        self._grid = (sum(-(-size // config.rows) for size in sizes),)
        self._options = dict(
            ROWS=config.rows, GROUPS=groups, PIECES=pieces, NORM_GROUPS=cut(columns, 1 << 30, 128)[0], num_warps=config.warps, **common
        )

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        if self._matrix_units and x.data_ptr() % 16:
            raise ValueError("x must begin at a multiple of 16 bytes")
        (packed_matrix_gemv_kernel if self._matrix_units else packed_gemv_kernel)[self._grid](
            x, self._norm, x if residual is None else residual, out, *self._arguments, RESIDUAL=residual is not None, **self._options
        )


def _fits_matrix_units(matrices: Sequence[PackedWeight], form: Layout, target: Target) -> bool:
    whole = all(matrix.shape[0] % 16 == 0 for matrix in matrices) and matrices[0].shape[1] in (512, 1024, 2048, 4096)
    return whole and lane_takes(form) and not target.interpreted


class SeveralProducts(Product):
    """A product of matrices of different kinds: one plan for each run of alike ones, launched behind each other."""

    def __init__(self, plans: Sequence[Product]) -> None:
        matrices = [matrix for plan in plans for matrix in (*plan.matrices, *plan.tail)]
        super().__init__(matrices, (), plans[0].norm, plans[0].eps)
        self.plans = list(plans)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        start = 0
        for plan in self.plans:
            end = start + plan.rows
            plan(x, out[start:end], None if residual is None else residual[start:end])
            start = end


def product(matrices: Sequence[Weight], target: Target, *, tail: Sequence[torch.Tensor] = (), **options: object) -> Product:
    """The plan for matrices of any kinds with small ones, as a rule dense, behind them, in few launches; options: norm, eps, pdl.

    `UnsupportedByKernel` where one of them is of a kind no kernel reads.
    """
    if not all(isinstance(matrix, torch.Tensor) for matrix in tail):
        matrices, tail = [*matrices, *tail], ()
    if not all([usable(name, target.device) for name in self_tests(matrices)[0]]):
        raise UnsupportedByKernel("packed weights, whose kernel is not used on this device")
    runs: list[list[Weight]] = []
    for matrix in matrices:
        if runs and len(runs[-1]) < 4 and _alike([*runs[-1], matrix], target):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    behind = list(tail)
    plans: list[Product] = []
    for run in runs:
        last = run is runs[-1]
        if isinstance(run[0], PackedWeight):
            plans.append(PackedGemv(run, target, **options))
        elif isinstance(run[0], ScaledWeight):
            plans.append(Fp8Gemv(run, target, tail=behind if last else (), **options))
            behind = [] if last else behind
        else:
            with_tail = [*run, *behind] if last else run
            if last and len(with_tail) <= 4 and _alike(with_tail, target):
                run, behind = with_tail, []
            plans.append(DenseGemv(run, target, **options))
    if behind:
        plans.append(product(behind, target, **options))
    return plans[0] if len(plans) == 1 else SeveralProducts(plans)


def self_tests(weights: Sequence[Weight]) -> tuple[list[str], list[str]]:
    """Names of those that speak for the packed ones among these: of the general form, then of the faster one."""
    forms = sorted({form_of(weight) for weight in weights if isinstance(weight, PackedWeight)})
    return [f"packed_gemv.{form}" for form in forms], [f"packed_gemv.{form}_matrix_units" for form in forms]


def _alike(matrices: Sequence[Weight], target: Target) -> bool:
    """Whether one launch takes them all."""
    kinds = {(type(matrix), matrix.dtype if isinstance(matrix, torch.Tensor) else None) for matrix in matrices}
    if len(kinds) > 1:
        return False
    try:
        (common_layout if isinstance(matrices[0], PackedWeight) else common_format)(matrices, target)
    except UnsupportedByKernel:
        return False
    return True


_SAMPLES = {
    "int4": [(32, {}), (128, dict(zero=True, scale=torch.bfloat16))], "int3": [(64, {}), (384, dict(zero=True))],
    "e2m1": [(16, dict(scale=torch.float8_e4m3fn, factor=True)), (32, dict(scale=torch.float32, factor=True, divides=True))],
}  # fmt: skip


def check(target: Target, form: str) -> float:
    """With and without zeros, or factors to multiply with and to divide by; ragged rows, columns in several pieces, norm and residual."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(384, device=device, generator=generator)
    norm = torch.randn(384, device=device, generator=generator) * 0.1
    residual = torch.randn(72, device=device, generator=generator)
    for group, options in _SAMPLES[form]:
        matrices = [random_packed((rows, 384), form, group, device, seed=rows, **options) for rows in (67, 5)]
        plan = PackedGemv(matrices, target, norm=norm, config=TileConfig(16, 256, 4))
        out = torch.full((72,), torch.nan, device=device)
        plan(x, out, residual)
        worst = max(worst, relative_error(out, plan.reference(x, residual, torch.float64)))
    return worst


def check_matrix_units(target: Target, form: str) -> float:
    """Two matrices with the norm; one of 4,096 columns with the residual in place."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    norm = torch.randn(2048, device=device, generator=generator) * 0.1
    for group, options in _SAMPLES[form]:
        group = min(group, 128)
        x, residual = torch.randn(4096, device=device, generator=generator), torch.randn(272, device=device, generator=generator)
        x[::7] *= 1e-3
        matrices = [random_packed((rows, 2048), form, group, device, seed=rows, **options) for rows in (96, 32)]
        wide = random_packed((272, 4096), form, group, device, **options)
        for plan, added in (
            (PackedGemv(matrices, target, norm=norm, matrix_units=True), None), (PackedGemv([wide], target, matrix_units=True), residual),
        ):  # fmt: skip
            expected = plan.reference(x[: plan.columns], added, torch.float64)
            out = torch.full((plan.rows,), torch.nan, device=device) if added is None else added
            plan(x[: plan.columns], out, added)
            worst = max(worst, relative_error(out, expected))
    return worst


for _form in _SAMPLES:
    self_test(f"packed_gemv.{_form}", limit=1e-5)(partial(check, form=_form))
    self_test(f"packed_gemv.{_form}_matrix_units", limit=1e-5)(partial(check_matrix_units, form=_form))
