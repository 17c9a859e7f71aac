"""The experts of one token in two launches: gate and up with SiLU, then down with the weighted sum and the residual.

Experts are found through a device table of addresses (expert_table), read when the kernels run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..model.linear import dense
from ..model.moe import MoEWeights
from .configs import TileConfig, configuration, fitted, next_power_of_two
from .expert_table import ExpertTable, matrices_of, random_experts
from .gemv import code_format, common_format, readable
from .rows import finish, fp8_values, let_next_start, load_codes, load_scales, rows_times_x, wait_for_inputs
from .support import Target, UnsupportedByKernel, relative_error, self_test

_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.uint8: tl.uint8, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.float32: tl.float32,
}  # fmt: skip


@triton.jit
def expert_up_kernel(
    x, norm, table, ids, hidden, eps,
    K: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PER_SCALE: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [TOP_K + 1, WIDTH] = SiLU(gate x) * (up x) of the chosen experts and, last, the shared one.

    Grid (tiles of PAIRS inner rows, TOP_K + 1). A program's rows are gate and up in turn.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)  # after the wait: the next kernel reads the ids before it waits itself
    choice = tl.program_id(1)
    expert = tl.load(ids + choice, mask=choice < TOP_K, other=EXPERTS)
    entry = table + expert.to(tl.int64) * 6
    gate = tl.multiple_of(tl.load(entry).to(tl.pointer_type(CODE)), 16)
    up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(CODE)), 16)
    gate_scale = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    up_scale = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
    inner_rows = tl.where(choice < TOP_K, INNER, SHARED_INNER)
    order = tl.arange(0, 2 * PAIRS)
    row = tl.program_id(0) * PAIRS + order // 2
    is_gate = order % 2 == 0
    block = row * 0
    if ROW_BLOCK > 0:
        block = row // ROW_BLOCK
    total, squares = rows_times_x(
        x, norm, tl.where(is_gate, gate, up) + row * K, tl.where(is_gate, gate_scale, up_scale) + block * SCALE_COLUMNS,
        row < inner_rows, 0, K, FORMAT, GROUP, GROUPS, PIECES, PER_SCALE, MASKED, NORM, False,
    )  # fmt: skip
    if NORM:
        total = total * tl.rsqrt(squares / K + eps)
    gated, plain = tl.split(tl.reshape(total, (PAIRS, 2)))
    place = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tl.store(hidden + choice * WIDTH + place, gated / (1.0 + tl.exp(-gated)) * plain, mask=place < inner_rows)


@triton.jit
def expert_down_kernel(
    hidden, shares, residual, table, ids, out,
    OUTPUTS: tl.constexpr, CODE: tl.constexpr, FORMAT: tl.constexpr, ROW_BLOCK: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUP: tl.constexpr, PER_SCALE: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
    SHARED_SCALE_COLUMNS: tl.constexpr, SHARED_GROUP: tl.constexpr, SHARED_PER_SCALE: tl.constexpr,
    SHARED_GROUPS: tl.constexpr, SHARED_PIECES: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, SHARED_MASKED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [OUTPUTS] = residual + sum over choices of share * (down @ hidden[choice]), always summed in one order.

    Each program takes ROWS outputs of all experts: the chosen ones side by side, GROUPS column groups of each at a time.
    The ids were written two kernels back, and the kernel in between let this one start only after it had waited for them.
    """
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < OUTPUTS
    block = row * 0
    if ROW_BLOCK > 0:
        block = row // ROW_BLOCK
    slot = tl.arange(0, TOP_WIDTH * GROUPS)
    choice = slot // GROUPS
    taken = choice < TOP_K
    # Past this multiprocessor's cache, which nobody has emptied since the ids were written.
    expert = tl.load(ids + choice, mask=taken, other=0, cache_modifier=".cg")
    entry = table + expert.to(tl.int64) * 6
    down = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(CODE)), 16)
    scale = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
    group = slot % GROUPS
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = taken[:, None] & (column < INNER)
    codes = load_codes(
        (down[None, :] + row[:, None] * INNER)[:, :, None] + column[None, :, :], live[:, None, None] & inside[None, :, :], MASKED
    )
    factors = load_scales(
        scale[None, :] + block[:, None] * SCALE_COLUMNS + (group // PER_SCALE)[None, :],
        live[:, None] & (taken & (group * GROUP < INNER))[None, :], FORMAT, MASKED,
    )  # fmt: skip
    shared = tl.multiple_of(tl.load(table + EXPERTS * 6 + 2).to(tl.pointer_type(CODE)), 16)
    shared_scale = tl.load(table + EXPERTS * 6 + 5).to(tl.pointer_type(tl.float32))
    total, _ = rows_times_x(  # waits for hidden after its own first load
        hidden + TOP_K * WIDTH, shares, shared + row * SHARED_INNER, shared_scale + block * SHARED_SCALE_COLUMNS, live, 0,
        SHARED_INNER, FORMAT, SHARED_GROUP, SHARED_GROUPS, SHARED_PIECES, SHARED_PER_SCALE, SHARED_MASKED, False, PDL,
    )  # fmt: skip
    total = total * tl.load(shares + TOP_K)
    share = tl.load(shares + choice, mask=taken, other=0.0)
    for piece in tl.static_range(PIECES):
        if piece > 0:
            group = piece * GROUPS + slot % GROUPS
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = taken[:, None] & (column < INNER)
            codes = load_codes(
                (down[None, :] + row[:, None] * INNER)[:, :, None] + column[None, :, :],
                live[:, None, None] & inside[None, :, :], MASKED,
            )  # fmt: skip
            factors = load_scales(
                scale[None, :] + block[:, None] * SCALE_COLUMNS + (group // PER_SCALE)[None, :],
                live[:, None] & (taken & (group * GROUP < INNER))[None, :], FORMAT, MASKED,
            )  # fmt: skip
        values = tl.load(hidden + choice[:, None] * WIDTH + column, mask=inside, other=0.0)
        if FORMAT == "dense":
            sums = tl.sum(codes.to(tl.float32) * values[None, :, :], 2)
        else:
            sums = tl.sum(fp8_values(codes, FORMAT) * values[None, :, :], 2) * factors
        total += tl.sum(sums * share[None, :], 1)
    finish(total, 0.0, residual, out, row, live, 0.0, 1, False, RESIDUAL)


class ExpertsPlan:
    """The mixture of experts of one layer for one token, without its router.

    weights as loaded, FP8 of one layout or dense of one dtype throughout; the stacks are used where they are. norm: as
    in GemvPlan. The plan keeps the weights alive as long as its table points at them.
    """

    def __init__(
        self, weights: MoEWeights, top_k: int, target: Target, *, norm: torch.Tensor | None = None, eps: float = 1e-6,
        pdl: bool = False, up_config: TileConfig | None = None, down_config: TileConfig | None = None,
    ) -> None:  # fmt: skip
        experts = weights.experts
        count, inner, outputs = experts.gate.shape
        shared_inner = weights.shared_gate.shape[0]
        if norm is not None and (norm.dtype != torch.float32 or norm.shape != (outputs,)):
            raise UnsupportedByKernel(f"a norm of {norm.dtype} {list(norm.shape)}")
        form = common_format([experts.gate, experts.up, weights.shared_gate, weights.shared_up], target)
        down, shared_down = code_format(experts.down, target), code_format(weights.shared_down, target)
        tensors = [readable(weight, form) for weight in matrices_of(weights)]
        same = len({(tensor.dtype) for tensor in tensors}) == 1 and down.name == shared_down.name == form.name
        if not same or down.row_block != shared_down.row_block:
            raise UnsupportedByKernel("routed and shared experts of different layouts")
        if 2 * inner * outputs >= 1 << 31:
            raise UnsupportedByKernel(f"experts of {inner} x {outputs}")
        suffix = "_dense" if form.name == "dense" else ""
        up_config = up_config or fitted(configuration("expert_up" + suffix, target), inner * (top_k + 1), outputs, target, 16)
        down_config = down_config or fitted(configuration("expert_down" + suffix, target), outputs, inner, target, 16)
        self.weights, self.norm, self.eps, self.top_k = weights, norm, eps, top_k
        self.table = ExpertTable(weights)
        width = max(inner, shared_inner)
        self.hidden = torch.zeros(top_k + 1, width, dtype=torch.float32, device=target.device)
        common = dict(
            CODE=_TYPES[tensors[0].dtype], FORMAT=form.name, EXPERTS=count, TOP_K=top_k, INNER=inner, SHARED_INNER=shared_inner,
            WIDTH=width, **(dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)),
        )  # fmt: skip
        groups, pieces = _cut(outputs, up_config.columns, form.group)
        self._up_grid = (-(-width // up_config.rows), top_k + 1)
        self._up = dict(
            K=outputs, ROW_BLOCK=form.row_block, SCALE_COLUMNS=form.scale_columns, GROUP=form.group, PER_SCALE=form.per_scale,
            PAIRS=up_config.rows, GROUPS=groups, PIECES=pieces, NORM=norm is not None, num_warps=up_config.warps,
            MASKED=bool(inner % up_config.rows or inner != shared_inner or groups * pieces * form.group != outputs), **common,
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
        """The first launch: `hidden` float32 [top_k + 1, inner] = SiLU(gate x) * (up x)."""
        expert_up_kernel[self._up_grid](
            x, self.norm if self.norm is not None else self.hidden, self.table.pointers, ids, self.hidden, self.eps, **self._up
        )

    def down(self, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """The second launch. With programmatic dependent launch it must directly follow `up` on the stream."""
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
