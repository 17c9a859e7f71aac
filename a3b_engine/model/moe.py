"""Mixture of experts with a gated shared expert: a softmax router picks `num_experts_per_tok` experts a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..config import TextConfig
from .linear import Weight, dense, linear


@dataclass(frozen=True)
class ExpertWeights:
    """gate, up [E, I, D] and down [E, D, I]; indexing by expert gives one expert's matrix."""

    gate: Weight
    up: Weight
    down: Weight


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


def route(x: torch.Tensor, router: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares (x's dtype, each row sums to 1) and ids (int64) of the chosen experts, [T, count] each; softmax in float32."""
    probabilities = linear(x, router).float().softmax(-1)
    share, chosen = probabilities.topk(count, dim=-1)
    return (share / share.sum(-1, keepdim=True)).to(x.dtype), chosen


def _experts_of_one_token(x: torch.Tensor, experts: ExpertWeights, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """One token: gather its experts and multiply them as a batch, so that nothing waits for the host to read their ids."""
    ids = chosen[0]
    column = x[0][:, None]
    hidden = F.silu(dense(experts.gate[ids], x.dtype) @ column) * (dense(experts.up[ids], x.dtype) @ column)
    out = (dense(experts.down[ids], x.dtype) @ hidden)[..., 0]  # [count, D]
    return (out * share[0][:, None]).sum(0, keepdim=True)


def _experts_grouped(x: torch.Tensor, experts: ExpertWeights, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Many tokens: each expert that anyone chose runs once over its tokens."""
    out = torch.zeros_like(x)
    order = chosen.flatten().argsort(stable=True)
    tokens, shares = order // chosen.shape[1], share.flatten()[order]
    counts = torch.bincount(chosen.flatten(), minlength=experts.gate.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows, weight = tokens[start : start + count], shares[start : start + count, None]
        start += count
        part = x[rows]
        hidden = F.silu(linear(part, experts.gate[expert])) * linear(part, experts.up[expert])
        out.index_add_(0, rows, linear(hidden, experts.down[expert]) * weight)
    return out
