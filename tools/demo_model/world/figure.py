"""Characters: eight kinds by outline, nine colours by body, and what they wear.

Units are about pixels at scale 1; the origin is the middle of the head, the feet stand at y = FEET.
"""

from __future__ import annotations

import random

from PIL import Image

from .face import draw_face
from .pen import Colour, Pen, jitter, mix
from .scene import Person

FEET = 142
WHITE, BLACK = (255, 255, 255), (20, 18, 26)
CREAM = (255, 243, 222)

PALETTE: dict[str, Colour] = {
    "red": (222, 36, 40),
    "orange": (246, 134, 24),
    "yellow": (250, 218, 40),
    "green": (48, 158, 66),
    "blue": (44, 92, 222),
    "purple": (132, 56, 178),
    "pink": (248, 148, 190),
    "white": (248, 248, 246),
    "black": (40, 38, 46),
}


def draw_person(image: Image.Image, person: Person, x: float, feet: float, size: float, flip: bool, dice: random.Random) -> Pen:
    """Draw a character, without what it holds, with its feet at (x, feet); `dice` gives line and tint. Returns its pen."""
    pen = Pen(image, x, feet - FEET * size, size, flip)
    pen.ink = mix(jitter((34, 28, 40), dice, 14), WHITE, 0.45 if person.colour == "black" else 0.0)
    pen.line_width = dice.uniform(2.0, 3.4)
    colour = jitter(PALETTE[person.colour], dice, 9)
    cloth = jitter(PALETTE[person.garment_colour or person.colour], dice, 9)
    patch = jitter(CREAM, dice, 6)
    back, front = _KINDS[person.kind]

    back(pen, colour)
    if person.garment == "cape":
        _cape(pen, cloth)
    front(pen, colour, patch)
    draw_face(pen, person.expression)
    if person.garment == "scarf":
        _scarf(pen, cloth)
    elif person.garment == "hat":
        _hat(pen, cloth)
    elif person.garment == "cape":
        _clasp(pen, cloth)
    return pen


def _shade(colour: Colour) -> Colour:
    return mix(colour, BLACK, 0.22) if sum(colour) > 240 else mix(colour, WHITE, 0.16)


# Clothing.
def _scarf(pen: Pen, cloth: Colour) -> None:
    pen.shape([(12, 46), (34, 44), (40, 96), (18, 98)], cloth)
    for y in (84, 91):
        pen.stroke([(19, y), (37, y - 1)], _shade(cloth), 2.5)
    pen.block(0, 47, 40, 10, cloth)
    pen.stroke([(-14, 39), (-14, 55)], _shade(cloth), 3)
    pen.stroke([(2, 39), (2, 55)], _shade(cloth), 3)


def _hat(pen: Pen, cloth: Colour) -> None:
    pen.shape([(-25, -42), (-21, -88), (21, -88), (25, -42)], cloth)
    pen.block(0, -52, 24, 5, _shade(cloth), outline=False)
    pen.oval(0, -40, 44, 8, cloth)


def _cape(pen: Pen, cloth: Colour) -> None:
    pen.shape([(-24, 32), (24, 32), (62, 128), (32, 138), (0, 130), (-32, 138), (-62, 128)], cloth)
    for side in (-1, 1):
        pen.stroke([(26 * side, 50), (48 * side, 128)], _shade(cloth), 3)


def _clasp(pen: Pen, cloth: Colour) -> None:
    pen.shape([(-34, 38), (34, 38), (40, 56), (0, 48), (-40, 56)], cloth)
    pen.oval(0, 45, 6, 6, (250, 214, 70))


# Kinds: what lies behind the cape, then the rest up to the face.
def _feet(pen: Pen, colour: Colour, apart: float = 18, size: float = 15) -> None:
    for side in (-1, 1):
        pen.oval(apart * side, FEET - 7, size, 8, colour)


def _paws(pen: Pen, colour: Colour) -> None:
    for side in (-1, 1):
        pen.oval(32 * side, 84, 9, 17, colour)


def _cat_back(pen: Pen, colour: Colour) -> None:
    pen.limb([(-24, 124), (-50, 120), (-58, 96), (-50, 74), (-56, 60)], colour, 10)


