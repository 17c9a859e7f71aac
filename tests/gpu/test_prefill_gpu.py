"""Kernels of many tokens on a CUDA GPU, at the sizes of Qwen3.5-35B-A3B: four layers of random weights, against float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEVICE = "cuda:0"
LENGTHS = (1, 3, 16, 63, 64, 65, 130, 500, 2048)


class Case:
    """The model in bfloat16 and FP8, its float32 twin, and the kernels."""

    def __init__(self) -> None:
        sys.path.insert(0, str(BENCHMARKS))
        import prefill as benchmark

        from a3b_engine.bench.shape import ModelShape, model_config
        from a3b_engine.bench.weights import RandomWeights
        from a3b_engine.kernels import support
        from a3b_engine.model.text import TextModel
        from a3b_engine.runtime.prefill import KERNELS, FastText

        self.where = support.target(DEVICE)
        if self.where is None:
            pytest.skip("the kernels are not written for this GPU")
        self.kernels, self.usable, self.relative_error = KERNELS, support.usable, support.relative_error
        self.config = model_config(ModelShape(layers=4))
        weights = benchmark.lively(RandomWeights(self.config).load(self.where.device, torch.bfloat16, dequantize=False))
        self.plain = TextModel(self.config.text, weights)
        self.exact = TextModel(self.config.text, benchmark.float32_twin(weights))
        self.fast = FastText(self.plain, self.where)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, 240000, (tokens,), generator=generator).to(self.where.device)
        return self.plain.embed(ids), torch.arange(tokens, device=self.where.device).expand(3, -1)

    def run(self, model, x: torch.Tensor, positions: torch.Tensor, pieces: tuple[int, ...]):
        from a3b_engine.runtime.cache import SequenceState

        state, hidden, start = SequenceState(self.config.text, 1 << 14, self.where.device, x.dtype), [], 0
        for size in pieces:
            hidden.append(model.forward(x[start : start + size], positions[:, start : start + size], state.layers))
            start += size
        return torch.cat(hidden), state


@pytest.fixture(scope="module")
def case():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield Case()
    torch.backends.cuda.matmul.allow_tf32 = before


def test_self_tests_pass(case):
    assert {name: case.usable(name, DEVICE) for name in case.kernels} == dict.fromkeys(case.kernels, True)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_as_close_to_float32_as_the_plain_path(case, tokens):
    x, positions = case.inputs(tokens)
    expected, _ = case.run(case.exact, x.float(), positions, (tokens,))
    expected = case.exact.logits(expected[-64:])
    plain, fast = (case.relative_error(case.plain.logits(case.run(model, x, positions, (tokens,))[0][-64:]), expected) for model in (case.plain, case.fast))
    assert fast <= 1.2 * plain, (fast, plain)


@pytest.mark.parametrize("pieces", [(300, 1, 1, 210), (64, 448), (500, 12)], ids=str)
def test_pieces_are_as_good_as_the_whole(case, pieces):
    x, positions = case.inputs(512)
    expected, exact_state = case.run(case.exact, x.float(), positions, (512,))
    plain = case.relative_error(case.run(case.plain, x, positions, (512,))[0], expected)
    hidden, state = case.run(case.fast, x, positions, pieces)
    assert case.relative_error(hidden, expected) <= 1.2 * plain
    assert case.relative_error(state.layers[0].recurrent, exact_state.layers[0].recurrent) <= 0.02


@pytest.mark.parametrize("tokens", [3, 65, 700])
def test_same_call_same_bits_whatever_the_buffers_held(case, tokens, monkeypatch):
    """Twice on fresh buffers, and once on buffers full of NaN and of impossible numbers."""
    from a3b_engine.runtime import prefill

    x, positions = case.inputs(tokens)
    (first, state), (second, other) = (case.run(case.fast, x, positions, (tokens,)) for _ in range(2))
    get = prefill.Scratch.get

    def poisoned(self, name, dtype, *shape):
        fresh = (name, dtype, shape) not in self._made
        found = get(self, name, dtype, *shape)
        return found.fill_(torch.nan if dtype.is_floating_point else -7) if fresh else found

    monkeypatch.setattr(prefill.Scratch, "get", poisoned)
    third, last = case.run(case.fast, x, positions, (tokens,))
    assert torch.isfinite(first).all() and torch.equal(first, second) and torch.equal(first, third)
    for layer, (a, b, c) in enumerate(zip(state.layers, other.layers, last.layers)):
        if hasattr(a, "recurrent"):
            assert torch.equal(a.recurrent, b.recurrent) and torch.equal(a.recurrent, c.recurrent), layer
            assert torch.equal(a.conv, b.conv) and torch.equal(a.conv, c.conv), layer


def test_the_host_waits_for_nothing(case):
    x, positions = case.inputs(400)
    case.run(case.fast, x, positions, (400,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(case.fast, x, positions, (400,))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scratch_of_a_chunk_stays_below_500_megabytes(case):
    from a3b_engine.runtime.cache import SequenceState

    x, positions = case.inputs(2048)
    state = SequenceState(case.config.text, 1 << 14, case.where.device, x.dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.fast.forward(x, positions, state.layers)
    assert torch.cuda.max_memory_allocated() - before < 500e6
