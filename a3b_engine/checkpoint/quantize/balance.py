"""Bias correction: what rounding adds to an output on average is taken out again by rounding a few weights the other way.

A row of weights w rounded to w + d changes its output by d.x. Over inputs x of mean m and (uncorrelated) variance h that is

    J = sum(h d^2) + (sum(m d))^2

in the mean square: noise, and a bias that is there in every token. Rounding to nearest minimises the first term and
leaves the second to chance; in a row of K weights it is as large as the first where the means are as large as the
deviations. Turning weight i to the neighbouring code changes sum(m d) by g = |m s| and costs c = h |s| (|s| - 2 |d|) of noise,
almost nothing for a weight that lay near the middle. The weights that pull the bias towards zero are turned in the
order of c / g, up to the threshold t at which t = 2 (|bias| - sum of g so far): there the next turn costs what it gains.
J falls by at least the square of the bias taken out. No tensor is added: a model of this engine's form has no place for a
bias vector in its experts, and none is needed.

Without a mean there is nothing to correct. Taking one that is the same in all columns, which keeps the sum of every row, was
tried on the trained demo model and did nothing: such a mean is below 0.3 % of the variance there, those of single
columns add up to 2 to 22 %.
"""

from __future__ import annotations

import torch

# Halvings of the threshold's interval. 2^-20 of the largest cost is finer than two weights of a row differ.
_HALVINGS = 20
# Gains are summed as whole numbers of 2^-24 of the row's largest: exact, so in any order the same.
_FRACTION_BITS = 24


def balance_rows(
    weights: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor,
    variance: torch.Tensor | None, mean: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """codes float32 [R, K] of weights [R, K] -> codes whose rows have next to no bias. All float32.

    scale, lowest, highest (code): [R, K] or what broadcasts to it, as do mean and variance (None: 1) of the inputs.
    """
    error = codes * scale - weights
    size = scale.abs().expand_as(error)
    gain, share = size * mean.abs(), error * mean
    unit = _unit(gain.amax(-1, keepdim=True))
    bias = (share / unit).round_().to(torch.int64).sum(-1, keepdim=True)
    whole_gain = (gain / unit).round_().to(torch.int64)
    # Up or down in codes so that mean * scale * step has the sign that bias lacks.
    step = torch.where((scale < 0).expand_as(error), 1.0, -1.0) * torch.sign(bias).to(torch.float32)
    step = step * torch.where(mean < 0, -1.0, 1.0)
    turned = codes + step
    # The error has the sign of the step's contrary: the neighbour on the other side of the weight.
    allowed = (error * step * torch.where(scale < 0, -1.0, 1.0) <= 0) & (whole_gain > 0) & (turned >= lowest) & (turned <= highest)
    price = (size - 2.0 * error.abs()).clamp_(min=0.0)
    if variance is not None:
        price = price * variance
    price = price / mean.abs().clamp(min=1e-30)
    price = (price / unit).masked_fill_(~allowed, float("inf"))
    whole_gain = whole_gain.masked_fill_(~allowed, 0)
    return torch.where(price < _threshold(price, whole_gain, bias.abs()), turned, codes)


def _unit(largest: torch.Tensor) -> torch.Tensor:
    """2^-24 of the power of two at or below `largest`, through its bits: exact on every device. Dividing by it is exact too."""
    exponent = (largest.view(torch.int32) >> 23).sub_(_FRACTION_BITS).clamp_(min=1)
    return (exponent << 23).view(torch.float32)


def _threshold(price: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the highest t found with t <= 2 (bias - sum of the gains whose price is below t)."""
    low = torch.zeros_like(bias, dtype=torch.float32)
    finite = price.masked_fill(torch.isinf(price), 0.0).amax(-1, keepdim=True)
    high = torch.minimum(2.0 * bias.to(torch.float32), 2.0 * finite + 1.0)
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        taken = torch.where(price < middle, gain, 0).sum(-1, keepdim=True)
        fits = middle.to(torch.float64) <= 2.0 * (bias - taken).to(torch.float64)
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return low
