"""Things that stand about and mean nothing: no fact speaks of them, so a reader must learn to pass over them."""

from __future__ import annotations

import random

from PIL import Image

from .backdrop import HORIZON, Backdrop
from .pen import SIZE, Pen


def draw_clutter(image: Image.Image, air: Backdrop, dice: random.Random) -> None:
    """Up to three of them on the ground, behind the characters."""
    for _ in range(dice.randint(0, 3)):
        pen = Pen(image, dice.uniform(16, SIZE - 16), dice.uniform(HORIZON + 34, HORIZON + 66), dice.uniform(0.7, 1.2))
        dice.choice((_bush, _stone, _crate, _barrel, _sign))(pen, air)


def _bush(pen: Pen, air: Backdrop) -> None:
    green = air.tone((84, 138, 76))
    for x, y, size in ((-16, -8, 14), (16, -8, 14), (0, -16, 18)):
        pen.oval(x, y, size, size * 0.85, green)


def _stone(pen: Pen, air: Backdrop) -> None:
    pen.shape([(-22, 0), (-16, -14), (0, -19), (15, -12), (21, 0)], air.tone((146, 142, 146)))
    pen.shape([(0, -19), (15, -12), (21, 0), (4, 0)], air.tone((120, 116, 124)))


def _crate(pen: Pen, air: Backdrop) -> None:
    wood, line = air.tone((172, 130, 84)), air.tone((122, 86, 52))
    pen.block(0, -16, 17, 16, wood)
    pen.stroke([(-16, -31), (16, -1)], line, 4)
    pen.stroke([(-16, -31), (16, -31), (16, -1), (-16, -1), (-16, -31)], line, 4)


def _barrel(pen: Pen, air: Backdrop) -> None:
    pen.oval(0, -18, 16, 20, air.tone((150, 106, 70)))
    for y in (-26, -10):
        pen.block(0, y, 15, 2, air.tone((96, 92, 96)))


def _sign(pen: Pen, air: Backdrop) -> None:
    pen.block(0, -16, 3, 18, air.tone((122, 86, 52)))
    pen.shape([(-20, -46), (14, -46), (24, -37), (14, -28), (-20, -28)], air.tone((206, 178, 136)))
