"""The records of a load plan: which bytes of which file make up a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .header import TensorInfo
from .names import TIERS, kept_in_float32, may_stay_scaled, tier_of

if TYPE_CHECKING:
    from .packed_plan import PackedEntry


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of a file, and the tensor it belongs to (for messages)."""

    name: str
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Where the scales of an FP8 weight lie.

    The pieces, joined, are the scale as `stored_shape`. Each row then stands for `row_repeat` rows, of which the first
    `row_skip` do not belong to this weight (a fused gate|up whose halves meet inside a block), giving `shape`.
    `copies` > 1 repeats a single stored value for every matrix of a stack.
    """

    block: tuple[int, int]
    dtype: str
    pieces: tuple[Piece, ...]
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    row_repeat: int = 1
    row_skip: int = 0
    copies: int = 1

    def of_experts(self, count: int, ids: Sequence[int]) -> Fp8Storage:
        """The scales of some experts of a stack of `count`."""
        shape = (len(ids), *self.shape[1:])
        if self.copies > 1:
            return replace(self, shape=shape, copies=len(ids))
        return replace(self, shape=shape, stored_shape=(len(ids), *self.stored_shape[1:]), pieces=pieces_of(self.pieces, count, ids))


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine weight: its pieces, joined in order, are its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    fp8: Fp8Storage | None = None

    @property
    def stays_scaled(self) -> bool:
        return self.fp8 is not None and may_stay_scaled(self.name)

    def device_bytes(self, compute_dtype, dequantize: bool) -> int:
        """Bytes on the device when loaded."""
        count = math.prod(self.shape)
        if self.stays_scaled and not dequantize:
            return count + 4 * math.prod(self.fp8.shape)
        return count * (4 if kept_in_float32(self.name) else compute_dtype.itemsize)

    def of_experts(self, ids: Sequence[int]) -> Entry:
        """The entry of some experts of this stack [E, N, K]."""
        count, *matrix = self.shape
        return replace(
            self,
            shape=(len(ids), *matrix),
            pieces=pieces_of(self.pieces, count, ids),
            fp8=self.fp8 and self.fp8.of_experts(count, ids),
        )


@dataclass
class LoadPlan:
    """What to read for a model. `aliases` maps a weight to the one it shares memory with (tied head).

    Entries of few bits have a class of their own: anything with name, shape, dtype, pieces, fp8 None, device_bytes, of_experts
    and prepare (see `packed_plan.PackedEntry`).
    """

    folder: Path
    entries: dict[str, Entry | PackedEntry]
    aliases: dict[str, str]
    has_vision: bool
    unused: list[str] = field(default_factory=list)

    def device_bytes(self, compute_dtype, dequantize: bool) -> int:
        """Bytes the weights take when loaded with this compute dtype (a torch dtype)."""
        return sum(entry.device_bytes(compute_dtype, dequantize) for entry in self.entries.values())

    def tier_bytes(self, compute_dtype, dequantize: bool) -> dict[str, int]:
        """`device_bytes` by tier (see `names.TIERS`)."""
        tiers = dict.fromkeys(TIERS, 0)
        tied = "embed_tokens.weight" in self.aliases.values()
        for name, entry in self.entries.items():
            tiers[tier_of(name, tied)] += entry.device_bytes(compute_dtype, dequantize)
        return tiers

    @property
    def stored_bytes(self) -> int:
        """Bytes read from the files."""
        pieces = (piece for entry in self.entries.values() for piece in (*entry.pieces, *(entry.fp8.pieces if entry.fp8 else ())))
        return sum(piece.nbytes for piece in pieces)


def whole(info: TensorInfo) -> Piece:
    """All bytes of a tensor."""
    return Piece(info.name, info.file, info.offset, info.nbytes)


def rows_of(info: TensorInfo, first: int, count: int, row_bytes: int) -> Piece:
    """`count` rows of a tensor from row `first` on."""
    return Piece(info.name, info.file, info.offset + first * row_bytes, count * row_bytes)


def pieces_of(pieces: tuple[Piece, ...], count: int, ids: Sequence[int]) -> tuple[Piece, ...]:
    """The bytes of some matrices of a stack of `count`, which `pieces` hold one each or all in one."""
    if len(pieces) == count:
        return tuple(pieces[number] for number in ids)
    (stack,) = pieces
    nbytes = stack.nbytes // count
    return tuple(Piece(stack.name, stack.file, stack.offset + number * nbytes, nbytes) for number in ids)
