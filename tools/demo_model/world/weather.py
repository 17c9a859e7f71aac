"""Rain, snow and fog, drawn over a picture or over what a window shows."""

from __future__ import annotations

import random

from PIL import Image

from .pen import FINE, Colour, Pen

RAIN = (198, 224, 252)
FLAKE = (255, 255, 255)


def draw_rain(image: Image.Image, dice: random.Random) -> None:
    """Slanted streaks."""
    pen, width, height = _sheet(image)
    lean = dice.choice((-1, 1)) * dice.uniform(6, 12)
    for _ in range(_amount(width, height)):
        x, y, size = dice.uniform(-10, width + 10), dice.uniform(-16, height), dice.uniform(0.7, 1.2)
        pen.stroke([(x, y), (x + lean * size, y + 27 * size)], RAIN, 2.4)


def draw_snow(image: Image.Image, dice: random.Random) -> None:
    """Round flakes."""
    pen, width, height = _sheet(image)
    for _ in range(_amount(width, height)):
        size = dice.uniform(2.4, 5)
        pen.oval(dice.uniform(0, width), dice.uniform(0, height), size, size, FLAKE)


def draw_fog(image: Image.Image, dice: random.Random, haze: Colour) -> None:
    """Pale banks, at 40, 55 and 70 hundredths of the height: behind the characters' heads."""
    pen, width, height = _sheet(image)
    for share in (0.4, 0.55, 0.7):
        y = height * share + dice.uniform(-12, 12)
        for number in range(-(-width // 96) + 1):
            x = number * 96 + dice.uniform(-24, 24)
            pen.oval(x, y + dice.uniform(-5, 5), dice.uniform(60, 90), dice.uniform(11, 17), haze)


def _sheet(image: Image.Image) -> tuple[Pen, int, int]:
    return Pen(image), image.width // FINE, image.height // FINE


def _amount(width: int, height: int) -> int:
    """How many drops or flakes: twice as dense in a window, which is all there is to see of the weather."""
    return width * height // (1700 if width > 300 else 850)
