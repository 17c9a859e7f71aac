"""The sampler kernels against the CPU path. Not collected by itself: test_kernels_sampler.py runs it under Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import mend_interpreter

mend_interpreter()

from a3b_engine.errors import SamplingError  # noqa: E402
from a3b_engine.grammar import apply_bitmask  # noqa: E402
from a3b_engine.kernels import sampler, support  # noqa: E402
from a3b_engine.sampling import MAX_SEED, Sampler, SamplingParams, philox_uniform  # noqa: E402

CPU = torch.device("cpu")
seeds, probabilities = st.integers(0, MAX_SEED), st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95, 1.0]) | st.floats(0, 1)
logit = (
    st.sampled_from([0.0, -0.0, 1.0, 1.5, 2.0, -math.inf])  # ties
    | st.floats(-30, 30, width=32)
    | st.floats(-(2.0**126), 2.0**126, width=32)
    | st.floats(-(2.0**-100), 2.0**-100, width=32)
)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]) | st.floats(0, 4),
    top_p=probabilities,
    top_k=st.sampled_from([0, 1, 2, 20, 64, 65, 1 << 24]) | st.integers(0, 64),
    min_p=st.just(0.0) | probabilities,
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
    seed=seeds,
)


def packed(allowed, size):
    """Bit i % 32 of word i // 32 is set where id i is allowed."""
    words = [sum(1 << i for i in range(32) if 32 * w + i in allowed) for w in range(-(-size // 32))]
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


def outcome(reference, logits):
    """(token, status) of a CPU sampler."""
    try:
        return reference.draw(logits), sampler.OK
    except SamplingError as problem:
        return 0, sampler.NOTHING_ALLOWED if "No token" in str(problem) else sampler.NOT_FINITE


def assert_same_tokens(params, rows, *, real=None, prompt=(), allowed=None, ends=()):
    """Draw from each row of logits in turn on both sides; tokens, refusals and book-keeping must agree."""
    size = rows.shape[1]
    device = sampler.DeviceSampler(size, real or size, ends, CPU)
    device.start(params, list(prompt))
    reference = Sampler(params, size, real or size, list(prompt), CPU)
    if allowed is not None:
        device.bitmask.copy_(packed(allowed, size))
    for row in rows:
        device.sample(row, needs_sort=device.needs_sort)
        masked = row.float().clone()
        apply_bitmask(masked, device.bitmask)
        token, status = outcome(reference, masked)
        assert (int(device.token), int(device.status)) == (token, status)
        if status == sampler.OK and token not in ends:
            reference.record(token)
    assert torch.equal(device.counts.float(), reference._counts)
    assert int(device._ints[1]) == reference._step


def normal(*shape, seed=0, scale=4.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_self_test_passes():
    assert support.usable("sampler", "cpu")


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(0, 2**63 - 1))
def test_the_random_number_is_that_of_the_cpu_path(seed, step):
    ints = torch.tensor([seed - (1 << 64) if seed >> 63 else seed, step])
    uniform = torch.zeros(1, dtype=torch.int64)
    sampler.draw_uniform[(1,)](ints, uniform)
    assert int(uniform) / 2**24 == philox_uniform(seed, step)


@pytest.mark.filterwarnings("ignore:invalid value")  # inf - inf, in numbers nobody reads
@settings(max_examples=120, deadline=None)
@given(st.lists(logit, min_size=1, max_size=200), parameters, st.data())
def test_device_and_cpu_draw_the_same_token(logits, params, data):
    size = len(logits)
    some_ids = st.lists(st.integers(0, size - 1), max_size=5)
    allowed = data.draw(st.none() | st.sets(st.integers(0, size - 1), max_size=6), "allowed")
    real, prompt = data.draw(st.integers(1, size), "real"), data.draw(some_ids, "prompt")
    ends = tuple(data.draw(st.sets(st.integers(0, size - 1), max_size=2), "ends"))
    assert_same_tokens(params, torch.tensor([logits] * 2, dtype=torch.float32), real=real, prompt=prompt, allowed=allowed, ends=ends)


PRESETS = (
    {}, {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.5}, {"temperature": 0.0, "frequency_penalty": 0.5},
    {"top_k": 40, "min_p": 0.05, "presence_penalty": 1.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
)  # fmt: skip


@pytest.mark.parametrize("scored", [1024, 128])
@pytest.mark.parametrize("settings_", PRESETS)
def test_presets_draw_the_tokens_of_the_cpu_path(settings_, scored, monkeypatch):
    """Steps in a row, on logits that came through bfloat16 and so have ties. With 1,024 scores a program the short list
    runs over at every step, with 128 it never does."""
    monkeypatch.setattr(sampler, "SCORED", scored)
    rows = (normal(5, 5400, seed=9) if scored == 128 else normal(10, 1500, seed=9)).to(torch.bfloat16)
    assert_same_tokens(SamplingParams(seed=2**63 + 5, **settings_), rows, real=rows.shape[1] - 10, prompt=list(range(0, 1490, 3)))


@pytest.mark.parametrize("ties", [1, 237, 238, 600])
def test_a_list_that_is_just_full(ties, monkeypatch):
    """19 tokens and `ties` that share the 20th place are listed: 256 fit, 257 do not. All of them are drawn alike."""
    monkeypatch.setattr(sampler, "SCORED", 128)
    rows = normal(1, 3400, seed=3, scale=0.01)
    best = torch.arange(19) * 128 + 5
    rows[:, best] = torch.linspace(3.0, 4.0, 19)
    rows[:, 2560 : 2560 + ties] = 2.0
    kept = set(best.tolist()) | set(range(2560, 2560 + ties))
    for seed in range(2):
        params = SamplingParams(top_k=20, top_p=1.0, temperature=5.0, seed=seed)
        device = sampler.DeviceSampler(3400, 3400, (), CPU)
        device.start(params, [])
        device.sample(rows[0], needs_sort=False)
        assert int(device.token) in kept
        assert int(device.token) == Sampler(params, 3400, 3400, [], CPU).draw(rows[0].clone())
        assert int(device._listed) == 0  # for the next step


@pytest.mark.parametrize("top_k", [1, 20, 64])
def test_ties_beyond_one_look_at_the_rows(top_k):
    """All 9,000 tokens share the score of the last one that top-k keeps; so they all stay, as on the CPU."""
    rows = torch.zeros(2, 9000)
    assert_same_tokens(SamplingParams(top_k=top_k, top_p=1.0, temperature=1.0, seed=4), rows)
    rows[:, ::700] = 1.0
    rows[:, 4321] = 2.0
    assert_same_tokens(SamplingParams(top_k=top_k, top_p=0.9, temperature=0.9, seed=5), rows, allowed=set(range(0, 9000, 7)) | {4321})


def test_a_random_number_on_the_border_of_two_tokens():
    """This seed's first number is 22/32: of 32 equal tokens that min_p leaves, it falls to the 23rd and not to the 22nd as well."""
    assert philox_uniform(322971, 0) == 22 / 32
    params = SamplingParams(top_k=40, top_p=1.0, min_p=1.0, temperature=1.0, seed=322971)
    row = torch.tensor([5.0] * 32 + [0.0] * 10)
    assert Sampler(params, 42, 42, [], CPU).draw(row.clone()) == 22
    assert_same_tokens(params, row[None])


def test_ties_that_take_three_looks():
    """Few ties in the first two looks at 64 rows of 128, many in the third: the id is counted through all of them."""
    allowed = set(range(5, 16384, 128)) | set(range(16384, 17000))
    for seed in range(3):
        assert_same_tokens(SamplingParams(top_k=20, top_p=1.0, temperature=1.0, seed=seed), torch.zeros(1, 17000), allowed=allowed)


def test_minus_zero_ties_with_zero():
    for settings_ in ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 0, "top_p": 0.0}):
        assert_same_tokens(SamplingParams(**settings_), torch.tensor([[-1.0, -0.0, 0.0, -0.0]]))


@pytest.mark.parametrize("size, top_p, kept", [(4, 0.5, 2), (8, 0.75, 6), (6, 0.0, 1)])
def test_top_p_cuts_between_ties(size, top_p, kept):
    """Equal tokens that end exactly at top_p: the next one is out."""
    rows, drawn = torch.zeros(1, size), set()
    for seed in range(12):
        params = SamplingParams(top_k=size, top_p=top_p, temperature=1.0, seed=seed)
        assert_same_tokens(params, rows)
        drawn.add(Sampler(params, size, size, [], CPU).draw(rows[0].clone()))
    assert drawn == set(range(kept))


def test_64_rows_that_each_hold_a_candidate():
    rows = normal(3, 8500, seed=11, scale=0.1)
    rows[:, 60::128] += torch.linspace(5, 6, len(range(60, 8500, 128)))
    assert_same_tokens(SamplingParams(top_k=64, top_p=1.0, temperature=2.0, seed=6), rows)


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {"top_k": 20}, {"top_k": 0, "top_p": 0.5}])
def test_only_one_token_is_allowed(settings_):
    device = sampler.DeviceSampler(2000, 2000, (), CPU)
    device.start(SamplingParams(**settings_), [])
    for only in (0, 31, 32, 1999):
        device.bitmask.copy_(packed({only}, 2000))
        device.sample(normal(2000), needs_sort=device.needs_sort)
        assert int(device.token) == only and int(device.status) == sampler.OK


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {"top_k": 20}, {"top_k": 0}])
@pytest.mark.parametrize(
    "value, status",
    [(math.nan, sampler.NOT_FINITE), (-math.nan, sampler.NOT_FINITE), (math.inf, sampler.NOT_FINITE), (-math.inf, sampler.NOTHING_ALLOWED)],
)
def test_hostile_logits_are_reported_and_not_counted(settings_, value, status):
    device = sampler.DeviceSampler(300, 300, (), CPU)
    device.start(SamplingParams(**settings_), [])
    logits = torch.full((300,), -math.inf)
    logits[7] = value
    device.sample(logits, needs_sort=device.needs_sort)
    assert (int(device.status), int(device.token)) == (status, 0)
    assert not device.counts.any() and int(device._ints[1]) == 0


