"""A prescribed routing and a bound allocator on a CUDA GPU: in a captured graph, and with the memory that torch really has."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

from a3b_engine.bench.bandwidth import host_copy_rate  # noqa: E402
from a3b_engine.bench.cap import MemoryCap  # noqa: E402
from a3b_engine.bench.packed import FORMS, packed_bytes, random_packed  # noqa: E402
from a3b_engine.bench.routing import skewed_trace, uniform_trace  # noqa: E402
from a3b_engine.kernels.support import target  # noqa: E402
from a3b_engine.runtime.capture import captured  # noqa: E402

CUDA = torch.device("cuda", 0)


def test_a_captured_step_follows_the_trace_and_the_one_that_takes_its_place():
    from a3b_engine.bench.trace import RoutingTrace

    steps, layers, top_k = 5, 40, 8
    ids = torch.zeros((layers, top_k), dtype=torch.int32, device=CUDA)
    reroute = RoutingTrace(steps, layers, top_k, target(CUDA))
    graph = captured(lambda: [reroute(layer, ids[layer]) for layer in range(layers)], CUDA)
    for trace in (uniform_trace(steps, layers, 256, top_k, seed=1), skewed_trace(steps, layers, 256, top_k, seed=2)):
        reroute.fill(trace)
        for step in range(2 * steps):
            graph.replay()
            assert torch.equal(ids.cpu(), torch.from_numpy(trace[step % steps]))
        assert reroute.steps_done == 2 * steps


def test_the_allocator_refuses_more_than_the_cap_and_forgets_it_afterwards():
    held = torch.cuda.memory_reserved(CUDA)
    with MemoryCap(CUDA, held + (256 << 20)) as cap:
        small = torch.empty(100 << 20, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(400 << 20, dtype=torch.uint8, device=CUDA)
        found = cap.figures()
    assert found["cap_kept"] is True and found["peak_reserved_gb"] >= found["peak_allocated_gb"] >= 0.1
    assert 0 < found["outside_allocator_gb"] < found["in_use_gb"]
    assert torch.empty(400 << 20, dtype=torch.uint8, device=CUDA).nbytes > small.nbytes


def test_copies_from_pinned_memory_have_a_rate():
    rate = host_copy_rate(CUDA, 1 << 28)
    assert 2e9 < rate < 2e12


@pytest.mark.parametrize("name", FORMS)
def test_random_experts_are_made_on_the_card(name):
    weight = random_packed(FORMS[name], (4, 512, 2048), torch.Generator(device=CUDA).manual_seed(1))
    assert weight.device == CUDA and weight.nbytes == packed_bytes(FORMS[name], (4, 512, 2048))
    assert float(weight.dequantize(torch.float32).std()) == pytest.approx(0.02, rel=0.1)
