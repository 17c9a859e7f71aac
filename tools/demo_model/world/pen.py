"""A pen for Pillow in picture coordinates, and colour arithmetic."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

SIZE = 384
FINE = 2  # everything is drawn this much larger and scaled down once, which smooths all edges

Colour = tuple[int, int, int]


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """`share` 0: the first colour, 1: the second."""
    return tuple(round(a + (b - a) * share) for a, b in zip(first, second))


def jitter(colour: Colour, dice: random.Random, reach: int) -> Colour:
    """The colour with each channel moved by at most `reach`."""
    return tuple(min(255, max(0, value + dice.randint(-reach, reach))) for value in colour)


class Pen:
    """Draws around an origin, at a scale, maybe mirrored. `ink` None: shapes without outline."""

    def __init__(self, image: Image.Image, x: float = 0, y: float = 0, scale: float = 1, flip: bool = False) -> None:
        self._draw = ImageDraw.Draw(image)
        self.x, self.y, self.scale, self.flip = x, y, scale, flip
        self.ink: Colour | None = None
        self.line_width = 3.0

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return (self.x + (-x if self.flip else x) * self.scale) * FINE, (self.y + y * self.scale) * FINE

    def _box(self, x: float, y: float, rx: float, ry: float, grow: float) -> list[float]:
        cx, cy = self._at(x, y)
        rx, ry = rx * self.scale * FINE + grow, ry * self.scale * FINE + grow
        return [cx - rx, cy - ry, cx + rx, cy + ry]

    def oval(self, x: float, y: float, rx: float, ry: float, fill: Colour, outline: bool = True) -> None:
        """An ellipse by its centre and radii."""
        if outline and self.ink:
            self._draw.ellipse(self._box(x, y, rx, ry, self.line_width * FINE / 2), fill=self.ink)
            self._draw.ellipse(self._box(x, y, rx, ry, -self.line_width * FINE / 2), fill=fill)
        else:
            self._draw.ellipse(self._box(x, y, rx, ry, 0), fill=fill)

    def block(self, x: float, y: float, rx: float, ry: float, fill: Colour, outline: bool = True) -> None:
        """A rectangle by its centre and half sizes."""
        if outline and self.ink:
            self._draw.rectangle(self._box(x, y, rx, ry, self.line_width * FINE / 2), fill=self.ink)
            self._draw.rectangle(self._box(x, y, rx, ry, -self.line_width * FINE / 2), fill=fill)
        else:
            self._draw.rectangle(self._box(x, y, rx, ry, 0), fill=fill)

    def shape(self, points: list[tuple[float, float]], fill: Colour, outline: bool = True) -> None:
        """A polygon."""
        spots = [self._at(x, y) for x, y in points]
        self._draw.polygon(spots, fill=fill)
        if outline and self.ink:
            self._draw.line([*spots, *spots[:2]], fill=self.ink, width=round(self.line_width * FINE), joint="curve")

    def stroke(self, points: list[tuple[float, float]], colour: Colour, width: float) -> None:
        """A line through points; `width` scales with the figure."""
        spots = [self._at(x, y) for x, y in points]
        self._draw.line(spots, fill=colour, width=max(1, round(width * self.scale * FINE)), joint="curve")

    def limb(self, points: list[tuple[float, float]], colour: Colour, width: float) -> None:
        """A thick line with an outline."""
        if self.ink:
            self.stroke(points, self.ink, width + 2 * self.line_width / self.scale)
        self.stroke(points, colour, width)

    def bow(self, x: float, y: float, rx: float, ry: float, start: float, end: float, colour: Colour, width: float) -> None:
        """Part of an ellipse's rim, angles in degrees clockwise from the right; never mirrored."""
        self._draw.arc(self._box(x, y, rx, ry, 0), start, end, fill=colour, width=max(1, round(width * self.scale * FINE)))

    def slice(self, x: float, y: float, rx: float, ry: float, start: float, end: float, fill: Colour) -> None:
        """A filled part of an ellipse, cut straight. Same angles as `bow`."""
        self._draw.chord(self._box(x, y, rx, ry, 0), start, end, fill=fill)
