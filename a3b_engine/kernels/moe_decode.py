"""The experts of one token in two launches: gate and up with SiLU, then down with the weighted sum and the residual.

Experts are found through a device table of addresses (expert_table), read when the kernels run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton.language as tl

from ..checkpoint.packed import PackedWeight
from ..model.linear import dense
from ..model.moe import MoEWeights
from .configs import TileConfig, configuration, fitted, next_power_of_two
from .expert_table import ExpertTable, matrices_of, random_experts
from .fp8_gemv import fits_matrix_units, row_tiles
from .gemv import code_format, common_format, readable
from .matrix_gemv import matrix_down_kernel, matrix_up_kernel
from .moe_programs import expert_down_kernel, expert_up_kernel
from .packed_experts import packed_launches
from .support import Target, UnsupportedByKernel, relative_error, self_test, usable

_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.uint8: tl.uint8, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.float32: tl.float32,
}  # fmt: skip


class ExpertsPlan:
    """The mixture of experts of one layer for one token, without its router.

    weights as loaded, of any kind (see `packed_layouts.Layout`); the stacks are used where they are. norm: as in Product.
    early_x: with programmatic dependent launch, x was complete before the kernel directly ahead of this plan let it start, as
    RouterPlan sees to; `up` then prepares x while the router is at work. matrix_units: as in Fp8Gemv. form: of the kernels for packed and
    for mixed weights, "general" or "matrix_units"; None where weights, card and self-tests decide. The plan keeps the weights
    alive as long as its table points at them. Raises `UnsupportedByKernel`.
    """

    def __init__(
        self, weights: MoEWeights, top_k: int, target: Target, *, norm: torch.Tensor | None = None, eps: float = 1e-6,
        pdl: bool = False, early_x: bool = False, up_config: TileConfig | None = None, down_config: TileConfig | None = None,
        matrix_units: bool | None = None, form: str | None = None,
    ) -> None:  # fmt: skip
        experts = weights.experts
        count, inner, outputs = experts.gate.shape
        shared_inner = weights.shared_gate.shape[0]
        if norm is not None and (norm.dtype != torch.float32 or norm.shape != (outputs,)):
            raise UnsupportedByKernel(f"a norm of {norm.dtype} {list(norm.shape)}")
        self.weights, self.norm, self.eps, self.top_k = weights, norm, eps, top_k
        width = max(inner, shared_inner)
        self._packed = None
        if form is not None or not _alike(weights, target):
            options = dict(norm=norm, eps=eps, pdl=pdl, up_config=up_config, down_config=down_config)
            self._packed = packed_launches(weights, top_k, target, form=form, early_x=early_x, **options)
            self.table = ExpertTable(weights)
            self.hidden = torch.zeros(top_k + 1, width, dtype=torch.float32, device=target.device)
            return
        form = common_format([experts.gate, experts.up, weights.shared_gate, weights.shared_up], target)
        down, shared_down = code_format(experts.down, target), code_format(weights.shared_down, target)
        tensors = [readable(weight, form) for weight in matrices_of(weights)]
        if 2 * inner * outputs >= 1 << 31:
            raise UnsupportedByKernel(f"experts of {inner} x {outputs}")
        fits = form.name == "e4m3" and inner == shared_inner and inner % 128 == 0 and fits_matrix_units(matrices_of(weights), target)
        if matrix_units is None:
            matrix_units = fits and up_config is None and down_config is None and usable("moe_decode.matrix_units", target.device)
        self._matrix_up, self._matrix_down = matrix_units, matrix_units and inner == 512 and top_k == 8
        suffix = "_dense" if form.name == "dense" else ""
        up_config = up_config or fitted(configuration("expert_up" + suffix, target), inner * (top_k + 1), outputs, target, 16)
        down_config = down_config or fitted(configuration("expert_down" + suffix, target), outputs, inner, target, 16)
        self.table = ExpertTable(weights)
        self.hidden = torch.zeros(top_k + 1, width, dtype=torch.float32, device=target.device)
        pdl_options = dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)
        common = dict(
            CODE=_TYPES[tensors[0].dtype], FORMAT=form.name, EXPERTS=count, TOP_K=top_k, INNER=inner, SHARED_INNER=shared_inner,
            WIDTH=width, **pdl_options,
        )  # fmt: skip
        self._matrix_down_options = dict(EXPERTS=count, TOP_K=top_k, INNER=inner, num_warps=8, **pdl_options)
        self._matrix_options = dict(
            K=outputs, EXPERTS=count, TOP_K=top_k, INNER=inner, NORM=norm is not None, EARLY_X=early_x,
            **row_tiles([inner] * (top_k + 1) * 2, outputs // 512, target), **pdl_options,
        )  # fmt: skip
        self._matrix_grid = (inner // 8 // self._matrix_options["TILES"], top_k + 1)
        groups, pieces = _cut(outputs, up_config.columns, form.group)
        self._up_grid = (-(-width // up_config.rows), top_k + 1)
        self._up = dict(
            K=outputs, ROW_BLOCK=form.row_block, SCALE_COLUMNS=form.scale_columns, GROUP=form.group, PER_SCALE=form.per_scale,
            PAIRS=up_config.rows, GROUPS=groups, PIECES=pieces, NORM=norm is not None, EARLY_X=early_x,
            MASKED=bool(inner % up_config.rows or inner != shared_inner or groups * pieces * form.group != outputs),
            num_warps=up_config.warps, **common,
        )  # fmt: skip
        groups, pieces = _cut(inner, down_config.columns, down.group)
        shared_groups, shared_pieces = _cut(shared_inner, down_config.columns, shared_down.group)
        ragged, top_width = outputs % down_config.rows != 0, next_power_of_two(top_k)
        self._down_grid = (-(-outputs // down_config.rows),)
        self._down = dict(
            OUTPUTS=outputs, ROW_BLOCK=down.row_block, SCALE_COLUMNS=down.scale_columns, GROUP=down.group, PER_SCALE=down.per_scale,
            GROUPS=groups, PIECES=pieces, SHARED_SCALE_COLUMNS=shared_down.scale_columns, SHARED_GROUP=shared_down.group,
            SHARED_PER_SCALE=shared_down.per_scale, SHARED_GROUPS=shared_groups, SHARED_PIECES=shared_pieces,
            ROWS=down_config.rows, TOP_WIDTH=top_width, num_warps=down_config.warps,
            MASKED=ragged or top_width != top_k or groups * pieces * down.group != inner,
            SHARED_MASKED=ragged or shared_groups * shared_pieces * shared_down.group != shared_inner, **common,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        """x [D] of any float dtype, ids int32 [top_k], shares float32 [top_k + 1]; out [D] of any float dtype, may be
        `residual` or, without a norm in between, x itself. Two launches behind each other, nothing else."""
        self.up(x, ids)
        self.down(ids, shares, out, residual)

    def up(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """The first launch: `hidden` float32 [top_k + 1, inner] = SiLU(gate x) * (up x), for `down` alone to read (packed_matrix
        has an order of its own)."""
        if self._packed is not None:
            self._packed.up(x, self.table.pointers, ids, self.hidden)
            return
        norm = self.norm if self.norm is not None else self.hidden
        if self._matrix_up:
            if x.data_ptr() % 16:
                raise ValueError("x must begin at a multiple of 16 bytes")
            matrix_up_kernel[self._matrix_grid](x, norm, self.table.pointers, ids, self.hidden, self.eps, **self._matrix_options)
            return
        expert_up_kernel[self._up_grid](x, norm, self.table.pointers, ids, self.hidden, self.eps, **self._up)

    def down(self, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """The second launch. With programmatic dependent launch it must directly follow `up` on the stream."""
        if self._packed is not None:
            self._packed.down(self.hidden, shares, residual, self.table.pointers, ids, out)
            return
        if self._matrix_down:
            matrix_down_kernel[(out.shape[0] // 16,)](
                self.hidden, shares, residual if residual is not None else shares, self.table.pointers, ids, out,
                RESIDUAL=residual is not None, **self._matrix_down_options,
            )  # fmt: skip
            return
        expert_down_kernel[self._down_grid](
            self.hidden, shares, residual if residual is not None else shares, self.table.pointers, ids, out,
            RESIDUAL=residual is not None, **self._down,
        )  # fmt: skip

    @property
    def up_bytes(self) -> int:
        """Bytes of weights and scales `up` reads."""
        experts, shared = self.weights.experts, self.weights
        routed = (experts.gate.nbytes + experts.up.nbytes) // experts.gate.shape[0] * self.top_k
        return routed + shared.shared_gate.nbytes + shared.shared_up.nbytes

    @property
    def down_bytes(self) -> int:
        """Bytes of weights and scales `down` reads."""
        experts = self.weights.experts
        return experts.down.nbytes // experts.down.shape[0] * self.top_k + self.weights.shared_down.nbytes

    def reference(
        self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, residual: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:  # fmt: skip
        """The same in plain PyTorch (model.moe, with the choice given), in `dtype` throughout: [D]."""
        vector = x.to(dtype)
        if self.norm is not None:
            vector = vector * torch.rsqrt(vector.square().mean() + self.eps) * (1.0 + self.norm.to(dtype))
        experts, shared = self.weights.experts, self.weights
        chosen = [(experts.gate[i], experts.up[i], experts.down[i]) for i in ids.tolist()]
        chosen.append((shared.shared_gate, shared.shared_up, shared.shared_down))
        out = torch.zeros_like(vector) if residual is None else residual.to(dtype)
        for share, matrices in zip(shares.to(dtype), chosen):
            gate, up, down = (dense(matrix, torch.float32).to(dtype) for matrix in matrices)
            out = out + share * (down @ (F.silu(gate @ vector) * (up @ vector)))
        return out


def _alike(weights: MoEWeights, target: Target) -> bool:
    """Whether all matrices are FP8 of one layout or dense of one dtype."""
    matrices = matrices_of(weights)
    if any(isinstance(matrix, PackedWeight) for matrix in matrices):
        return False
    try:
        form = common_format([matrices[0], matrices[1], *matrices[3:5]], target)
    except UnsupportedByKernel:
        return False
    down, shared_down = (code_format(matrix, target) for matrix in (matrices[2], matrices[5]))
    same_types = len({readable(matrix, form).dtype for matrix in matrices}) == 1
    return same_types and down.name == shared_down.name == form.name and down.row_block == shared_down.row_block


def _cut(columns: int, at_once: int, group: int) -> tuple[int, int]:
    """Groups read at once and pieces, so that `columns` are covered."""
    groups = min(max(1, at_once // group), next_power_of_two(-(-columns // group)))
    return groups, -(-columns // (groups * group))


@self_test("moe_decode", limit=1e-5)
def check(target: Target) -> float:
    """FP8 and dense experts of ragged sizes, columns in several pieces, with the norm and the residual."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    x, residual = torch.randn(2, 144, device=device, generator=generator)
    norm = torch.randn(144, device=device, generator=generator) * 0.1
    ids = torch.tensor([4, 0, 3], dtype=torch.int32, device=device)
    shares = torch.tensor([0.5, 0.3, 0.2, 0.7], device=device)
    for dtype in (None, torch.bfloat16):
        small = dict(up_config=TileConfig(16, 128, 4), down_config=TileConfig(16, 64, 4))
        plan = ExpertsPlan(random_experts(5, 144, 80, 48, device, dtype), 3, target, norm=norm, **small)
        out = torch.full((144,), torch.nan, device=device)
        plan(x, ids, shares, out, residual)
        worst = max(worst, relative_error(out, plan.reference(x, ids, shares, residual, torch.float64)))
    return worst


@self_test("moe_decode.matrix_units", limit=1e-5)
def check_matrix_units(target: Target) -> float:
    """The published sizes, which these kernels are written for, with few experts; two tiles a program and one."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    norm = torch.randn(2048, device=device, generator=generator) * 0.1
    ids = torch.tensor([4, 0, 3, 8, 7, 1, 5, 6], dtype=torch.int32, device=device)
    shares = torch.rand(9, device=device, generator=generator)
    weights = random_experts(9, 2048, 512, 512, device)
    for early_x, multiprocessors in ((False, 132), (True, 132), (True, 1000)):
        x, residual = torch.randn(2, 2048, device=device, generator=generator)
        where = replace(target, multiprocessors=multiprocessors)
        plan = ExpertsPlan(weights, 8, where, norm=norm, early_x=early_x, matrix_units=True)
        out = torch.full((2048,), torch.nan, device=device)
        plan.hidden.fill_(torch.nan)
        plan(x, ids, shares, out, residual)
        worst = max(worst, relative_error(out, plan.reference(x, ids, shares, residual, torch.float64)))
    return worst
