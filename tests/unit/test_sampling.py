"""Sampling: the generator's known answers, truncation rules, penalties, hostile logits."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.draw import REACH, draw_ranked, fixed_exp
from a3b_engine.errors import SamplingError
from a3b_engine.sampling import GREEDY_BELOW, MAX_SEED, Sampler, SamplingParams, philox_uniform

CPU = torch.device("cpu")


def draw(logits, *, real=None, prompt=(), **params):
    sampler = Sampler(SamplingParams(**params), len(logits), real or len(logits), list(prompt), CPU)
    return sampler.draw(torch.tensor(logits, dtype=torch.float32))


def test_philox_matches_the_published_known_answers():
    """Random123's known-answer vector of philox4x32-10 for counter 0 and key 0 begins with this word."""
    assert philox_uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24


@given(st.integers(0, MAX_SEED), st.integers(0, 2**20))
def test_philox_is_in_range_and_depends_on_seed_and_step(seed, step):
    value = philox_uniform(seed, step)
    assert 0.0 <= value < 1.0
    assert value == philox_uniform(seed, step)


def test_philox_is_uniform_enough():
    values = [philox_uniform(7, step) for step in range(20000)]
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert abs(sum((v - 0.5) ** 2 for v in values) / len(values) - 1 / 12) < 0.005


def test_high_half_of_the_seed_counts():
    assert [philox_uniform(5, i) for i in range(4)] != [philox_uniform(5 + (1 << 40), i) for i in range(4)]


def test_U01_the_largest_seed_is_accepted_and_one_more_is_not():
    assert 0 <= draw([0.0, 1.0], seed=MAX_SEED) <= 1
    with pytest.raises(SamplingError, match="seed"):
        SamplingParams(seed=MAX_SEED + 1)


def test_greedy_takes_the_best():
    assert draw([0.1, 3.0, 2.9], temperature=0.0) == 1
    assert draw([0.1, 3.0, 2.9], temperature=5e-5) == 1


def test_padded_vocabulary_is_never_drawn():
    assert draw([0.0, 0.1, 50.0, 60.0], real=2, temperature=0.0) == 1
    sampler = Sampler(SamplingParams(temperature=50.0, top_k=0, top_p=1.0), 4, 2, [], CPU)
    for _ in range(50):
        token = sampler.draw(torch.tensor([0.0, 0.0, 9.0, 9.0]))
        sampler.record(token)
        assert token < 2


def test_frequencies_follow_the_softmax():
    logits, temperature = [1.0, 0.0, -1.0, 2.0], 0.8
    expected = torch.softmax(torch.tensor(logits) / temperature, 0)
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=3), 4, 4, [], CPU)
    counts = torch.zeros(4)
    for _ in range(4000):
        token = sampler.draw(torch.tensor(logits))
        sampler.record(token)
        counts[token] += 1
    assert torch.allclose(counts / 4000, expected, atol=0.03)


@pytest.mark.parametrize("params, survivors", [({"top_k": 2, "top_p": 1.0}, {0, 1}), ({"top_k": 0, "top_p": 0.5}, {0}),
                                               ({"top_k": 0, "top_p": 0.0}, {0}), ({"top_k": 0, "top_p": 1.0, "min_p": 0.3}, {0, 1})])
def test_truncation_keeps_the_right_tokens(params, survivors):
    logits = [math.log(p) for p in (0.55, 0.25, 0.15, 0.05)]
    drawn = set()
    sampler = Sampler(SamplingParams(temperature=1.0, **params), 4, 4, [], CPU)
    for _ in range(300):
        token = sampler.draw(torch.tensor(logits))
        sampler.record(token)
        drawn.add(token)
    assert drawn == survivors


def test_penalties_move_the_choice():
    assert draw([2.0, 1.9], temperature=0.0, prompt=[0], repetition_penalty=1.2) == 1
    assert draw([-1.0, -1.1], temperature=0.0, prompt=[0], repetition_penalty=1.2) == 1
    for penalty in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        sampler = Sampler(SamplingParams(temperature=0.0, **penalty), 2, 2, [0], CPU)
        assert sampler.draw(torch.tensor([2.0, 1.9])) == 0  # the prompt does not count for these two
        sampler.record(0)
        assert sampler.draw(torch.tensor([2.0, 1.9])) == 1


@settings(max_examples=200)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), st.floats(0, 4), st.floats(0, 1), st.integers(0, 50), st.floats(0, 1), st.integers(0, MAX_SEED))
def test_any_finite_logits_give_a_token(logits, temperature, top_p, top_k, min_p, seed):
    token = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert 0 <= token < len(logits)


