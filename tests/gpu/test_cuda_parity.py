"""The engine on a CUDA GPU against the reference: float32 without TF32, bfloat16, FP8 as stored, and its memory.

The checkpoints are the small random models of tests/parity, made on the spot from generators alone. The reference is
the engine in float32 on the CPU, which tests/parity holds against transformers; so transformers is not needed here.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from compare import encode, largest, run_pieces
from small_files import dequantized, write_folder
from small_models import ALL, TOKENIZER_SIZE, WITH_VISION, model_config
from small_prompts import layouts, prompt, random_ids

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

LIMIT = 1e-3  # float32 logits: other summation orders than on the CPU
DEVICE = "cuda:0"
CASES = [(name, layout) for name in ALL for layout in layouts(name)]


@pytest.fixture(autouse=True)
def exact_float32():
    """TF32 off for the length of a test: it would round the inputs of float32 products to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


class Models:
    """Folders, engines and reference logits, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict = {}

    def once(self, key, make):
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def folder(self, name: str, form: str = "fp32 fused") -> Path:
        number_format, experts = form.split()
        return self.once(("folder", name, form), lambda: write_folder(
            self._root / f"{name}-{number_format}-{experts}", name, format=number_format, experts=experts))

    def twin(self, name: str) -> Path:
        """The weights of the FP8 folder, multiplied out into a float32 one."""
        return self.once(("twin", name), lambda: write_folder(
            self._root / f"{name}-twin", name, dequantized(self.folder(name, "fp8 per_expert"), model_config(name)),
            format="fp32", experts="fused"))

    def engine(self, name: str, device: str = DEVICE, dtype: torch.dtype = torch.float32):
        return self.once(("engine", name, device, dtype), lambda: load(self.folder(name), device, dtype))

    def reference(self, name: str, layout: str) -> torch.Tensor:
        """float32 logits [T, vocab] on the CPU."""
        ids, pictures = (random_ids(130, name, "lengths"), []) if layout == "lengths" else prompt(name, layout)
        engine = self.engine(name, "cpu")
        return self.once(("reference", name, layout), lambda: engine.logits(ids, images=encode(engine, pictures)))

    def close(self) -> None:
        for made in self._made.values():
            if hasattr(made, "close"):
                made.close()


def load(folder: Path, device: str = DEVICE, dtype: torch.dtype = torch.float32):
    from a3b_engine import Engine

    return Engine.load(folder, device=device, dtype=dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    store = Models(tmp_path_factory.mktemp("cuda"))
    yield store
    store.close()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_float32_logits(models, differences, name, layout):
    ids, pictures = prompt(name, layout)
    engine = models.engine(name)
    difference = largest(engine.logits(ids, images=encode(engine, pictures)), models.reference(name, layout))
    assert differences.note("CUDA fp32 logits", difference, f"{name}, {layout}", LIMIT) <= LIMIT


@pytest.mark.parametrize("name", ALL)
def test_chunks_and_single_steps(models, differences, name):
    ids = random_ids(130, name, "lengths")
    expected = models.reference(name, "lengths")
    for size in (1, 2, 7, 63, 64, 65, 129):
        difference = largest(models.engine(name).logits(ids, chunk_size=size), expected)
        assert differences.note("CUDA fp32 logits, chunks", difference, f"{name}, chunks of {size}", LIMIT) <= LIMIT
    pieces = [(1, 64), (2, 1), (60, 64), (1, 1), (66, 33)]
    assert largest(run_pieces(models.engine(name), ids, None, pieces).cpu(), expected) <= LIMIT


@pytest.mark.parametrize("name", WITH_VISION)
def test_chunks_cut_pictures(models, name):
    ids, pictures = prompt(name, "mixed images")
    engine = models.engine(name)
    images = encode(engine, pictures)
    for size in (1, 3, 17):
        ours = engine.logits(ids, images=images, chunk_size=size)
        assert largest(ours, models.reference(name, "mixed images")) <= LIMIT, size


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_stays_close(models, differences, name):
    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    engine = models.engine(name, dtype=torch.bfloat16)
    expected = models.reference(name, layout)
    for size in (2048, 1):
        ours = engine.logits(ids, images=encode(engine, pictures), chunk_size=size)
        cosine = float(torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), dim=0))
        assert differences.note("CUDA bf16 logits, cosine to fp32", cosine, name, 0.99, smallest=True) > 0.99


@pytest.mark.parametrize("name", ALL)
def test_same_prompt_same_bits(models, name):
    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    engine = models.engine(name)
    images = encode(engine, pictures)
    first = engine.logits(ids, images=images, chunk_size=16)
    engine.logits(random_ids(90, name, "another"))
    # index_add over experts may add in another order from run to run: equal up to that.
    assert largest(engine.logits(ids, images=images, chunk_size=16), first) <= 2e-5


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_equal_the_cpu(models, name):
    from test_greedy import greedy

    ids = random_ids(20, name, "cuda greedy")
    ours, reason = greedy(models.engine(name), ids, None, 48)
    expected, expected_reason = greedy(models.engine(name, "cpu"), ids, None, 48)
    assert ours == expected and reason == expected_reason
    assert all(token < TOKENIZER_SIZE for token in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALL)
def test_fp8_as_stored_equals_its_dequantised_twin(models, differences, name, dtype):
    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    stored, twin = load(models.folder(name, "fp8 per_expert"), dtype=dtype), load(models.twin(name), dtype=dtype)
    try:
        assert stored.weight_bytes < twin.weight_bytes
        for size in (2048, 1):
            ours, expected = (engine.logits(ids, images=encode(engine, pictures), chunk_size=size)
                              for engine in (stored, twin))
            limit = 2e-5 if dtype == torch.float32 else 1e-2
            kind = f"CUDA {str(dtype).removeprefix('torch.')}, FP8 as stored vs dequantised file"
            assert differences.note(kind, largest(ours, expected), f"{name}, chunks of {size}", limit) <= limit
    finally:
        stored.close()
        twin.close()


@pytest.mark.parametrize("form", ["fp32 fused", "fp8 per_expert"])
def test_released_weights_leave_no_memory(models, form):
    name = "published_heads"
    folder = models.folder(name, form)
    ids, pictures = prompt(name, "two images")

    def use(engine) -> None:
        engine.load_weights()
        engine.logits(ids, images=encode(engine, pictures))

    from a3b_engine import Engine

    warm = Engine.open(folder, device=DEVICE, dtype=torch.bfloat16)
    use(warm)  # the libraries keep a workspace from their first product on
    warm.unload_weights()
    start = settled()
    engine = Engine.open(folder, device=DEVICE, dtype=torch.bfloat16)
    assert settled() == start
    engine.load_weights()
    held = settled() - start
    # The allocator rounds every tensor up to 512 bytes.
    assert engine.weight_bytes <= held <= engine.weight_bytes + 512 * 400 + MISCELLANY
    for _ in range(3):
        use(engine)
        engine.release_caches()  # the second picture of a size is kept as a graph
        assert held <= settled() - start <= held + MISCELLANY
        engine.unload_weights()
        assert settled() == start
        assert engine.loaded_bytes == 0


def test_cancelled_load_leaves_no_memory(models):
    from a3b_engine import Engine

    class Stop(Exception):
        pass

    engine = Engine.open(models.folder("published_heads"), device=DEVICE, dtype=torch.float32)
    start = settled()
    calls = 0

    def cancel() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise Stop

    with pytest.raises(Stop):
        engine.load_weights(cancel=cancel)
    assert calls == 4
    assert settled() == start
    assert not engine.is_loaded
    engine.load_weights()
    ids = random_ids(12, "after a cancelled load")
    assert torch.isfinite(engine.logits(ids)).all()
    engine.close()


MISCELLANY = 1 << 20  # tables of expert slots, and what the libraries keep of a graph (50 KiB on an H200) until the weights leave


def settled() -> int:
    """Bytes of live CUDA tensors once nothing is waiting to be collected."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(DEVICE)
