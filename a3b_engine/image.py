"""Pictures as the vision tower wants them: 8-bit RGB, resized, cut into rows of patches.

Resizing goes through Pillow's bicubic filter (support widened when shrinking, rounded to 8 bits after each pass). This is
the published processor's Pillow form bit for bit; its torchvision form rounds filter weights more coarsely and differs
from both by a third of an 8-bit level on average on pure noise, by 19 levels in the worst pixel seen. OpenCV's cubic and
area filters differ by 4 to 40 levels on average there and are therefore not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CheckpointError, ImageError
from .tokenizer import MAX_CONFIG_BYTES, read_json

if TYPE_CHECKING:
    import torch

FITS = ("keep", "letterbox", "crop", "stretch")
MIN_SIZE, MAX_SIZE = 64, 2048
MAX_ASPECT = 200
MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
_MID_GREY = 128
_EXPECTED = "expected [H, W, 3], a batch [B, H, W, 3], with 1 or 4 channels instead of 3, or [H, W]"


@dataclass(frozen=True)
class ImageProcessorConfig:
    """What `preprocessor_config.json` says; the defaults are those of the published Qwen3.5 file."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    @property
    def factor(self) -> int:
        """Height and width of a prepared picture are multiples of this many pixels; one such square is one token."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_folder(cls, folder: str | Path) -> ImageProcessorConfig:
        """Read `preprocessor_config.json`. An absent file, or absent keys, mean the published defaults.

        Pixel limits are taken from `size.shortest_edge` / `size.longest_edge`, else from `min_pixels` / `max_pixels`.
        Raises CheckpointError naming the key for values that cannot be used.
        """
        path = Path(folder) / "preprocessor_config.json"
        if not path.is_file():
            return cls()
        data = read_json(path, MAX_CONFIG_BYTES)
        size = data.get("size") if isinstance(data.get("size"), dict) else {}
        values: dict[str, Any] = {
            name: _whole(path, name, data.get(name), getattr(cls, name))
            for name in ("patch_size", "temporal_patch_size", "merge_size")
        }
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            values[name] = _whole(path, name, size.get(edge, data.get(name)), getattr(cls, name))
        if values["min_pixels"] > values["max_pixels"]:
            raise CheckpointError(
                f"{path}: the smallest picture ({values['min_pixels']} pixels) is larger than the largest "
                f"({values['max_pixels']} pixels). Restore the published file."
            )
        for name in ("image_mean", "image_std"):
            values[name] = _triple(path, name, data.get(name), getattr(cls, name))
        if min(values["image_std"]) <= 0:
            raise CheckpointError(f"{path}: image_std must be above 0, found {list(values['image_std'])}.")
        return cls(**values)


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """pixels: uint8 [H, W, 3], H and W multiples of the factor. grid: tokens as (rows, columns)."""

    pixels: np.ndarray
    grid: tuple[int, int]

    @property
    def n_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """One encoded picture.

    features: float tensor [n_tokens, hidden] on the CPU. grid: (rows, columns) of tokens. picture: the prepared picture,
    uint8 [H, W, 3]. source: fingerprint of the vision tower that made the features.
    """

    features: torch.Tensor
    grid: tuple[int, int]
    picture: np.ndarray
    source: str

    @property
    def n_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


# ---- any picture to 8-bit RGB -----------------------------------------------------------------------------------


def to_pictures(rgb: Any) -> list[np.ndarray]:
    """Every picture in `rgb` as uint8 [H, W, 3].

    rgb: torch tensor or numpy array [H, W], [H, W, C] or [B, H, W, C] with C of 1, 3 or 4; floats (any precision) are 0..1,
    8-bit integers 0..255; or a PIL image; or a list of these, of any sizes. Values out of range are clamped, NaN becomes
    black, a fourth channel is alpha over white. Raises ImageError with the shape found and the shape expected.
    """
    if isinstance(rgb, (list, tuple)):
        pictures = [picture for item in rgb for picture in to_pictures(item)]
        if not pictures:
            raise ImageError("The list of images is empty; connect at least one image.")
        return pictures
    if hasattr(rgb, "getbands"):  # a PIL image, recognised without importing Pillow
        return [_from_pil(rgb)]
    array = _to_array(rgb)
    if array.ndim == 2:
        array = array[None, :, :, None]
    elif array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4):
        hint = ""
        if array.ndim == 4 and array.shape[1] in (1, 3, 4):
            hint = " The channels stand before height and width: move them to the end."
        raise ImageError(f"An image of shape {list(np.shape(rgb))} cannot be encoded: {_EXPECTED}.{hint}")
    if 0 in array.shape:
        raise ImageError(f"An image of shape {list(np.shape(rgb))} holds no pixels: {_EXPECTED}.")
    return [_to_rgb8(picture) for picture in array]


def _to_array(rgb: Any) -> np.ndarray:
    if hasattr(rgb, "detach"):  # a torch tensor
        if str(rgb.layout) != "torch.strided" or rgb.is_meta:
            raise ImageError(f"An image tensor of layout {rgb.layout} on {rgb.device} cannot be encoded: {_EXPECTED}, dense and with its values.")
        tensor = rgb.detach().cpu()
        # numpy has no bfloat16 or float8; other float types are converted picture by picture later.
        rgb = (tensor.float() if str(tensor.dtype).startswith(("torch.bfloat16", "torch.float8")) else tensor).numpy()
    array = np.asarray(rgb)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ImageError(
            f"An image of type {array.dtype} cannot be encoded: expected floats from 0 to 1 or 8-bit integers (uint8)."
        )
    return array


def _to_rgb8(picture: np.ndarray) -> np.ndarray:
    """[H, W, 1 | 3 | 4] float or uint8 -> uint8 [H, W, 3]."""
    if picture.dtype == np.uint8 and picture.shape[-1] != 4:
        rgb8 = picture
    else:
        if picture.dtype == np.uint8:
            unit = picture.astype(np.float32) / np.float32(255)
        else:  # clamped in its own type first, so that nothing overflows on the way to float32
            unit = np.nan_to_num(picture, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1).astype(np.float32)
        if unit.shape[-1] == 4:
            alpha = unit[..., 3:]
            unit = unit[..., :3] * alpha + (1 - alpha)
        rgb8 = np.rint(unit * np.float32(255)).astype(np.uint8)
    if rgb8.shape[-1] == 1:
        rgb8 = np.repeat(rgb8, 3, axis=-1)
    return np.ascontiguousarray(rgb8)


def _from_pil(image: Any) -> np.ndarray:
    from PIL import ImageOps

    if 0 in image.size:
        raise ImageError(f"A picture of {image.size[0]} x {image.size[1]} pixels holds nothing to encode.")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return _to_rgb8((np.asarray(image).astype(np.float32) / 65535)[..., None])
    if image.mode in ("I", "F"):
        raise ImageError(f"A picture of Pillow mode {image.mode!r} has no fixed range; convert it to 'RGB' first.")
    if image.mode == "La":
        image = image.convert("LA")  # the only way Pillow knows out of this mode
    transparent = image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info
    return _to_rgb8(np.asarray(image.convert("RGBA" if transparent else "RGB")))


# ---- size -------------------------------------------------------------------------------------------------------


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width, multiples of `factor`, nearest to the given shape with the area inside the limits.

    The published rule, including Python's rounding of halves to even; a side never falls below `factor`, so a very narrow
    picture may exceed `max_pixels`. Raises ImageError where one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageError(
            f"A picture of {width} x {height} pixels is too narrow: one side may be at most {MAX_ASPECT} times the other. "
            "Crop it, or choose the fit 'letterbox' or 'crop'."
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def prepare_picture(picture: np.ndarray, config: Any, size: int = 384, fit: str = "keep") -> PreparedImage:
    """Bring one uint8 [H, W, 3] picture to the size the vision tower reads.

    config: ImageProcessorConfig or VisionConfig. size: side of the square, a multiple of the factor from 64 to 2048; the
    area size x size is the most a picture takes with "keep". fit: "keep" keeps the shape (nearly: sides are rounded to the
    factor) and leaves a picture that fits alone; "letterbox" puts the whole picture in the middle of a grey square; "crop"
    takes the square in the middle; "stretch" forces the square. Raises ImageError naming the value.
    """
    factor = _factor(config)
    if isinstance(size, bool) or not isinstance(size, int) or not MIN_SIZE <= size <= MAX_SIZE or size % factor:
        raise ImageError(f"size is {size!r}; it must be a multiple of {factor} from {MIN_SIZE} to {MAX_SIZE}.")
    height, width = picture.shape[:2]
    if fit == "keep":
        most = min(size * size, getattr(config, "max_pixels", MAX_PIXELS))
        least = min(getattr(config, "min_pixels", MIN_PIXELS), most)
        pixels = _resize(picture, *smart_resize(height, width, factor, least, most))
    elif fit == "letterbox":
        pixels = _letterbox(picture, size)
    elif fit == "crop":
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        pixels = _resize(picture[top : top + side, left : left + side], size, size)
    elif fit == "stretch":
        pixels = _resize(picture, size, size)
    else:
        raise ImageError(f"fit is {fit!r}; it must be one of {', '.join(FITS)}.")
    return PreparedImage(pixels, (pixels.shape[0] // factor, pixels.shape[1] // factor))


def _letterbox(picture: np.ndarray, size: int) -> np.ndarray:
    scale = size / max(picture.shape[:2])
    height, width = (max(1, min(size, round(side * scale))) for side in picture.shape[:2])
    square = np.full((size, size, 3), _MID_GREY, dtype=np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    square[top : top + height, left : left + width] = _resize(picture, height, width)
    return square


def _resize(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    if picture.shape[:2] == (height, width):
        return np.array(picture, order="C")  # its own memory: the caller may go on writing to his
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(picture))
    return np.array(image.resize((width, height), Image.Resampling.BICUBIC))


# ---- patches ----------------------------------------------------------------------------------------------------


def to_patches(prepared: PreparedImage, config: ImageProcessorConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """Rows for the patch embedding on `device`: float32 [H/P * W/P, 3 * T * P * P], values (x/255 - mean) / std.

    Row order: row-major over the merge blocks, then inside the block; a row is channels, frames (the still picture
    repeated T times), patch rows, patch columns. This is the order of the published processor.
    """
    import torch

    patch, frames, merge = config.patch_size, config.temporal_patch_size, config.merge_size
    height, width = prepared.pixels.shape[:2]
    mean, std = (torch.tensor(values, dtype=torch.float32).to(device) for values in (config.image_mean, config.image_std))
    # Bytes travel to the device, not the eight times as many that they become there.
    pixels = torch.from_numpy(np.ascontiguousarray(prepared.pixels)).to(device)
    unit = (pixels.to(torch.float32) / 255 - mean) / std
    blocks = unit.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    rows = blocks.permute(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row and column inside, channel, y, x
    rows = rows.unsqueeze(5).expand(*rows.shape[:5], frames, patch, patch)
    return rows.reshape((height // patch) * (width // patch), 3 * frames * patch * patch)


def _factor(config: Any) -> int:
    """Pixels a token covers on each side, from an ImageProcessorConfig or a VisionConfig."""
    merge = config.merge_size if hasattr(config, "merge_size") else config.spatial_merge_size
    return config.patch_size * merge


def _whole(path: Path, key: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
        raise CheckpointError(
            f"{path}: {key} must be a whole number above 0, found {value!r}. Restore the published file."
        )
    return value


def _triple(path: Path, key: str, value: Any, default: tuple[float, float, float]) -> tuple[float, float, float]:
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3 or not all(_is_number(number) for number in value):
        raise CheckpointError(f"{path}: {key} must be three numbers, found {value!r}. Restore the published file.")
    return tuple(float(number) for number in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
