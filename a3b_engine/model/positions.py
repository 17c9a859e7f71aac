"""Where tokens sit on the three rotary axes: text counts on, an image spreads over rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch


@dataclass(frozen=True)
class ImagePlace:
    """An image inside a token sequence: first token, and rows x columns of its merged patches."""

    start: int
    rows: int
    columns: int

    @property
    def length(self) -> int:
        return self.rows * self.columns


def mrope_positions(length: int, images: Sequence[ImagePlace]) -> tuple[torch.Tensor, int]:
    """Positions of a sequence with images.

    Text moves all three axes by one a token. An image at position s has T = s, H = s + row, W = s + column, and the
    text behind it goes on at s + max(rows, columns). Returns int64 [3, length] and the position of the next token.
    """
    parts: list[torch.Tensor] = []
    token, position = 0, 0
    for place in sorted(images, key=lambda p: p.start):
        text = torch.arange(place.start - token) + position
        parts.append(text.expand(3, -1))
        position += place.start - token
        grid = torch.zeros(3, place.rows, place.columns, dtype=torch.int64)
        grid[1] = torch.arange(place.rows)[:, None]
        grid[2] = torch.arange(place.columns)[None, :]
        parts.append(grid.flatten(1) + position)
        position += max(place.rows, place.columns)
        token = place.start + place.length
    parts.append((torch.arange(length - token) + position).expand(3, -1))
    return torch.cat(parts, dim=1), position + length - token
