"""A matrix, or a stack of them, as 4- or 3-bit codes with a scale for each group of columns."""

from __future__ import annotations

from typing import Callable, Mapping

import torch

from ...errors import CheckpointError
from ..packed import PackedWeight, pack_codes
from ..scaled import ScaledWeight
from .balance import balance_rows
from .groups import choose_scales

GROUP = 64  # the experts of 35B-A3B in 4 bits: 17.1 GB; in groups of 32 they are 18.1 GB
# Columns that `PackedWeight` packs together.
_TOGETHER = {4: 2, 3: 32}
# Weights worked on at once: on a CPU what stays in its cache, on a GPU what keeps it busy (about 100 bytes each).
_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}
WORK_BYTES = 100 * (1 << 22)
_FLOAT16_MAX = 65504.0


def quantize_matrix(
    weight: torch.Tensor | ScaledWeight, bits: int, group: int = GROUP, *, zero: bool = False,
    variance: torch.Tensor | None = None, mean: torch.Tensor | None = None, name: str = "weight",
    poll: Callable[[int], None] | None = None,
) -> PackedWeight:  # fmt: skip
    """weight [..., N, K], float or FP8 -> the same in `bits` (4 or 3) bits, on the same device.

    group: columns that share a float16 scale. zero: also a whole zero point for each group (8 bits), for weights that do
    not lie around 0. Scales have the least squared error of a search (`groups.choose_scales`). variance, mean: float [K]
    or [..., K] of the inputs of each column, where they are known: errors then count by the variance, and with a mean every
    row is freed of the bias that rounding would add to its output (`balance.balance_rows`). The same arguments give the
    same result on every device. Takes about 100 bytes for each of the weights worked on at once, beside weight and
    result. poll(matrices finished since the last call) may raise.
    Raises `CheckpointError` naming `name` for values that are not finite or too large, and columns that groups do not divide.
    """
    *lead, rows, columns = weight.shape
    check_shape(columns, bits, group, name)
    device = weight.device
    codes = torch.empty(*lead, rows, columns * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(*lead, rows, columns // group, dtype=torch.float16, device=device)
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device=device) if zero else None
    statistics = [_by_matrix(values, columns, lead, device) for values in (variance, mean)]
    height = max(1, _AT_ONCE.get(device.type, _AT_ONCE["cuda"]) // columns)
    stack = weight if lead else _Alone(weight)
    flat = [part.reshape(-1, rows, part.shape[-1]) if part is not None else None for part in (codes, scales, zeros)]
    if len(lead) > 1:
        raise CheckpointError(f"{name}: shape {list(weight.shape)}, expected [N, K] or a stack [E, N, K].")
    at_once = max(1, height // max(rows, 1))  # whole matrices, where they are small
    for first in range(0, lead[0] if lead else 1, at_once):
        part = stack[first : first + at_once]
        dense = part.dequantize(torch.float32) if isinstance(part, ScaledWeight) else part.float()
        known = [None if values is None else values[first : first + at_once] for values in statistics]
        for start in range(0, rows, height):
            piece = dense[:, start : start + height]
            found = _quantize_rows(piece, bits, group, zero, *known, name)
            for target, value in zip(flat, found):
                if target is not None:
                    target[first : first + at_once, start : start + height] = value
        if poll is not None:
            poll(dense.shape[0])
    return PackedWeight(codes=codes, scale=scales, zero=zeros, factor=None, values="int", group=group, bits=bits)


class _Alone:
    """One matrix as a stack of one."""

    def __init__(self, weight: torch.Tensor | ScaledWeight) -> None:
        self._weight = weight

    def __getitem__(self, _: slice) -> torch.Tensor:
        weight = self._weight
        return (weight.dequantize(torch.float32) if isinstance(weight, ScaledWeight) else weight)[None]


def _quantize_rows(
    weights: torch.Tensor, bits: int, group: int, with_zero: bool, variance: torch.Tensor | None, mean: torch.Tensor | None, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [E, R, K] -> packed codes uint8 [E, R, K * bits // 8], scale float16 and zero uint8 [E, R, K // group]."""
    count, rows, columns = weights.shape
    check_matrix(weights, name, f"{bits} bits")
    grouped = weights.reshape(-1, group).t().contiguous()  # groups side by side: their sums are sums of long rows
    importance = None
    if variance is not None:
        importance = variance[:, None].expand(count, rows, columns).reshape(-1, group).t().contiguous()
    groups = choose_scales(grouped, bits, with_zero=with_zero, importance=importance)
    codes = groups.codes.t().reshape(count, rows, columns)
    if mean is not None:
        by_group = [values.view(count, rows, -1, 1) for values in (groups.scale, groups.zero)]
        scale, zero = (values.expand(-1, -1, -1, group).reshape(count, rows, columns) for values in by_group)
        lowest, highest = -zero, float((1 << bits) - 1) - zero
        known = [None if values is None else values[:, None] for values in (variance, mean)]
        codes = balance_rows(weights, codes, scale, lowest, highest, *known)
    zero = groups.zero.view(count, rows, -1)
    stored = (codes.reshape(count, rows, -1, group) + zero[..., None]).to(torch.uint8).view(count, rows, columns)
    return pack_codes(stored, bits), groups.scale.view(count, rows, -1).half(), zero.to(torch.uint8)


def check_matrix(weights: torch.Tensor, name: str, form: str, limit: float = _FLOAT16_MAX) -> None:
    """Raises `CheckpointError` for values that have no place in `form`, whose largest is `limit`."""
    largest = weights.abs().amax()
    if not largest <= limit:  # a comparison that NaN fails too
        found = f"a value as large as {largest.item():g}" if torch.isfinite(largest) else "values that are not finite (NaN or infinity)"
        raise CheckpointError(f"{name}: holds {found}, which cannot be stored in {form}. Damaged? Download the folder again.")


def check_shape(columns: int, bits: int, group: int, name: str) -> None:
    """Raises `CheckpointError` for columns that do not divide into groups."""
    if bits not in _TOGETHER:
        raise ValueError(f"bits: found {bits!r}, expected one of {', '.join(map(str, _TOGETHER))}")
    if not isinstance(group, int) or group < 1:
        raise ValueError(f"group: found {group!r}, expected a number of columns")
    for unit in (group, _TOGETHER[bits]):
        if columns % unit:
            raise CheckpointError(f"{name}: {columns} columns are no multiple of {unit}, which groups of {group} in {bits} bits need. Choose another group size.")


def default_group(columns: Mapping[str, int], bits: int, group: int | None = None) -> int:
    """`group`, or where that is None the most columns, up to GROUP, that matrices of these columns (by name) can share a scale.

    Raises `CheckpointError` where they cannot.
    """
    widths = set(columns.values())
    if group is None:
        group = next((size for size in (GROUP, 32, 16) if not any(width % size for width in widths)), GROUP)
    for name, width in columns.items():
        check_shape(width, bits, group, name)
    return group


def _by_matrix(values: torch.Tensor | None, columns: int, lead: list[int], device: torch.device) -> torch.Tensor | None:
    if values is None:
        return None
    return values.to(device, torch.float32).expand(*(lead or [1]), columns).reshape(-1, columns)
