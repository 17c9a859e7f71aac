"""Where experts are: a table of addresses on the device, read when a kernel runs.

Experts can move and their rows of the table be rewritten between two replays of a captured graph.
"""

from __future__ import annotations

import torch

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight
from ..model.moe import ExpertWeights, MoEWeights
from .fp8_gemv import random_fp8
from .support import UnsupportedByKernel


class ExpertTable:
    """`pointers` int64 [E + 1, 12] on the device: addresses of gate, up, down; their scales; their zeros; their factors;
    of every expert, the shared expert last.

    Whoever moves an expert rewrites its row on the stream the kernels run on; the new place must hold the same layout.
    Addresses of codes are multiples of 16. What a weight does not have (dense experts have no scales, FP8 has no zeros)
    repeats the address of its codes, and is not read.
    """

    def __init__(self, weights: MoEWeights) -> None:
        experts = weights.experts
        shared = [_addresses(matrix) for matrix in (weights.shared_gate, weights.shared_up, weights.shared_down)]
        shared_row = [matrix[field][0] for field in range(4) for matrix in shared]
        tables = getattr(experts, "tables", None)  # of experts in slots: their addresses come and go
        rows = []
        if tables is None:
            routed = [_addresses(stack) for stack in (experts.gate, experts.up, experts.down)]
            rows = [[stack[field][i] for field in range(4) for stack in routed] for i in range(len(routed[0][0]))]
        rows.append(shared_row)
        if any(address % 16 for row in rows for address in row[:3]):
            raise UnsupportedByKernel("experts that do not begin at a multiple of 16 bytes")
        if tables is None:
            self.pointers = torch.tensor(rows, dtype=torch.int64, device=weights.router.device)
        else:
            self.pointers = tables.pointers
            self.pointers[-1].copy_(torch.tensor(shared_row))


def _addresses(weight: Weight) -> list[list[int]]:
    """Where the codes, scales, zeros and factors of each matrix of a stack [E, N, K] (or of one matrix [N, K]) begin."""
    if isinstance(weight, PackedWeight):
        parts = [weight.codes, weight.scale, weight.zero, weight.factor]
    elif isinstance(weight, ScaledWeight):
        parts = [weight.data, weight.scale, None, None]
    else:
        parts = [weight, None, None, None]
    count = parts[0].shape[0] if parts[0].ndim == 3 else 1
    codes = parts[0]
    return [[part.data_ptr() + i * (part.nbytes // count) for i in range(count)] for part in (codes if part is None else part for part in parts)]


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
