"""A safetensors file whose tensors arrive one after the other, in any order."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import torch

from ..dtypes import DTYPE_BITS

PARTIAL_SUFFIX = ".part"  # index.py takes a file so named for an unfinished download


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to be written: its name, safetensors dtype code and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class ShardWriter:
    """Writes `path` under a name that says it is unfinished, until `finish`; leaving the `with` block before removes it."""

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        self.path, self.partial = path, path.with_name(path.name + PARTIAL_SUFFIX)
        header, self._places, self.size = _layout(outputs)
        self._stream = open(self.partial, "wb")
        self._stream.write(header)
        self._stream.truncate(self.size)

    def write(self, name: str, data: torch.Tensor | bytes | memoryview, at: int = 0) -> None:
        """Bytes of tensor `name`, beginning `at` bytes into it."""
        if isinstance(data, torch.Tensor):
            # numpy knows neither bfloat16 nor float8, but it knows bytes.
            data = data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        begin, nbytes = self._places[name]
        if at + len(data) > nbytes:
            raise ValueError(f"{name}: {len(data)} bytes at {at} do not fit its {nbytes}")
        self._stream.seek(begin + at)
        self._stream.write(data)

    def finish(self) -> None:
        """The file is whole: onto the disk and to its name."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self.partial, self.path)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.partial.unlink(missing_ok=True)


def shard_size(outputs: Sequence[Output]) -> int:
    """Bytes of the whole file."""
    return _layout(outputs)[2]


def _layout(outputs: Sequence[Output]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Header with its length, (offset in the file, bytes) of each tensor, bytes of the file. Widest elements first and the
    header padded, so that every tensor is aligned."""
    places: dict[str, tuple[int, int]] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in sorted(outputs, key=lambda output: (-DTYPE_BITS[output.dtype], output.name)):
        begin, end = end, end + output.nbytes
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [begin, end]}
        places[output.name] = (begin, end - begin)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {name: (start + begin, size) for name, (begin, size) in places.items()}, start + end