def test_excluded_tokens_are_never_drawn_whatever_the_settings():
    for seed in range(100):
        logits = [-math.inf, 0.0, -math.inf, 0.0]
        assert draw(logits, temperature=2.0, top_k=3, top_p=1.0, seed=seed) in (1, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad, message", [([math.nan, math.nan], "NaN"), ([0.0, math.nan, 5.0], "NaN"), ([0.0, math.inf], "infinite"), ([-math.inf, -math.inf], "No token")])
def test_hostile_logits_are_named(temperature, bad, message):
    with pytest.raises(SamplingError, match=message):
        draw(bad, temperature=temperature)


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 2}, {"top_k": 0}, {"top_k": 100}])
def test_one_nan_among_many_is_an_error_unless_it_is_excluded(settings_):
    logits = [0.5 * number for number in range(60)]
    logits[30] = math.nan
    with pytest.raises(SamplingError, match="NaN"):
        draw(logits, **settings_)
    assert draw(logits, real=30, **settings_) < 30


def exact_draws(scores, params, uniform):
    """Every token a draw in float64 gives when the random number and the limits are moved by a rounding error."""
    values, ids = scores.double().sort(descending=True, stable=True)
    if 0 < params.top_k < len(values):
        count = int((values >= values[params.top_k - 1]).sum())
        values, ids = values[:count], ids[:count]
    share = values.softmax(0)
    found, nudges = set(), (-4e-6, 0.0, 4e-6)
    for nudge_u, nudge_p, nudge_m in itertools.product(nudges, repeat=3):
        kept = (share.cumsum(0) - share < params.top_p + nudge_p) | (params.top_p >= 1.0)
        kept &= share >= params.min_p * (1 + nudge_m) * share[0]
        kept[0] = True
        running = (share * kept).cumsum(0)
        target = min(max(uniform + nudge_u, 0.0), 1.0 - 1e-12) * running[-1]
        found.add(int(ids[min(int((running <= target).sum()), len(ids) - 1)]))
    return found


PROBABILITIES = st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95, 1.0]) | st.floats(0, 1)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0]) | st.floats(-30, 30, width=32), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.7, 1.0]) | st.floats(0, 4), PROBABILITIES, st.integers(0, 64), st.just(0.0) | PROBABILITIES, st.integers(0, MAX_SEED),
)  # fmt: skip
def test_whole_numbers_draw_what_floats_draw(logits, temperature, top_p, top_k, min_p, seed):
    """Up to rounding on a border."""
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    row = torch.tensor(logits)
    token = Sampler(params, len(logits), len(logits), [], CPU).draw(row.clone())
    if temperature < GREEDY_BELOW:
        assert token == int(row.argmax())
    else:
        assert token in exact_draws(row / temperature, params, philox_uniform(seed, 0))


def test_fixed_exp_is_the_exponential():
    below = -torch.cat((torch.linspace(0, 30, 5001), torch.tensor([1e-30, 63.0, 65.0, 1e30, math.inf])))
    exact = below.double().exp() * 2**40
    assert ((fixed_exp(below).double() - exact).abs() <= exact * 2e-7 + 1).all()
    assert fixed_exp(torch.zeros(1)) == 2**40 and fixed_exp(torch.tensor([-REACH])) == 0 and fixed_exp(below)[-2:].sum() == 0


@pytest.mark.parametrize("best", [1.0, 2.0**24, -(2.0**25) + 2, 3e30])
def test_leaving_out_what_weighs_nothing_changes_nothing(best):
    """The whole vocabulary drawn at once and the few that `Sampler` keeps of it, near the reach of large and small scores."""
    row = torch.cat((torch.tensor([best] * 3), best - torch.linspace(20, 40, 600)))
    values, ids = row.sort(descending=True, stable=True)
    one = torch.ones(1, dtype=torch.int64)
    for step in range(20):
        sampler = Sampler(SamplingParams(top_k=0, top_p=1.0, temperature=1.0, seed=step), len(row), len(row), [], CPU)
        uniform = one * int(philox_uniform(step, 0) * 2**24)
        expected = draw_ranked(values, ids, one * 0, one << 30, torch.tensor([-math.inf]), uniform)
        assert sampler.draw(row.clone()) == int(expected)


def test_sampling_leaves_torch_generators_alone():
    before = torch.get_rng_state()
    draw([0.0, 1.0, 2.0], temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("field, value", [("temperature", -0.1), ("temperature", math.nan), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("min_p", "0.1"),
                                          ("max_new_tokens", 0), ("max_new_tokens", ""), ("seed", -1), ("stop", ("",)), ("stop", None), ("stop", 5), ("thinking_budget", -1), ("repetition_penalty", 0.0)])
def test_bad_parameters_are_named(field, value):
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})
