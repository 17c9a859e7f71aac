"""Decoding by kernels and captured graphs on a CUDA card, at the sizes of Qwen3.5-35B-A3B: a few layers, random weights."""

from __future__ import annotations

import threading

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

DEVICE = torch.device("cuda:0")
LAYERS = 8  # two layers with attention, six with DeltaNet


class Model:
    """A few layers of the published sizes, in bfloat16 with FP8 matrices, and the same numbers in float32."""

    def __init__(self) -> None:
        from a3b_engine.bench.shape import ModelShape, model_config
        from a3b_engine.bench.weights import RandomWeights
        from a3b_engine.model.text import TextModel

        self.config = model_config(ModelShape(layers=LAYERS, vision_depth=1))
        weights = RandomWeights(self.config, seed=3).load(DEVICE, torch.bfloat16, False)
        for name, weight in weights.items():
            if name.endswith("experts.down.weight"):
                weight.scale.mul_(20)  # so that experts weigh as much in the stream as in a trained model
        self.text = TextModel(self.config.text, weights)
        exact = {name: weight.float() if isinstance(weight, torch.Tensor) else weight for name, weight in weights.items()}
        self.exact = TextModel(self.config.text, exact)
        generator = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, 240_000, (300,), generator=generator).tolist()


@pytest.fixture(scope="module")
def model():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        yield Model()
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def prefilled(text, model, tokens, capacity=None):
    from a3b_engine.runtime.cache import SequenceState
    from a3b_engine.runtime.forward import forward_chunks

    state = SequenceState(model.config.text, 4096, DEVICE, text.embedding.dtype, capacity=capacity)
    *_, hidden = forward_chunks(text, model.config, state, tokens)
    state.settle()
    return state, text.logits(hidden[-1:])[0]


def made(model, tokens, capacity=2048, capture=True):
    """A step in place behind `tokens`; what no kernel may read holds NaN."""
    from a3b_engine.kernels.support import target
    from a3b_engine.runtime.decode import DecodeStep

    state, logits = prefilled(model.text, model, tokens, capacity)
    token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    snapshot = state.snapshot()
    step = DecodeStep(model.text, state, token, target(DEVICE))
    if capture:
        step.capture()
    state.restore(snapshot)
    for layer in state.layers:
        if hasattr(layer, "buffer"):
            layer.buffer[:, state.length :] = torch.nan
    for buffer in (step._projected, step._mixed, step._stream, step.logits, step._rings):
        buffer.fill_(torch.nan)
    step.enter()
    return step, state, token, logits


def greedy(model, steps, capture, between=lambda number: None):
    step, _, token, logits = made(model, model.prompt, capture=capture)
    tokens = []
    for number in range(steps):
        token.copy_(logits.argmax()[None])
        tokens.append(token.clone())
        step.launch()
        logits = step.logits
        between(number)
    return torch.cat(tokens).tolist(), step.logits.clone()


def test_all_kernels_are_used(model):
    from a3b_engine.kernels.support import all_usable
    from a3b_engine.runtime import decode, prefill
    from a3b_engine.runtime.runner import Runner

    assert all_usable(decode.KERNELS + prefill.KERNELS, DEVICE)
    runner = Runner(model.text, model.config, 248_077, 8192)
    assert runner.decodes_by_kernels and runner.prefills_by_kernels


def test_500_greedy_tokens_of_graph_and_single_launches_are_equal(model):
    by_graph, last = greedy(model, 500, True)
    one_by_one, expected = greedy(model, 500, False)
    assert by_graph == one_by_one
    assert len(set(by_graph)) > 5 and torch.isfinite(last).all()
    assert torch.equal(last, expected)


def test_logits_are_as_near_to_float32_as_the_plain_path(model):
    """Teacher-forced over 40 tokens; relative errors of whole rows of logits. The median counts: where rounding turns a
    near tie of the router, which random weights have many of, another expert speaks, and the row is off in any precision."""
    from a3b_engine.kernels.support import relative_error
    from a3b_engine.runtime.forward import forward_chunks

    exact, _ = prefilled(model.exact, model, model.prompt)
    plain, _ = prefilled(model.text, model, model.prompt)
    step, _, token, _ = made(model, model.prompt)
    ours, theirs = [], []
    for number in model.prompt[:40]:
        expected, rounded = (
            text.logits([*forward_chunks(text, model.config, state, [number])][-1])[0] for text, state in ((model.exact, exact), (model.text, plain)))
        token.fill_(number)
        step.launch()
        ours.append(relative_error(step.logits, expected))
        theirs.append(relative_error(rounded, expected))
    ours, theirs = (sorted(errors)[20] for errors in (ours, theirs))
    print(f"median relative error of logits to float32: kernels {ours:.2e}, plain bfloat16 {theirs:.2e}")
    assert ours <= theirs and ours <= 0.05


