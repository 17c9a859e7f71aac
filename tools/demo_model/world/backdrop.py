"""Places, by outline and not by colour alone, under a sky that tells the time of day and the weather."""

from __future__ import annotations

import random

from PIL import Image

from .pen import FINE, SIZE, Colour, Pen, jitter, mix
from .weather import draw_fog, draw_rain, draw_snow

HORIZON = 236
SNOW = (244, 248, 252)

# Top of the sky, bottom of the sky, what everything else is tinted with, and how much.
_HOURS: dict[str, tuple[Colour, Colour, Colour, float]] = {
    "day": ((96, 178, 246), (206, 236, 255), (255, 255, 250), 0.10),
    "sunset": ((150, 64, 130), (255, 150, 60), (236, 110, 70), 0.36),
    "night": ((12, 16, 52), (38, 48, 104), (18, 24, 74), 0.55),
}


class Backdrop:
    """Colours of a place at an hour and in a weather, for one picture."""

    def __init__(self, time: str, weather: str, dice: random.Random, weather_dice: random.Random) -> None:
        top, low, self.tint, self.share = _HOURS[time]
        self.time, self.weather, self.dice, self.weather_dice = time, weather, dice, weather_dice
        grey = {"day": (150, 158, 170), "sunset": (150, 104, 104), "night": (44, 48, 70)}[time]
        if weather in ("rain", "snow"):
            top, low = mix(top, grey, 0.55), mix(low, grey, 0.3)
        self.top, self.low = jitter(top, dice, 10), jitter(low, dice, 10)
        self.haze = {"day": (226, 230, 234), "sunset": (234, 190, 170), "night": (96, 104, 136)}[time]

    def tone(self, colour: Colour, far: float = 0.0) -> Colour:
        """A thing's colour at this hour; `far` 0..1 lets it sink into the sky."""
        colour = mix(jitter(colour, self.dice, 8), self.tint, self.share)
        if self.weather == "fog":
            colour = mix(colour, self.haze, 0.5)
        return mix(colour, self.low, far)

    def ground(self, colour: Colour) -> Colour:
        """The ground's colour: under snow it is white, whatever it is made of."""
        return self.tone(mix(colour, SNOW, 0.8) if self.weather == "snow" else colour)

    def capped(self, colour: Colour) -> Colour:
        """The colour of roofs and tops: with snow on it in snow."""
        return self.tone(SNOW if self.weather == "snow" else colour)

    def behind(self, image: Image.Image) -> None:
        """What the weather puts behind the characters."""
        if self.weather == "fog":
            draw_fog(image, self.weather_dice, self.haze)

    def before(self, image: Image.Image) -> None:
        """What the weather puts before them."""
        if self.weather == "rain":
            draw_rain(image, self.weather_dice)
        elif self.weather == "snow":
            draw_snow(image, self.weather_dice)


def draw_sky(image: Image.Image, air: Backdrop, box: tuple[int, int, int, int]) -> None:
    """The sky in `box` (left, top, right, bottom in pixels): gradient, sun or moon and stars, clouds."""
    dice, (left, top, right, bottom) = air.dice, box
    strip = Image.new("RGB", (1, 8))
    strip.putdata([mix(air.top, air.low, row / 7) for row in range(8)])
    column = strip.resize((1, (bottom - top) * FINE), Image.Resampling.BILINEAR)
    sky = column.resize(((right - left) * FINE, column.height), Image.Resampling.NEAREST)
    image.paste(sky, (left * FINE, top * FINE))
    pen, width = Pen(image), right - left
    if air.time == "night":
        for _ in range(26):
            size = dice.uniform(1.2, 2.8)
            pen.oval(
                dice.uniform(left + 3, right - 3), dice.uniform(top + 3, top + (bottom - top) * 0.7), size, size, (255, 250, 210)
            )
    x = left + width * dice.choice((0.2, 0.5, 0.8)) + dice.uniform(-0.05, 0.05) * width
    if air.time == "night":
        y = top + 40 + dice.uniform(-6, 8)
        pen.oval(x, y, 25, 25, (255, 246, 200))
        pen.oval(x + 12, y - 6, 20, 20, air.top)
    elif air.time == "day":
        y = top + 40 + dice.uniform(-6, 8)
        for turn in range(8):
            dx, dy = ((1, 0), (0.7, 0.7), (0, 1), (-0.7, 0.7), (-1, 0), (-0.7, -0.7), (0, -1), (0.7, -0.7))[turn]
            pen.stroke([(x + dx * 28, y + dy * 28), (x + dx * 38, y + dy * 38)], (255, 226, 70), 4)
        pen.oval(x, y, 23, 23, (255, 222, 60))
    else:
        y = top + min(96, (bottom - top) * 0.6) + dice.uniform(-6, 6)
        pen.oval(x, y, 54, 54, mix(air.low, (255, 120, 50), 0.5))
        pen.oval(x, y, 40, 40, (255, 86, 40))
        for dy, half in ((-18, 52), (8, 60)):
            pen.block(x + dice.uniform(-8, 8), y + dy, half, 4, mix(air.low, (255, 200, 150), 0.4))
    _clouds(pen, air, box)