def _cat(pen: Pen, colour: Colour, patch: Colour) -> None:
    _feet(pen, colour)
    pen.oval(0, 92, 31, 48, colour)
    _paws(pen, colour)
    for side in (-1, 1):
        pen.shape([(48 * side, -6), (44 * side, -68), (10 * side, -38)], colour)
        pen.shape([(40 * side, -26), (39 * side, -52), (23 * side, -36)], (250, 170, 180), outline=False)
    pen.oval(0, 0, 49, 43, colour)
    pen.oval(0, 3, 37, 32, patch, outline=False)
    for side in (-1, 1):
        for y, dy in ((8, -4), (15, 3)):
            pen.stroke([(32 * side, y), (60 * side, y + dy)], pen.ink, 2.4)
    pen.shape([(-5, 4), (5, 4), (0, 10)], (235, 120, 140), outline=False)


def _dog_back(pen: Pen, colour: Colour) -> None:
    pen.limb([(-24, 112), (-46, 92), (-52, 74)], colour, 12)


def _dog(pen: Pen, colour: Colour, patch: Colour) -> None:
    _feet(pen, colour)
    pen.oval(0, 92, 31, 48, colour)
    _paws(pen, colour)
    pen.oval(0, 0, 45, 44, colour)
    pen.oval(0, 3, 36, 34, patch, outline=False)
    for side in (-1, 1):  # long ears that hang over the cheeks
        pen.shape(
            [(24 * side, -42), (42 * side, -40), (60 * side, 4), (58 * side, 36), (45 * side, 40), (36 * side, 6)], _shade(colour)
        )
    pen.oval(0, 7, 9, 5.5, BLACK, outline=False)


def _robot_back(pen: Pen, colour: Colour) -> None:
    for side in (-1, 1):
        pen.limb([(34 * side, 66), (50 * side, 84), (50 * side, 104)], (150, 156, 168), 9)
        pen.oval(50 * side, 106, 8, 8, colour)


def _robot(pen: Pen, colour: Colour, patch: Colour) -> None:
    pen.stroke([(0, -40), (0, -66)], pen.ink, 5)
    pen.oval(0, -70, 9, 9, (255, 226, 90))
    for side in (-1, 1):
        pen.block(17 * side, 128, 9, 14, (150, 156, 168))
        pen.block(51 * side, 0, 6, 14, (150, 156, 168))
    pen.block(0, 84, 36, 36, colour)
    pen.block(0, 84, 20, 16, (206, 214, 224))
    for x, light in ((-11, (226, 60, 60)), (0, (250, 214, 70)), (11, (70, 180, 90))):
        pen.oval(x, 84, 4.5, 4.5, light, outline=False)
    pen.block(0, 0, 47, 40, colour)
    pen.block(0, 2, 38, 30, mix(patch, (214, 236, 255), 0.7))


def _girl_back(pen: Pen, colour: Colour) -> None:
    hair = (92, 58, 40)
    pen.oval(0, 2, 50, 48, hair)
    for side in (-1, 1):  # two plaits
        for x, y in ((50, 22), (53, 40), (52, 58)):
            pen.oval(x * side, y, 10, 12, hair)


def _girl(pen: Pen, colour: Colour, patch: Colour) -> None:
    skin = mix(patch, (246, 190, 150), 0.6)
    for side in (-1, 1):
        pen.limb([(12 * side, 118), (12 * side, FEET - 6)], skin, 8)
        pen.oval(15 * side, FEET - 5, 12, 6, (120, 70, 50))
        pen.limb([(20 * side, 58), (40 * side, 86)], skin, 9)
    pen.shape([(-18, 38), (18, 38), (50, 124), (-50, 124)], colour)
    pen.oval(0, 3, 42, 40, skin)
    pen.shape(
        [(-43, -2), (-38, -30), (0, -46), (38, -30), (43, -2), (24, -22), (0, -26), (-24, -22)], (92, 58, 40), outline=False
    )


def _boy_back(pen: Pen, colour: Colour) -> None:
    pen.shape(
        [(-46, 4), (-50, -26), (-34, -40), (-26, -58), (-8, -48), (6, -64), (16, -48), (36, -54), (38, -36), (52, -22), (46, 4)],
        (60, 44, 40),
    )


