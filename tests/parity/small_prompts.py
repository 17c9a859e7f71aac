"""Prompts for the small models: token ids and pictures of many layouts, reproducible from their names."""

from __future__ import annotations

import math
import zlib

import torch
from small_models import BASE_TOKENS, MERGE, PATCH, SHAPES, generator, token_id


def picture(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """uint8 [height, width, 3]: a smooth gradient with noise; both sides multiples of 32, so nothing is resized."""
    rng = generator("picture", height, width, seed)
    ramp = torch.linspace(0, 160, height)[:, None, None] * torch.rand(3, generator=rng)
    ramp = ramp + torch.linspace(0, 90, width)[None, :, None] * torch.rand(3, generator=rng)
    return (ramp + torch.rand(height, width, 3, generator=rng) * 60).clamp(0, 255).to(torch.uint8)


def random_ids(length: int, *seed: object) -> list[int]:
    """Ordinary token ids (no control token), reproducible from the seed."""
    return torch.randint(0, BASE_TOKENS, (length,), generator=generator("ids", length, *seed)).tolist()


def with_images(parts: list[list[int] | torch.Tensor]) -> list[int]:
    """Token ids of a prompt whose pictures stand between vision_start and vision_end, pads expanded."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            rows, columns = merged_grid(part)
            pads = [token_id("<|image_pad|>")] * (rows * columns)
            ids += [token_id("<|vision_start|>"), *pads, token_id("<|vision_end|>")]
        else:
            ids += part
    return ids


def merged_grid(picture: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of image tokens of a uint8 [H, W, 3] picture that needs no resize."""
    return picture.shape[0] // (PATCH * MERGE), picture.shape[1] // (PATCH * MERGE)


def encoder_size(picture: torch.Tensor) -> int:
    """A `size` for `encode_image(fit="keep")` that leaves the picture as it is.

    "keep" holds the area between min(65536, size^2) and size^2, so a small picture has to have the area of a square.
    """
    area = picture.shape[0] * picture.shape[1]
    side = 32 * math.ceil(math.sqrt(area) / 32)
    if area < 65536 and side * side != area:
        raise ValueError(f"a picture of {tuple(picture.shape)} would be resized: choose one with the area of a square")
    return side


# Prompt layouts: lists of text lengths and (height, width) pictures. None of the pictures needs a resize.
LAYOUTS: dict[str, list[int | tuple[int, int]]] = {
    "text": [70],
    "one image": [6, (64, 64), 9],
    "two images": [4, (64, 64), 13, (64, 64), 7],
    "wide image": [5, (32, 128), 8],
    "tall image": [5, (288, 32), 8],
    "large image": [3, (224, 384), 10],
    "mixed images": [2, (128, 32), 3, (96, 384), 1, (64, 64), 5],
    "image first": [(64, 256), 6],
    "image last": [7, (64, 64)],
}
TEXT_LAYOUTS = ("text",)


def prompt(name: str, layout: str) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids and pictures of a layout; the text and the pixels differ from model to model."""
    parts: list[list[int] | torch.Tensor] = []
    for index, part in enumerate(LAYOUTS[layout]):
        if isinstance(part, tuple):
            parts.append(picture(*part, seed=zlib.crc32(f"{name}/{layout}/{index}".encode())))
        else:
            parts.append(random_ids(part, name, layout, index))
    return with_images(parts), [part for part in parts if isinstance(part, torch.Tensor)]


def layouts(name: str) -> tuple[str, ...]:
    """The layouts a model can take."""
    return tuple(LAYOUTS) if SHAPES[name]["vision"] else TEXT_LAYOUTS
