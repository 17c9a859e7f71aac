"""The bytes of kept prompts: bounded, the least recently used given up first, and taken back at any time."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from sequence_samples import CHUNK, PLENTY, Runs, Sample, kept_bytes

from a3b_engine.runtime.forward import locate_images
from a3b_engine.runtime.prefix import PrefixStore


@pytest.fixture(scope="module")
def exact(random_checkpoint):
    """For what does not depend on the precision."""
    return Sample.load(random_checkpoint, torch.float32)


def test_least_recently_used_goes_first(exact):
    prompts = [(exact.ids(100, seed), 0) for seed in range(4)]
    runs = Runs(exact, limit_bytes=3 * kept_bytes(exact, 100))
    for prompt in prompts[:3]:
        assert runs.run(prompt) == 0
    assert runs.store.nbytes == 3 * kept_bytes(exact, 100)
    assert runs.run(prompts[0]) == 100
    assert runs.run(prompts[3]) == 0  # in place of number 1
    assert [runs.run(prompts[n]) for n in (0, 2, 3)] == [100] * 3
    assert runs.run(prompts[1]) == 0  # in place of number 0
    assert [runs.run(prompts[n]) for n in (2, 3, 1)] == [100] * 3
    assert runs.run(prompts[0]) == 0


def test_the_shared_part_outlives_the_ends_of_its_prompts(exact):
    """Room for one shared part and one end: every new text takes the place of the last one, never of the shared part."""
    system = exact.ids(100, 1)
    runs = Runs(exact, limit_bytes=kept_bytes(exact, 101) + kept_bytes(exact, 151))
    assert [runs.run(exact.prompt(system, exact.ids(50, 10 + n))) for n in range(4)] == [0, 101, 101, 101]
    assert runs.run(exact.prompt(system, exact.ids(50, 13))) == 151
    assert runs.run(exact.prompt(system, exact.ids(50, 14))) == 101  # also after a run that needed only the end


@pytest.mark.parametrize("queue_again", [False, True])
def test_of_one_prompt_the_end_goes_before_the_shared_part(exact, queue_again):
    systems = [exact.ids(100, seed) for seed in range(2)]
    runs = Runs(exact, limit_bytes=2 * (kept_bytes(exact, 101) + kept_bytes(exact, 151)))
    for system in systems:
        runs.run(exact.prompt(system, exact.ids(50, 2)))
    if queue_again:
        assert [runs.run(exact.prompt(system, exact.ids(50, 2))) for system in systems] == [151, 151]
    runs.run((exact.ids(100, 3), 0))
    assert runs.run(exact.prompt(systems[1], exact.ids(50, 2))) == 151
    assert runs.run(exact.prompt(systems[0], exact.ids(50, 2))) == 101


def test_both_points_of_the_newest_prompt_stay(exact):
    runs = Runs(exact, limit_bytes=kept_bytes(exact, 101) + kept_bytes(exact, 151))
    for seed in range(3):
        prompt = exact.prompt(exact.ids(100, seed), exact.ids(50, seed))
        assert runs.run(prompt) == 0 and runs.run(prompt) == 151
        assert runs.store.nbytes == runs.store.limit_bytes


@torch.no_grad()
def test_a_prompt_that_waits_for_its_end_keeps_its_shared_part(exact):
    """Another prompt was kept after it: that one makes room, not the part of the same prompt."""
    store, state = PrefixStore(kept_bytes(exact, 101) + kept_bytes(exact, 151) + kept_bytes(exact, 100) - 1), exact.state()
    ids, _ = exact.prompt(exact.ids(100, 1), exact.ids(50, 2))
    key, other = store.key(ids, [], [], [101]), store.key(ids[:100], [], [], [])
    for length, now in ((101, key), (100, other), (151, key)):
        state.reset()
        assert store.keep(now, state, exact.feed(state, ids[:length])[-1:])
    assert store.find(key).length == 151 and store.find(other) is None
    assert store.drop(1) == kept_bytes(exact, 151) and store.find(key).length == 101


@pytest.mark.parametrize("limit, kept", [(0, 0), (-1, 101), (-151, 101), (1, 151)])
def test_what_is_larger_than_the_limit_is_not_kept_and_drives_nothing_out(exact, limit, kept):
    """limit: bytes, where positive more than both points need, where negative less."""
    both = kept_bytes(exact, 101) + kept_bytes(exact, 151)
    runs = Runs(exact, limit_bytes=0 if not limit else both + limit)
    prompt = exact.prompt(exact.ids(100, 1), exact.ids(50, 2))
    assert [runs.run(prompt), runs.run(prompt)] == [0, kept]
    assert runs.store.nbytes == {0: 0, 101: kept_bytes(exact, 101), 151: both}[kept]
    long = (exact.ids(800, 3), 0)
    assert [runs.run(long), runs.run(long)] == [0, 0]
    assert runs.run(prompt) == kept


def test_drop_frees_what_was_asked_for_and_says_how_much(exact):
    runs, one = Runs(exact), kept_bytes(exact, 100)
    for seed in range(4):
        runs.run((exact.ids(100, seed), 0))
    assert runs.store.drop(0) == runs.store.drop(-5) == 0
    assert runs.store.drop(1) == one and runs.store.nbytes == 3 * one
    assert runs.store.drop(one + 1) == 2 * one and len(runs.store) == 1
    assert runs.run((exact.ids(100, 3), 0)) == 100  # the newest is the last to go
    assert runs.store.drop(PLENTY) == one and runs.store.nbytes == 0 and runs.store.drop(1) == 0
    runs.run((exact.ids(100, 3), 0))
    runs.store.clear()
    assert runs.store.nbytes == 0 and runs.run((exact.ids(100, 3), 0)) == 0


def test_dropped_states_are_really_let_go(exact):
    runs, prompt = Runs(exact), (exact.ids(100, 1), 0)
    runs.prefill(prompt)
    kept = runs.store.find(runs.store.key(prompt[0], [], [], [], CHUNK))
    watched = [weakref.ref(t) for t in (kept.snapshot.keys_values, kept.snapshot.recurrent, kept.hidden)]
    assert kept.nbytes == runs.store.nbytes == sum(t().untyped_storage().nbytes() for t in watched) + kept.snapshot.conv.nbytes
    runs.store.drop(1)
    assert kept.hidden.isfinite().all()  # whoever found it can still use it
    del kept
    gc.collect()
    assert all(t() is None for t in watched)


def test_room_is_made_before_the_copy(exact, monkeypatch):
    """So that the peak of memory is the limit, too."""
    runs = Runs(exact, limit_bytes=2 * kept_bytes(exact, 100))
    for seed in range(2):
        runs.prefill((exact.ids(100, seed), 0))
    snapshot, held = runs.state.snapshot, []
    monkeypatch.setattr(runs.state, "snapshot", lambda: held.append(runs.store.nbytes) or snapshot())
    runs.prefill((exact.ids(100, 2), 0))
    assert held == [kept_bytes(exact, 100)] and runs.store.nbytes == 2 * kept_bytes(exact, 100)


def test_no_memory_for_a_copy_gives_up_what_is_kept_and_not_the_run(exact, monkeypatch):
    runs = Runs(exact)
    runs.run((exact.ids(100, 1), 0))

    def full():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runs.state, "snapshot", full)
    assert runs.run((exact.ids(100, 2), 0)) == 0
    assert runs.store.nbytes == 0


def test_pictures_are_hashed_once_and_not_held(exact, monkeypatch):
    store, picture = PrefixStore(PLENTY), exact.picture(1)
    ids, _ = exact.prompt([], exact.ids(10, 1), (picture, picture))
    places = locate_images(ids, [picture, picture], exact.config.image_token_id)
    first = store.key(ids, [picture, picture], places, [])
    counted = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: counted.append(self) or self)
    assert store.key(ids, [picture, picture], places, []) == first and not counted
    other = replace(picture, features=picture.features.half())
    assert store.key(ids, [other, other], places, []) != first and len(counted) == 1
    same_bytes = replace(picture, features=other.features.view(torch.bfloat16))
    assert store.key(ids, [same_bytes] * 2, places, []) != store.key(ids, [other] * 2, places, [])
    watched = weakref.ref(picture)
    counted.clear()
    del picture
    gc.collect()
    assert watched() is None


def test_memory_can_be_taken_from_another_thread_during_a_run(exact):
    runs, stop = Runs(exact), threading.Event()

    def take():
        while not stop.wait(0.002):
            runs.store.drop(1)

    thief = threading.Thread(target=take)
    thief.start()
    try:
        for n in range(8):
            runs.run(exact.prompt(exact.ids(100, n % 2), exact.ids(50, n % 3)))
    finally:
        stop.set()
        thief.join()
