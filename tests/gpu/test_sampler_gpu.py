"""The sampler of the decode graph on a CUDA GPU: the tokens of the CPU path, from one captured graph for all parameters."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

from a3b_engine.grammar import apply_bitmask  # noqa: E402
from a3b_engine.kernels.support import target, usable  # noqa: E402
from a3b_engine.sampling import Sampler, SamplingParams  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCABULARY, REAL, ENDS = 50_000, 49_900, (49_800, 49_801)
GRID = (
    {}, {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.1},
    {"top_k": 1}, {"top_k": 64, "min_p": 0.05, "frequency_penalty": 0.3, "top_p": 1.0}, {"top_k": 0, "top_p": 0.9},
    {"top_k": 40, "presence_penalty": 1.5, "frequency_penalty": -0.2, "repetition_penalty": 1.3, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.0}, {"top_k": 65, "min_p": 0.1, "temperature": 1.7}, {"temperature": 0.3, "top_k": 5, "min_p": 0.9},
)  # fmt: skip
STEPS = 30


class Captured:
    """A device sampler, its logits, and one graph that draws from them."""

    def __init__(self, vocabulary: int = VOCABULARY, real: int = REAL) -> None:
        from a3b_engine.kernels.sampler import DeviceSampler

        self.sampler = DeviceSampler(vocabulary, real, ENDS, CUDA, logprob=True)
        self.logits = torch.zeros(vocabulary, device=CUDA)
        self._pdl = target(CUDA).pdl
        self.sampler.start(SamplingParams(), [])
        self.draw(eagerly=True)  # compiles
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.draw(eagerly=True)

    def draw(self, *, eagerly: bool = False) -> None:
        if self.sampler.needs_sort:
            self.sampler.sample(self.logits, needs_sort=True)
        elif eagerly:
            self.sampler.sample(self.logits, needs_sort=False, pdl=self._pdl)
        else:
            self._graph.replay()


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """bool [V] -> int32 [ceil(V / 32)]"""
    bits = torch.nn.functional.pad(allowed, (0, -len(allowed) % 32)).view(-1, 32).long()
    words = (bits << torch.arange(32)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@contextlib.contextmanager
def nothing_waits_or_allocates():
    """What PyTorch does in here must not wait for the card, nor ask for memory."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.fixture(scope="module")
def captured():
    return Captured()


def test_the_self_test_passes():
    assert usable("sampler", CUDA)


@pytest.mark.parametrize("number", range(len(GRID)))
def test_300_steps_draw_the_tokens_of_the_cpu(captured, number):
    """Masks come and go, tokens are forced in between; the plain sampler on the card draws the same ones too."""
    chance = random.Random(number)
    prompt = [chance.randrange(REAL) for _ in range(50)]
    params = SamplingParams(seed=chance.getrandbits(64), **GRID[number])
    sampler = captured.sampler
    sampler.start(params, prompt)
    plain = [Sampler(params, VOCABULARY, REAL, prompt, device) for device in (CPU, CUDA)]
    generator = torch.Generator().manual_seed(number)
    drawn = []
    for step in range(STEPS):
        row = torch.randn(VOCABULARY, generator=generator) * chance.choice((0.3, 3.0, 8.0))
        if chance.random() < 0.5:
            row = row.to(torch.bfloat16).float()  # ties
        if chance.random() < 0.2:
            row[ENDS[0]] = 40.0
        allowed = torch.ones(VOCABULARY, dtype=torch.bool)
        if chance.random() < 0.4:
            allowed = torch.rand(VOCABULARY, generator=generator) < chance.choice((0.5, 0.001))
            allowed[chance.randrange(REAL)] = True
        mask = packed(allowed)
        sampler.bitmask.copy_(mask)
        captured.logits.copy_(row)
        captured.draw()
        masked = row.clone()
        apply_bitmask(masked, mask)
        expected, on_card = (one.draw(masked.to(one._counts.device, copy=True)) for one in plain)
        assert sampler.result.tolist() == [expected, 0], step
        assert on_card == expected, step
        forced = [chance.randrange(REAL) for _ in range(chance.choice((0, 0, 0, 1, 5)))]
        sampler.record(torch.tensor(forced, dtype=torch.int64, device=CUDA) if step % 2 else forced)
        for one in plain:
            for token in ([] if expected in ENDS else [expected]) + forced:
                one.record(token)
        drawn.append(expected)
    assert torch.equal(sampler.counts.cpu().float(), plain[0]._counts) and int(sampler._ints[1]) == plain[0]._step
    assert len(set(drawn)) > 5


def test_the_whole_vocabulary_of_the_model():
    ours = Captured(248320, 248077)
    for number, settings in enumerate(({}, {"temperature": 0.0}, {"top_k": 64, "temperature": 2.0, "top_p": 1.0}, {"top_k": 0})):
        params = SamplingParams(seed=number, **settings)
        ours.sampler.start(params, [5])
        theirs = Sampler(params, 248320, 248077, [5], CPU)
        for row in (torch.randn(8, 248320, generator=torch.Generator().manual_seed(number)) * 3).to(torch.bfloat16).float():
            ours.logits.copy_(row)
            ours.draw()
            expected = theirs.draw(row.clone())
            theirs.record(expected)
            assert ours.sampler.result.tolist() == [expected, 0], settings


@pytest.mark.parametrize("bad, status", [(float("nan"), 1), (float("inf"), 1), (-float("inf"), 2)])
def test_hostile_logits_are_reported_and_the_next_step_is_right(captured, bad, status):
    sampler = captured.sampler
    sampler.bitmask.fill_(-1)
    sampler.start(SamplingParams(seed=1), [])
    captured.logits.fill_(-float("inf"))
    captured.logits[1234] = bad
    captured.draw()
    assert sampler.result.tolist() == [0, status] and not sampler.counts.any()
    row = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    captured.logits.copy_(row)
    captured.draw()
    assert int(sampler.token) == Sampler(SamplingParams(seed=1), VOCABULARY, REAL, [], CPU).draw(row)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_draws_and_records_neither_wait_nor_allocate(captured):
    sampler = captured.sampler
    sampler.bitmask.fill_(-1)
    sampler.start(SamplingParams(seed=2), [])
    captured.logits.copy_(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4)))
    ids, host = torch.tensor([3, 3, 9], device=CUDA), torch.zeros(2, dtype=torch.int64, pin_memory=True)
    sampler.record([1])
    sampler.record(ids)  # compiled before anything is counted
    captured.draw()
    with nothing_waits_or_allocates():
        sampler.record([1, 2, 16])
        sampler.record(ids)
        captured.draw()
        sampler.token.fill_(77)
        host.copy_(sampler.result, non_blocking=True)
    torch.cuda.synchronize()
    assert host.tolist() == [77, 0]
    assert [int(sampler.counts[token]) for token in (1, 2, 3, 9, 16)] == [2, 1, 4, 2, 1] and int(sampler._ints[1]) == 1 + 3 + 1 + 3 + 3 + 1


def test_records_can_be_captured(captured):
    sampler = captured.sampler
    sampler.start(SamplingParams(), [])
    ids = torch.tensor([7, 8], device=CUDA)
    sampler.record(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.record(ids)
    sampler.start(SamplingParams(), [])
    for pair in ([5, 6], [6, 6]):
        ids.copy_(torch.tensor(pair))
        graph.replay()
    assert (int(sampler.counts[5]), int(sampler.counts[6]), int(sampler.counts[7]), int(sampler._ints[1])) == (1, 3, 0, 4)
