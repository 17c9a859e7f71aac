"""Drawing a token with whole numbers only, so that every device draws the same one.

Exponentials, sums and running sums in floating point depend on the vector width, on the order of the additions and on
the library; a token then hangs on the last bit. Here a score becomes a whole number, 2^40 * exp(score - best) in
fixed-point arithmetic, and sums of whole numbers are the same in any order. Scores themselves come from single IEEE
operations, which agree everywhere. Pure PyTorch; everything stays on the device and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch

from ..sampling import GREEDY_BELOW, Sampler, philox_uniform

UNIT_BITS = 40  # weight of the best token: 2^40; tokens more than 27.7 below it weigh nothing
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


def draw_sorted(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that falls to `uniform`, after top-k (0 = off, ties with the last one stay), top-p and min-p.

    scores float32 [V]: logits over temperature, -inf where forbidden, no NaN. The rest are tensors of one element:
    top_k int64, top_p int64 (`share_of_top_p`), min_p float32 (`log_min_p`), uniform int64 of 24 random bits.
    Returns (id int64 [1], best score float32 [1]); best is infinite where there is nothing to draw, and the id then means nothing.
    """
    values, ids = scores.sort(descending=True, stable=True)
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
    return ids.gather(0, index), values[:1]


class PortableSampler(Sampler):
    """`sampling.Sampler` that draws with `draw_sorted`: the reference of the device's sampler.

    Differs from its base where the base's float sums round across a border (a chance of about 1e-6 a token), and in
    refusing every NaN, where the base lets top-k drop some.
    """

    def draw(self, logits: torch.Tensor) -> int:
        params = self.params
        logits[self.real_tokens :] = -torch.inf
        self._penalise(logits)
        greedy = params.temperature < GREEDY_BELOW
        uniform = 0 if greedy else int(philox_uniform(params.seed, self._step) * 2**UNIFORM_BITS)
        settings = (1 if greedy else params.top_k, share_of_top_p(params.top_p), uniform)
        top_k, top_p, drawn = (torch.tensor([value], device=logits.device) for value in settings)
        min_p = torch.tensor([log_min_p(params.min_p)], dtype=torch.float32, device=logits.device)
        token, best = draw_sorted(logits if greedy else logits / params.temperature, top_k, top_p, min_p, drawn)
        self._check(best)
        return int(token)
