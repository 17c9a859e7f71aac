"""Reading the record that `convert` writes: stacks of experts as codes and scales, decided from the tensors themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import CheckpointError, UnsupportedFormatError
from ..header import TensorInfo, shown
from ..packed import PackedWeight
from ..schemes import Module
from ..storage import Piece, pieces_of, whole
from .record import METHOD, VERSION


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One stack of experts [E, N, K] of few bits, as a plan's entry: where its codes and scales lie."""

    name: str
    shape: tuple[int, ...]
    bits: int
    group: int
    codes: tuple[Piece, ...]
    scale: tuple[Piece, ...]
    dtype: str = "U8"
    fp8: None = None
    stays_scaled: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return *self.codes, *self.scale

    def device_bytes(self, compute_dtype: torch.dtype, dequantize: bool) -> int:
        """Bytes on the device when loaded."""
        count = math.prod(self.shape)
        return count * compute_dtype.itemsize if dequantize else sum(piece.nbytes for piece in self.pieces)

    def of_experts(self, ids: Sequence[int]) -> PackedEntry:
        """The entry of some experts of the stack."""
        count, *matrix = self.shape
        codes, scale = (pieces_of(pieces, count, ids) for pieces in (self.codes, self.scale))
        return replace(self, shape=(len(ids), *matrix), codes=codes, scale=scale)

    def prepare(self, allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], copy: Callable[[Piece, str, torch.Tensor], None]) -> PackedWeight:
        """The weight, its tensors made by `allocate` and given to `copy` (piece, dtype code, tensor) to be filled."""
        *lead, columns = self.shape
        codes = allocate((*lead, columns * self.bits // 8), torch.uint8)
        scale = allocate((*lead, columns // self.group), torch.float16)
        # Codes as I8, which is bytes; U8 stands for E8M0 scales there.
        for pieces, code, target in ((self.codes, "I8", codes.view(torch.int8)), (self.scale, "F16", scale)):
            for piece, part in zip(pieces, target.view(len(pieces), -1), strict=True):
                copy(piece, code, part)
        return PackedWeight(codes, scale, None, None, "int", self.group, self.bits)


def packed_stack(module: Module, name: str, shape: tuple[int, ...], quantization: Mapping) -> PackedEntry:
    """The entry of stack `name` of `shape`, stored as `module`. Bits and group follow from the shapes."""
    if quantization.get("quant_method") == METHOD and quantization.get("version") != VERSION:
        raise UnsupportedFormatError(
            f"{module.name}: config.json says {METHOD} version {shown(str(quantization.get('version')), 20)}, this engine reads version {VERSION}. Update the pack, or quantise again."
        )
    codes, scale = (module.parts.get(part) for part in ("codes", "scale"))
    if codes is None or scale is None or module.parts.keys() != {"codes", "scale"}:
        raise CheckpointError(f"{shown(module.name)}: found {', '.join(sorted(module.parts))}, expected codes and scale. Incomplete? Quantise again.")
    *lead, columns = shape
    bits = next((bits for bits in (4, 3) if codes.shape == (*lead, columns * bits // 8)), None)
    groups = scale.shape[-1] if scale.shape else 0
    if codes.dtype != "U8" or bits is None:
        raise _wrong(codes, f"U8 codes of 4 or 3 bits for {list(shape)}")
    if scale.dtype != "F16" or scale.shape != (*lead, groups) or not groups or columns % groups:
        raise _wrong(scale, f"F16 scales of groups that divide {columns} columns, for {list(shape)}")
    return PackedEntry(name, shape, bits, columns // groups, (whole(codes),), (whole(scale),))


def _wrong(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(f"{info.file}: tensor {shown(info.name)} is {info.dtype} {list(info.shape)}, expected {expected}. Damaged, or config.json of another model?")
