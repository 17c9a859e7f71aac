"""FP8 weights kept as stored: 8-bit codes and the scales that multiply them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Iterator

import torch

# Weights are multiplied out in float32 in pieces of about this many elements: few enough that a large head never stands
# in memory twice, and that on a CPU a piece stays in its cache; many enough that a GPU is busy.
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass
class ScaledWeight:
    """A weight [..., N, K] = data * scale, each scale value covering one block of `block` rows x columns.

    data: float8_e4m3fn or float8_e5m2 [..., N, K]. scale: float32 [..., ceil(N/bn), ceil(K/bk)]. The last block of a
    row or column may be ragged. Per-tensor scales have block (N, K), per-channel scales block (1, K).
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.data.shape[-2:]
        expected = (*self.data.shape[:-2], -(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale {list(self.scale.shape)} for data {list(self.data.shape)} in blocks {self.block}: expected {list(expected)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ScaledWeight:
        """The same weight on `device`."""
        data, scale = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.data, self.scale))
        return ScaledWeight(data, scale, self.block)

    def __getitem__(self, expert: int | slice | torch.Tensor) -> ScaledWeight:
        """One expert, or several, of a stack [E, N, K]: indexes the leading dimension only."""
        if self.data.ndim < 3:
            raise IndexError(f"only a stack of weights [E, N, K] is indexed by expert; this one is {list(self.data.shape)}")
        # Through bytes: gathering float8 tensors is not implemented for every device.
        data = self.data.view(torch.uint8)[expert].view(self.data.dtype)
        return ScaledWeight(data, self.scale[expert], self.block)

    def row_pieces(self, rows: int) -> Iterator[ScaledWeight]:
        """A matrix [N, K] cut into pieces of about so many rows, top to bottom; none cuts a block."""
        height = self.block[0]
        step = rows if height >= self.shape[0] else max(1, rows // height) * height
        for first in range(0, self.shape[0], step):
            stop = min(self.shape[0], first + step)
            scale = self.scale[first // height : -(-stop // height)]
            yield ScaledWeight(self.data[first:stop], scale, self.block)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight [..., N, K]: multiplied in float32, then rounded once to `dtype`."""
        out = torch.empty(self.data.shape, dtype=dtype, device=self.data.device)
        if not out.numel():
            return out
        rows, columns = self.data.shape[-2:]
        # Matrices whose rows fill their blocks can be stacked on top of each other and done at once.
        height = rows if rows % self.block[0] else self.data.numel() // columns
        data, plain = self.data.reshape(-1, height, columns), out.view(-1, height, columns)
        scale = self.scale.reshape(data.shape[0], -1, self.scale.shape[-1])
        for matrix in range(data.shape[0]):
            dequantize_rows(data[matrix], scale[matrix], self.block, plain[matrix])
        return out


def dequantize_rows(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """out [R, K] = data [R, K] * scale [ceil(R/bn), ceil(K/bk)], where row 0 begins a block. Any float dtype for `out`."""
    rows, columns = data.shape
    height, width = min(block[0], rows), min(block[1], columns)
    budget = _ELEMENTS_AT_ONCE.get(data.device.type, _ELEMENTS_AT_ONCE["cuda"])
    step = max(budget // (columns * height), 1) * height
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        values = _decode(data[start:stop])
        factors = scale[start // block[0] : -(-stop // block[0])]
        if (stop - start) % height == 0 and columns % width == 0:
            values.view(-1, height, columns // width, width).mul_(factors[:, None, :, None])
        else:  # ragged last blocks
            factors = factors.repeat_interleave(block[0], dim=0)[: stop - start]
            values.mul_(factors.repeat_interleave(block[1], dim=1)[:, :columns])
        out[start:stop] = values


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """float8 -> float32. On a CPU through a table of the 256 values, several times faster than torch's conversion."""
    if codes.device.type != "cpu":
        return codes.float()
    index = codes.contiguous().view(torch.uint8).view(-1).to(torch.int32)
    return _table(codes.dtype).index_select(0, index).view(codes.shape)


@cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()
