"""Which experts a token goes to, and with what shares.

Router logits in float32 (model.moe.route rounds them to the activations' dtype first, so near ties may fall another way
there), softmax over all experts, the `top_k` largest, renormalised: equal to a softmax over the chosen logits alone,
which is what is computed. Equal logits: the lower id first. A logit that is NaN or infinitely low counts as the lowest number, so
that the ids are always those of experts; the shares show a NaN, as a softmax would. The shared expert's share is the
sigmoid of its own logit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..model.moe import MoEWeights
from .configs import TileConfig, configuration, fitted, next_power_of_two
from .gemv import GemvPlan, code_format
from .rows import let_next_start, wait_for_inputs
from .support import Target, UnsupportedByKernel, relative_error, self_test


@triton.jit
def choose_kernel(
    logits, ids, shares,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits float32 [EXPERTS + 1], the last the shared expert's -> ids int32 [TOP_K], shares float32 [TOP_K + 1]. One program."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    index = tl.arange(0, WIDTH)
    value = tl.load(logits + index, mask=index < EXPERTS, other=0.0)
    broken = tl.max((value != value).to(tl.int32), 0)
    value = tl.where(value == value, tl.maximum(value, -3.0e38), -3.0e38) + 0.0
    # As integers in the same order: one instruction finds the largest of a warp.
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(index < EXPERTS, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    slot = tl.arange(0, TOP_WIDTH)
    chosen = slot * 0
    logit = slot * 0.0 - float("inf")
    for choice in tl.static_range(TOP_K):
        highest = tl.max(key, 0)
        place = tl.min(tl.where(key == highest, index, WIDTH), 0)
        high_bits = highest ^ ((highest >> 31) & 0x7FFFFFFF)
        chosen = tl.where(slot == choice, place, chosen)
        logit = tl.where(slot == choice, high_bits.to(tl.float32, bitcast=True), logit)
        key = tl.where(index == place, -2147483648, key)
    weight = tl.where(broken > 0, float("nan"), tl.exp(logit - tl.max(logit, 0)))
    tl.store(ids + slot, chosen, mask=slot < TOP_K)
    tl.store(shares + slot, weight / tl.sum(weight, 0), mask=slot < TOP_K)
    shared = tl.load(logits + EXPERTS)
    tl.store(shares + TOP_K, 1.0 / (1.0 + tl.exp(-shared)))


class RouterPlan:
    """router [E, K] and switch [1, K], dense and of one dtype. norm: as in GemvPlan. Two launches: logits, then the choice;
    made by the last program of the first one it took longer. With programmatic dependent launch the kernel behind this plan
    may read x at once (ExpertsPlan's early_x).

    After a call `ids` int32 [top_k] holds the chosen experts and `shares` float32 [top_k + 1] their shares and the shared
    expert's; `logits` float32 [E + 1] stays readable. The three tensors are the plan's and never move.
    """

    def __init__(
        self, router: torch.Tensor, switch: torch.Tensor, top_k: int, target: Target, *, norm: torch.Tensor | None = None,
        eps: float = 1e-6, pdl: bool = False, config: TileConfig | None = None,
    ) -> None:  # fmt: skip
        experts, columns = router.shape
        if code_format(router, target).name != "dense" or router.dtype != switch.dtype or switch.shape != (1, columns):
            raise UnsupportedByKernel(f"router of {router.dtype} {list(router.shape)}, switch of {switch.dtype} {list(switch.shape)}")
        if experts * columns >= 1 << 31 or not 1 <= top_k <= experts:
            raise UnsupportedByKernel(f"{top_k} of {experts} experts")
        config = config or fitted(configuration("router", target), experts + 1, columns, target)
        self.router, self.switch, self.norm, self.eps, self.top_k = router, switch, norm, eps, top_k
        device = target.device
        self.ids = torch.zeros(top_k, dtype=torch.int32, device=device)
        self.shares = torch.zeros(top_k + 1, dtype=torch.float32, device=device)
        self.logits = torch.zeros(experts + 1, dtype=torch.float32, device=device)
        self._sizes = dict(EXPERTS=experts, WIDTH=next_power_of_two(experts), TOP_K=top_k, TOP_WIDTH=next_power_of_two(top_k))
        self._pdl = dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)
        self._product = GemvPlan([router, switch], config, target, norm=norm, eps=eps, pdl=pdl, late=True)

    def __call__(self, x: torch.Tensor) -> None:
        """x [K], any float type. Only launches."""
        self._product(x, self.logits)
        choose_kernel[(1,)](self.logits, self.ids, self.shares, **self._sizes, **self._pdl, num_warps=1)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.switch.nbytes

    def reference(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [top_k] and shares [top_k + 1] in plain PyTorch, in `dtype` throughout."""
        vector = x.to(dtype)
        if self.norm is not None:
            vector = vector * torch.rsqrt(vector.square().mean() + self.eps) * (1.0 + self.norm.to(dtype))
        probabilities = F.linear(vector, self.router.to(dtype)).softmax(-1)
        order = probabilities.sort(descending=True, stable=True)
        share = order.values[: self.top_k]
        switch = torch.sigmoid(F.linear(vector, self.switch.to(dtype)))
        return order.indices[: self.top_k], torch.cat((share / share.sum(), switch))


def router_of(weights: MoEWeights, top_k: int, target: Target, **options: object) -> RouterPlan:
    """The plan of one layer's router; options as in RouterPlan."""
    return RouterPlan(weights.router, weights.shared_switch, top_k, target, **options)


@self_test("router", limit=1e-5)
def check(target: Target) -> float:
    """Twice; wrong ids make the error infinite."""
    device, worst = target.device, 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(320, device=device, generator=generator)
    norm = torch.randn(320, device=device, generator=generator) * 0.1
    router = (torch.randn(40, 320, device=device, generator=generator) * 0.1).to(torch.bfloat16)
    switch = (torch.randn(1, 320, device=device, generator=generator) * 0.1).to(torch.bfloat16)
    plan = RouterPlan(router, switch, 5, target, norm=norm, config=TileConfig(4, 256, 1))
    ids, shares = plan.reference(x, torch.float64)
    for _ in range(2):
        plan.ids.fill_(-1)
        plan(x)
        worst = max(worst, relative_error(plan.shares, shares), 0.0 if torch.equal(plan.ids.long(), ids) else float("inf"))
    return worst
