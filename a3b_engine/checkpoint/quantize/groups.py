"""The scale of each group of weights, chosen by squared error.

Everything here is elementwise arithmetic in float32 and sums in a fixed order, each operation a kernel of its own: a CPU
and a GPU give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Where the largest weight of a group falls, in units of the lowest code: below 1 it does not use the whole range, above 1
# it is clipped. The steps are as fine as the error can tell: 160 of them instead of 11 gain 0.2 % of it.
_REACH = tuple(0.85 + 0.06 * step for step in range(11))
# Scales fitted to the codes by least squares after the search.
_FITS = 2
_FLOAT16_MAX = 65504.0


@dataclass
class Groups:
    """Groups of weights as codes, arranged [group, R]: value = code * scale, where -zero <= code < 2**bits - zero.

    codes: float32 whole numbers. scale: float32 [R], each a float16 value; may be negative. zero: float32 [R].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def choose_scales(weights: torch.Tensor, bits: int, *, with_zero: bool, importance: torch.Tensor | None) -> Groups:
    """weights float32 [group, R], finite -> the best codes found for each group.

    Least sum of importance * (value - weight)^2 over: plain rounding with the largest weight on the highest code (so
    that no result is worse than that), the largest weight on or beyond the lowest code in steps (two's complement has one
    more negative code, and a scale may be negative), with `with_zero` also scales that span least to most weight, and
    last scales fitted to the codes found: s = sum(h w q) / sum(h q q). Scales are rounded to float16 before codes are
    computed, so that their rounding adds no error.
    importance: float32 [group, R], or None for 1.
    """
    search = _Search(weights, bits, importance)
    low = float(1 << (bits - 1))
    most, least = weights.amax(0), weights.amin(0)
    largest = torch.where(most >= -least, most, least)  # argmax may take either of two equal ones, as the device likes
    middle = torch.full_like(largest, low)
    search.attempt(largest / (low - 1), middle)
    for reach in _REACH:
        search.attempt(largest / (-low * reach), middle)
    if with_zero:
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
        for reach in _REACH:
            scale = (most - least) / (reach * (2 * low - 1))
            search.attempt(scale, (-least / scale.clamp(min=1e-30)).round_().clamp_(0.0, 2 * low - 1))
    for _ in range(_FITS):
        search.fit()
    return search.best()


def ordered_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension by halves: the same order, and the same bits, on every device."""
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        folded = values[:half] + values[half : 2 * half]
        if values.shape[0] % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


class _Search:
    """The best scale so far of every group."""

    def __init__(self, weights: torch.Tensor, bits: int, importance: torch.Tensor | None) -> None:
        self.weights, self.importance = weights, importance
        self.most = float((1 << bits) - 1)
        self.scale = self.zero = self.error = None

    def attempt(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Keep `scale` [R] and `zero` [R] for the groups in which they are better than what was found before."""
        scale = scale.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().float()
        codes = self._codes(scale, zero)
        error = codes.mul_(scale).sub_(self.weights).square_()
        if self.importance is not None:
            error.mul_(self.importance)
        error = ordered_sum(error)
        if self.error is None:
            self.scale, self.zero, self.error = scale, zero, error
            return
        better = error < self.error
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        self.error = torch.where(better, error, self.error)

    def fit(self) -> None:
        """Attempt the scale that fits the present codes best."""
        codes = self._codes(self.scale, self.zero)
        weighted = codes if self.importance is None else codes * self.importance
        squares = ordered_sum(codes * weighted)
        scale = ordered_sum(weighted * self.weights) / torch.where(squares > 0, squares, 1.0)
        self.attempt(scale, self.zero)

    def best(self) -> Groups:
        return Groups(self._codes(self.scale, self.zero), self.scale, self.zero)

    def _codes(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        codes = (self.weights * inverse).round_()
        return torch.minimum(torch.maximum(codes, -zero, out=codes), self.most - zero, out=codes)
