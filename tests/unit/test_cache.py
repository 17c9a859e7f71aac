"""The state of a sequence: fixed and growing buffers, emptying, copies and what they cost."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_samples import CPU, Sample, same

from a3b_engine.errors import MemoryBudgetError
from a3b_engine.model.deltanet import DeltaNetState
from a3b_engine.runtime.cache import KeyValueCache, SequenceState, sequence_bytes, snapshot_bytes

FORMS = pytest.mark.parametrize("capacity", [None, 400])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def sample(request, random_checkpoint):
    return Sample.load(random_checkpoint, request.param)


def caches(state):
    return [layer for layer in state.layers if isinstance(layer, KeyValueCache)]


def states(state):
    return [layer for layer in state.layers if isinstance(layer, DeltaNetState)]


def addresses(state):
    """Of every buffer that a captured graph would hold."""
    return [c.buffer.data_ptr() for c in caches(state)] + [t.data_ptr() for s in states(state) for t in (s.conv, s.recurrent)]


def poison(state):
    """Fill everything that the state holds with what would show in any result."""
    for cache in caches(state):
        cache.buffer.fill_(torch.nan)
    for layer in states(state):
        layer.conv.fill_(torch.nan)
        layer.recurrent.fill_(torch.nan)


def equal_states(one, other):
    one, other = one.snapshot(), other.snapshot()
    tensors = ("keys_values", "conv", "recurrent")
    numbers = (one.length, one.next_position) == (other.length, other.next_position)
    return numbers and all(same(getattr(one, name), getattr(other, name)) for name in tensors)


def test_fixed_buffers_have_the_layout_of_the_kernels_and_never_move(sample):
    state, text = sample.state(400), sample.config.text
    before = addresses(state)
    for cache in caches(state):
        assert cache.buffer.shape == (2, 400, text.num_key_value_heads, text.head_dim) and cache.buffer.is_contiguous()
    for layer in states(state):
        assert layer.conv.is_contiguous() and layer.recurrent.is_contiguous() and layer.recurrent.dtype == torch.float32
    sample.feed(state, sample.ids(300, 1), chunk_size=70)
    kept = state.snapshot()
    sample.go_on(state, torch.zeros(1, text.hidden_size, dtype=sample.dtype), 3)
    state.settle()
    assert addresses(state) == before
    state.restore(kept)
    assert addresses(state) == before
    state.reset()
    assert addresses(state) == before


def test_both_forms_give_the_same(sample):
    ids = sample.ids(330, 2)
    growing, fixed = sample.state(), sample.state(400)
    assert same(sample.feed(growing, ids, chunk_size=100), sample.feed(fixed, ids, chunk_size=100))
    assert equal_states(growing, fixed)


def test_settle_brings_replaced_states_home(sample):
    state = sample.state(100)
    homes = [(s.conv, s.recurrent) for s in states(state)]
    sample.feed(state, sample.ids(10, 3))
    replaced = [(s.conv.clone(), s.recurrent.clone()) for s in states(state)]
    assert all(s.recurrent is not home[1] for s, home in zip(states(state), homes))
    state.settle()
    for layer, home, value in zip(states(state), homes, replaced):
        assert layer.conv is home[0] and layer.recurrent is home[1]
        assert same(layer.conv, value[0]) and same(layer.recurrent, value[1])


def test_settle_leaves_alone_what_was_written_in_place(sample, monkeypatch):
    """As a captured graph does. Nothing is copied then."""
    state = sample.state(100)
    for layer in states(state):
        layer.recurrent.fill_(2.5)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    state.settle()
    assert all((layer.recurrent == 2.5).all() for layer in states(state))


@pytest.mark.parametrize("limit, capacity, most", [(20, None, 20), (1000, 20, 20), (20, 1000, 20)])
def test_too_many_tokens_are_refused_by_name_and_change_nothing(sample, limit, capacity, most):
    state = sample.state(capacity, limit)
    assert state.limit == most
    sample.feed(state, sample.ids(most, 4))
    cache = caches(state)[0]
    before = cache.buffer.clone()
    with pytest.raises(MemoryBudgetError, match=f"21 tokens do not fit the context of {most}; raise `context`"):
        cache.append(*torch.ones(2, 1, *cache.buffer.shape[2:], dtype=sample.dtype))
    with pytest.raises(MemoryBudgetError, match="21 tokens"):
        state.advance(1)
    assert cache.length == state.length == most and same(cache.buffer[:, :most], before[:, :most])


@FORMS
def test_reset_leaves_nothing_of_the_last_sequence(sample, capacity):
    ids = sample.ids(90, 5)
    expected = sample.feed(sample.state(), ids, chunk_size=40)
    state = sample.state(capacity)
    sample.feed(state, sample.ids(300, 6))
    poison(state)
    state.settle()
    poison(state)
    before = addresses(state)
    state.reset()
    assert (state.length, state.next_position, addresses(state)) == (0, 0, before)
    assert all(not layer.conv.any() and not layer.recurrent.any() for layer in states(state))
    assert same(sample.feed(state, ids, chunk_size=40), expected)


@FORMS
@pytest.mark.parametrize("into", ["itself", "fresh", "longer", "shorter", "broken"])
def test_a_restored_state_goes_on_as_the_first_did(sample, capacity, into):
    ids, more = sample.ids(150, 7), sample.ids(40, 8)
    first = sample.state(capacity)
    hidden = sample.feed(first, ids)[-1:]
    kept = first.snapshot()
    expected = sample.feed(first, more), sample.go_on(first, hidden)[1]
    state = first if into == "itself" else sample.state(capacity)
    if into == "longer":
        sample.feed(state, sample.ids(350, 9))
    elif into == "shorter":
        sample.feed(state, sample.ids(3, 9))
    elif into == "broken":
        sample.feed(state, sample.ids(200, 9))
        caches(state)[0].length = 123  # as an error between two layers leaves it
        poison(state)
    state.restore(kept)
    assert (state.length, state.next_position) == (150, 150)
    assert same(sample.feed(state, more), expected[0]) and same(sample.go_on(state, hidden)[1], expected[1])


def test_a_snapshot_is_a_copy(sample):
    state = sample.state(400)
    sample.feed(state, sample.ids(50, 10))
    kept = state.snapshot()
    copies = [t.clone() for t in (kept.keys_values, kept.conv, kept.recurrent)]
    sample.feed(state, sample.ids(50, 11))
    state.settle()
    poison(state)
    state.restore(kept)
    sample.feed(state, sample.ids(50, 12))
    state.settle()
    poison(state)
    assert all(same(t, copy) for t, copy in zip((kept.keys_values, kept.conv, kept.recurrent), copies))


def test_snapshots_cross_between_the_forms(sample):
    growing, fixed, more = sample.state(), sample.state(400), sample.ids(20, 13)
    sample.feed(growing, sample.ids(100, 14))
    fixed.restore(growing.snapshot())
    assert equal_states(growing, fixed)
    again = sample.state()
    again.restore(fixed.snapshot())
    assert same(sample.feed(again, more), sample.feed(growing, more))


def test_a_snapshot_too_long_is_refused_and_changes_nothing(sample):
    long, short, untouched = sample.state(), sample.state(50), sample.state(50)
    sample.feed(long, sample.ids(51, 15))
    for state in (short, untouched):
        sample.feed(state, sample.ids(30, 16))
    with pytest.raises(MemoryBudgetError, match="51 tokens do not fit the context of 50"):
        short.restore(long.snapshot())
    assert equal_states(short, untouched)


def test_no_snapshot_of_half_a_step(sample):
    state = sample.state()
    sample.feed(state, sample.ids(10, 17))
    caches(state)[0].append(*torch.ones(2, 1, *caches(state)[0].buffer.shape[2:], dtype=sample.dtype))
    with pytest.raises(RuntimeError, match="did not finish"):
        state.snapshot()


def test_a_graph_that_writes_in_place_counts_its_tokens(sample):
    state = sample.state(64)
    sample.feed(state, sample.ids(10, 18))
    state.next_position = 4  # as pictures leave it
    state.advance(3)
    assert (state.length, state.next_position, caches(state)[0].length) == (13, 7, 13)


@pytest.mark.parametrize("kinds", [("full_attention",) * 2, ("linear_attention",) * 2])
def test_layers_of_one_kind_only(sample, kinds):
    config = replace(sample.config.text, layer_types=kinds, num_hidden_layers=2)
    for capacity in (None, 30):
        state = SequenceState(config, 100, CPU, sample.dtype, capacity)
        for cache in caches(state):
            cache.append(*torch.ones(2, 5, *cache.buffer.shape[2:], dtype=sample.dtype))
        state.length = state.next_position = 5
        kept = state.snapshot()
        state.reset()
        state.restore(kept)
        assert state.length == 5 and kept.nbytes == snapshot_bytes(config, 5, sample.dtype)
        assert all((cache.append(*torch.zeros(2, 1, *cache.buffer.shape[2:]))[0][:5] == 1).all() for cache in caches(state))


@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(st.integers(1, 300), min_size=1, max_size=4), fixed=st.booleans())
def test_bytes_are_what_they_are_said_to_be(sample, pieces, fixed):
    config, total = sample.config.text, sum(pieces)
    state = sample.state(total if fixed else None, 2048)
    done = 0
    for number, piece in enumerate(pieces):
        sample.feed(state, sample.ids(piece, number))
        done += piece
        bound = sequence_bytes(config, done, sample.dtype, total if fixed else None)
        assert sum(cache.nbytes for cache in caches(state)) < state.nbytes <= bound
        assert not fixed or state.nbytes == bound
    wanted = state.snapshot_nbytes
    kept = state.snapshot()
    tensors = kept.keys_values, kept.conv, kept.recurrent
    assert wanted == kept.nbytes == snapshot_bytes(config, total, sample.dtype) == sum(t.nbytes for t in tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
