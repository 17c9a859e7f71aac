"""Where experts are: a table of addresses on the device, read when a kernel runs.

Experts can move and their rows of the table be rewritten between two replays of a captured graph.
"""

from __future__ import annotations

import torch

from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight
from ..model.moe import ExpertWeights, MoEWeights
from .fp8_gemv import random_fp8
from .support import UnsupportedByKernel


class ExpertTable:
    """`pointers` int64 [E + 1, 6] on the device: addresses of gate, up, down, gate scale, up scale, down scale of every
    expert, the shared expert last.

    Whoever moves an expert rewrites its row on the stream the kernels run on; the new place must hold the same layout.
    Addresses of codes are multiples of 16. Dense experts have no scales: those columns repeat the weights' addresses.
    """

    def __init__(self, weights: MoEWeights) -> None:
        experts = weights.experts
        routed = [_addresses(stack) for stack in (experts.gate, experts.up, experts.down)]
        shared = [_addresses(matrix) for matrix in (weights.shared_gate, weights.shared_up, weights.shared_down)]
        rows = [[part[0][i] for part in routed] + [part[1][i] for part in routed] for i in range(len(routed[0][0]))]
        rows.append([part[0][0] for part in shared] + [part[1][0] for part in shared])
        if any(address % 16 for row in rows for address in row[:3]):
            raise UnsupportedByKernel("experts that do not begin at a multiple of 16 bytes")
        self.pointers = torch.tensor(rows, dtype=torch.int64, device=weights.router.device)


def _addresses(weight: Weight) -> tuple[list[int], list[int]]:
    """Where each matrix of a stack [E, N, K] (or one matrix [N, K]) and its scales begin."""
    data, scale = (weight.data, weight.scale) if isinstance(weight, ScaledWeight) else (weight, weight)
    count = data.shape[0] if data.ndim == 3 else 1
    codes, scales = ([part.data_ptr() + i * (part.nbytes // count) for i in range(count)] for part in (data, scale))
    return codes, scales


def matrices_of(weights: MoEWeights) -> list[Weight]:
    """gate, up, down of the routed experts (stacks), then of the shared one."""
    experts = weights.experts
    return [experts.gate, experts.up, experts.down, weights.shared_gate, weights.shared_up, weights.shared_down]


def random_experts(
    experts: int, hidden: int, inner: int, shared: int, device: torch.device, dtype: torch.dtype | None = None
) -> MoEWeights:
    """A layer of random experts for self-tests and measurements: FP8 in 128x128 blocks, or dense of `dtype`."""

    def matrix(seed: int, *shape: int) -> Weight:
        weight = random_fp8(shape, (128, 128), device, seed=seed)
        return weight if dtype is None else weight.dequantize(dtype)

    stacks = ExpertWeights(matrix(1, experts, inner, hidden), matrix(2, experts, inner, hidden), matrix(3, experts, hidden, inner))
    generator = torch.Generator(device=device).manual_seed(4)
    router, switch = (torch.randn(rows, hidden, device=device, generator=generator) * 0.02 for rows in (experts, 1))
    return MoEWeights(router, stacks, matrix(5, shared, hidden), matrix(6, shared, hidden), matrix(7, hidden, shared), switch)
