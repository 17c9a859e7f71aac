"""The routed experts of one layer in few bits."""

from __future__ import annotations

from typing import Callable, Mapping

import torch

from ..names import is_expert_stack
from ..packed import PackedWeight
from .calibration import Calibration
from .matrix import quantize_matrix


def quantize_experts(
    weights: Mapping[str, object], calibration: Calibration, bits: int, group: int, poll: Callable[[int], None] | None = None
) -> dict[str, PackedWeight]:
    """weights: all of the layer at which `calibration` stands, by canonical name -> its stacks of experts in `bits` bits.

    poll(matrices finished since the last call) may raise.
    """
    statistics = calibration.advance(weights)
    packed: dict[str, PackedWeight] = {}
    for name in filter(is_expert_stack, weights):
        known = statistics[name.removesuffix(".weight").rsplit(".", 1)[1]]
        packed[name] = quantize_matrix(weights[name], bits, group, variance=known.variance, mean=known.mean, name=name, poll=poll)
    return packed


class Portions:
    """Reports `total` bytes in shares while `count` parts are finished one after the other."""

    def __init__(self, total: int, count: int, report: Callable[[int], None]) -> None:
        self._total, self._count, self._report = total, count, report
        self._finished = 0

    def __call__(self, parts: int) -> None:
        before = self._total * self._finished // self._count
        self._finished += parts
        self._report(self._total * self._finished // self._count - before)


def packed_bytes(shape: tuple[int, ...], bits: int, group: int) -> int:
    """Bytes of a stack [.., N, K] in few bits: codes and float16 scales."""
    count = torch.Size(shape).numel()
    return count * bits // 8 + 2 * (count // group)
