"""Draws the demo's picture: a girl in a yellow raincoat and a small blue robot on a harbour wall at dusk.

    python tools/draw_demo_picture.py [FILE]      (needs Pillow; default file: assets/demo_picture.png)

Everything is drawn at three times the size and scaled down once, which smooths all edges. The result is the
same on every run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT, SCALE = 768, 512, 3
HORIZON, WALL = 300, 400

INK = (43, 38, 66)
SKY_TOP, SKY_LOW = (58, 61, 122), (250, 176, 132)
SEA_FAR, SEA_NEAR = (220, 140, 128), (54, 74, 124)


class Canvas:
    """Draws in the coordinates of the final picture, with an ink outline around every shape."""

    def __init__(self):
        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), SKY_TOP)
        self.pen = ImageDraw.Draw(self.image)

    def points(self, values):
        return [(x * SCALE, y * SCALE) for x, y in values]

    def box(self, x, y, w, h):
        return [x * SCALE, y * SCALE, (x + w) * SCALE, (y + h) * SCALE]

    def oval(self, x, y, w, h, fill, outline=INK, line=3):
        self.pen.ellipse(self.box(x, y, w, h), fill=fill, outline=outline, width=line * SCALE if outline else 0)

    def block(self, x, y, w, h, fill, radius=0, outline=INK, line=3):
        self.pen.rounded_rectangle(
            self.box(x, y, w, h),
            radius=radius * SCALE,
            fill=fill,
            outline=outline,
            width=line * SCALE if outline else 0,
        )

    def shape(self, values, fill, outline=INK, line=3):
        self.pen.polygon(self.points(values), fill=fill)
        if outline:
            self.stroke([*values, values[0]], outline, line)

    def stroke(self, values, colour=INK, line=3):
        self.pen.line(self.points(values), fill=colour, width=line * SCALE, joint="curve")
        radius = line / 2
        for x, y in values:
            self.oval(x - radius, y - radius, line, line, colour, outline=None)

    def arc(self, x, y, w, h, start, end, colour=INK, line=3):
        self.pen.arc(self.box(x, y, w, h), start, end, fill=colour, width=line * SCALE)

    def bands(self, top, bottom, first, last, steps):
        """A vertical gradient in flat steps, as in a print."""
        height = (bottom - top) / steps
        for step in range(steps):
            share = step / (steps - 1)
            colour = tuple(round(a + (b - a) * share) for a, b in zip(first, last))
            self.block(0, top + step * height, WIDTH, height + 1, colour, outline=None)


def draw_backdrop(c: Canvas, dice: random.Random) -> None:
    c.bands(0, HORIZON, SKY_TOP, SKY_LOW, 24)
    for _ in range(26):
        x, y = dice.uniform(0, WIDTH), dice.uniform(0, 120)
        c.oval(x, y, 2.5, 2.5, (255, 244, 214), outline=None)
    c.oval(318, 228, 130, 130, (255, 226, 150), outline=None)
    for x, y, w in ((60, 92, 150), (560, 62, 170), (300, 140, 120)):
        for dx, dy, share in ((0, 10, 0.5), (w * 0.25, 0, 0.5), (w * 0.5, 10, 0.5)):
            c.oval(x + dx, y + dy, w * share, w * share * 0.4, (250, 206, 190), outline=None)
    c.bands(HORIZON, WALL, SEA_FAR, SEA_NEAR, 14)
    for _ in range(46):
        y = dice.uniform(HORIZON + 4, WALL - 6)
        length = 6 + (y - HORIZON) * 0.35
        x = dice.gauss(383, 60 + (y - HORIZON) * 1.6)
        c.block(x, y, length, 2.4, (255, 222, 164), radius=1, outline=None)


def draw_lighthouse(c: Canvas) -> None:
    c.shape([(560, 300), (640, 286), (768, 280), (768, 318), (560, 316)], (74, 66, 104))
    c.shape([(664, 288), (674, 168), (706, 168), (716, 288)], (250, 240, 226))
    for low, high in ((258, 228), (208, 184)):
        left, right = 664 + (288 - low) / 12, 716 - (288 - low) / 12
        c.shape([(left, low), (left + 2.4, high), (right - 2.4, high), (right, low)], (214, 76, 72), line=2)
    c.shape([(700, 155), (769, 132), (769, 178)], (255, 236, 170), outline=None)
    c.block(672, 142, 36, 26, (255, 232, 140))
    c.shape([(666, 142), (690, 120), (714, 142)], (214, 76, 72))


def draw_boat(c: Canvas) -> None:
    c.stroke([(122, 322), (122, 250)], line=4)
    c.shape([(126, 252), (126, 308), (168, 308)], (250, 240, 226))
    c.shape([(118, 264), (118, 308), (90, 308)], (238, 150, 110))
    c.shape([(76, 318), (178, 318), (160, 340), (94, 340)], (150, 72, 74))


def draw_wall(c: Canvas, dice: random.Random) -> None:
    c.block(-6, WALL, WIDTH + 12, HEIGHT - WALL + 6, (126, 112, 138))
    c.block(-6, WALL, WIDTH + 12, 16, (166, 150, 170))
    for row in range(4):
        y = WALL + 16 + row * 25
        c.stroke([(0, y), (WIDTH, y)], (92, 82, 112), 2)
        for column in range(-1, 9):
            x = column * 96 + (48 if row % 2 else 0) + dice.uniform(-5, 5)
            c.stroke([(x, y), (x, y + 25)], (92, 82, 112), 2)


def draw_girl(c: Canvas) -> None:
    skin, coat, shade, boot, hair = (246, 200, 168), (250, 206, 64), (222, 168, 40), (206, 64, 66), (64, 42, 52)
    c.block(206, 392, 22, 56, (70, 84, 140), radius=6)
    c.block(244, 392, 22, 56, (70, 84, 140), radius=6)
    c.block(198, 436, 34, 26, boot, radius=9)
    c.block(242, 436, 34, 26, boot, radius=9)
    c.shape([(206, 268), (264, 268), (292, 400), (180, 400)], coat)
    c.shape([(258, 272), (264, 268), (292, 400), (272, 400)], shade, outline=None)
    c.stroke([(235, 276), (235, 400)], shade, 3)
    for y in (300, 330, 360):
        c.oval(226, y, 9, 9, (255, 244, 214), line=2)
    c.stroke([(262, 292), (318, 270), (352, 236)], INK, 27)  # the arm that waves
    c.stroke([(262, 292), (318, 270), (350, 238)], coat, 21)
    c.oval(340, 214, 28, 28, skin)
    c.stroke([(208, 292), (184, 340), (196, 366)], INK, 27)
    c.stroke([(208, 292), (184, 340), (195, 362)], coat, 21)
    c.oval(184, 358, 25, 25, skin)
    c.oval(172, 148, 126, 124, coat)  # hood
    c.oval(184, 160, 102, 106, hair)
    c.oval(192, 172, 88, 92, skin)
    c.shape(
        [(190, 216), (196, 178), (228, 164), (268, 172), (282, 214), (262, 190), (246, 206), (228, 188), (208, 206)],
        hair,
    )
    for x in (211, 247):
        c.oval(x, 212, 15, 21, (255, 255, 255), line=2)
        c.oval(x + 5, 217, 8, 13, INK, outline=None)
        c.oval(x + 8, 219, 3.4, 4, (255, 255, 255), outline=None)
    c.oval(200, 234, 16, 9, (240, 158, 142), outline=None)
    c.oval(258, 234, 16, 9, (240, 158, 142), outline=None)
    c.arc(223, 228, 28, 22, 15, 165, line=3)


def draw_robot(c: Canvas) -> None:
    body, dark, glow = (92, 156, 214), (58, 108, 168), (255, 240, 150)
    for x in (470, 520):
        c.block(x, 400, 20, 40, dark, radius=5)
        c.block(x - 9, 434, 38, 24, (84, 84, 110), radius=8)
    c.stroke([(456, 330), (428, 350), (420, 316)], INK, 19)
    c.stroke([(456, 330), (428, 350), (420, 318)], dark, 13)
    c.stroke([(556, 332), (586, 362), (578, 388)], INK, 19)
    c.stroke([(556, 332), (586, 362), (579, 385)], dark, 13)
    c.stroke([(420, 308), (420, 276)], line=4)  # the lantern it holds up
    c.shape([(404, 306), (436, 306), (432, 330), (408, 330)], glow)
    c.stroke([(402, 304), (438, 304)], line=4)
    c.stroke([(406, 332), (434, 332)], line=4)
    c.oval(568, 380, 22, 22, body)
    c.block(450, 306, 112, 104, body, radius=20)
    c.block(470, 328, 72, 46, (226, 236, 244), radius=9)
    c.shape(
        [(506, 364), (489, 345), (493, 336), (501, 336), (506, 342), (511, 336), (519, 336), (523, 345)],
        (226, 92, 96),
        line=2,
    )
    for x in (478, 498, 518):
        c.oval(x, 384, 12, 12, (250, 206, 64), line=2)
    c.block(494, 292, 24, 18, dark, radius=4)
    c.block(440, 204, 132, 92, body, radius=28)
    c.block(456, 222, 100, 54, (34, 40, 72), radius=18)
    for x in (474, 516):
        c.oval(x, 234, 22, 26, glow, outline=None)
    c.arc(492, 250, 28, 16, 20, 160, glow, 3)
    c.stroke([(506, 204), (506, 178)], line=4)
    c.oval(496, 160, 20, 20, (226, 92, 96))
    c.oval(430, 236, 14, 32, dark)
    c.oval(568, 236, 14, 32, dark)


def draw(path: Path) -> None:
    canvas, dice = Canvas(), random.Random(7)
    draw_backdrop(canvas, dice)
    draw_lighthouse(canvas)
    draw_boat(canvas)
    draw_wall(canvas, dice)
    draw_girl(canvas)
    draw_robot(canvas)
    small = canvas.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    small.save(path, optimize=True)


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "assets" / "demo_picture.png"
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