def _clouds(pen: Pen, air: Backdrop, box: tuple[int, int, int, int]) -> None:
    dice, (left, top, right, _) = air.dice, box
    if air.weather in ("rain", "snow"):
        dark = {"day": (92, 100, 116), "sunset": (96, 66, 84), "night": (62, 66, 88)}[air.time]
        if air.weather == "snow":
            dark = mix(dark, (236, 240, 248), 0.6)
        x = left + dice.uniform(-10, 10)
        while x < right + 16:
            size = dice.uniform(20, 30)
            pen.oval(x, top + dice.uniform(2, 14), size * 1.3, size, jitter(dark, dice, 6))
            x += size * 1.25
    elif air.weather == "clear" and air.time == "day":
        for _ in range(dice.randint(0, 2)):
            x, y = dice.uniform(left + 20, right - 20), top + dice.uniform(80, 110)
            for dx, size in ((-18, 10), (0, 14), (18, 10)):
                pen.oval(x + dx, y, size * 1.5, size, (255, 255, 255))


def draw_place(image: Image.Image, place: str, air: Backdrop) -> None:
    """The whole background, over the sky where there is one."""
    if place != "room":
        draw_sky(image, air, (0, 0, SIZE, HORIZON + 20))
    _PLACES[place](image, Pen(image), air)


def _floor(pen: Pen, colour: Colour, top: float = HORIZON) -> None:
    pen.block(SIZE / 2, (top + SIZE + 4) / 2, SIZE / 2 + 4, (SIZE + 4 - top) / 2, colour)


def _tufts(pen: Pen, air: Backdrop, colour: Colour, count: int) -> None:
    for _ in range(count):
        x, y = air.dice.uniform(0, SIZE), air.dice.uniform(HORIZON + 30, SIZE)
        pen.shape(
            [(x - 7, y), (x - 5, y - 11), (x - 1, y - 3), (x + 2, y - 14), (x + 4, y - 3), (x + 8, y - 9), (x + 8, y)], colour
        )


