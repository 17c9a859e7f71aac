"""Pictures of every kind to 8-bit RGB, sizes, and patch rows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from a3b_engine.errors import CheckpointError, ImageError
from a3b_engine.image import (
    MAX_ASPECT,
    ImageFeatures,
    ImageProcessorConfig,
    PreparedImage,
    prepare_picture,
    smart_resize,
    to_patches,
    to_pictures,
)

CONFIG = ImageProcessorConfig()
RELAXED = settings(max_examples=60, deadline=None, derandomize=True)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---- any picture to 8-bit RGB


@pytest.mark.parametrize("kind", ["torch", "numpy", "uint8", "float64"])
def test_values_survive_exactly(kind):
    rgb8 = noise(5, 7, 3)
    unit = rgb8.astype(np.float32) / 255
    value = {"torch": torch.from_numpy(unit), "numpy": unit, "uint8": rgb8, "float64": rgb8 / 255}[kind]
    [picture] = to_pictures(value)
    assert picture.dtype == np.uint8 and np.array_equal(picture, rgb8)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 0), (torch.bfloat16, 1)])
def test_half_precision_is_read(dtype, tolerance):
    rgb8 = noise(6, 6, 3)
    [picture] = to_pictures((torch.from_numpy(rgb8).float() / 255).to(dtype))
    assert np.abs(picture.astype(int) - rgb8).max() <= tolerance


def test_E01_opaque_alpha_changes_nothing():
    rgb8 = noise(1, 16, 16, 3)
    unit = torch.from_numpy(rgb8).float() / 255
    [picture] = to_pictures(torch.cat([unit, torch.ones(1, 16, 16, 1)], dim=-1))
    assert np.array_equal(picture, rgb8[0])
    [eight_bit] = to_pictures(np.concatenate([rgb8[0], np.full((16, 16, 1), 255, np.uint8)], axis=-1))
    assert np.array_equal(eight_bit, rgb8[0])


def test_alpha_is_composited_on_white():
    rgba = np.array([[[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]]], dtype=np.float32)
    [picture] = to_pictures(rgba)
    assert picture.tolist() == [[[255, 255, 255], [128, 128, 128]]]


def test_E03_every_picture_of_a_batch_is_used():
    rgb8 = noise(2, 8, 8, 3)
    pictures = to_pictures(torch.from_numpy(rgb8).float() / 255)
    assert len(pictures) == 2 and all(np.array_equal(a, b) for a, b in zip(pictures, rgb8))


def test_E05_picture_without_a_batch_axis():
    [picture] = to_pictures(torch.zeros(480, 640, 3))
    assert picture.shape == (480, 640, 3)


def test_grey_pictures():
    assert to_pictures(np.full((4, 6), 0.5, np.float32))[0].tolist() == np.full((4, 6, 3), 128).tolist()
    assert to_pictures(np.full((4, 6, 1), 1.0, np.float32))[0].shape == (4, 6, 3)
    assert to_pictures(np.ones((4, 6), bool))[0].min() == 255


def test_E06_sizes_may_differ():
    pictures = to_pictures([torch.zeros(1, 512, 512, 3), torch.zeros(1, 716, 1024, 3), (noise(3, 3, 3),)])
    assert [picture.shape[:2] for picture in pictures] == [(512, 512), (716, 1024), (3, 3)]
    grids = [prepare_picture(picture, CONFIG).grid for picture in pictures]
    assert grids == [(12, 12), (10, 14), (8, 8)]


def test_E11_values_out_of_range_are_clamped():
    ramp = torch.linspace(-0.5, 4.0, 64 * 64).reshape(1, 64, 64, 1).expand(1, 64, 64, 3)
    [picture] = to_pictures(ramp)
    flat = picture[..., 0].reshape(-1).astype(int)
    assert flat[0] == 0 and flat[-1] == 255 and (np.diff(flat) >= 0).all()


@pytest.mark.filterwarnings("error")
def test_nan_infinity_and_huge_values():
    values = np.array([[np.nan, np.inf, -np.inf, 1e300]])
    for dtype in (np.float16, np.float32, np.float64):
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        assert to_pictures(cast)[0][0, :, 0].tolist() == [0, 255, 0, 255]


def test_pil_pictures_are_turned_and_flattened():
    rgb8 = noise(4, 6, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned left: shown after a quarter turn to the right
    image = Image.fromarray(rgb8)
    image.info["exif"] = exif.tobytes()
    assert np.array_equal(to_pictures(image)[0], np.rot90(rgb8, -1))
    clear = Image.new("RGBA", (2, 3), (255, 0, 0, 0))
    assert to_pictures(clear)[0].tolist() == np.full((3, 2, 3), 255).tolist()
    assert to_pictures(Image.new("CMYK", (2, 2)))[0].shape == (2, 2, 3)
    deep = Image.fromarray(np.full((2, 2), 65535, np.uint16))
    assert to_pictures(deep)[0].min() == 255


@pytest.mark.parametrize(
    "value, words",
    [
        (torch.zeros(3, 64, 64), ["[3, 64, 64]", "[H, W, 3]"]),
        (torch.zeros(2, 3, 64, 64), ["[2, 3, 64, 64]", "move them to the end"]),
        (torch.zeros(4, 4, 2), ["[4, 4, 2]"]),
        (torch.zeros(1, 1, 4, 4, 3), ["[1, 1, 4, 4, 3]"]),
        (torch.zeros(8), ["[8]"]),
        (torch.zeros(0, 4, 4, 3), ["[0, 4, 4, 3]", "no pixels"]),
        (torch.zeros(4, 0, 3), ["no pixels"]),
        (np.zeros((4, 4, 3), np.int32), ["int32", "uint8"]),
        (np.zeros((4, 4, 3), complex), ["complex"]),
        ([], ["empty"]),
        ("picture.png", ["cannot be encoded"]),
        (None, ["cannot be encoded"]),
    ],
)
def test_E05_other_shapes_and_types_are_refused_with_the_expected_one(value, words):
    with pytest.raises(ImageError) as caught:
        to_pictures(value)
    for word in words:
        assert word in str(caught.value)


def test_strided_and_gradient_tensors():
    unit = torch.rand(8, 8, 3, requires_grad=True)
    assert np.array_equal(to_pictures(unit[::2].flip(1))[0], to_pictures(unit.detach().numpy()[::2, ::-1])[0])


# ---- sizes


@pytest.mark.parametrize(
    "height, width, grid",
    [
        (384, 384, (12, 12)),
        (1, 1, (8, 8)),
        (256, 256, (8, 8)),
        (1024, 1024, (12, 12)),
        (15420, 690, (56, 2)),
        (690, 15420, (2, 56)),
        (64, 64, (8, 8)),
        (MAX_ASPECT, 1, (114, 1)),
    ],
)
def test_E08_keep_has_a_bounded_token_count(height, width, grid):
    prepared = prepare_picture(np.zeros((height, width, 3), np.uint8), CONFIG)
    assert prepared.grid == grid and prepared.pixels.shape == (grid[0] * 32, grid[1] * 32, 3)
    assert min(prepared.pixels.shape[:2]) >= 32


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), size=st.sampled_from([64, 256, 384, 1024, 2048]))
@RELAXED
def test_smart_resize_keeps_its_bounds(height, width, size):
    least = min(65536, size * size)
    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(ImageError, match="too narrow"):
            smart_resize(height, width, 32, least, size * size)
        return
    rows, columns = smart_resize(height, width, 32, least, size * size)
    assert rows % 32 == columns % 32 == 0 and min(rows, columns) >= 32
    assert rows * columns <= size * size or min(rows, columns) == 32 or rows * columns < least * 2


def test_keep_leaves_a_picture_that_fits_untouched():
    picture = noise(384, 320, 3)
    assert np.array_equal(prepare_picture(picture, CONFIG).pixels, picture)


def test_letterbox_shows_the_whole_picture_on_grey():
    prepared = prepare_picture(np.full((100, 200, 3), 255, np.uint8), CONFIG, size=128, fit="letterbox")
    column = prepared.pixels[:, 64, 0].tolist()
    assert column == [128] * 32 + [255] * 64 + [128] * 32 and prepared.grid == (4, 4)
    thin = prepare_picture(np.full((1, 5000, 3), 255, np.uint8), CONFIG, size=128, fit="letterbox")
    assert (thin.pixels[:, 0, 0] == 255).sum() == 1


def test_crop_takes_the_middle_and_stretch_everything():
    picture = np.zeros((64, 128, 3), np.uint8)
    picture[:, 32:96] = 255
    assert prepare_picture(picture, CONFIG, size=64, fit="crop").pixels.min() == 255
    stretched = prepare_picture(picture, CONFIG, size=64, fit="stretch").pixels
    assert stretched.shape == (64, 64, 3) and stretched[0, 0, 0] == 0 and stretched[0, 32, 0] == 255


@pytest.mark.parametrize("size", [0, 32, 100, 2080, 384.0, "384", None, True])
def test_bad_sizes_are_named(size):
    with pytest.raises(ImageError, match="multiple of 32 from 64 to 2048"):
        prepare_picture(noise(8, 8, 3), CONFIG, size=size)


def test_bad_fit_and_aspect_are_named():
    with pytest.raises(ImageError, match="keep, letterbox, crop, stretch"):
        prepare_picture(noise(8, 8, 3), CONFIG, fit="zoom")
    with pytest.raises(ImageError, match="1000 x 4 pixels is too narrow.*200 times"):
        prepare_picture(noise(4, 1000, 3), CONFIG)


def test_a_vision_config_gives_the_factor_too():
    config = SimpleNamespace(patch_size=16, spatial_merge_size=2)
    assert prepare_picture(noise(384, 384, 3), config).grid == (12, 12)


# ---- patches and configuration


def test_patch_rows_have_the_documented_order():
    """Each pixel carries its own address, so a wrong permutation cannot hide."""
    rows, columns = np.meshgrid(np.arange(64), np.arange(96), indexing="ij")
    pixels = np.stack([rows, columns, rows ^ columns], axis=-1).astype(np.uint8)
    patches = to_patches(PreparedImage(pixels, (2, 3)), CONFIG)
    assert patches.shape == (4 * 6, 1536) and patches.dtype == torch.float32
    expected = []
    for block_row in range(2):
        for block_column in range(3):
            for inner_row in range(2):
                for inner_column in range(2):
                    top, left = 32 * block_row + 16 * inner_row, 32 * block_column + 16 * inner_column
                    square = pixels[top : top + 16, left : left + 16].transpose(2, 0, 1)
                    expected.append(np.repeat(square[:, None], 2, axis=1).reshape(-1))
    expected = (torch.from_numpy(np.stack(expected)).float() / 255 - 0.5) / 0.5
    assert torch.equal(patches, expected)


def test_features_count_their_tokens():
    features = ImageFeatures(torch.zeros(6, 8), (2, 3), np.zeros((64, 96, 3), np.uint8), "tower")
    assert features.n_tokens == 6


def write(folder, data):
    (folder / "preprocessor_config.json").write_text(json.dumps(data), encoding="utf-8")


def test_F24_pixel_limits_without_a_size_entry(tmp_path):
    write(tmp_path, {"min_pixels": 4096, "max_pixels": 1000000})
    config = ImageProcessorConfig.from_folder(tmp_path)
    assert (config.min_pixels, config.max_pixels) == (4096, 1000000)
    assert config.image_mean == (0.5, 0.5, 0.5) and config.factor == 32
    assert prepare_picture(noise(64, 64, 3), config).grid == (2, 2)


def test_F24_absent_file_or_keys_mean_the_published_values(tmp_path):
    assert ImageProcessorConfig.from_folder(tmp_path) == CONFIG
    write(tmp_path, {})
    assert ImageProcessorConfig.from_folder(tmp_path) == CONFIG
    write(tmp_path, {"size": {"shortest_edge": 100, "longest_edge": 200}, "min_pixels": 1, "patch_size": 14})
    config = ImageProcessorConfig.from_folder(tmp_path)
    assert (config.min_pixels, config.max_pixels, config.patch_size) == (100, 200, 14)


@pytest.mark.parametrize(
    "data, word",
    [
        ([], "preprocessor_config.json holds a JSON list"),
        ({"patch_size": "16"}, "patch_size"),
        ({"merge_size": 0}, "merge_size"),
        ({"size": {"longest_edge": True}}, "max_pixels"),
        ({"min_pixels": 10, "max_pixels": 9}, "larger than"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"image_mean": "0.5"}, "image_mean"),
    ],
)
def test_broken_configuration_names_the_key(tmp_path, data, word):
    write(tmp_path, data)
    with pytest.raises(CheckpointError, match=word):
        ImageProcessorConfig.from_folder(tmp_path)


def test_a_prepared_picture_has_its_own_writable_memory():
    picture = noise(384, 384, 3)
    shown = picture.copy()
    prepared = prepare_picture(to_pictures(picture)[0], CONFIG)
    picture[:] = 0
    assert np.array_equal(prepared.pixels, shown)
    assert prepare_picture(to_pictures(Image.new("RGB", (384, 384)))[0], CONFIG).pixels.flags.writeable


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV", "LA", "PA", "RGBa", "La"])
def test_every_eight_bit_mode_of_pillow_is_read(mode):
    assert to_pictures(Image.new(mode, (3, 2)))[0].shape == (2, 3, 3)


def test_tensors_that_numpy_cannot_hold():
    assert to_pictures(torch.ones(4, 4, 3).to(torch.float8_e4m3fn))[0].min() == 255
    for bad in (torch.rand(4, 4).to_sparse(), torch.rand(4, 4, 3, device="meta")):
        with pytest.raises(ImageError, match="cannot be encoded"):
            to_pictures(bad)