def test_what_a_grammar_or_the_padding_hides_may_be_anything():
    logits = torch.full((200,), math.nan)
    logits[10:12] = 1.0
    assert_same_tokens(SamplingParams(temperature=1.0), logits.repeat(2, 1), real=150, allowed={10, 11})


@pytest.mark.parametrize("make", [list, torch.tensor], ids=["host", "device"])
def test_tokens_from_elsewhere_count_and_a_new_answer_forgets(make):
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, seed=3)
    device = sampler.DeviceSampler(100, 100, (), CPU)
    device.start(params, [])
    logits = torch.zeros(100)
    logits[5], logits[6] = 2.0, 1.0
    device.record(make([5, 5]))
    device.sample(logits, needs_sort=False)
    assert int(device.token) == 6 and int(device._ints[1]) == 3 and int(device.counts[5]) == 2
    device.start(params, [])
    device.sample(logits, needs_sort=False)
    assert int(device.token) == 5 and int(device._ints[1]) == 1


@pytest.mark.parametrize("top_k", [5, 0])
def test_logprob_is_over_all_allowed_tokens(top_k):
    device = sampler.DeviceSampler(3000, 2990, (), CPU, logprob=True)
    device.start(SamplingParams(temperature=0.8, top_k=top_k), [])
    logits = normal(3000, seed=2)
    device.sample(logits, needs_sort=device.needs_sort)
    expected = (logits[:2990] / 0.8).log_softmax(0)[int(device.token)]
    assert float(device.logprob) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("make", [list, torch.tensor], ids=["host", "device"])