def _forest(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    _floor(pen, air.ground((96, 150, 72)))
    for far, step in ((0.4, 46), (0.0, 74)):
        x = dice.uniform(-20, 10)
        while x < SIZE + 30:
            tall, foot = dice.uniform(150, 190) - far * 60, HORIZON + 30 - far * 60
            pen.block(x, foot - 8, 6, 18, air.tone((104, 70, 46), far))
            needles = air.tone((34, 104, 62), far)
            for tier in range(3):
                tip, half = foot - tall + tier * tall * 0.24, 19 + 8 * tier
                pen.shape([(x, tip), (x - half, tip + tall * 0.38), (x + half, tip + tall * 0.38)], needles)
                if air.weather == "snow":
                    pen.shape(
                        [(x, tip), (x - half * 0.4, tip + tall * 0.15), (x + half * 0.4, tip + tall * 0.15)], air.tone(SNOW, far)
                    )
            x += step * dice.uniform(0.85, 1.15)
    _tufts(pen, air, air.tone((60, 130, 60)), 7)


def _city(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    x = dice.uniform(-30, 0)
    while x < SIZE:
        half = dice.uniform(22, 34)
        top = dice.uniform(60, 150)
        wall = air.tone(dice.choice(((136, 142, 158), (164, 150, 146), (116, 128, 150))))
        pen.block(x + half, (top + HORIZON + 20) / 2, half - 2, (HORIZON + 20 - top) / 2, wall)
        pen.block(x + half, top + 2, half, 5, air.capped((90, 94, 108)))
        pane = (255, 226, 120) if air.time != "day" else air.tone((222, 240, 252))
        for row in range(int((HORIZON - top) // 24)):
            for side in (-0.5, 0.5):
                pen.block(
                    x + half + side * half,
                    top + 22 + row * 24,
                    5.5,
                    7,
                    pane if dice.random() < 0.8 else mix(wall, (20, 20, 30), 0.4),
                )
        x += 2 * half + dice.uniform(0, 6)
    _floor(pen, air.ground((112, 112, 120)), HORIZON + 18)
    stripe = air.tone((240, 236, 220))
    for number in range(5):
        left = number * 90 + dice.uniform(-30, -20)
        pen.block(left + 20, HORIZON + 96, 22, 4, stripe)


def _beach(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    _floor(pen, air.tone((44, 130, 196)), HORIZON - 46)
    for row in range(4):
        y = HORIZON - 36 + row * 17
        for number in range(8):
            pen.bow(number * 56 + dice.uniform(-10, 10), y, 17, 7, 180, 360, air.tone((226, 244, 255)), 3)
    shore = [(x, HORIZON + 34 + (8 if x % 96 else -6)) for x in range(-48, SIZE + 97, 48)]
    pen.shape([*shore, (SIZE + 60, SIZE + 9), (-60, SIZE + 9)], air.ground((240, 214, 150)))
    x = dice.choice((34, SIZE - 34)) + dice.uniform(-8, 8)
    lean = 26 if x < SIZE / 2 else -26
    crown = (x + lean, 92 + dice.uniform(-8, 8))
    pen.stroke([(x, HORIZON + 60), (x + lean * 0.3, 170), crown], air.tone((142, 96, 58)), 13)
    leaf = air.tone((40, 140, 66))
    for dx, dy in ((-64, 8), (-48, -30), (0, -46), (48, -30), (64, 8), (-38, 38), (38, 38)):
        pen.shape(
            [
                crown,
                (crown[0] + dx * 0.55 - dy * 0.2, crown[1] + dy * 0.55 - 12),
                (crown[0] + dx, crown[1] + dy + 10),
                (crown[0] + dx * 0.4, crown[1] + dy * 0.4 + 8),
            ],
            leaf,
        )
    boat = SIZE - x + dice.uniform(-40, 40)
    pen.shape(
        [(boat - 26, HORIZON - 42), (boat + 26, HORIZON - 42), (boat + 16, HORIZON - 28), (boat - 16, HORIZON - 28)],
        air.tone((150, 70, 60)),
    )
    pen.shape([(boat, HORIZON - 96), (boat, HORIZON - 46), (boat + 26, HORIZON - 46)], air.tone((250, 246, 236)))


def _mountain(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    for x, top, half, far in ((60, 70, 120, 0.2), (330, 60, 130, 0.2), (195, 34, 130, 0.0)):
        x, top = x + dice.uniform(-22, 22), top + dice.uniform(-10, 16)
        pen.shape([(x, top), (x - half, HORIZON + 8), (x + half, HORIZON + 8)], air.tone((112, 112, 136), far))
        pen.shape([(x, top), (x + half, HORIZON + 8), (x + half * 0.3, HORIZON + 8)], air.tone((84, 84, 112), far))
        drop, cap = 0.3, half * 0.3
        foot = top + (HORIZON - top) * drop
        pen.shape(
            [(x, top), (x - cap, foot), (x - cap * 0.4, foot - 12), (x, foot + 8), (x + cap * 0.45, foot - 10), (x + cap, foot)],
            air.tone(SNOW, far),
        )
    _floor(pen, air.ground((126, 172, 92)))
    for _ in range(5):
        x, y = dice.uniform(0, SIZE), dice.uniform(HORIZON + 20, SIZE)
        pen.oval(x, y, dice.uniform(9, 18), 8, air.tone((140, 138, 140)))


def _village(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    _floor(pen, air.ground((150, 178, 104)))
    x = dice.uniform(-20, 6)
    while x < SIZE:
        half, wall = dice.uniform(40, 50), dice.uniform(64, 80)
        middle, foot = x + half, HORIZON + 22
        pen.block(middle + half * 0.5, foot - wall - 44, 8, 20, air.tone((128, 72, 60)))
        pen.block(middle, foot - wall / 2, half - 6, wall / 2, air.tone((246, 226, 190)))
        pen.shape(
            [(middle - half - 3, foot - wall), (middle, foot - wall - 62), (middle + half + 3, foot - wall)],
            air.capped((190, 78, 54)),
        )
        pane = (255, 220, 110) if air.time != "day" else air.tone((150, 200, 230))
        for side in (-1, 1):
            pen.block(middle + side * half * 0.45, foot - wall * 0.66, 9, 10, air.tone((110, 72, 50)))
            pen.block(middle + side * half * 0.45, foot - wall * 0.66, 6.5, 7.5, pane)
        pen.block(middle, foot - 16, 10, 17, air.tone((110, 72, 50)))
        x += 2 * half + dice.uniform(4, 14)
    _tufts(pen, air, air.tone((92, 140, 70)), 5)


def _castle(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice, stone = air.dice, air.tone((158, 150, 150))
    dark, foot, top = mix(stone, (30, 26, 40), 0.5), HORIZON + 24, 134 + dice.uniform(-8, 8)
    shift = dice.uniform(-14, 14)

    def battlements(left: float, right: float, y: float) -> None:
        count = max(2, int((right - left) // 26))
        step = (right - left) / count
        for number in range(count):
            x = left + step * (number + 0.5)
            pen.block(x, y - 8, step * 0.3, 10, stone)
            if air.weather == "snow":
                pen.block(x, y - 17, step * 0.3, 4, air.tone(SNOW))

    _floor(pen, air.ground((128, 160, 96)))
    pen.block(192, (top + foot) / 2, 200, (foot - top) / 2, stone)
    battlements(0, SIZE, top)
    for x, high in ((52 + shift, 62), (192 + shift, 34), (332 + shift, 62)):
        high += dice.uniform(-8, 8)
        pen.block(x, (high + foot) / 2, 31, (foot - high) / 2, mix(stone, (255, 255, 255), 0.12))
        battlements(x - 36, x + 36, high)
        lit = (255, 214, 100) if air.time != "day" else dark
        pen.block(x, high + 34, 7, 13, lit)
        pen.slice(x, high + 22, 7, 8, 180, 360, lit)
    for row in range(4):
        for column in range(6):
            pen.block(column * 70 + (35 if row % 2 else 0), top + 24 + row * 26, 13, 2, mix(stone, dark, 0.4))


def _desert(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    _floor(pen, air.ground((232, 186, 104)))
    for x, half, high in ((dice.uniform(20, 90), 120, 56), (dice.uniform(270, 350), 140, 70)):
        pen.slice(x, HORIZON + 10, half, high, 180, 360, air.ground((222, 170, 90)))
    pen.slice(dice.uniform(150, 230), HORIZON + 34, 190, 56, 180, 360, air.ground((238, 196, 116)))
    spots = [24, 128, 256, 356]
    for x in dice.sample(spots, 3):
        x, foot, tall = x + dice.uniform(-10, 10), HORIZON + dice.uniform(14, 30), dice.uniform(116, 150)
        green = air.tone((56, 136, 74))
        pen.block(x, foot - tall / 2, 11, tall / 2, green)
        pen.oval(x, foot - tall, 11, 11, green)
        for side, height in ((-1, 0.45), (1, 0.6)):
            y = foot - tall * height
            pen.block(x + side * 16, y, 18, 7, green)
            pen.block(x + side * 30, y - 20, 7, 27, green)
            pen.oval(x + side * 30, y - 46, 7, 7, green)


def _room(image: Image.Image, pen: Pen, air: Backdrop) -> None:
    dice = air.dice
    dim = {"day": 0.0, "sunset": 0.16, "night": 0.42}[air.time]
    wall = mix(jitter(dice.choice(((236, 214, 186), (214, 222, 206), (226, 206, 214))), dice, 8), air.tint, dim)
    wood = mix((140, 92, 58), air.tint, dim)
    pen.block(SIZE / 2, SIZE / 2, SIZE, SIZE, wall)
    for number in range(9):
        pen.block(number * 48 + 8, HORIZON / 2, 2.5, HORIZON, mix(wall, wood, 0.22))
    _floor(pen, mix((176, 126, 84), air.tint, dim), HORIZON + 30)
    for number in range(3):
        pen.block(SIZE / 2, HORIZON + 62 + number * 36, SIZE, 1.5, wood)
    left = round(dice.uniform(86, 120))
    frame = (left, 14, left + 176, 172)
    pen.block(left + 88, 93, 98, 89, mix((250, 248, 240), air.tint, dim * 0.5))
    draw_sky(image, air, frame)
    spot = tuple(value * FINE for value in frame)
    outside = image.crop(spot)
    air.behind(outside)
    air.before(outside)
    image.paste(outside, spot)
    pen.block(left + 88, 93, 4, 80, (250, 248, 240))
    pen.block(left + 88, 110, 88, 4, (250, 248, 240))
    for side in (-1, 1):
        x = left + 88 + side * 100
        pen.shape(
            [(x - 16, 0), (x + 16, 0), (x + 10 + side * 10, 196), (x - 10 + side * 10, 196)], mix((176, 84, 90), air.tint, dim)
        )
    shelf = 26 if left > 100 else SIZE - 26
    pen.block(shelf, 170, 34, 96, wood)
    for row in range(4):
        pen.block(shelf, 100 + row * 46, 28, 19, mix(wood, (30, 20, 20), 0.5))
        for number in range(5):
            pen.block(
                shelf - 22 + number * 11,
                103 + row * 46,
                4.5,
                15,
                mix(dice.choice(((180, 90, 80), (90, 120, 150), (200, 180, 120))), air.tint, dim),
            )


_PLACES = {
    "forest": _forest, "city": _city, "beach": _beach, "mountain": _mountain,
    "village": _village, "castle": _castle, "desert": _desert, "room": _room,
}  # fmt: skip
