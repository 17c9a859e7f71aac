"""The picture of a scene: 384 x 384, drawn with Pillow, a pure function of the scene."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from .backdrop import Backdrop, draw_place
from .clutter import draw_clutter
from .figure import draw_person
from .held import draw_prop
from .pen import FINE, SIZE
from .scene import Scene

_COLUMNS = {"left": 70, "middle": 192, "right": 314}


def draw(scene: Scene) -> np.ndarray:
    """uint8 [384, 384, 3], RGB."""
    return np.asarray(draw_image(scene))


def draw_image(scene: Scene) -> Image.Image:
    """The same as a Pillow image.

    Every part of the picture has its own dice, so that two scenes that differ in one trait have pictures that differ
    there only.
    """
    image = Image.new("RGB", (SIZE * FINE, SIZE * FINE))
    indoors = scene.place == "room"
    air = Backdrop(scene.time, scene.weather, _dice(scene, 1), _dice(scene, 2))
    draw_place(image, scene.place, air)
    draw_clutter(image, air, _dice(scene, 0))
    if not indoors:
        air.behind(image)
    flip = _dice(scene, 6).random() < 0.5  # one side for all, so that two props never lie on each other
    pens = []
    for person in scene.by_position():
        dice = _dice(scene, 3 + scene.people.index(person))
        size = dice.uniform(0.92, 1.18 if len(scene.people) == 1 else 1.04)
        x = SIZE / 2 + (_COLUMNS[person.position] - SIZE / 2) * (1 - max(0.0, size - 1)) + dice.uniform(-9, 9)
        pens.append((draw_person(image, person, x, 364 + dice.uniform(-12, 10), size, flip, dice), person, dice))
    for pen, person, dice in pens:
        if person.prop:
            draw_prop(pen, person.prop, dice)
    if not indoors:
        air.before(image)
    return _finish(image.reduce(FINE), _dice(scene, 7))


def _dice(scene: Scene, part: int) -> random.Random:
    return random.Random(scene.style * 8 + part)


def _finish(image: Image.Image, dice: random.Random) -> Image.Image:
    """A little more or less light and contrast, as prints and screens differ."""
    gain, lift = dice.uniform(0.9, 1.06), dice.uniform(-6, 8)
    table = [min(255, max(0, round(value * gain + lift))) for value in range(256)]
    return image.point(table * 3)
