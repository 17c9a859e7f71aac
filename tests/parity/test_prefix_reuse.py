"""A prompt that starts from a kept part of an earlier one gives, bit by bit, what computing all of it again gives.

On every shape of model, in both precisions; tests/unit/test_prefix.py has the rules of what is kept.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import ALL, generator
from small_prompts import random_ids

TAIL = 40
CHUNK = 33


def load(folder, dtype):
    """Configuration and language model of a folder."""
    from a3b_engine.checkpoint.index import CheckpointIndex
    from a3b_engine.checkpoint.plan import build_plan
    from a3b_engine.checkpoint.reader import load_weights
    from a3b_engine.config import ModelConfig
    from a3b_engine.model.text import TextModel

    config = ModelConfig.from_folder(folder)
    weights = load_weights(build_plan(CheckpointIndex.open(folder), config), torch.device("cpu"), dtype)
    return config, TextModel(config.text, weights)


def prompts(name, config):
    """Two prompts that differ behind token 107 only, and their pictures."""
    from a3b_engine.image import ImageFeatures

    if config.vision is None:
        shared, images = random_ids(106, name, "shared") + [config.eos_token_ids[0]], []
    else:
        features = torch.randn(12, config.text.hidden_size, generator=generator("features", name))
        images = [ImageFeatures(features, (3, 4), np.zeros((96, 128, 3), np.uint8), "made up")] * 2
        picture = [config.vision_start_token_id, *[config.image_token_id] * 12, config.vision_end_token_id]
        shared = random_ids(70, name, "shared") + picture + random_ids(9, name, "between") + picture
    assert len(shared) == 107
    return [shared + random_ids(TAIL + n, name, "tail", n) for n in range(2)], images


@pytest.mark.parametrize("capacity", [None, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_reuse_is_exact(models, name, dtype, capacity):
    from a3b_engine.runtime.cache import SequenceState
    from a3b_engine.runtime.forward import forward_chunks
    from a3b_engine.runtime.prefix import PrefixStore, prefill

    config, model = load(models.folder(name), dtype)
    (first, second), images = prompts(name, config)
    store = PrefixStore(1 << 30)
    state = SequenceState(config.text, 512, torch.device("cpu"), dtype, capacity)

    def run(ids, state, store):
        """The hidden row behind the prompt and those of twelve greedy tokens, and how much was reused."""
        hidden, reused = prefill(model, config, state, store, ids, images, system_end=107, chunk_size=CHUNK)
        rows = [hidden]
        for _ in range(12):
            token = int(model.logits(rows[-1]).argmax())
            rows += forward_chunks(model, config, state, [token])
        return torch.cat(rows), reused

    for ids, expected in ((first, 0), (second, 107), (first, len(first)), (second, len(second))):
        rows, reused = run(ids, state, store)
        again, nothing = run(ids, SequenceState(config.text, 512, torch.device("cpu"), dtype), PrefixStore(0))
        assert (reused, nothing) == (expected, 0)
        assert torch.equal(rows, again) and rows.isfinite().all()
