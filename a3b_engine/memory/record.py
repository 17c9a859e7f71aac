"""One routed expert in one run of bytes: what a slot on the device holds, and what is fetched from RAM in one piece."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight
from ..model.moe import ExpertWeights

ALIGNMENT = 256  # bytes: of parts in a record, and of records
MATRICES = ("gate", "up", "down")
FIELDS = ("codes", "scale", "zero", "factor")


@dataclass(frozen=True)
class Part:
    """One tensor of one expert: where it begins in the record, its bytes, type and shape."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, records: torch.Tensor) -> torch.Tensor:
        """This part of records uint8 [n, record]: [n, *shape], a view."""
        return records[:, self.offset : self.offset + self.nbytes].view(self.dtype).unflatten(-1, self.shape)


class RecordLayout:
    """How the experts of one kind (FP8, packed or dense; of one shape) lie in records of `nbytes` bytes.

    offsets: where each part begins, in the order of the columns of `kernels.expert_table`: codes of gate, up, down, then
    their scales, zeros and factors; a part they do not have is at the place of its codes.
    """

    def __init__(self, experts: ExpertWeights) -> None:
        """experts: stacks [E, N, K]; only their layout is looked at, so that those of the meta device will do."""
        self._stacks = [getattr(experts, name) for name in MATRICES]
        self._parts: list[list[Part | None]] = [[None] * len(FIELDS) for _ in MATRICES]
        filled = 0
        # All codes first: they begin at rounder addresses than what follows them.
        for field in range(len(FIELDS)):
            for matrix, stack in enumerate(self._stacks):
                part = fields_of(stack)[field]
                if part is None:
                    continue
                count = part.shape[0]
                nbytes = part.nbytes // count
                self._parts[matrix][field] = Part(filled, nbytes, part.dtype, tuple(part.shape[1:]))
                filled += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = filled
        self.offsets = tuple((parts[field] or parts[0]).offset for field in range(len(FIELDS)) for parts in self._parts)

    def write(self, experts: ExpertWeights, records: torch.Tensor) -> None:
        """Stacks [n, N, K] into records uint8 [n, nbytes], wherever each of both is."""
        for parts, name in zip(self._parts, MATRICES):
            for part, source in zip(parts, fields_of(getattr(experts, name))):
                if part is not None:  # through bytes: copying float8 with gaps is not implemented for every device
                    part.of(records).view(torch.uint8).copy_(source.view(torch.uint8), non_blocking=True)

    def read(self, records: torch.Tensor) -> ExpertWeights:
        """Records uint8 [n, nbytes] as stacks [n, N, K], without a copy."""
        matrices = []
        for stack, parts in zip(self._stacks, self._parts):
            codes, scale, zero, factor = (None if part is None else part.of(records) for part in parts)
            if isinstance(stack, ScaledWeight):
                matrices.append(ScaledWeight(codes, scale, stack.block))
            elif isinstance(stack, PackedWeight):
                matrices.append(PackedWeight(codes, scale, zero, factor, stack.values, stack.group, stack.bits, stack.factor_divides))
            else:
                matrices.append(codes)
        return ExpertWeights(*matrices)


def fields_of(weight: Weight) -> tuple[torch.Tensor | None, ...]:
    """Codes, scale, zero and factor of a weight."""
    if isinstance(weight, PackedWeight):
        return weight.codes, weight.scale, weight.zero, weight.factor
    if isinstance(weight, ScaledWeight):
        return weight.data, weight.scale, None, None
    return weight, None, None, None

