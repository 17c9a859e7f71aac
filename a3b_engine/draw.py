"""Drawing a token with whole numbers only, so that every device draws the same one.

Exponentials, sums and running sums in floating point depend on the vector width, on the order of the additions and on
the library; a token then hangs on the last bit. Here a score becomes a whole number, 2^40 * exp(score - best) in
fixed-point arithmetic, and sums of whole numbers are the same in any order. Scores themselves come from single IEEE
operations, which agree everywhere. Pure PyTorch: nothing here waits for a device. `sampling.Sampler` draws with it, and
`kernels.sampler.DeviceSampler` computes the same numbers in kernels of its own.
"""

from __future__ import annotations

import math

import torch

UNIT_BITS = 40  # weight of the best token: 2^40
REACH = 28.0  # tokens this far below the best weigh nothing: ln(2^40) is 27.7
UNIFORM_BITS = 24  # of the random number
SHARE_BITS = 30  # top_p is a whole number of 2^-30
LOG2_E = round(math.log2(math.e) * 2**30)
# 2^f for f in [0, 1): ln(2)^i / i! in units of 2^-30, off by less than 1e-8
POWERS = tuple(round(math.log(2) ** i / math.factorial(i) * 2**30) for i in range(10))
LOWEST = -64.0  # exp of less is nothing


def fixed_exp(below: torch.Tensor) -> torch.Tensor:
    """float32 differences to the best score (<= 0, -inf allowed) -> int64 2^40 * exp(difference), rounded down."""
    scaled = (below.clamp(min=LOWEST) * 2.0**24).to(torch.int64) * LOG2_E  # logarithm to base 2, in units of 2^-54
    fraction = (scaled >> 24) & (2**30 - 1)
    power = torch.full_like(scaled, POWERS[-1])
    for coefficient in reversed(POWERS[:-1]):
        power = coefficient + (power * fraction >> 30)
    return power << (UNIT_BITS - 30) >> (-(scaled >> 54)).clamp(max=63)


def share(total: torch.Tensor, part: torch.Tensor, bits: int, extra: int = 0) -> torch.Tensor:
    """total * part / 2^bits rounded down (extra = 2^bits - 1: rounded up), without overflow for 0 <= total < 2^60 and
    0 <= part <= 2^bits <= 2^30."""
    return (total >> bits) * part + ((total & ((1 << bits) - 1)) * part + extra >> bits)


def share_of_top_p(top_p: float) -> int:
    return round(top_p * 2**SHARE_BITS)


def log_min_p(min_p: float) -> float:
    """min_p on the scale of score differences."""
    return math.log(min_p) if min_p > 0.0 else -math.inf


def draw_ranked(
    values: torch.Tensor, ids: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """The id, int64 [1], that falls to `uniform` after top-k (0 = off, ties with the last one stay), top-p and min-p.

    values float32 [N]: logits over temperature, best first, no NaN; ids int64 [N], ascending among equal values. Tokens
    that weigh nothing (see REACH) or are no part of the top-k may be left out. The rest are tensors of one element:
    top_k int64, top_p int64 (`share_of_top_p`), min_p float32 (`log_min_p`), uniform int64 of UNIFORM_BITS random bits.
    Where the best value is infinite there is nothing to draw, and the id means nothing.
    """
    count = values.shape[0]
    last = top_k.masked_fill(top_k <= 0, count).clamp(max=count) - 1
    below = (values - values[:1]).nan_to_num(nan=LOWEST, neginf=LOWEST)
    weights = fixed_exp(below) * (values >= values.gather(0, last))
    before = weights.cumsum(0) - weights
    # before < top_p * total is, for whole numbers, before < that product rounded up; the best token always stays
    limit = share(weights.sum(), top_p, SHARE_BITS, (1 << SHARE_BITS) - 1).clamp(min=1)
    weights = weights * ((before < limit) & (below >= min_p))
    target = share(weights.sum(), uniform, UNIFORM_BITS)
    index = (weights.cumsum(0) <= target).sum(0, keepdim=True).clamp(max=count - 1)
    return ids.gather(0, index)
