"""The experts' two launches where weights are packed, or routed and shared experts are of different kinds: a part of ExpertsPlan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ..checkpoint.packed import PackedWeight
from ..model.linear import Weight
from ..model.moe import ExpertWeights, MoEWeights
from .configs import TileConfig, configuration, fitted, next_power_of_two
from .expert_table import matrices_of, random_experts
from .packed_layouts import Layout, common_layout, cut, form_of, lane_takes
from .packed_matrix import packed_matrix_down_kernel, packed_matrix_up_kernel
from .packed_programs import packed_down_kernel, packed_up_kernel
from .packed_samples import random_packed
from .support import Target, UnsupportedByKernel, relative_error, self_test, usable

SHARED_PACKED, SHARED_FP8, SHARED_OTHER = range(3)  # as in packed_matrix


class PackedLaunches:
    """The two launches, settled. gate and up are of one layout, those of the routed experts and those of the shared one; down may
    be of another. Arguments as in ExpertsPlan."""

    def __init__(
        self, weights: MoEWeights, top_k: int, target: Target, *, norm: torch.Tensor | None, eps: float, pdl: bool,
        up_config: TileConfig | None = None, down_config: TileConfig | None = None,
    ) -> None:  # fmt: skip
        experts = weights.experts
        count, inner, outputs = experts.gate.shape
        shared_inner = weights.shared_gate.shape[0]
        up_form, shared_up_form = common_layout([experts.gate, experts.up], target), common_layout([weights.shared_gate, weights.shared_up], target)
        down_form, shared_down_form = common_layout([experts.down], target), common_layout([weights.shared_down], target)
        up_config = up_config or fitted(configuration("packed_up", target), inner * (top_k + 1), outputs, target, 128)
        down_config = down_config or fitted(configuration("packed_down", target), outputs, inner, target, 128)
        width, self._norm, self._eps = max(inner, shared_inner), norm, eps
        common = dict(
            EXPERTS=count, TOP_K=top_k, INNER=inner, SHARED_INNER=shared_inner, WIDTH=width,
            **(dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)),
        )  # fmt: skip

        def groups(name: str, columns: int, at_once: int, group: int) -> dict[str, int]:
            return dict(zip((name + "GROUPS", name + "PIECES"), cut(columns, at_once, group)))

        self._up_grid = (-(-width // up_config.rows), top_k + 1)
        self._up = dict(
            K=outputs, ROUTED=up_form, SHARED=shared_up_form, PAIRS=up_config.rows, NORM_GROUPS=cut(outputs, 1 << 30, 128)[0], NORM=norm is not None,
            num_warps=up_config.warps, **groups("", outputs, up_config.columns, up_form.group),
            **groups("SHARED_", outputs, up_config.columns, shared_up_form.group), **common,
        )  # fmt: skip
        self._down_grid = (-(-outputs // down_config.rows),)
        self._down = dict(
            OUTPUTS=outputs, ROUTED=down_form, SHARED=shared_down_form, ROWS=down_config.rows, TOP_WIDTH=next_power_of_two(top_k),
            num_warps=down_config.warps, **groups("", inner, down_config.columns, down_form.group),
            **groups("SHARED_", shared_inner, down_config.columns * top_k, shared_down_form.group), **common,
        )  # fmt: skip

    def up(self, x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        packed_up_kernel[self._up_grid](x, hidden if self._norm is None else self._norm, table, ids, hidden, self._eps, **self._up)

    def down(
        self, hidden: torch.Tensor, shares: torch.Tensor, residual: torch.Tensor | None, table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        packed_down_kernel[self._down_grid](
            hidden, shares, shares if residual is None else residual, table, ids, out, RESIDUAL=residual is not None, **self._down
        )


class MatrixLaunches(PackedLaunches):
    """The same on the matrix units, for weights that `fits` says they take; `down` in the general form where it cannot."""

    def __init__(self, weights: MoEWeights, top_k: int, target: Target, *, early_x: bool, **options: object) -> None:
        super().__init__(weights, top_k, target, **options)
        _, inner, outputs = weights.experts.gate.shape
        self._matrix_down = fits_down(weights, top_k, target)
        same = {name: self._up[name] for name in ("ROUTED", "SHARED", "EXPERTS", "TOP_K", "INNER", "PDL", "launch_pdl") if name in self._up}
        shared = _shared_is(self._up["SHARED"], self._up["ROUTED"], target)
        warps = outputs // 512
        self._up_grid = (inner // 8, top_k + 1)
        self._up = dict(
            same, K=outputs, WARPS=warps, SHARED_IS=shared, SHARED_GROUPS=self._up["SHARED_GROUPS"], SHARED_PIECES=self._up["SHARED_PIECES"],
            NORM=self._norm is not None, EARLY_X=early_x, num_warps=warps,
        )  # fmt: skip
        if shared != SHARED_OTHER:
            self._up["maxnreg"] = 96  # five programs of four warps a multiprocessor: on an H200 all of them at once
        self._up.update(DOWN=None, SHARED_DOWN=None)
        if self._matrix_down:
            forms = {name: self._down[name] for name in ("ROUTED", "SHARED", "SHARED_GROUPS", "SHARED_PIECES")}
            shared_down = _shared_is(forms["SHARED"], forms["ROUTED"], target)
            if shared_down == SHARED_PACKED and (forms["ROUTED"].form == "int3" or shared == SHARED_OTHER):
                shared_down = SHARED_OTHER
            self._up.update(DOWN=forms["ROUTED"], SHARED_DOWN=forms["SHARED"] if shared_down == SHARED_PACKED else None)
            self._down_grid = (outputs // 16,)
            self._down = dict(same, **{**forms, "SHARED_IS": shared_down, "num_warps": top_k})

    def up(self, x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        if x.data_ptr() % 16:
            raise ValueError("x must begin at a multiple of 16 bytes")
        packed_matrix_up_kernel[self._up_grid](x, hidden if self._norm is None else self._norm, table, ids, hidden, self._eps, **self._up)

    def down(
        self, hidden: torch.Tensor, shares: torch.Tensor, residual: torch.Tensor | None, table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        if not self._matrix_down:
            return super().down(hidden, shares, residual, table, ids, out)
        packed_matrix_down_kernel[self._down_grid](
            hidden, shares, shares if residual is None else residual, table, ids, out, RESIDUAL=residual is not None, **self._down
        )


def _shared_is(shared: Layout, routed: Layout, target: Target) -> int:
    if shared == routed:
        return SHARED_PACKED
    in_blocks = (shared.form, shared.row_block, shared.group, shared.per_scale) == ("e4m3", 128, 128, 1)
    return SHARED_FP8 if in_blocks and target.fp8_native else SHARED_OTHER


def fits(weights: MoEWeights, target: Target) -> bool:
    """Whether the matrix units take these for `up`."""
    experts = weights.experts
    _, inner, outputs = experts.gate.shape
    form = common_layout([experts.gate, experts.up], target)
    return lane_takes(form) and not target.interpreted and inner % 8 == 0 and outputs in (512, 1024, 2048, 4096) and weights.shared_gate.shape[0] == inner


def fits_down(weights: MoEWeights, top_k: int, target: Target) -> bool:
    """The same for `down`, where they take `up`."""
    down = weights.experts.down
    return lane_takes(common_layout([down], target)) and down.shape[-1] == 512 and top_k == 8


def self_tests(weights: MoEWeights) -> tuple[list[str], list[str]]:
    """Names of those that speak for experts like these: of the general form, then of the faster one, which may take routed experts that
    are packed."""
    forms = sorted({form_of(matrix) for matrix in matrices_of(weights) if isinstance(matrix, PackedWeight)})
    general = [f"packed_experts.{form}" for form in forms] or ["packed_experts.mixed"]
    routed = weights.experts.gate
    return general, [f"packed_experts.{form_of(routed)}_matrix_units"] if isinstance(routed, PackedWeight) else []


def packed_launches(
    weights: MoEWeights, top_k: int, target: Target, *, form: str | None, early_x: bool, **options: object
) -> PackedLaunches:
    """The fastest form that takes these weights and passed its self-test here; `UnsupportedByKernel` where there is none.

    form: "general" or "matrix_units" whatever the self-tests say. Other arguments as in ExpertsPlan.
    """
    general, faster = self_tests(weights)
    if form is None and not all([usable(name, target.device) for name in general]):
        raise UnsupportedByKernel("packed experts, or shared ones of another kind, whose kernel is not used on this device")
    fast = form == "matrix_units"
    if form is None and faster and options["up_config"] is None and options["down_config"] is None:
        fast = fits(weights, target) and all([usable(name, target.device) for name in faster])
    return MatrixLaunches(weights, top_k, target, early_x=early_x, **options) if fast else PackedLaunches(weights, top_k, target, **options)


def random_packed_experts(
    experts: int, hidden: int, inner: int, shared: int, device: torch.device, form: str, group: int, *, shared_form: str = "fp8", **options: object
) -> MoEWeights:
    """A layer of random packed experts (see `random_packed`), the shared one packed alike, "fp8" or "bf16"."""

    def matrix(seed: int, *shape: int) -> Weight:
        return random_packed(shape, form, group if shape[-1] % group == 0 else shape[-1], device, seed=seed, **options)

    stacks = ExpertWeights(matrix(1, experts, inner, hidden), matrix(2, experts, inner, hidden), matrix(3, experts, hidden, inner))
    if shared_form == form:
        weights = random_experts(1, hidden, inner, shared, device)
        weights = replace(weights, shared_gate=matrix(5, shared, hidden), shared_up=matrix(6, shared, hidden), shared_down=matrix(7, hidden, shared))
    else:
        weights = random_experts(1, hidden, inner, shared, device, None if shared_form == "fp8" else torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(4)
    router = torch.randn(experts, hidden, device=device, generator=generator) * 0.02
    return replace(weights, router=router, experts=stacks)


NVFP4 = dict(scale=torch.float8_e4m3fn, factor=True)
# form -> what its self-tests run: group, shared expert, options of random_packed.
_SAMPLES = {
    "int4": [(32, "fp8", {}), (64, "bf16", dict(zero=True, scale=torch.bfloat16)), (128, "int4", {})],
    "int3": [(32, "fp8", {}), (64, "int3", dict(zero=True))],
    "e2m1": [(16, "fp8", NVFP4), (16, "e2m1", NVFP4), (32, "bf16", dict(scale=torch.float32, factor=True, divides=True))],
}


def check(target: Target, form: str) -> float:
    """One form beside shared experts of every kind, columns in several pieces, with the norm and the residual."""
    small = dict(up_config=TileConfig(16, 128, 4), down_config=TileConfig(32, 64, 4))
    worst = 0.0
    for group, shared, options in _SAMPLES[form]:
        weights = random_packed_experts(5, 256, 128, 128, target.device, form, group, shared_form=shared, **options)
        worst = max(worst, _error(weights, 3, target, form="general", **small))
    return worst


def check_matrix_units(target: Target, form: str) -> float:
    """The same at the published sizes, which these kernels are written for, with few experts."""
    worst = 0.0
    for group, shared, options in _SAMPLES[form]:
        weights = random_packed_experts(9, 2048, 512, 512, target.device, form, group, shared_form=shared, **options)
        worst = max(worst, _error(weights, 8, target, form="matrix_units", early_x=True))
    return worst


def _error(weights: MoEWeights, top_k: int, target: Target, **options: object) -> float:
    from .moe_decode import ExpertsPlan

    device, size = target.device, weights.experts.gate.shape[-1]
    generator = torch.Generator(device=device).manual_seed(1)
    x, residual = torch.randn(2, size, device=device, generator=generator)
    x[::7] *= 1e-3
    norm = torch.randn(size, device=device, generator=generator) * 0.1
    ids = torch.randperm(weights.router.shape[0], generator=generator, device=device)[:top_k].int()
    shares = torch.rand(top_k + 1, device=device, generator=generator)
    plan = ExpertsPlan(weights, top_k, target, norm=norm, **options)
    out = torch.full((size,), torch.nan, device=device)
    plan.hidden.fill_(torch.nan)
    plan(x, ids, shares, out, residual)
    return relative_error(out, plan.reference(x, ids, shares, residual, torch.float64))


for _form in _SAMPLES:
    self_test(f"packed_experts.{_form}", limit=1e-5)(partial(check, form=_form))
    self_test(f"packed_experts.{_form}_matrix_units", limit=1e-5)(partial(check_matrix_units, form=_form))


@self_test("packed_experts.mixed", limit=1e-5)
def check_mixed(target: Target) -> float:
    """FP8 experts beside a dense shared one."""
    weights, dense = (random_experts(5, 256, 128, 96, target.device, dtype) for dtype in (None, torch.bfloat16))
    weights = replace(weights, shared_gate=dense.shared_gate, shared_up=dense.shared_up, shared_down=dense.shared_down)
    return _error(weights, 3, target, up_config=TileConfig(16, 128, 4), down_config=TileConfig(32, 64, 4), form="general")
