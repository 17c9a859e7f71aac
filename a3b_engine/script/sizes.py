"""Picture sizes from the shot and the family of the image model: width and height, multiples of 64."""

from __future__ import annotations

import math

from ..errors import ScriptError

STEP = 64
# Area in pixels the models of a family were trained at.
SIZE_FAMILIES: dict[str, int] = {
    "sd15": 512 * 512,
    "sd21": 768 * 768,
    "sdxl": 1024 * 1024,
    "flux": 1024 * 1024,
    "sd3": 1024 * 1024,
    "qwen_image": 1328 * 1328,
    "flux_2mp": 1408 * 1408,
}
# Width to height. A face fills an upright panel, a body a tall one, a place a broad one; the ratios are those of the
# published SDXL size buckets, so that `sdxl` gives exactly these buckets.
SHOT_RATIOS: dict[str, float] = {
    "extreme_close": 1152 / 896,
    "close": 896 / 1152,
    "medium": 1.0,
    "full": 832 / 1216,
    "wide": 1216 / 832,
    "establishing": 1344 / 768,
    "over_shoulder": 1152 / 896,
    "pov": 1152 / 896,
}


def panel_size(shot: str, family: str = "sdxl") -> tuple[int, int]:
    """(width, height) for a shot; both multiples of 64, the area near the family's. Raises ScriptError."""
    if family not in SIZE_FAMILIES:
        raise ScriptError(f"size_family: {family!r} is not known. Use one of {', '.join(SIZE_FAMILIES)}.")
    area, ratio = SIZE_FAMILIES[family], SHOT_RATIOS[shot]
    width = math.sqrt(area * ratio)
    return _step(width), _step(width / ratio)


def _step(length: float) -> int:
    return max(STEP, STEP * round(length / STEP))
