"""An engine on another card than the first: the same tokens, nothing on the first card, and both at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA GPUs: torch.cuda.device_count() is below 2 here")

from a3b_engine import Engine, Prompt, SamplingParams  # noqa: E402
from small_model import held, picture, small_parts  # noqa: E402

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
GB = 10**9
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=7, max_new_tokens=40)
PROMPT = Prompt(system="You draw comics. " * 10, user="A fox finds a lamp. " * 10)


@pytest.fixture(scope="module")
def parts():
    return small_parts()


@pytest.fixture(scope="module")
def first(parts):
    engine = Engine.from_parts(parts, FIRST, context=2048)
    engine.load_weights()
    engine.generate(PROMPT, GREEDY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def met(parts):
    """The second card has been used before: cuBLAS has its workspaces, and nothing else is left."""
    engine = Engine.from_parts(parts, SECOND, context=2048)
    engine.load_weights()
    for _ in range(2):
        engine.encode_image(picture())
        engine.generate(PROMPT, GREEDY)
    engine.close()
    assert held(SECOND) <= 68 * 1024**2


@pytest.mark.parametrize("part", [False, True])
def test_the_second_card_writes_the_same_and_leaves_the_first_alone(parts, first, met, part):
    expected = [first.generate(PROMPT, sampling).text for sampling in (GREEDY, DRAWN)]
    seen = first.encode_image(picture())[0].features
    first.release_caches()
    before, at_rest = held(FIRST), held(SECOND)
    budget = None if not part else Engine.from_parts(parts, SECOND, context=2048).least_bytes + GB // 2
    engine = Engine.from_parts(parts, SECOND, context=2048, vram_budget=budget)
    engine.load_weights()
    assert (engine.memory()["experts_on_device"] < engine.memory()["experts"]) is part
    assert [engine.generate(PROMPT, sampling).text for sampling in (GREEDY, DRAWN)] == expected
    assert torch.allclose(engine.encode_image(picture())[0].features.float(), seen.float(), atol=0.02, rtol=0.02)
    if part:
        asked, fetched = engine.expert_counts()
        assert 0 < fetched < asked
    assert held(FIRST) == before and torch.cuda.current_device() == 0
    freed = engine.release()
    assert freed > 0 and engine.generate(PROMPT, GREEDY).text == expected[0]
    engine.close()
    assert held(SECOND) == at_rest and held(FIRST) == before


def test_both_at_once(parts, first):
    """Two threads, as two workflows of two servers in one process would do it."""
    expected = first.generate(PROMPT, DRAWN).text
    second = Engine.from_parts(parts, SECOND, context=2048)
    second.load_weights()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(engine.generate, PROMPT, DRAWN) for engine in (first, second) * 4]
        assert {answer.result().text for answer in answers} == {expected}
    second.close()