def test_a_graph_survives_other_work_and_an_emptied_cache(model):
    """Other models run, the allocator's cache is emptied, another thread allocates: the tokens stay the same."""
    expected, _ = greedy(model, 60, True)
    stop = threading.Event()

    def neighbour():
        while not stop.is_set():
            torch.empty(1 << 22, device=DEVICE).fill_(torch.nan)

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        def between(number):
            if number % 20 == 0:
                junk = torch.full((1 << 26,), torch.nan, device=DEVICE)
                (junk[: 1 << 20].view(1024, 1024) @ junk[: 1 << 20].view(1024, 1024)).sum()
                del junk
                torch.cuda.empty_cache()

        tokens, _ = greedy(model, 60, True, between)
    finally:
        stop.set()
        thread.join()
    assert tokens == expected


def test_nothing_is_allocated_by_a_step(model):
    step, _, token, _ = made(model, model.prompt)
    step.launch()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    for _ in range(20):
        step.launch()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


def answer(model, prompt, sampling, count, *, mask=None, tokens=1000, runner=None):
    from a3b_engine.runtime.runner import Runner

    runner = runner or Runner(model.text, model.config, 248_077, 8192)
    assert runner.decodes_by_kernels
    steps, kept = runner.start(prompt, [], sampling, tokens, lambda: None)
    out = []
    for _ in range(count):
        out.append(steps.draw(mask, sure=True))
        steps.feed(out[-1:])
    runner.finish()
    return out, kept


def test_a_kept_prompt_gives_the_same_answer_bit_by_bit(model):
    from a3b_engine.runtime.runner import Runner
    from a3b_engine.sampling import SamplingParams

    sampling = SamplingParams(temperature=1.0, seed=11)
    end = model.config.eos_token_ids[0]
    prompt = model.prompt[:150] + [end] + model.prompt[150:280] + [end] + model.prompt[280:]
    other = prompt[:200] + model.prompt[:40] + [end, 17]
    runner = Runner(model.text, model.config, 248_077, 8192)
    first, kept = answer(model, prompt, sampling, 50, runner=runner)
    assert kept == 0
    second, kept = answer(model, prompt, sampling, 50, runner=runner)
    assert kept == len(prompt) and second == first
    third, kept = answer(model, other, sampling, 50, runner=runner)
    assert kept == 151
    assert third == answer(model, other, sampling, 50)[0]
    answer(model, other, sampling, 5, tokens=5000, runner=runner)  # larger buffers
    assert answer(model, prompt, sampling, 50, runner=runner)[0] == first


def test_a_grammar_mask_holds_and_ends(model):
    from a3b_engine.sampling import SamplingParams

    allowed = [3, 77, 240_001]
    mask = torch.zeros(248_320 // 32, dtype=torch.int32)
    for token in allowed:
        mask[token // 32] |= 1 << token % 32
    out, _ = answer(model, model.prompt, SamplingParams(temperature=2.0), 30, mask=mask)
    assert set(out) <= set(allowed) and len(set(out)) > 1


def test_released_buffers_leave_no_memory_and_come_back(model):
    import gc

    from a3b_engine.runtime.runner import Runner
    from a3b_engine.sampling import SamplingParams

    def settled():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(DEVICE)

    sampling = SamplingParams(temperature=0.0)
    runner = Runner(model.text, model.config, 248_077, 8192)
    first, _ = answer(model, model.prompt, sampling, 10, runner=runner)
    runner.release()
    start = settled()
    for _ in range(3):
        assert answer(model, model.prompt, sampling, 10, runner=runner)[0] == first
        held = settled() - start
        assert held >= sum(runner.nbytes().values())
        runner.release()
        assert settled() == start