def test_records_on_both_sides_are_alike(make):
    """170 forced tokens, more than a launch takes at once, some of them many times; then draws under all penalties."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.2, seed=8)
    forced = [7] * 70 + [number % 13 for number in range(100)]
    device, reference = sampler.DeviceSampler(300, 300, (), CPU), Sampler(params, 300, 300, [1], CPU)
    device.start(params, [1])
    device.record(make(forced))
    for token in forced:
        reference.record(token)
    for row in normal(3, 300, seed=4):
        device.sample(row, needs_sort=False)
        reference.record(reference.draw(row.clone()))
    assert torch.equal(device.counts.float(), reference._counts) and int(device._ints[1]) == reference._step == 173


def test_token_and_status_are_read_in_one_piece():
    device = sampler.DeviceSampler(50, 50, (), CPU)
    device.start(SamplingParams(temperature=0.0), [])
    logits = torch.zeros(50)
    logits[49] = 1.0
    device.sample(logits, needs_sort=False)
    assert device.result.tolist() == [49, sampler.OK]
    device.bitmask.zero_()
    device.sample(logits, needs_sort=False)
    assert device.result.tolist() == [0, sampler.NOTHING_ALLOWED] and int(device.status) == sampler.NOTHING_ALLOWED


def test_a_sort_after_draws_without_one():
    """What a short-list draw leaves behind does not disturb a sorted one, nor the other way round."""
    device = sampler.DeviceSampler(2000, 2000, (), CPU)
    for number, settings_ in enumerate(({"top_k": 20}, {"top_k": 0}, {"top_k": 20}, {"top_k": 65}, {"temperature": 0.0})):
        params = SamplingParams(seed=number, **settings_)
        device.start(params, [])
        reference = Sampler(params, 2000, 2000, [], CPU)
        for row in normal(2, 2000, seed=number):
            device.sample(row, needs_sort=device.needs_sort)
            token = reference.draw(row.clone())
            reference.record(token)
            assert int(device.token) == token
