"""Pictures through captured graphs on a CUDA card: the features of the plain tower, for every size and in any order."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

DEVICE = torch.device("cuda:0")


def test_graphs_give_the_features_of_the_plain_tower():
    from a3b_engine.bench.shape import ModelShape, model_config
    from a3b_engine.bench.weights import RandomWeights
    from a3b_engine.model.vision import VisionModel
    from a3b_engine.runtime.vision_graph import MOST_GRAPHS, VisionRunner

    config = model_config(ModelShape(layers=4, experts=8, text_tokens=2000, vocab=2100, vision_depth=3))
    vision = VisionModel(config.vision, RandomWeights(config).load(DEVICE, torch.bfloat16, False))
    runner = VisionRunner(vision)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for grid in [(4, 6), (4, 6), (4, 6), (6, 4), (4, 6), (6, 4), (12, 12), (12, 12), (2, 3), (2, 3), (4, 6), (4, 6)]:
            patches = torch.randn((4 * grid[0] * grid[1], config.vision.patch_dim), generator=generator)
            torch.testing.assert_close(runner.encode(patches, grid), vision.encode(patches, grid), rtol=0, atol=0)
    assert 0 < runner.nbytes and len(runner._graphs) == MOST_GRAPHS
    assert runner.release() > 0 and runner.nbytes == 0
