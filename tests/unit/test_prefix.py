"""Reuse of kept prompts: bit by bit what computing again gives, only where that holds, and within its bytes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_samples import PLENTY, Runs, Sample, kept_bytes, same

from a3b_engine.errors import PromptError
from a3b_engine.model.positions import ImagePlace, mrope_positions
from a3b_engine.runtime.forward import PREFILL_CHUNK, chunk_borders, forward_chunks, locate_images
from a3b_engine.runtime.prefix import MIN_SHARED, PrefixStore, cut_points, end_of_first_turn


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def sample(request, random_checkpoint):
    return Sample.load(random_checkpoint, request.param)


@pytest.fixture(scope="module")
def exact(random_checkpoint):
    """For what does not depend on the precision."""
    return Sample.load(random_checkpoint, torch.float32)


# What is reused


@pytest.mark.parametrize("capacity", [None, 600])
def test_text_prompts(sample, capacity):
    runs, system = Runs(sample, capacity=capacity), sample.ids(100, 1)
    first, second = sample.prompt(system, sample.ids(70, 2)), sample.prompt(system, sample.ids(90, 3))
    assert runs.run(first) == 0
    assert runs.run(first) == 171  # the seed changed: nothing is computed again
    assert runs.run(second) == 101  # the last text changed
    assert runs.run(first) == 171
    assert runs.run(sample.prompt(sample.ids(100, 4), sample.ids(70, 2))) == 0  # the system text changed


@pytest.mark.parametrize("capacity", [None, 600])
def test_prompts_with_pictures(sample, capacity):
    runs, system, shape = Runs(sample, capacity=capacity), sample.ids(20, 1), (5, 12)
    one, other, third = (sample.picture(seed, *shape) for seed in range(3))
    text, between = sample.ids(40, 2), sample.ids(9, 3)
    shared = 21 + 62 + 9 + 62
    assert runs.run(sample.prompt(system, text, (one, other), between), (one, other)) == 0
    assert runs.run(sample.prompt(system, text, (one, other), between), (one, other)) == shared + 40
    assert runs.run(sample.prompt(system, sample.ids(50, 4), (one, other), between), (one, other)) == shared
    for changed in ((one, third), (third, other), (other, one), (one, one)):  # other pixels, same size
        assert runs.run(sample.prompt(system, text, changed, between), changed) == 0
    turned = replace(other, grid=(12, 5))  # same features in another shape: other positions
    assert runs.run(sample.prompt(system, text, (one, turned), between), (one, turned)) == 0
    assert runs.run(sample.prompt(system, text, (one, other), sample.ids(9, 5)), (one, other)) == 0  # text ahead of the last picture
    assert runs.run(sample.prompt(system, text, (one,)), (one,)) == 0
    again = tuple(replace(image, features=image.features.clone()) for image in (one, other))  # encoded anew
    assert runs.run(sample.prompt(system, text, again, between), again) == shared + 40


def test_image_tokens_that_stand_for_no_picture(exact):
    """A text may hold them as tokens like any other: those are not the same prompt."""
    store, picture = PrefixStore(PLENTY), exact.picture(0)
    ids, _ = exact.prompt([], exact.ids(10, 1), (picture,))
    places = locate_images(ids, [picture], exact.config.image_token_id)
    assert store.key(ids, [picture], places, []) != store.key(ids, [], [], [])


def test_a_prompt_that_is_the_beginning_of_a_kept_one(sample):
    runs, system = Runs(sample), sample.ids(100, 1)
    ids, system_end = sample.prompt(system, sample.ids(60, 2))
    runs.run((ids, system_end))
    assert runs.run((ids[:101], 0)) == 101  # ends where the other was cut: even its last row is there
    assert runs.run((ids[:90], 0)) == 0  # ends where nothing was kept
    assert runs.run((ids[:130], 0)) == 0  # goes through the kept point, but is not cut there
    assert runs.run((ids[:130], system_end)) == 101


def test_a_kept_prompt_that_is_the_beginning_of_a_longer_one(sample):
    """It is taken only where computing again would cut at the same place."""
    runs = Runs(sample)
    ids = sample.ids(200, 1)
    assert runs.run((ids[:150], 0)) == 0
    assert runs.run((ids, 0)) == 0
    assert runs.run((ids, 150)) == 150
    assert runs.run((ids[:150], 90)) == 0  # the same tokens in other parts


def test_another_chunk_size_is_another_computation(exact):
    store, ids = PrefixStore(PLENTY), exact.ids(200, 1)
    keys = [store.key(ids, [], [], cuts, size) for cuts, size in (([], 64), ([], 65), ([100], 64), ([100, 150], 64), ([150], 64))]
    assert len({digest for key in keys for digest in key.digests}) == sum(len(key.digests) for key in keys) - 1
    assert keys[2].digests[0] == keys[3].digests[0]  # [100] and [100, 150] begin alike


def test_default_chunks(sample):
    runs = Runs(sample, chunk_size=PREFILL_CHUNK)
    prompt = sample.prompt(sample.ids(300, 1), sample.ids(200, 2))
    assert [runs.run(prompt), runs.run(prompt)] == [0, 501]
    assert runs.run(sample.prompt(sample.ids(300, 1), sample.ids(20, 3))) == 301


def test_a_sequence_that_went_on_leaves_the_kept_ones_alone(sample):
    runs, prompt = Runs(sample), sample.prompt(sample.ids(100, 1), sample.ids(50, 2))
    for _ in range(3):
        hidden, _ = runs.prefill(prompt)
        sample.go_on(runs.state, hidden, 100)
        hidden.fill_(torch.nan)
    assert runs.run(prompt) == 151


def test_what_was_in_the_state_does_not_matter(sample):
    """Least of all what is not a number, in buffers that are used again."""
    runs, prompt = Runs(sample, capacity=600), sample.prompt(sample.ids(100, 1), sample.ids(50, 2))
    for wanted in (0, 151):
        runs.state.reset()
        sample.feed(runs.state, sample.ids(500, 3))
        runs.state.settle()
        for layer in runs.state.layers:
            for tensor in (layer.buffer,) if hasattr(layer, "buffer") else (layer.conv, layer.recurrent):
                tensor.fill_(torch.nan)
        assert runs.run(prompt) == wanted


# Where a prompt is cut


def test_cut_points():
    end, text = 7, [1] * 400
    picture, second = ImagePlace(100, 8, 8), ImagePlace(170, 4, 4)
    closed = text[:186] + [end] + text[187:]
    assert cut_points(text, [], 150, end) == [150]
    assert cut_points(text, [picture], 50, end) == [164]
    assert cut_points(closed, [picture, second], 50, end) == cut_points(tuple(closed), [second, picture], 50, end) == [187]
    assert cut_points(text[:187], [picture, second], 50, end) == [186]
    assert cut_points(closed[:187], [picture, second], 50, end) == []  # the whole prompt
    assert cut_points(text[:164], [picture], 50, end) == []
    assert cut_points(text, [], MIN_SHARED, end) == [MIN_SHARED] and cut_points(text, [], MIN_SHARED - 1, end) == []
    assert cut_points(text, [ImagePlace(0, 9, 7)], 0, end) == [] and cut_points(text, [ImagePlace(0, 8, 8)], 0, end) == [64]
    assert cut_points(text, [], 400, end) == cut_points(text, [], 0, end) == []


def test_the_end_of_the_system_turn_of_a_real_prompt(engine):
    from a3b_engine import Prompt

    ends = engine.config.eos_token_ids
    one, other = (engine.render(Prompt(system="You draw comics. " * 20, user=user)).token_ids for user in ("A cat.", "Two dogs and a boat."))
    end = end_of_first_turn(one, ends)
    assert end == end_of_first_turn(other, ends) > MIN_SHARED
    assert one[:end] == other[:end] and one[end - 1] in ends
    assert "comics" in engine.tokenizer.decode(one[:end]) and "cat" in engine.tokenizer.decode(one[end:])
    alone = engine.render(Prompt(user="A cat. " * 40)).token_ids
    assert end_of_first_turn(alone, ends) == 0  # what changes with every run is no part to keep
    assert end_of_first_turn([1, 2, 3], ends) == end_of_first_turn([], ends) == 0


@given(total=st.integers(0, 300), cuts=st.lists(st.integers(-5, 310), max_size=4), size=st.integers(1, 310))
def test_chunks(total, cuts, size):
    borders = chunk_borders(total, cuts, size)
    assert borders[0] == 0 and borders[-1] == total and borders == sorted(set(borders))
    assert all(b - a <= size for a, b in zip(borders, borders[1:]))
    assert {cut for cut in cuts if 0 < cut < total} <= set(borders)
    for cut in {cut for cut in cuts if 0 < cut < total}:  # what is in front of a cut does not depend on what is behind it
        assert chunk_borders(cut, cuts, size) == [border for border in borders if border <= cut]


def test_a_start_that_is_no_border_is_refused(exact):
    state, ids = exact.state(), exact.ids(100, 1)
    exact.feed(state, ids[:60])
    with pytest.raises(ValueError, match="start: found 59"):
        exact.feed(state, ids, start=59, cuts=[60])
    with pytest.raises(ValueError, match="start: found 80"):
        exact.feed(state, ids, start=80, cuts=[80])


def test_at_every_cut_and_at_the_end_the_states_stand_in_their_buffers(exact):
    state = exact.state()
    for _ in exact.model_steps(state, exact.ids(50, 1), cuts=[20, 40], chunk_size=10):
        home = {tensor.data_ptr() for whole in (state.conv, state.recurrent) for tensor in whole}
        held = {tensor.data_ptr() for layer in state.layers[:3] for tensor in (layer.conv, layer.recurrent)}
        assert (held == home) == (state.length in (20, 40, 50))


def test_positions_at_every_border(exact):
    """Also of a prompt that follows something else, and with borders inside pictures."""
    wide, tall = exact.picture(1, 3, 9), exact.picture(2, 7, 2)
    ids, _ = exact.prompt(exact.ids(5, 1), exact.ids(8, 2), (wide, tall), exact.ids(2, 3))
    places = locate_images(ids, (wide, tall), exact.config.image_token_id)
    outside = [at for at in range(len(ids) + 1) if not any(p.start < at < p.start + p.length for p in places)]
    seen = {}
    state = exact.state()
    for _ in exact.model_steps(state, ids, (wide, tall), chunk_size=1):
        seen[state.length] = state.next_position
    for place in places:
        behind = place.start + place.length
        assert {seen[at] for at in range(place.start + 1, behind)} == {seen[behind]}
    for cut in outside[1:-1]:
        head, tail = exact.state(), exact.state()
        exact.feed(head, ids[:cut], [i for i, p in zip((wide, tall), places) if p.start < cut])
        assert head.next_position == seen[cut]
        tail.restore(head.snapshot())
        exact.feed(tail, ids, (wide, tall), start=cut, cuts=[cut])
        assert tail.next_position == seen[len(ids)] == len(ids) - 27 + 9 - 14 + 7


class Recorder:
    """Any object with this face is a model. Notes what it is given."""

    def __init__(self, hidden_size):
        self.hidden_size, self.rows, self.positions = hidden_size, [], []

    def embed(self, token_ids):
        return token_ids[:, None].float().expand(-1, self.hidden_size).clone()

    def forward(self, x, positions, states):
        self.rows.append(x)
        self.positions.append(positions)
        return x


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 1000])
@pytest.mark.parametrize("start", [0, 5, 20, 47, 60])
def test_what_the_model_is_given(exact, start, chunk_size):
    """Tokens, features and positions of the rest of a prompt that begins at position 30: from ahead of, inside and behind pictures."""
    images = exact.picture(1, 3, 9), exact.picture(2, 7, 2)
    ids, _ = exact.prompt(exact.ids(8, 1), exact.ids(12, 2), images, exact.ids(2, 3))
    places = locate_images(ids, images, exact.config.image_token_id)
    rows = torch.tensor(ids)[:, None].float().expand(-1, exact.config.text.hidden_size).clone()
    for image, place in zip(images, places):
        rows[place.start : place.start + place.length] = image.features
    positions = mrope_positions(len(ids), places)[0] + 30

    def run(state, **options):
        model = Recorder(exact.config.text.hidden_size)
        for _ in forward_chunks(model, exact.config, state, ids, images, cuts=[start], chunk_size=chunk_size, **options):
            yield torch.cat(model.rows), torch.cat(model.positions, dim=1)

    stopped = exact.state()
    stopped.next_position = 30
    if start == 0:
        *_, fed = run(stopped)
        assert torch.equal(fed[0], rows) and torch.equal(fed[1], positions)
        return
    fed = next(fed for fed in run(stopped) if stopped.length == start)
    assert torch.equal(fed[0], rows[:start]) and torch.equal(fed[1], positions[:, :start])
    *_, fed = run(stopped, start=start)
    assert torch.equal(fed[0], rows[start:]) and torch.equal(fed[1], positions[:, start:])
    assert stopped.length == len(ids) and stopped.next_position == 30 + len(ids) - 27 + 9 - 14 + 7


def test_a_prompt_behind_another_one_starts_in_its_middle_too(sample):
    picture = sample.picture(1, 3, 4)
    ids, _ = sample.prompt(sample.ids(30, 1), sample.ids(30, 2), (picture,))
    whole, halved = sample.state(), sample.state()
    for state in (whole, halved):
        sample.feed(state, sample.ids(40, 3))
    expected = sample.feed(whole, ids, (picture,), cuts=[45])
    first = sample.feed(halved, ids[:45], (picture,), cuts=[])
    assert same(torch.cat((first, sample.feed(halved, ids, (picture,), start=45, cuts=[45]))), expected)
    assert halved.next_position == whole.next_position == 40 + len(ids) - 12 + 4


# Stopping in between


class Stop(Exception):
    pass


@pytest.mark.parametrize("chunks", range(6))
def test_stopping_keeps_whole_parts_only(sample, chunks):
    """100 + 1 tokens in three chunks, 90 in two: stopped after any number of them."""
    runs, prompt = Runs(sample), sample.prompt(sample.ids(100, 1), sample.ids(90, 2))
    left = [chunks]

    def stop():
        if not left[0]:
            raise Stop
        left[0] -= 1

    if chunks < 5:
        with pytest.raises(Stop):
            runs.prefill(prompt, before_chunk=stop)
    else:
        runs.prefill(prompt, before_chunk=stop)
    assert len(runs.store) == (chunks >= 3) + (chunks >= 5)
    assert runs.run(prompt) == (0 if chunks < 3 else 101 if chunks < 5 else 191)


def test_a_failing_layer_leaves_nothing_behind(sample, monkeypatch):
    runs, prompt = Runs(sample), sample.prompt(sample.ids(100, 1), sample.ids(90, 2))
    forward, calls = sample.model.forward, []

    def fails(x, positions, states):
        calls.append(x.shape[0])
        if len(calls) == 4:
            states[3].append(*torch.ones(2, 5, *states[3].buffer.shape[2:], dtype=sample.dtype))
            raise RuntimeError("the card fell off")
        return forward(x, positions, states)

    monkeypatch.setattr(sample.model, "forward", fails)
    with pytest.raises(RuntimeError, match="fell off"):
        runs.prefill(prompt)
    monkeypatch.undo()
    assert calls == [48, 48, 5, 48] and len(runs.store) == 1
    assert runs.run(prompt) == 101


def test_pictures_that_do_not_fit_the_tokens_are_refused_before_anything_runs(exact):
    runs, picture = Runs(exact), exact.picture(0)
    with pytest.raises(PromptError, match="Picture 1 needs 64"):
        runs.prefill((exact.ids(90, 1), 0), (picture,))
    assert not len(runs.store) and runs.state.length == 0


def test_any_sequence_of_runs(sample):
    """Runs with few systems, pictures and texts in any order, memory taken in between, at any limit: never a wrong bit."""
    pictures = [sample.picture(1, 6, 6), sample.picture(2, 6, 6), sample.picture(3, 4, 9)]
    run = st.tuples(
        st.integers(0, 1), st.lists(st.sampled_from(range(3)), max_size=2), st.integers(0, 2), st.integers(-1, 500_000)
    )

    @settings(max_examples=15, deadline=None)
    @given(
        queue=st.lists(run, min_size=2, max_size=7),
        limit=st.integers(0, 4) | st.just(1000), capacity=st.sampled_from([None, 500]), chunk_size=st.sampled_from([17, 64, 2048]),
    )  # fmt: skip
    def check(queue, limit, capacity, chunk_size):
        runs = Runs(sample, limit * kept_bytes(sample, 150), capacity, chunk_size)
        before = None
        for system, shown, text, wanted in queue:
            images = tuple(pictures[n] for n in shown)
            prompt = sample.prompt(sample.ids(70, system), sample.ids(30 + text, text), images, sample.ids(3, 0))
            reused = runs.run(prompt, images)
            if before == prompt[0] + shown and limit == 1000:
                assert reused == len(prompt[0])
            held = runs.store.nbytes
            assert held <= max(0, runs.store.limit_bytes)
            freed = runs.store.drop(wanted)
            assert runs.store.nbytes == held - freed and (freed >= wanted or runs.store.nbytes == 0)
            before = prompt[0] + shown if freed == 0 else None

    check()
