"""Expert slots and pinned memory on a CUDA GPU: captured, started early, and at the speed of the bus."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

import triton.language as tl  # noqa: E402

from a3b_engine.kernels.expert_slots import Fetch, TakeSlots, take_slots_reference  # noqa: E402
from a3b_engine.kernels.expert_slots_check import SlotsCase  # noqa: E402
from a3b_engine.kernels.rows import let_next_start, wait_for_inputs  # noqa: E402
from a3b_engine.kernels.support import target, usable  # noqa: E402
from a3b_engine.memory import pinned  # noqa: E402
from a3b_engine.memory.pinned import PinnedArena  # noqa: E402

CUDA = torch.device("cuda:0")
RECORD = 3_146_496  # bytes of an FP8 expert


@triton.jit
def choose_next(trace, number, ids, TOP_K: tl.constexpr, PDL: tl.constexpr):
    """Stands for the router: ids of step `number`, which it moves on."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    step = tl.load(number)
    choice = tl.arange(0, TOP_K)
    tl.store(ids + choice, tl.load(trace + step * TOP_K + choice))
    tl.store(number, step + 1)


@triton.jit
def read_chosen(pointers, ids, copies, number, log, out, WORDS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Stands for the experts' kernels: a sum over each chosen record, found through the table. EARLY: as `down`, which reads
    ids, table and weights before it waits, one launch further on."""
    choice = tl.program_id(0)
    if EARLY:
        let_next_start(PDL)
    else:
        wait_for_inputs(PDL)
        let_next_start(PDL)
    expert = tl.load(ids + choice, cache_modifier=".cg")
    record = tl.load(pointers + expert.to(tl.int64) * 12, cache_modifier=".cg").to(tl.pointer_type(tl.int32))
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, WORDS, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(record + at, mask=at < WORDS, other=0).to(tl.int64) * (at + 1)
    if EARLY:
        wait_for_inputs(PDL)
    step = tl.load(number, cache_modifier=".cg") - 1
    tl.store(out + step * TOP_K + choice, tl.sum(total, 0))
    if not EARLY:
        tl.store(log + (step * TOP_K + choice) * 2, tl.load(copies + choice * 2, cache_modifier=".cg"))
        tl.store(log + (step * TOP_K + choice) * 2 + 1, tl.load(copies + choice * 2 + 1, cache_modifier=".cg"))


@pytest.fixture(scope="module")
def where():
    found = target(CUDA)
    if found is None:
        pytest.skip("the kernels are not written for this GPU")
    return found


def test_the_self_test_passes(where):
    assert usable("expert_slots", CUDA)


def test_pinned_memory_is_seen_by_kernels_and_copies(where):
    before = pinned._pinned
    arena = PinnedArena(RECORD, CUDA, segment_bytes=3 * RECORD)
    records = arena.take_many(4)
    assert arena.nbytes == pinned._pinned - before == 4 * RECORD
    values = torch.randint(0, 256, (4, RECORD), dtype=torch.uint8, device=CUDA)
    for record, value in zip(records, values):
        record.host.copy_(value, non_blocking=True)
    out = torch.zeros_like(values)
    copies = torch.tensor([[record.address, place.data_ptr()] for record, place in zip(records, out)], device=CUDA)
    Fetch(copies, RECORD, where)()
    assert torch.equal(out, values)
    torch.cuda.synchronize()
    for record in records[1:]:
        arena.give_back(record)
    assert arena.trim() == RECORD and arena.nbytes == 3 * RECORD
    assert torch.equal(records[0].host, values[0].cpu()) and arena.take().address == records[1].address
    arena.close()
    assert pinned._pinned == before
    assert (torch.ones(1, device=CUDA) + 1).item() == 2  # nothing of it is left as an error


def test_a_refusal_leaves_no_error_behind(where, monkeypatch):
    """More than there is: told before it is touched; and where the driver refuses, PyTorch goes on as if nothing had been."""
    with pytest.raises(pinned.PinnedMemoryError):
        PinnedArena(1 << 44, CUDA).take()
    memory, before = torch.empty(1 << 20, dtype=torch.uint8), pinned._pinned
    pinned._register(memory, CUDA)
    with pytest.raises(pinned.PinnedMemoryError, match="REGISTERED"):
        pinned._register(memory, CUDA)
    assert (torch.ones(1, device=CUDA) + 1).item() == 2
    pinned._unregister(memory, CUDA)
    assert pinned._pinned == before


@pytest.mark.parametrize("experts, present, top_k", [(256, 60, 8), (64, 30, 8), (40, 17, 4)])
def test_2000_steps_of_a_captured_graph(where, experts, present, top_k):
    """Choice, slots, fetch, and two readers in one graph with early launches: every copy and every byte read is right."""
    steps = 2000 if experts == 64 else 500
    case = SlotsCase(where, experts, present, top_k, 5 * 8192 + 256, seed=experts, homeless=3)
    words = case.record_bytes // 4
    chance = random.Random(1)
    hot = chance.sample(range(experts), experts // 3)
    trace = [chance.sample(hot if chance.random() < 0.7 else range(experts), top_k) for _ in range(steps)]
    for _ in range(steps // 10):  # the same again
        trace[chance.randrange(steps)] = trace[chance.randrange(steps)]
    expected = case.tables.copied("cpu")
    logged = torch.stack([take_slots_reference(expected, torch.tensor(ids)) for ids in trace])
    weights = torch.arange(1, words + 1)
    sums = [int((record.view(torch.int32).long() * weights).sum()) for record in case.records]
    right = torch.tensor([[sums[expert] for expert in ids] for ids in trace])

    device_trace, number = torch.tensor(trace, dtype=torch.int32, device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    ids = torch.zeros(top_k, dtype=torch.int32, device=CUDA)
    log = torch.zeros(steps, top_k, 2, dtype=torch.int64, device=CUDA)
    early, late = (torch.zeros(steps, top_k, dtype=torch.int64, device=CUDA) for _ in range(2))
    take = TakeSlots(case.tables, top_k, where, pdl=where.pdl)
    fetch = Fetch(take.copies, case.record_bytes, where, pdl=where.pdl)
    pdl = dict(PDL=True, launch_pdl=True) if where.pdl else dict(PDL=False)

    def step() -> None:
        choose_next[(1,)](device_trace, number, ids, TOP_K=top_k, PDL=where.pdl)
        take(ids)
        fetch()
        for out, is_early in ((late, False), (early, True)):
            read_chosen[(top_k,)](case.tables.pointers, ids, take.copies, number, log, out, WORDS=words, BLOCK=1024, TOP_K=top_k, EARLY=is_early, **pdl)

    before = case.tables.copied(CUDA)
    slots = case.slots.clone()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, table in vars(before).items():
        if name != "advances":
            getattr(case.tables, name).copy_(table)
    case.slots.copy_(slots)
    number.zero_()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    wrong = (log.cpu() != logged).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"copies of {len(wrong)} steps, the first {wrong[0]}: {log[wrong[0]].tolist()} where {logged[wrong[0]].tolist()} are right"
    for out, name in ((late, "behind the wait"), (early, "ahead of the wait")):
        wrong = (out.cpu() != right).any(1).nonzero().flatten().tolist()
        assert not wrong, f"records of {len(wrong)} steps, the first {wrong[0]}, read {name}"
    ours = case.tables.copied("cpu")
    assert [name for name, table in vars(expected).items() if name != "advances" and not torch.equal(getattr(ours, name), table)] == []
    assert case.tables.counts[1] > steps / 20


@pytest.mark.parametrize("tokens", [1, 64, 2048, 16384])
def test_visits_at_the_sizes_of_the_model(where, tokens):
    case = SlotsCase(where, 256, 80, 8, 8192 + 256, seed=tokens, homeless=5, pdl=True)
    for _ in range(3):
        assert case.look(torch.randint(0, 256, (tokens, 8), dtype=torch.int32), 176) == ""
        assert case.step(case.chance.sample(range(256), 8)) == ""


def microseconds(work, repeats: int = 30) -> float:
    """Median time of one run, by events."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def test_one_expert_comes_nearly_as_fast_as_by_a_copy(where):
    """Eight experts in turn, so that no cache helps. Against a copy at the same moment: what the bus gives halves now and then."""
    arena = PinnedArena(RECORD, CUDA, segment_bytes=8 * RECORD)
    records = arena.take_many(8)
    place = torch.zeros(RECORD, dtype=torch.uint8, device=CUDA)
    fetches = [Fetch(torch.tensor([[0, 0]] * 3 + [[record.address, place.data_ptr()]] + [[0, 0]] * 4, device=CUDA), RECORD, where) for record in records]
    for record in records:
        record.host.random_(0, 256)
    for fetch in fetches:
        fetch()
    assert torch.equal(place.cpu(), records[-1].host)
    by_kernel = microseconds(lambda: [fetch() for fetch in fetches]) / 8
    by_copy = microseconds(lambda: [place.copy_(record.host, non_blocking=True) for record in records]) / 8
    print(f"\none expert: {RECORD / by_kernel / 1e3:.1f} GB/s by fetch, {RECORD / by_copy / 1e3:.1f} GB/s by a copy")
    assert by_kernel < by_copy / 0.85
