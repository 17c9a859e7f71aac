"""Mixture of experts with a gated shared expert: a softmax router picks `num_experts_per_tok` experts a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..config import TextConfig
from .linear import Weight, dense, linear

# Elements of one expert matrix stack made dense at a time: 128 MB in float32, 32 experts of the 35B model.
_ELEMENTS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class ExpertWeights:
    """gate, up [E, I, D] and down [E, D, I]; indexing by expert gives one expert's matrix.

    `memory.pooled.PooledExperts` has the same face over experts that are not all on the device.
    """

    gate: Weight
    up: Weight
    down: Weight

    def of_token(self, ids: torch.Tensor) -> ExpertWeights:
        """Stacks of the experts ids int64 [n], which one token chose."""
        return ExpertWeights(self.gate[ids], self.up[ids], self.down[ids])

    def of_group(self, ids: torch.Tensor) -> ExpertWeights:
        """Stacks of the experts ids int64 [n], which are some of those that many tokens chose."""
        return self.of_token(ids)


@dataclass(frozen=True)
class MoEWeights:
    """router [E, D]; the routed experts; shared_{gate,up} [S, D], shared_down [D, S]; shared_switch [1, D]."""

    router: torch.Tensor
    experts: ExpertWeights
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight
    shared_switch: torch.Tensor


def mixture_of_experts(x: torch.Tensor, weights: MoEWeights, config: TextConfig) -> torch.Tensor:
    """x [T, D] -> [T, D]: the weighted sum of the chosen experts plus the shared one behind its sigmoid."""
    share, chosen = route(x, weights.router, config.num_experts_per_tok)
    routed = (_experts_of_one_token if x.shape[0] == 1 else _experts_grouped)(x, weights.experts, share, chosen)
    shared = linear(F.silu(linear(x, weights.shared_gate)) * linear(x, weights.shared_up), weights.shared_down)
    return routed + torch.sigmoid(linear(x, weights.shared_switch)) * shared


def dense_elements_at_once(config: TextConfig) -> int:
    """Elements of each expert matrix that stand made dense at the same time, at most."""
    one = config.moe_intermediate_size * config.hidden_size
    return one * min(config.num_experts, max(1, _ELEMENTS_AT_ONCE // one))


def route(x: torch.Tensor, router: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares (x's dtype, each row sums to 1) and ids (int64) of the chosen experts, [T, count] each; softmax in float32."""
    probabilities = linear(x, router).float().softmax(-1)
    share, chosen = probabilities.topk(count, dim=-1)
    return (share / share.sum(-1, keepdim=True)).to(x.dtype), chosen


def _experts_of_one_token(x: torch.Tensor, experts: ExpertWeights, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """One token: gather its experts and multiply them as a batch, so that nothing waits for the host to read their ids."""
    taken = experts.of_token(chosen[0])
    column = x[0][:, None]
    hidden = F.silu(dense(taken.gate, x.dtype) @ column) * (dense(taken.up, x.dtype) @ column)
    out = (dense(taken.down, x.dtype) @ hidden)[..., 0]  # [count, D]
    return (out * share[0][:, None]).sum(0, keepdim=True)


def _experts_grouped(x: torch.Tensor, experts: ExpertWeights, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Many tokens: experts of about equally many tokens run together as one padded batch.

    A batch keeps the number of operations small where one expert at a time would cost hundreds of launches a layer.
    Every (token, choice) pair has a row of its own in the result, so that sums have one order on every device.
    """
    tokens, count = chosen.shape
    pairs = chosen.flatten().argsort(stable=True)  # pairs token*count+choice, sorted by expert
    loads = torch.bincount(chosen.flatten(), minlength=experts.gate.shape[0])
    starts = loads.cumsum(0) - loads
    heaviest = loads.argsort(descending=True, stable=True)
    loads_on_host = loads[heaviest].tolist()
    active = sum(load > 0 for load in loads_on_host)
    at_once = max(1, _ELEMENTS_AT_ONCE // (experts.gate.shape[1] * experts.gate.shape[2]))  # experts
    results = x.new_empty(tokens * count + 1, x.shape[1])  # the last row takes what padding computes
    for first in range(0, active, at_once):
        ids = heaviest[first : min(first + at_once, active)]
        slot = torch.arange(loads_on_host[first], device=x.device)  # padded to the heaviest of the group
        filled = slot < loads[ids, None]
        pair = pairs[(starts[ids, None] + slot).clamp(max=len(pairs) - 1)]
        part = x[pair // count]  # [group, slots, D]
        taken = experts.of_group(ids)
        gate, up, down = (dense(stack, x.dtype).transpose(1, 2) for stack in (taken.gate, taken.up, taken.down))
        hidden = F.silu(part @ gate) * (part @ up)
        results[torch.where(filled, pair, tokens * count)] = hidden @ down
    return (results[:-1].view(tokens, count, -1) * share[..., None]).sum(1)
