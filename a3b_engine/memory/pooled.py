"""The routed experts of one layer, some of them in slots on the device and the others outside it."""

from __future__ import annotations

import torch

from ..kernels.expert_slots import LayerTables
from ..model.linear import Weight
from ..model.moe import ExpertWeights
from .pool import SlotPool


class PooledExperts:
    """The face of `model.moe.ExpertWeights` over a `SlotPool`.

    gate, up, down are stacks of the meta device: their shapes, types and scales' blocks, no numbers. Kernels find the experts by
    `tables`; plain PyTorch asks for copies.
    """

    def __init__(self, pool: SlotPool, layer: int) -> None:
        self.pool, self._layer = pool, layer

    @property
    def gate(self) -> Weight:
        return self.pool.shapes.gate

    @property
    def up(self) -> Weight:
        return self.pool.shapes.up

    @property
    def down(self) -> Weight:
        return self.pool.shapes.down

    @property
    def tables(self) -> LayerTables:
        return self.pool.tables[self._layer]

    def of_token(self, ids: torch.Tensor) -> ExpertWeights:
        """Stacks of the experts ids int64 [n], which take slots if they have none."""
        if not self.pool.full:
            self.pool.take(self._layer, ids)
        return self.of_group(ids)

    def of_group(self, ids: torch.Tensor) -> ExpertWeights:
        """Stacks of the experts ids int64 [n]; slots stay as they are."""
        return self.pool.layout.read(self.pool.records(self._layer, ids.tolist()))
