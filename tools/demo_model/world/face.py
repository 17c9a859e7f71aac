"""Faces: five expressions, each told by eyes, brows, mouth and a sign beside them, large enough for 16 pixel patches."""

from __future__ import annotations

from .pen import Pen

INK = (28, 22, 34)
WHITE = (255, 255, 255)
MOUTH = (196, 50, 66)
TEAR = (70, 150, 245)
RAGE = (225, 30, 30)


def draw_face(pen: Pen, expression: str) -> None:
    """Eyes and mouth on a light face patch of about 68 x 60 units around the origin."""
    _FACES[expression](pen)


def _happy(pen: Pen) -> None:
    for side in (-1, 1):
        pen.bow(15 * side, -3, 9, 10, 180, 360, INK, 5)
        pen.oval(25 * side, 9, 6.5, 4.5, (255, 150, 150), outline=False)
    pen.slice(0, 5, 19, 21, 0, 180, INK)
    pen.slice(0, 7, 15, 16, 0, 180, MOUTH)
    pen.slice(0, 6, 15, 7, 0, 180, WHITE)


def _sad(pen: Pen) -> None:
    for side in (-1, 1):
        pen.oval(15 * side, -3, 6, 7, INK, outline=False)
        pen.stroke([(8 * side, -21), (25 * side, -12)], INK, 4.5)
        pen.shape([(18 * side, 3), (11.5 * side, 18), (24.5 * side, 18)], TEAR, outline=False)
        pen.oval(18 * side, 19, 6.5, 7, TEAR, outline=False)
    pen.bow(0, 27, 11, 11, 200, 340, INK, 5)


def _angry(pen: Pen) -> None:
    for side in (-1, 1):
        pen.oval(15 * side, -2, 6, 6, INK, outline=False)
        pen.shape([(2 * side, -8), (27 * side, -22), (28 * side, -14), (4 * side, -1)], INK, outline=False)
    pen.block(0, 18, 17, 7.5, INK, outline=False)
    pen.shape([(-14, 13), (-7, 22), (0, 13), (7, 22), (14, 13)], WHITE, outline=False)
    for dx, dy in ((-6, -6), (6, -6), (-6, 6), (6, 6)):  # the cross of anger at the temple
        pen.stroke([(34 + dx * 1.5, -24 + dy * 0.5), (34 + dx * 0.5, -24 + dy * 0.5), (34 + dx * 0.5, -24 + dy * 1.5)], RAGE, 4)


def _surprised(pen: Pen) -> None:
    for side in (-1, 1):
        pen.oval(15 * side, -5, 12, 13, INK, outline=False)
        pen.oval(15 * side, -5, 9, 10, WHITE, outline=False)
        pen.oval(15 * side, -5, 3.5, 4, INK, outline=False)
    pen.oval(0, 20, 8.5, 10.5, INK, outline=False)
    pen.oval(0, 22, 5, 6.5, MOUTH, outline=False)


def _calm(pen: Pen) -> None:
    for side in (-1, 1):
        pen.bow(15 * side, -7, 9, 7, 10, 170, INK, 4.5)
    pen.stroke([(-8, 17), (8, 17)], INK, 4.5)


_FACES = {"happy": _happy, "sad": _sad, "angry": _angry, "surprised": _surprised, "calm": _calm}