def _boy(pen: Pen, colour: Colour, patch: Colour) -> None:
    skin = mix(patch, (246, 190, 150), 0.6)
    for side in (-1, 1):
        pen.limb([(26 * side, 52), (42 * side, 88)], colour, 15)
        pen.oval(43 * side, 94, 8, 8, skin)
        pen.block(14 * side, 120, 12, 15, (112, 104, 98))
        pen.oval(17 * side, FEET - 5, 15, 6, (70, 62, 60))
    pen.block(0, 74, 29, 34, colour)
    pen.oval(0, 3, 43, 41, skin)
    pen.shape(
        [(-43, -6), (-40, -30), (0, -46), (40, -30), (43, -6), (30, -24), (16, -16), (4, -28), (-12, -18), (-28, -26)],
        (60, 44, 40),
        outline=False,
    )


def _bird_back(pen: Pen, colour: Colour) -> None:
    for x in (-14, 0, 14):  # a crest of three feathers
        pen.shape([(x - 8, -36), (x * 2.2, -72), (x + 8, -36)], _shade(colour))
    for side in (-1, 1):
        pen.limb([(14 * side, 112), (14 * side, FEET - 3)], (240, 150, 40), 5)
        for dx in (-10, 0, 10):
            pen.stroke([(14 * side, FEET - 8), (14 * side + dx, FEET)], (240, 150, 40), 4.5)


def _bird(pen: Pen, colour: Colour, patch: Colour) -> None:
    pen.shape([(-40, -10), (40, -10), (46, 60), (26, 112), (0, 122), (-26, 112), (-46, 60)], colour)
    for side in (-1, 1):
        pen.shape(
            [
                (36 * side, 42),
                (64 * side, 72),
                (54 * side, 78),
                (58 * side, 92),
                (46 * side, 92),
                (46 * side, 106),
                (30 * side, 96),
            ],
            _shade(colour),
        )
    pen.oval(0, 0, 44, 42, colour)
    pen.block(0, 42, 40, 22, colour, outline=False)
    pen.oval(0, 2, 37, 33, patch, outline=False)
    pen.shape([(-10, 2), (10, 2), (0, 15)], (250, 160, 20))


def _bear_back(pen: Pen, colour: Colour) -> None:
    for side in (-1, 1):
        pen.oval(42 * side, -36, 19, 19, colour)
        pen.oval(42 * side, -36, 10, 10, (236, 190, 160), outline=False)


def _bear(pen: Pen, colour: Colour, patch: Colour) -> None:
    _feet(pen, colour, 26, 19)
    pen.oval(0, 92, 46, 50, colour)
    pen.oval(0, 98, 25, 30, patch, outline=False)
    for side in (-1, 1):
        pen.oval(46 * side, 80, 12, 22, colour)
    pen.oval(0, 0, 53, 44, colour)
    pen.oval(0, 4, 38, 33, patch, outline=False)
    pen.oval(0, 6, 8, 5, (110, 64, 40), outline=False)


def _dragon_back(pen: Pen, colour: Colour) -> None:
    pen.limb([(20, 120), (50, 128), (60, 112)], colour, 12)
    pen.shape([(52, 114), (62, 88), (70, 114)], (255, 210, 60))
    for side in (-1, 1):  # bat wings
        pen.shape(
            [
                (20 * side, 64),
                (48 * side, 34),
                (74 * side, 20),
                (70 * side, 58),
                (60 * side, 62),
                (56 * side, 82),
                (44 * side, 78),
                (34 * side, 92),
            ],
            _shade(colour),
        )


def _dragon(pen: Pen, colour: Colour, patch: Colour) -> None:
    _feet(pen, colour, 20, 17)
    pen.oval(0, 92, 34, 48, colour)
    for y, half in ((74, 17), (88, 21), (102, 21), (116, 17)):
        pen.block(0, y, half, 5.5, (255, 226, 140), outline=False)
    for side in (-1, 1):
        pen.shape([(40 * side, -22), (52 * side, -74), (18 * side, -40)], (255, 240, 200))
    for x in (-12, 0, 12):
        pen.shape([(x - 8, -38), (x, -56), (x + 8, -38)], (255, 210, 60))
    pen.oval(0, 0, 47, 43, colour)
    pen.oval(0, 4, 37, 32, patch, outline=False)
    for side in (-1, 1):
        pen.oval(5 * side, 8, 2.5, 2, BLACK, outline=False)


_KINDS = {
    "cat": (_cat_back, _cat),
    "dog": (_dog_back, _dog),
    "robot": (_robot_back, _robot),
    "girl": (_girl_back, _girl),
    "boy": (_boy_back, _boy),
    "bird": (_bird_back, _bird),
    "bear": (_bear_back, _bear),
    "dragon": (_dragon_back, _dragon),
}
