"""Prescribed routings: their statistics, a cache over them, and the launch that puts them in place of the router's."""

import numpy as np
import pytest
from interpreted import needs_triton, run_cases

from a3b_engine.bench.routing import HIT_RATES, MODEL, ROUTINGS, make_trace, place_shares, skewed_trace, uniform_trace

STEPS, LAYERS, TOP_K = 1000, 4, 8
SETTLED = STEPS // 4  # what was kept at the beginning is forgotten by then


def hit_rate(trace: np.ndarray, experts: int, slots: int) -> float:
    """Share of the choices that an LRU of that many slots a layer finds once it has settled.

    As the engine's slots: all experts of a token are looked up, then the missing ones take the places of the least recently
    used that this token does not need.
    """
    steps, layers, top_k = trace.shape
    used = np.full((layers, experts), -1)
    used[:, :slots] = 0  # step of the last use; -1: not kept
    found = 0
    for step in range(steps):
        for layer in range(layers):
            ids, of_layer = trace[step, layer], used[layer]
            missing = ids[of_layer[ids] < 0]
            of_layer[ids] = step + 1
            found += (top_k - len(missing)) * (step >= SETTLED)
            for _ in missing:
                of_layer[np.where((of_layer >= 0) & (of_layer <= step), of_layer, 1 << 40).argmin()] = -1
    return found / ((steps - SETTLED) * layers * top_k)


def reuse_distances(trace: np.ndarray, experts: int) -> np.ndarray:
    """Tokens since the same expert of the layer was last chosen, for every choice once settled; never: the whole trace."""
    steps, layers, _ = trace.shape
    last = np.full((layers, experts), -steps)
    distances = []
    for step in range(steps):
        for layer in range(layers):
            ids = trace[step, layer]
            if step >= SETTLED:
                distances.append(step - last[layer, ids])
            last[layer, ids] = step
    return np.concatenate(distances)


@pytest.fixture(scope="module", params=[128, 256])
def skewed(request):
    return request.param, skewed_trace(STEPS, LAYERS, request.param, TOP_K, seed=5)


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != MODEL])
def test_choices_are_experts_and_none_comes_twice(routing):
    trace = make_trace(routing, 200, 3, 20, 5, seed=1)
    assert trace.shape == (200, 3, 5) and trace.dtype == np.int32
    assert trace.min() == 0 and trace.max() == 19
    ordered = np.sort(trace, axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert np.array_equal(trace, make_trace(routing, 200, 3, 20, 5, seed=1))
    assert not np.array_equal(trace, make_trace(routing, 200, 3, 20, 5, seed=2))


def test_a_cache_finds_the_measured_shares_in_the_skewed_routing(skewed):
    experts, trace = skewed
    for share, expected in HIT_RATES[1:-1]:
        slots = max(round(share * experts), TOP_K)  # fewer than a token needs cannot be
        assert hit_rate(trace, experts, slots) == pytest.approx(expected, abs=0.02 if slots > TOP_K else 0.06)


def test_with_the_number_of_experts_that_was_measured_the_reuse_distances_are_the_measured_ones():
    """45 % on the next token, 80 % within 8 tokens, median 2, from a trace that was fitted to none of these."""
    distances = reuse_distances(skewed_trace(STEPS, LAYERS, 128, TOP_K, seed=5), 128)
    assert np.mean(distances == 1) == pytest.approx(0.45, abs=0.05)
    assert np.mean(distances <= 8) == pytest.approx(0.80, abs=0.03)
    assert np.median(distances) == 2


def test_a_cache_finds_its_share_in_the_uniform_routing():
    trace = uniform_trace(STEPS, LAYERS, 256, TOP_K, seed=5)
    for slots in (38, 128, 154):
        assert hit_rate(trace, 256, slots) == pytest.approx(slots / 256, abs=0.01)


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != MODEL])
def test_no_expert_is_preferred_over_time(routing):
    trace = make_trace(routing, 4000, 1, 32, 4, seed=3)
    counts = np.bincount(trace.ravel(), minlength=32)
    assert counts.min() > 0.5 * counts.mean() and counts.max() < 1.5 * counts.mean()


def test_layers_have_nothing_to_do_with_each_other(skewed):
    experts, trace = skewed
    common = np.mean([len(np.intersect1d(trace[step, 0], trace[step, 1])) for step in range(SETTLED, STEPS)])
    assert common == pytest.approx(TOP_K * TOP_K / experts, abs=0.15)


@pytest.mark.parametrize("experts, top_k", [(256, 8), (128, 8), (8, 2), (8, 8), (4, 1), (60, 6), (512, 10)])
def test_the_places_of_the_stack_have_probabilities_that_sum_to_the_experts_of_a_token(experts, top_k):
    shares = place_shares(experts, top_k)
    assert shares.shape == (experts,) and shares.min() >= 0 and shares.max() <= 1
    assert shares.sum() == pytest.approx(top_k)
    assert (np.diff(shares) <= 1e-12).all()  # what was used last is never less likely than what was used before it


@needs_triton
def test_the_launch_under_the_interpreter():
    run_cases("interpreted_trace.py")
