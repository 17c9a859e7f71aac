"""The launch that puts a prescribed routing in place of the router's. Not collected by itself: test_trace.py runs it under
Triton's interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()
from interpreted_decode import CONFIG, CPU, PROMPT, make_model  # noqa: E402

from a3b_engine.bench.residency import TRACE_STEPS, Routing  # noqa: E402
from a3b_engine.bench.routing import MODEL, SKEWED, UNIFORM, uniform_trace  # noqa: E402
from a3b_engine.bench.trace import RoutingTrace  # noqa: E402
from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.model import moe  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.decode import DecodeStep  # noqa: E402
from a3b_engine.runtime.forward import forward_chunks  # noqa: E402

WHERE = support.target("cpu")


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_layer_of_a_step_gets_its_row_and_the_trace_begins_again(top_k):
    steps, layers = 3, 4
    trace = np.arange(steps * layers * top_k, dtype=np.int32).reshape(steps, layers, top_k)
    reroute = RoutingTrace(steps, layers, top_k, WHERE)
    reroute.fill(trace)
    for step in range(2 * steps + 1):
        for layer in range(layers):
            ids = torch.full((top_k + 2,), -7, dtype=torch.int32)
            reroute(layer, ids[:top_k])
            assert ids.tolist() == [*trace[step % steps, layer], -7, -7]
    assert reroute.steps_done == 2 * steps + 1


def test_another_trace_begins_at_its_first_step_in_the_same_place():
    reroute = RoutingTrace(2, 1, 2, WHERE)
    ids = torch.zeros(2, dtype=torch.int32)
    place = reroute._trace.data_ptr()
    for first in (10, 20):
        reroute.fill(np.array([[[first, 1]], [[first + 1, 2]]], dtype=np.int32))
        reroute(0, ids)
        assert ids.tolist() == [first, 1]
    assert reroute._trace.data_ptr() == place and reroute.nbytes == 2 * 2 * 4 + 8


def test_a_decode_step_works_with_the_experts_of_the_trace(monkeypatch):
    """Against the plain model, whose router is made to choose the same experts with the shares of its own choice."""
    model = make_model("fp8")
    layers, experts, top_k = CONFIG.text.num_hidden_layers, CONFIG.text.num_experts, CONFIG.text.num_experts_per_tok
    trace = uniform_trace(3, layers, experts, top_k, seed=4)
    plain, steps = (SequenceState(CONFIG.text, 64, CPU, model.embedding.dtype, **options) for options in ({}, {"capacity": 32}))
    for state in (plain, steps):
        list(forward_chunks(model, CONFIG, state, PROMPT))
    steps.settle()
    reroute = RoutingTrace(3, layers, top_k, WHERE)
    reroute.fill(trace)
    token = torch.zeros(1, dtype=torch.int64)
    step = DecodeStep(model, steps, token, WHERE, reroute)
    step.enter()
    asked = []

    def route(x, router, count):
        asked.append(torch.from_numpy(trace[len(asked) // layers % 3, len(asked) % layers]).long()[None])
        return of_router(x, router, count)[0], asked[-1]

    of_router = moe.route
    monkeypatch.setattr(moe, "route", route)
    for number in (5, 20, 5, 9):
        *_, hidden = forward_chunks(model, CONFIG, plain, [number])
        token.fill_(number)
        step.launch()
        assert support.relative_error(step.logits, model.logits(hidden)[0]) < 1e-5
    assert reroute.steps_done == 4 and len(asked) == 4 * layers


def test_a_routing_is_put_into_an_engine_changed_and_taken_out():
    released = []
    engine = SimpleNamespace(reroute=None, config=CONFIG, device=CPU, release_caches=lambda: released.append(1))
    routing = Routing(engine, seed=1)
    routing.use(MODEL)
    assert engine.reroute is None and not released
    routing.use(UNIFORM)
    uniform, first = engine.reroute, engine.reroute._trace.clone()
    assert len(released) == 1 and first.shape == (TRACE_STEPS, 2, 2)
    engine.reroute(0, torch.zeros(2, dtype=torch.int32))
    routing.use(SKEWED)
    assert engine.reroute is uniform and engine.reroute.steps_done == 0 and len(released) == 1  # a captured step goes on with it
    assert not torch.equal(engine.reroute._trace, first)
    routing.use(MODEL)
    assert engine.reroute is None and len(released) == 2
