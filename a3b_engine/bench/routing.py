"""Which experts a prescribed routing chooses: made without any model, so that caches can be compared on equal terms."""

from __future__ import annotations

import numpy as np

UNIFORM, SKEWED, MODEL = "uniform", "skewed", "model"
ROUTINGS = (MODEL, UNIFORM, SKEWED)

# Share of the experts that are kept -> share of the choices found among them, where the least recently used go: measured on
# Qwen3-30B-A3B (128 experts, 8 a token), issues 1359 and 1374 of github.com/kekzl/imp. Between two of them the hit rate
# is taken as a straight line, which is never more than a smooth curve through them would give.
HIT_RATES = ((0.0, 0.0), (0.05, 0.366), (0.15, 0.741), (0.30, 0.894), (0.50, 0.962), (1.0, 1.0))


def uniform_trace(steps: int, layers: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """int32 [steps, layers, top_k]: every choice independent, every expert equally likely, none twice in a token.

    An LRU that keeps a share s of the experts then finds the share s of the choices: the least any cache can be offered.
    """
    random = np.random.default_rng(seed)
    trace = np.empty((steps, layers, top_k), dtype=np.int32)
    for first in range(0, steps, 64):
        keys = random.random((min(64, steps - first), layers, experts), dtype=np.float32)
        trace[first : first + 64] = np.argpartition(keys, top_k - 1, axis=-1)[..., :top_k]
    return trace


def skewed_trace(steps: int, layers: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """int32 [steps, layers, top_k]: choices with the temporal locality that was measured on a real model.

    A stack-distance model. Each layer keeps its experts ordered by when they were last chosen. A token chooses `top_k` of
    them without repetition, the one at place p with probability `place_shares()[p]`, and the chosen ones go to the front.
    Places, not experts, have probabilities: over time no expert is preferred, as measured (no static skew that would help).
    An LRU of S >= top_k slots holds places 0..S-1, so it finds the share of HIT_RATES at S / experts, whatever the number of experts.

    With 128 experts, which HIT_RATES come from, the other figures measured there follow without being put in: 42 % of the
    choices repeat on the next token (measured: 45), 80 % within 8 tokens (80), the median reuse distance is 2 tokens (2), and
    with 30 to 50 % kept 0.30 to 0.85 experts a layer and token are not found (0.38 to 0.80). With 256 experts the places are spread
    twice as far: the hit rates at the same shares stay, fewer repeat at once (23 %, 71 % within 8). That is the cautious reading, and
    what was measured with more experts (512, LRU of 12.5 / 25 %: 67 / 81 % found).
    """
    random = np.random.default_rng(seed)
    shares = place_shares(experts, top_k)
    order = np.argsort(random.random((layers, experts)), axis=-1)  # most recent first
    rows = np.arange(layers)[:, None]
    trace = np.empty((steps, layers, top_k), dtype=np.int32)
    for step in range(steps):
        places = _chosen_places(shares, layers, top_k, random)
        ids = order[rows, places]
        trace[step] = ids
        rest = np.ones(order.shape, dtype=bool)
        rest[rows, places] = False
        order = np.concatenate((ids, order[rest].reshape(layers, -1)), axis=-1)
    return trace


def place_shares(experts: int, top_k: int) -> np.ndarray:
    """float64 [experts]: the probability with which a token chooses the expert at each place of the stack; they sum to top_k.

    Where a probability would exceed one (few experts, many of them chosen) the places behind take what is too much.
    """
    wanted = np.diff(np.interp(np.arange(experts + 1) / experts, *zip(*HIT_RATES))) * top_k
    shares, over = np.empty(experts), 0.0
    for place, share in enumerate(wanted):
        shares[place] = min(1.0, share + over)
        over = share + over - shares[place]
    return shares


def _chosen_places(shares: np.ndarray, layers: int, top_k: int, random: np.random.Generator) -> np.ndarray:
    """int [layers, top_k]: places, none twice in a layer, each with exactly its probability.

    Systematic sampling over the places in random order: their probabilities laid end to end, and a comb of step one.
    """
    shuffled = np.argsort(random.random((layers, len(shares))), axis=-1)
    ends = np.cumsum(shares[shuffled], axis=-1)
    ends[:, -1] = top_k + 1.0  # rounding must not lose the last tooth
    teeth = random.random((layers, 1)) + np.arange(top_k)
    at = (ends[:, None, :] <= teeth[:, :, None]).sum(-1)
    return np.take_along_axis(shuffled, at, axis=-1)


def make_trace(routing: str, steps: int, layers: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """The trace of a routing by name, UNIFORM or SKEWED."""
    return {UNIFORM: uniform_trace, SKEWED: skewed_trace}[routing](steps, layers, experts, top_k, seed)


def expected_hit_rate(routing: str, share: float) -> float | None:
    """What an LRU that keeps this share of the experts finds in the routing; None for MODEL, whose choices nobody prescribed."""
    if routing == MODEL:
        return None
    return share if routing == UNIFORM else float(np.interp(share, *zip(*HIT_RATES)))
