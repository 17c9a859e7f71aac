"""Weights of four or three bits kept as stored: packed codes, and what turns a code into a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

# Weights are multiplied out in float32 in pieces of about this many elements (see `scaled`).
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
# FP4 (OCP microscaling format, E2M1): the top bit is the sign, then two bits of exponent and one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass
class PackedWeight:
    """A weight [..., N, K] of few bits: value = (code - zero) * scale of its group, or FP4(code) * (scale * factor).

    codes: uint8 [..., N, K * bits // 8]. Four bits: column 2i is the low half of byte i, column 2i + 1 the high half.
    Three bits: 32 columns are 12 bytes; first 8 with the two low bits (column j: bits 2 * (j % 4) of byte j // 4), then 4
    with the high bit (column j: bit j % 8 of byte j // 8).
    scale: [..., N, K // group] in the file's dtype, one of SCALE_DTYPES. zero: uint8 of the same shape, subtracted from
    the code; None stands for 2 ** (bits - 1). factor: float32 [..., 1, 1], one a matrix, multiplies its scales; where
    `factor_divides` the scales are divided by it instead (the two are not the same number in float32).
    values: "int", or "e2m1" for FP4 codes, which have no zero. group: columns that share a scale; it divides K.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    factor: torch.Tensor | None
    values: str
    group: int
    bits: int = 4
    factor_divides: bool = False

    def __post_init__(self) -> None:
        if self.values not in ("int", "e2m1") or self.bits not in (3, 4):
            raise ValueError(f"values {self.values!r} of {self.bits} bits: expected int of 3 or 4 bits, or e2m1 of 4")
        if self.values == "e2m1" and (self.bits != 4 or self.zero is not None):
            raise ValueError("e2m1 codes have 4 bits and no zero")
        *lead, rows, columns = self.shape
        unit = 32 if self.bits == 3 else 2
        if self.codes.dtype != torch.uint8 or columns % unit or self.codes.shape[-1] != columns * self.bits // 8:
            raise ValueError(f"codes {self.codes.dtype} {list(self.codes.shape)}: expected bytes of whole runs of {unit} columns")
        groups = (*lead, rows, columns // self.group)
        if self.group < 1 or columns % self.group or self.scale.dtype not in SCALE_DTYPES or tuple(self.scale.shape) != groups:
            raise ValueError(f"scale {self.scale.dtype} {list(self.scale.shape)} over {self.group} columns of {list(self.shape)}: expected {list(groups)}")
        if self.zero is not None and (self.zero.dtype != torch.uint8 or self.zero.shape != self.scale.shape):
            raise ValueError(f"zero {self.zero.dtype} {list(self.zero.shape)}: expected uint8 {list(groups)}")
        if self.factor is not None and (self.factor.dtype != torch.float32 or tuple(self.factor.shape) != (*lead, 1, 1)):
            raise ValueError(f"factor {self.factor.dtype} {list(self.factor.shape)}: expected float32 {[*lead, 1, 1]}")

    @property
    def shape(self) -> torch.Size:
        """Of the dense weight."""
        *lead, size = self.codes.shape
        return torch.Size((*lead, size * 8 // self.bits))

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes: who asks for plain numbers, as the kernels for dense weights do, learns that these are none."""
        return self.codes.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.zero, self.factor) if part is not None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedWeight:
        """The same weight on `device`."""
        return self._of_parts(lambda part: part.to(device, non_blocking=non_blocking))

    def __getitem__(self, expert: int | slice | torch.Tensor) -> PackedWeight:
        """One expert, or several, of a stack [E, N, K]: indexes the leading dimension only."""
        if self.codes.ndim < 3:
            raise IndexError(f"only a stack of weights [E, N, K] is indexed by expert; this one is {list(self.shape)}")
        return self._of_parts(lambda part: _indexed(part, expert))

    def _of_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        parts = (None if part is None else change(part) for part in (self.codes, self.scale, self.zero, self.factor))
        return PackedWeight(*parts, self.values, self.group, self.bits, self.factor_divides)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight [..., N, K]: computed in float32, then rounded once to `dtype`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        if not out.numel():
            return out
        rows, columns = self.shape[-2:]
        codes, plain = self.codes.reshape(-1, self.codes.shape[-1]), out.view(-1, columns)
        scale = self.scale.reshape(codes.shape[0], -1)
        zero = None if self.zero is None else self.zero.reshape(scale.shape)
        budget = _ELEMENTS_AT_ONCE.get(self.device.type, _ELEMENTS_AT_ONCE["cuda"])
        step = max(budget // columns, 1)
        for start in range(0, codes.shape[0], step):
            part = slice(start, min(start + step, codes.shape[0]))
            factor = self.factor
            if factor is not None and factor.numel() > 1:
                factor = factor.view(-1, 1)[torch.arange(part.start, part.stop, device=self.device) // rows]
            elif factor is not None:
                factor = factor.view(1, 1)
            scales = group_scales(scale[part], factor, self.factor_divides)
            plain[part] = multiplied_out(codes[part], scales, None if zero is None else zero[part], self.values, self.bits)
        return out


def group_scales(scale: torch.Tensor, factor: torch.Tensor | None, factor_divides: bool = False) -> torch.Tensor:
    """float32 scales of groups, times (or over) their matrix's factor where there is one."""
    scale = scale.float()
    if factor is None:
        return scale
    return scale / factor if factor_divides else scale * factor


def multiplied_out(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, values: str, bits: int = 4) -> torch.Tensor:
    """float32 [R, K] of codes [R, K * bits // 8], scales float32 [R, groups] and zeros uint8 [R, groups] (or None)."""
    numbers = _numbers(codes, values, bits).view(*scale.shape, -1)
    if values == "int":
        numbers -= 2 ** (bits - 1) if zero is None else zero.float()[..., None]
    return numbers.mul_(scale[..., None]).view(codes.shape[0], -1)


def unpack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., K] of codes [..., K * bits // 8]."""
    if bits == 4:
        return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    runs = codes.unflatten(-1, (-1, 12))
    low = (runs[..., :8, None] >> _shifts(4, 2, codes.device)) & 3
    high = (runs[..., 8:, None] >> _shifts(8, 1, codes.device)) & 1
    return (low.flatten(-2) | (high.flatten(-2) << 2)).flatten(-2)


def pack_codes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_codes`: uint8 [..., K] below 2 ** bits, K a multiple of 2 (4 bits) or 32 (3 bits)."""
    if bits == 4:
        return values[..., 0::2] | (values[..., 1::2] << 4)
    runs = values.unflatten(-1, (-1, 32))
    low = ((runs & 3).unflatten(-1, (8, 4)) << _shifts(4, 2, values.device)).sum(-1, dtype=torch.uint8)
    high = ((runs >> 2).unflatten(-1, (4, 8)) << _shifts(8, 1, values.device)).sum(-1, dtype=torch.uint8)
    return torch.cat((low, high), -1).flatten(-2)


def _numbers(codes: torch.Tensor, values: str, bits: int) -> torch.Tensor:
    """float32 [R, K]: the codes themselves, or the FP4 numbers they stand for."""
    if bits == 4:  # both numbers of a byte from a table of the 256 bytes
        return _pairs(values, codes.device).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape[0], -1)
    return unpack_codes(codes, bits).float()


@cache
def _pairs(values: str, device: torch.device) -> torch.Tensor:
    table = torch.tensor(_E2M1) if values == "e2m1" else torch.arange(16.0)
    byte = torch.arange(256)
    return torch.stack((table[byte & 15], table[byte >> 4]), -1).to(device)


@cache
def _shifts(count: int, width: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.uint8) * width).to(device)


def _indexed(part: torch.Tensor, expert: int | slice | torch.Tensor) -> torch.Tensor:
    """Through bytes where the dtype is float8: gathering it is not implemented for every device."""
    return part.view(torch.uint8)[expert].view(part.dtype) if part.dtype == torch.float8_e4m3fn else part[expert]
