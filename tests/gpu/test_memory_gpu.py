"""An engine with a part of its weights on a CUDA GPU, beside another user of the card: same tokens, no growth, no reload, within its cap."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

from a3b_engine import Engine, Prompt, SamplingParams  # noqa: E402
from a3b_engine.bench.cap import MemoryCap  # noqa: E402
from a3b_engine.errors import MemoryBudgetError  # noqa: E402
from a3b_engine.memory import homes  # noqa: E402
from small_model import held, picture, small_parts  # noqa: E402

CUDA = torch.device("cuda", 0)
GB = 10**9
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)
PROMPT = Prompt(system="You draw comics. " * 10, user="A fox finds a lamp. " * 10)


@pytest.fixture(scope="module")
def parts():
    return small_parts()


@pytest.fixture(scope="module")
def expected(parts):
    engine = Engine.from_parts(parts, CUDA, context=2048)
    engine.load_weights()
    text = engine.generate(PROMPT, GREEDY).text
    image = engine.encode_image(picture())[0].features
    engine.close()
    return text, image


def engine_with(parts, gb=None, **options):
    engine = Engine.from_parts(parts, CUDA, context=2048, vram_budget=None if gb is None else int(gb * GB), **options)
    engine.load_weights()
    return engine


def test_a_part_writes_what_the_whole_writes_within_its_cap(parts, expected):
    least = Engine.from_parts(parts, CUDA, context=2048)._budget.least / GB
    for gb in (least + 0.05, least + 0.5, least + 1.5):
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(CUDA)
        with MemoryCap(CUDA, reserved + int(gb * GB) + (64 << 20)) as cap:
            engine = engine_with(parts, gb)
            assert engine.generate(PROMPT, GREEDY).text == expected[0]
            features = engine.encode_image(picture())[0].features
            assert torch.allclose(features.float(), expected[1].float(), atol=0.02, rtol=0.02)
            kept = engine.generate(PROMPT, GREEDY).usage.kept_tokens
            assert kept > 0 or gb < least + 1  # under a tight cap kept prompts are the first to go
            asked, fetched = engine.expert_counts()
            assert 0 < fetched < asked and engine.memory()["total"] <= gb * GB
            engine.close()
            assert cap.figures()["cap_kept"]


def test_without_pinned_memory_the_host_serves_and_the_tokens_are_the_same(parts, expected, monkeypatch):
    monkeypatch.setattr(homes, "pinnable_bytes", lambda: 0)
    monkeypatch.setattr(homes.PinnedArena, "take", _refuse)
    least, embedding = Engine.from_parts(parts, CUDA, context=2048).least_bytes / GB, parts.weights.tier_bytes(torch.bfloat16, False)["embedding"] / GB
    with pytest.raises(MemoryBudgetError, match="no pinned RAM for the embedding"):
        engine_with(parts, least + 0.3)
    engine = engine_with(parts, least + embedding + 0.3)
    memory = engine.memory()
    assert memory["experts_pinned"] == memory["experts_on_disk"] == 0  # made-up weights have no files: ordinary RAM keeps them
    assert memory["host_pageable"] > 0
    assert engine.generate(PROMPT, GREEDY).text == expected[0]
    engine.close()


def _refuse(self):
    from a3b_engine.memory.pinned import PinnedMemoryError

    raise PinnedMemoryError("no pinned memory in this test")


def test_fifty_rounds_beside_another_user_of_the_card(parts, expected, monkeypatch):
    """The other one wants more than the engine's caches; it gets it, and the engine takes the room back when it leaves."""
    engine = engine_with(parts)
    assert engine.generate(PROMPT, GREEDY).text == expected[0]
    monkeypatch.setattr(type(parts.weights), "load", _must_not_load)
    levels, pinned = set(), set()
    for number in range(50):
        before = torch.cuda.mem_get_info(CUDA)[0]
        wanted = engine.cached_bytes + (1 + number % 2) * GB
        freed = engine.release(wanted)
        gained = torch.cuda.mem_get_info(CUDA)[0] - before
        assert freed >= wanted and gained >= 0.98 * freed
        rival = torch.empty(freed - (64 << 20), dtype=torch.uint8, device=CUDA)
        if number % 5 == 0:
            assert engine.generate(PROMPT, GREEDY).text == expected[0]
        del rival
        torch.cuda.empty_cache()
        engine.grow()
        if number % 5 == 0:
            assert engine.generate(PROMPT, GREEDY).text == expected[0]
            engine.release_caches()
            levels.add(held(CUDA))
            pinned.add(engine.memory()["host_pinned"])
    assert len(levels) == len(pinned) == 1, (levels, pinned)
    engine.close()


def _must_not_load(*args, **kwargs):
    raise AssertionError("weights were read again")


@pytest.mark.parametrize("park", [False, True])
def test_unloading_frees_everything_at_once(parts, park):
    """Without the garbage collector's help: ComfyUI wants the memory now."""
    engine = Engine.from_parts(parts, CUDA, context=2048, vram_budget=int(4.5 * GB), park=park)
    engine.load_weights()
    engine.generate(PROMPT, GREEDY)
    engine.unload_weights()
    gc.collect()
    start = held(CUDA)
    gc.disable()
    try:
        for _ in range(2):
            engine.load_weights()
            engine.generate(PROMPT, GREEDY)
            engine.unload_weights()
            assert held(CUDA) == start
    finally:
        gc.enable()
    assert (engine.memory()["host_pinned"] > 0) == park
    engine.close()
    assert engine.memory()["host_pinned"] == 0


def test_growing_and_shrinking_records_no_new_graph(parts, expected):
    engine = engine_with(parts, Engine.from_parts(parts, CUDA, context=2048)._budget.least / GB + 0.5)
    engine.generate(PROMPT, GREEDY)
    graphs = dict(engine._runner._buffers.step._graphs)
    assert list(graphs) == [False]
    for change in (lambda: engine.shrink(3 * engine._residence.sizes.row), lambda: engine.grow(2 * engine._residence.sizes.row)):
        assert change() > 0
        assert engine.generate(PROMPT, GREEDY).text == expected[0]
        assert engine._runner._buffers.step._graphs == graphs
    engine.close()


def test_a_parked_whole_comes_back_in_part(parts, expected):
    """The embedding, which was on the card, comes back to pinned memory, where kernels read it."""
    engine = engine_with(parts, park=True)
    assert engine.generate(PROMPT, GREEDY).text == expected[0]
    for room in (engine.least_room, float("inf"), engine.least_room + GB // 2):
        engine.unload_weights()
        engine.load_weights(room=room)
        assert engine.generate(PROMPT, GREEDY).text == expected[0]
        assert torch.allclose(engine.encode_image(picture())[0].features.float(), expected[1].float(), atol=0.02, rtol=0.02)
    engine.close()
