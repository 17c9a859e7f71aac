"""The experts of many tokens as grouped products: gate and up with SiLU, then down times the token's share.

Every expert's tokens stand in a row (route_prefill.sort_kernel); the shared expert is one more expert that takes all
tokens. Each (token, choice) pair leaves a row of its own, and whoever reads them adds a token's rows in the order of
its choices: nothing depends on which program comes first.
"""

from __future__ import annotations

import torch

from ..model.linear import dense
from ..model.moe import ExpertWeights, MoEWeights
from .expert_parts import ExpertPart, ExpertTiles, expert_parts
from .expert_table import ExpertTable, random_experts
from .launcher import Launchers
from .packed_prefill import SAMPLES, random_packed, require
from .route_prefill import RoutePlan
from .support import Target, UnsupportedByKernel, relative_error, self_test


class ExpertsPrefillPlan:
    """The mixture of experts of one layer for any number of tokens, its router aside.

    weights as loaded: FP8, packed, or dense of the activations' type; gate and up of one layout. Routed and shared experts of one
    layout take the same launches, else each their own. The plan keeps the weights alive. Routed experts on the meta device are
    a layout without numbers: then every call names the table of addresses.
    """

    def __init__(
        self, weights: MoEWeights, top_k: int, launchers: Launchers, dtype: torch.dtype, *, tiles: ExpertTiles | None = None, tested: bool = True
    ) -> None:
        """tested: refuse packed experts where the self-test of their kernels failed."""
        experts = weights.experts
        self.count, self.inner, self.outputs = experts.gate.shape
        self.shared_inner = weights.shared_gate.shape[0]
        if self.inner * self.outputs >= 1 << 31 or self.shared_inner * self.outputs >= 1 << 31:
            raise UnsupportedByKernel(f"experts of {self.inner} x {self.outputs}")
        self.weights, self.top_k, self._launchers, self._tiles = weights, top_k, launchers, tiles
        self.width = max(self.inner, self.shared_inner)
        parts = expert_parts(weights, top_k, launchers, dtype)
        if tested and any(part.packed for part in parts):
            require("moe_prefill.packed", launchers.target)
        self._parts, self._of_routed = parts, next(part for part in parts if part.routed)
        # of x and of what stands between the two launches
        self.product = dtype if all(part.dense for part in parts) or dtype == torch.float32 else torch.float16
        self.table = ExpertTable(weights) if hasattr(experts, "tables") or experts.gate.device.type != "meta" else None

    def tiles(self, tokens: int) -> ExpertTiles:
        return self._tiles or self._of_routed.tiles(tokens)

    def __call__(
        self, x: torch.Tensor, shares: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Two launches, or four. x [T, D] of the type `product`; shares, order, tiles as RoutePlan leaves them for tiles(T).tokens;
        hidden [T * (top_k + 1), width] of that type too; out [T, top_k + 1, D] of the plan's dtype, each row times its share.
        table: int64 [E + 1, 12] as in ExpertTable, in place of the plan's own; rows of experts nobody goes to are not read."""
        self.up(x, order, tiles, hidden, table)
        self.down(hidden, shares, order, tiles, out, table)

    def up(self, x: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, hidden: torch.Tensor, table: torch.Tensor | None = None) -> None:
        tokens, pointers = x.shape[0], self._pointers(table)
        for part in self._parts:
            size = self._size_of(part, tokens)
            grid, shared = part.grid(tokens, tiles, size, -(-part.inner // size.up_rows))
            part.launches(size)[0](grid, x, pointers, tiles, order, hidden, tokens, shared)

    def down(
        self, hidden: torch.Tensor, shares: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, table: torch.Tensor | None = None
    ) -> None:
        tokens, pointers = out.shape[0], self._pointers(table)
        for part in self._parts:
            size = self._size_of(part, tokens)
            grid, shared = part.grid(tokens, tiles, size, -(-self.outputs // (size.down_rows * size.down_run)))
            part.launches(size)[1](grid, hidden, pointers, tiles, order, shares, out, tokens, shared)

    def _size_of(self, part: ExpertPart, tokens: int) -> ExpertTiles:
        """All parts that read the table of tiles must agree on it; who reads none is free."""
        return self.tiles(tokens) if part.routed else part.tiles(tokens)

    def _pointers(self, table: torch.Tensor | None) -> torch.Tensor:
        if table is not None:
            return table
        if self.table is None:
            raise ValueError("experts without memory of their own need a table of addresses")
        return self.table.pointers

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
    dtype = torch.float32 if target.interpreted else torch.bfloat16
    experts, hidden, inner = (5, 48, 32) if target.interpreted else (8, 2048, 512)
    return max(_error(random_experts(experts, hidden, inner, inner, target.device, kept), target, dtype) for kept in (None, dtype))


@self_test("moe_prefill.packed", limit=8e-3)
def check_packed(target: Target) -> float:
    """Packed experts of every kind, beside a shared one in FP8, of the same layout, or dense."""
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    experts, hidden, inner = (3, 128, 64) if target.interpreted else (8, 2048, 512)
    errors = []
    for number, form in enumerate(SAMPLES):
        weights = random_experts(experts, hidden, inner, inner, device, dtype if number == 2 else None)
        shared = (weights.shared_gate, weights.shared_up, weights.shared_down)
        if number % 3 == 1:
            shared = tuple(random_packed(form, tuple(part.shape), device, 9 + at) for at, part in enumerate(shared))
        shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        stacks = ExpertWeights(*(random_packed(form, shape, device, at) for at, shape in enumerate(shapes)))
        errors.append(_error(MoEWeights(weights.router, stacks, *shared, weights.shared_switch), target, dtype, (18,)))
    return max(errors)


def _error(weights: MoEWeights, target: Target, dtype: torch.dtype, few: tuple[int, ...] = (1, 40)) -> float:
    """Largest relative error of shares and rows over some numbers of tokens (`few` under the interpreter); infinite where an expert
    was not the right one."""
    device, errors, launchers = target.device, [], Launchers(target)
    generator = torch.Generator(device=device).manual_seed(1)
    hidden = weights.router.shape[1]
    router, switch = weights.router.to(dtype), weights.shared_switch.to(dtype)
    weights = MoEWeights(router, weights.experts, weights.shared_gate, weights.shared_up, weights.shared_down, switch)
    norm = torch.randn(hidden, device=device, generator=generator) * 0.1
    route, plan = RoutePlan(router, switch, norm, 3, launchers, dtype), ExpertsPrefillPlan(weights, 3, launchers, dtype, tested=False)
    for tokens in (few if target.interpreted else (1, 40, 70, 200)):
        residual = torch.randn(tokens, hidden, device=device, generator=generator)
        ids, shares, out = run(route, plan, residual, norm, dtype)
        x, expected_ids, expected_shares = chosen(residual, norm, router, switch, 3)
        if not torch.equal(ids.long().sort(-1).values, expected_ids.sort(-1).values):
            return float("inf")
        expected = plan.reference(x.to(plan.product), ids, shares, torch.float64)
        errors += [relative_error(out, expected), relative_error(shares.sort(-1).values, expected_shares.sort(-1).values)]
    return max(errors)


def run(
    route: RoutePlan, plan: ExpertsPrefillPlan, residual: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype, table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
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
    plan(x, shares, order, tiles, hidden, out, table)
    return ids, shares, out


def chosen(residual: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, switch: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """The choice in float64: normed rows, ids [T, top_k], shares [T, top_k + 1]."""
    x = residual.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + norm.double())
    share, ids = (x @ router.double().t()).softmax(-1).topk(top_k, dim=-1)
    return x, ids, torch.cat((share / share.sum(-1, keepdim=True), torch.sigmoid(x @ switch.double().t())), dim=-1)
