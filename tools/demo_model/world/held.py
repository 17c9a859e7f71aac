"""Things a character holds: eight outlines, each about 44 units wide, in colours that do not depend on the holder."""

from __future__ import annotations

import random

from .pen import Pen

INK = (34, 28, 40)
WOOD = (126, 82, 48)
WHITE = (252, 252, 250)


def draw_prop(pen: Pen, prop: str, dice: random.Random) -> None:
    """Draw `prop` in the character's hand, at its right or left by the pen's side."""
    ink, width = pen.ink, pen.line_width
    pen.ink, pen.line_width = INK, 2.4
    x, y = pen.x, pen.y
    pen.x += (-44 if pen.flip else 44) * pen.scale
    pen.y += (90 + dice.uniform(-4, 4)) * pen.scale
    _PROPS[prop](pen)
    pen.ink, pen.line_width, pen.x, pen.y = ink, width, x, y


def _umbrella(pen: Pen) -> None:
    pen.stroke([(0, -34), (0, 30), (-8, 34), (-12, 28)], WOOD, 4)
    pen.shape([(-27, -20), (-22, -36), (-10, -46), (0, -49), (10, -46), (22, -36), (27, -20)], (0, 168, 168))
    pen.shape([(-9, -20), (-5, -40), (0, -48), (5, -40), (9, -20)], WHITE, outline=False)


def _book(pen: Pen) -> None:
    pen.shape([(-24, -14), (0, -7), (24, -14), (24, 18), (0, 25), (-24, 18)], (150, 90, 50))
    for side in (-1, 1):
        pen.shape([(0, -5), (21 * side, -12), (21 * side, 13), (0, 20)], WHITE)
        for y in (-4, 3, 10):
            pen.stroke([(4 * side, y), (17 * side, y - 4)], (120, 120, 130), 2)


def _lantern(pen: Pen) -> None:
    pen.bow(0, -22, 9, 10, 180, 360, INK, 3.5)
    pen.block(0, -20, 12, 4, (90, 60, 40))
    pen.oval(0, 3, 19, 20, (255, 208, 60))
    pen.oval(0, 3, 9, 13, (255, 246, 190), outline=False)
    pen.block(0, 24, 12, 4, (90, 60, 40))


def _balloon(pen: Pen) -> None:
    pen.stroke([(0, 30), (3, 10), (-2, -10), (0, -24)], INK, 2.4)
    pen.oval(0, -44, 19, 23, (232, 40, 130))
    pen.oval(-7, -52, 5, 7, (255, 190, 220), outline=False)
    pen.shape([(-5, -18), (5, -18), (0, -24)], (232, 40, 130))


def _flower(pen: Pen) -> None:
    pen.stroke([(0, 34), (0, -10)], (46, 140, 60), 5)
    pen.shape([(0, 24), (16, 10), (14, 24)], (46, 140, 60), outline=False)
    for dx, dy in ((0, -13), (12, -5), (8, 10), (-8, 10), (-12, -5)):
        pen.oval(dx, -14 + dy, 8.5, 8.5, WHITE)
    pen.oval(0, -14, 8, 8, (250, 180, 30))


def _ball(pen: Pen) -> None:
    pen.oval(0, 6, 22, 22, WHITE)
    for start, fill in ((20, (230, 60, 50)), (140, (40, 110, 220)), (260, (250, 205, 50))):
        pen.slice(0, 6, 20, 20, start, start + 80, fill)
    pen.oval(0, 6, 5, 5, WHITE)


def _flag(pen: Pen) -> None:
    pen.stroke([(-10, 36), (-10, -46)], WOOD, 5)
    pen.shape([(-8, -46), (28, -40), (28, -12), (-8, -16)], WHITE)
    pen.shape([(-7, -36), (27, -31), (27, -22), (-7, -27)], (226, 48, 48), outline=False)


def _gift(pen: Pen) -> None:
    pen.block(0, 10, 21, 18, (120, 206, 240))
    pen.block(0, 10, 4.5, 18, (226, 48, 60), outline=False)
    pen.block(0, 10, 21, 4.5, (226, 48, 60), outline=False)
    for side in (-1, 1):
        pen.shape([(0, -9), (16 * side, -22), (18 * side, -8)], (226, 48, 60))


_PROPS = {
    "umbrella": _umbrella, "book": _book, "lantern": _lantern, "balloon": _balloon,
    "flower": _flower, "ball": _ball, "flag": _flag, "gift": _gift,
}  # fmt: skip
