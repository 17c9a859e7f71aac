"""Preprocessing equal to the published processor in transformers."""

import numpy as np
import pytest
import torch

from a3b_engine.image import ImageProcessorConfig, prepare_picture, to_patches

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CONFIG = ImageProcessorConfig()
FLOAT_ROUNDING = 1e-6  # (x / 255 - 0.5) / 0.5 in another order of operations
LEVEL = 2 / 255  # one 8-bit level after normalisation
# The torchvision form keeps its filter weights in 16 bits; Pillow, which we use, is finer. Measured on noise with torch 2.9
# and 2.13: at most 19 levels in one pixel, at most 0.34 levels on average.
TOLERANCES = {"pillow": (FLOAT_ROUNDING, FLOAT_ROUNDING), "torchvision": (20 * LEVEL, 0.5 * LEVEL)}


def pictures():
    generator = np.random.default_rng(3)
    yield "noise", lambda h, w: generator.integers(0, 256, (h, w, 3), dtype=np.uint8)
    yield (
        "ramp",
        lambda h, w: np.stack(
            np.broadcast_arrays(np.linspace(0, 255, h)[:, None], np.linspace(0, 255, w)[None], 99.0), axis=-1
        ).astype(np.uint8),
    )


def processor(kind, size):
    options = dict(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": min(65536, size * size), "longest_edge": size * size},
    )  # fmt: skip
    if kind == "pillow":
        return getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)(**options)
    pytest.importorskip("torchvision", reason="torchvision is not installed: the fast processor cannot run")
    return getattr(transformers, "Qwen2VLImageProcessorFast", transformers.Qwen2VLImageProcessor)(**options)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize(
    "height, width, size",
    [
        (384, 384, 384), (256, 512, 384), (320, 416, 384), (64, 1024, 384), (64, 64, 64),  # no resize
        (512, 512, 384), (100, 60, 384), (716, 1024, 384), (1, 1, 384), (2000, 90, 384), (333, 777, 1024), (300, 200, 384),
    ],
)  # fmt: skip
def test_patches_equal_the_published_processor(kind, height, width, size):
    oracle = processor(kind, size)
    for _, make in pictures():
        picture = make(height, width)
        expected = oracle(images=[picture], return_tensors="pt", input_data_format="channels_last")
        prepared = prepare_picture(picture, CONFIG, size=size)
        ours = to_patches(prepared, CONFIG)
        assert expected["image_grid_thw"].tolist() == [[1, prepared.grid[0] * 2, prepared.grid[1] * 2]]
        difference = (ours - torch.as_tensor(expected["pixel_values"])).abs()
        untouched = prepared.pixels.shape == picture.shape
        worst, average = (FLOAT_ROUNDING, FLOAT_ROUNDING) if untouched else TOLERANCES[kind]
        assert difference.max().item() <= worst and difference.mean().item() <= average
