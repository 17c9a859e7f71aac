"""The vision tower alone, and the positions of picture tokens, against the reference."""

from __future__ import annotations

import pytest
import torch
from compare import encode, largest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MERGE, PATCH, WITH_VISION, token_id
from small_prompts import picture, random_ids

SIZES = [(64, 64), (32, 128), (128, 32), (288, 32), (96, 384), (224, 384), (512, 160), (384, 384)]


@pytest.mark.parametrize("name", WITH_VISION)
def test_patches_equal_the_published_processor(models, name):
    """A picture that needs no resize goes into the tower with the same bits as through the published processor."""
    from a3b_engine.image import ImageProcessorConfig, prepare_picture, to_patches
    from small_prompts import encoder_size

    settings_of_folder = ImageProcessorConfig.from_folder(models.folder(name))
    for size in SIZES:
        pixels = picture(*size)
        prepared = prepare_picture(pixels.numpy(), settings_of_folder, size=encoder_size(pixels), fit="keep")
        ours = to_patches(prepared, settings_of_folder)
        theirs = models.oracle(name).picture_inputs([pixels])
        assert [1, prepared.grid[0] * MERGE, prepared.grid[1] * MERGE] == theirs["image_grid_thw"][0].tolist()
        torch.testing.assert_close(ours, theirs["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", WITH_VISION)
def test_features_equal_the_reference_tower(models, differences, name, size):
    pixels = picture(*size)
    engine = models.engine(name)
    [image] = encode(engine, [pixels])
    [theirs] = models.oracle(name).vision([pixels])
    assert image.features.shape == theirs.shape == (size[0] * size[1] // (PATCH * MERGE) ** 2, theirs.shape[1])
    relative = largest(image.features, theirs) / float(theirs.abs().max())
    where = f"{name}, {size[0]}x{size[1]}"
    assert differences.note("vision features, relative", relative, where, 1e-4) <= 1e-4


@pytest.mark.parametrize("name", WITH_VISION)
def test_pictures_do_not_see_each_other(models, name):
    """A picture has the same features alone, in a batch of equal sizes, and beside one of another size."""
    engine = models.engine(name)
    first, second = picture(64, 64, seed=1), picture(64, 64, seed=2)
    alone = [encode(engine, [p])[0].features for p in (first, second)]
    batch = engine.encode_image(torch.stack([first, second]), size=64, fit="keep")
    mixed = encode(engine, [picture(32, 128), first, second])[1:]
    for together in (batch, mixed):
        assert all(torch.equal(image.features, features) for image, features in zip(together, alone, strict=True))


# Text lengths and pictures by turns. Two pictures always have vision_end and vision_start between them.
grids = st.tuples(st.integers(1, 12), st.integers(1, 12))
sections = st.lists(st.tuples(st.integers(0, 20), grids), max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(sections=sections, tail=st.integers(0, 20))
def test_positions_equal_get_rope_index(models, sections, tail):
    from a3b_engine.model.positions import ImagePlace, mrope_positions

    ids: list[int] = []
    places = []
    for text, (rows, columns) in sections:
        ids += [*random_ids(text), token_id("<|vision_start|>")]
        places.append(ImagePlace(len(ids), rows, columns))
        ids += [*[token_id("<|image_pad|>")] * (rows * columns), token_id("<|vision_end|>")]
    ids += random_ids(tail)
    if not ids:
        return
    theirs, delta = models.oracle("base").positions(ids, [grid for _, grid in sections])
    ours, following = mrope_positions(len(ids), places)
    assert torch.equal(ours, theirs)
    assert following == len(ids) + delta
