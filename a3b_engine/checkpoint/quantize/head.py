"""The head beside experts of few bits: e4m3 with 128 x 128 block scales, as the published FP8 files hold other matrices.

A token reads all of it, which beside 4-bit experts would be a third of what it reads at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

import torch

from ..dtypes import DENSE_CODES, torch_dtype
from ..reader import LoadCancelled, load_weights
from ..scaled import ScaledWeight
from ..storage import Entry, LoadPlan
from ..write import BLOCK, quantize_fp8_block
from .matrix import check_matrix

HEAD = "lm_head.weight"
FP8_LIMIT = torch.finfo(torch.bfloat16).max  # the scale of a block has the range of bfloat16
ROWS_AT_ONCE = 64 * BLOCK[0]  # 64 MB in float32 at 2,048 columns


def rounds_head(plan: LoadPlan) -> bool:
    """Whether the head becomes FP8: it is kept as plain floats, and is not the embedding as well."""
    entry = plan.entries.get(HEAD)
    return isinstance(entry, Entry) and entry.fp8 is None and entry.dtype in DENSE_CODES


def head_bytes(shape: tuple[int, int]) -> int:
    """Bytes of the rounded head [N, K] with its float32 scales."""
    rows, columns = shape
    return rows * columns + 4 * -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])


def bands(rows: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the rows that are rounded at once; none cuts a block."""
    for first in range(0, rows, ROWS_AT_ONCE):
        yield first, min(rows, first + ROWS_AT_ONCE)


def load_head(plan: LoadPlan, device: torch.device, cancel: Callable[[], object] | None = None) -> ScaledWeight:
    """The rounded head on `device`. What it is made of passes through ordinary RAM, so that the device never holds more than a band of it."""
    entry = plan.entries[HEAD]
    dtype = torch.float32 if entry.dtype == "F64" else torch_dtype(entry.dtype)
    plain = load_weights(replace(plan, entries={HEAD: entry}, aliases={}), "cpu", dtype, cancel=cancel)[HEAD]
    return fp8_head(plain, device, cancel)


def fp8_head(plain: torch.Tensor, device: torch.device, cancel: Callable[[], object] | None = None) -> ScaledWeight:
    """plain [N, K] of floats, on any device -> rounded, on `device`. cancel is called before each band: as in `load_weights`."""
    rows, columns = plain.shape
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), dtype=torch.float32, device=device)
    for first, stop in bands(rows):
        if cancel is not None and cancel() is True:
            raise LoadCancelled("Loading the model was cancelled; nothing of it is left in memory.")
        band = plain[first:stop].to(device).float()
        check_matrix(band, HEAD, "FP8", FP8_LIMIT)
        codes, factors = quantize_fp8_block(band)
        data[first:stop] = codes
        scale[first // BLOCK[0] : -(-stop // BLOCK[0])] = factors.float()
    return ScaledWeight(data, scale, BLOCK)
