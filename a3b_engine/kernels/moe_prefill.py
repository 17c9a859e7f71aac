"""The experts of many tokens as grouped products: gate and up with SiLU, then down times the token's share.

Every expert's tokens stand in a row (route_prefill.sort_kernel); the shared expert is one more expert that takes all
tokens. Each (token, choice) pair leaves a row of its own, and whoever reads them adds a token's rows in the order of
its choices: nothing depends on which program comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..model.linear import dense
from ..model.moe import MoEWeights
from .expert_table import ExpertTable, matrices_of, random_experts
from .fp8_gemm import product_type, stored
from .gemv import code_format, common_format
from .launcher import TRITON_TYPES, Launcher, Launchers
from .moe_prefill_programs import experts_down_kernel, experts_up_kernel
from .route_prefill import RoutePlan
from .support import Target, UnsupportedByKernel, relative_error, self_test


class ExpertTiles(NamedTuple):
    """Tokens a tile; weight rows, warps and stages of the two launches; tiles of rows that a program of `down` takes behind each
    other; whether `up` reads e4m3 codes by pairs (weight_tiles.product_of_pairs)."""

    tokens: int
    up_rows: int
    up_warps: int
    up_stages: int
    down_rows: int
    down_warps: int
    down_stages: int
    down_run: int = 1
    up_pairs: bool = False


def expert_tiles(tokens: int, experts: int, top_k: int, target: Target) -> ExpertTiles:
    """By how many tokens an expert gets on average, and by the shared memory of the card. Measured on an H200."""
    if target.interpreted:
        return ExpertTiles(16, 16, 4, 1, 16, 4, 1, down_run=2, up_pairs=True)
    load = tokens * top_k / experts
    width = 16 if load <= 20 else 32 if load <= 96 else 64
    if target.capability in ((8, 0), (9, 0), (10, 0)):
        return ExpertTiles(width, 64, 4, 3, 64, 4, 3, down_run=4, up_pairs=target.capability == (9, 0))
    return ExpertTiles(width, 32 if width == 64 else 64, 4, 2, 64, 4, 2, down_run=4)


class ExpertsPrefillPlan:
    """The mixture of experts of one layer for any number of tokens, its router aside.

    weights as loaded: FP8 of one layout, or dense of the activations' type. The plan keeps them alive.
    """

    def __init__(self, weights: MoEWeights, top_k: int, launchers: Launchers, dtype: torch.dtype, *, tiles: ExpertTiles | None = None) -> None:
        target, experts = launchers.target, weights.experts
        self.count, self.inner, self.outputs = experts.gate.shape
        self.shared_inner = weights.shared_gate.shape[0]
        form = common_format([experts.gate, experts.up, weights.shared_gate, weights.shared_up], target)
        down, shared_down = code_format(experts.down, target), code_format(weights.shared_down, target)
        codes = [stored(weight, form, dtype, target) for weight in matrices_of(weights)]
        same = len({part.dtype for part in codes}) == 1 and down.name == shared_down.name == form.name
        if not same or down.row_block != shared_down.row_block or down.group != shared_down.group:
            raise UnsupportedByKernel("routed and shared experts of different layouts")
        if self.inner * self.outputs >= 1 << 31 or self.shared_inner * self.outputs >= 1 << 31:
            raise UnsupportedByKernel(f"experts of {self.inner} x {self.outputs}")
        self.weights, self.top_k, self.form, self._launchers, self._tiles = weights, top_k, form, launchers, tiles
        self.width = max(self.inner, self.shared_inner)
        self.table = ExpertTable(weights)
        self.product = product_type(form, dtype)  # of x and of what stands between the two launches
        self._launches: dict[ExpertTiles, tuple[Launcher, Launcher]] = {}
        dense_block = 16 if target.interpreted else 64
        common = dict(
            CODE=TRITON_TYPES[codes[0].dtype], FORMAT=form.name, EXPERTS=self.count, TOP_K=top_k,
            INNER=self.inner, SHARED_INNER=self.shared_inner, WIDTH=self.width,
        )  # fmt: skip
        self._up = dict(
            K=self.outputs, ROW_BLOCK=form.row_block, SCALE_COLUMNS=form.scale_columns, PER_SCALE=form.per_scale,
            BK=dense_block if form.name == "dense" else form.group, **common,
        )  # fmt: skip
        self._down = dict(
            OUTPUTS=self.outputs, ROW_BLOCK=down.row_block, SCALE_COLUMNS=down.scale_columns, PER_SCALE=down.per_scale,
            SHARED_SCALE_COLUMNS=shared_down.scale_columns, SHARED_PER_SCALE=shared_down.per_scale,
            BK=dense_block if form.name == "dense" else down.group, **common,
        )  # fmt: skip

    def tiles(self, tokens: int) -> ExpertTiles:
        return self._tiles or expert_tiles(tokens, self.count, self.top_k, self._launchers.target)

    def __call__(
        self, x: torch.Tensor, shares: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Two launches. x [T, D] of the type `product`; shares, order, tiles as RoutePlan leaves them for tiles(T).tokens; hidden
        [T * (top_k + 1), width] of that type too; out [T, top_k + 1, D] of the plan's dtype, each row times its share."""
        self.up(x, order, tiles, hidden)
        self.down(hidden, shares, order, tiles, out)

    def up(self, x: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, hidden: torch.Tensor) -> None:
        tokens, size = x.shape[0], self.tiles(x.shape[0])
        shared = -(-tokens // size.tokens)
        grid = (-(-self.width // size.up_rows), tiles.shape[0] + shared, 1)
        self._launches_of(size)[0](grid, x, self.table.pointers, tiles, order, hidden, tokens, shared)

    def down(self, hidden: torch.Tensor, shares: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor) -> None:
        tokens, size = out.shape[0], self.tiles(out.shape[0])
        shared = -(-tokens // size.tokens)
        grid = (-(-self.outputs // (size.down_rows * size.down_run)), tiles.shape[0] + shared, 1)
        self._launches_of(size)[1](grid, hidden, self.table.pointers, tiles, order, shares, out, tokens, shared)

    def _launches_of(self, size: ExpertTiles) -> tuple[Launcher, Launcher]:
        found = self._launches.get(size)
        if found is None:
            get = self._launchers.get
            up = dict(BN=size.up_rows, BM=size.tokens, BY_PAIRS=size.up_pairs, num_warps=size.up_warps, num_stages=size.up_stages)
            down = dict(BN=size.down_rows, BM=size.tokens, num_warps=size.down_warps, num_stages=size.down_stages, RUN=size.down_run)
            found = self._launches[size] = get(experts_up_kernel, **self._up, **up), get(experts_down_kernel, **self._down, **down)
        return found

    def reference(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same in plain PyTorch, expert after expert, in `dtype` throughout: [T, top_k + 1, D]."""
        x, weights = x.to(dtype), self.weights
        out = x.new_zeros(x.shape[0], self.top_k + 1, self.outputs)

        def expert(part: torch.Tensor, *matrices) -> torch.Tensor:
            gate, up, down = (dense(matrix, torch.float32).to(dtype).t() for matrix in matrices)
            return (torch.nn.functional.silu(part @ gate) * (part @ up)) @ down

        for number in range(self.count):
            token, choice = (ids == number).nonzero(as_tuple=True)
            if len(token):
                out[token, choice] = expert(x[token], weights.experts.gate[number], weights.experts.up[number], weights.experts.down[number])
        out[:, self.top_k] = expert(x, weights.shared_gate, weights.shared_up, weights.shared_down)
        return out * shares.to(dtype)[..., None]


@self_test("moe_prefill", limit=8e-3)
def check(target: Target) -> float:
    """FP8 and dense experts, few tokens and many; empty experts and one that takes all; a wrong choice makes the error infinite."""
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    launchers, worst = Launchers(target), 0.0
    experts, hidden, inner = (5, 48, 32) if target.interpreted else (8, 2048, 512)
    generator = torch.Generator(device=device).manual_seed(1)
    for kept in (None, dtype):
        weights = random_experts(experts, hidden, inner, inner, device, kept)
        router, switch = weights.router.to(dtype), weights.shared_switch.to(dtype)
        weights = MoEWeights(router, weights.experts, weights.shared_gate, weights.shared_up, weights.shared_down, switch)
        norm = torch.randn(hidden, device=device, generator=generator) * 0.1
        route, plan = RoutePlan(router, switch, norm, 3, launchers, dtype), ExpertsPrefillPlan(weights, 3, launchers, dtype)
        for tokens in (1, 40) if target.interpreted else (1, 40, 70, 200):
            residual = torch.randn(tokens, hidden, device=device, generator=generator)
            ids, shares, out = run(route, plan, residual, norm, dtype)
            x, expected_ids, expected_shares = chosen(residual, norm, router, switch, 3)
            if not torch.equal(ids.long().sort(-1).values, expected_ids.sort(-1).values):
                return float("inf")
            expected = plan.reference(x.to(plan.product), ids, shares, torch.float64)
            worst = max(worst, relative_error(out, expected), relative_error(shares.sort(-1).values, expected_shares.sort(-1).values))
    return worst


def run(route: RoutePlan, plan: ExpertsPrefillPlan, residual: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Both plans on buffers full of NaN and of impossible numbers: ids, shares and the rows of `plan`. For checks."""
    tokens, device, top_k = residual.shape[0], residual.device, plan.top_k
    inverse = torch.rsqrt(residual.square().mean(-1) + 1e-6)
    x = (residual * inverse[:, None] * (1.0 + norm)).to(plan.product)
    tile = plan.tiles(tokens).tokens
    ids, order, tiles = (
        torch.full(shape, -9, dtype=torch.int32, device=device) for shape in ((tokens, top_k), (tokens * top_k,), (route.tiles(tokens, tile), 3))
    )
    shares = torch.full((tokens, top_k + 1), torch.nan, device=device)
    hidden = torch.full((tokens * (top_k + 1), plan.width), torch.nan, device=device, dtype=plan.product)
    out = torch.full((tokens, top_k + 1, plan.outputs), torch.nan, device=device, dtype=dtype)
    logits = torch.full((route.splits(tokens), tokens, plan.count + 1), torch.nan, device=device)
    route(residual, inverse, logits, ids, shares, order, tiles, tile)
    plan(x, shares, order, tiles, hidden, out)
    return ids, shares, out


def chosen(residual: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, switch: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """The choice in float64: normed rows, ids [T, top_k], shares [T, top_k + 1]."""
    x = residual.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + norm.double())
    share, ids = (x @ router.double().t()).softmax(-1).topk(top_k, dim=-1)
    return x, ids, torch.cat((share / share.sum(-1, keepdim=True), torch.sigmoid(x @ switch.double().t())), dim=-1)
