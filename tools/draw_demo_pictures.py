"""Draws the demo's two pictures: scenes of the drawn world (tools/demo_model/world) that no training lesson showed.

    python tools/draw_demo_pictures.py [FOLDER]      (needs Pillow and numpy; default folder: assets)

The result is the same on every run: demo_picture.en.png and demo_picture.zh.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.demo_model.world.draw import draw_image  # the line above makes it importable
from tools.demo_model.world.scene import Person, Scene

SCENES = {
    "en": Scene(
        people=(
            Person(("Mina", "\u7c73\u5a1c"), "girl", "yellow", "scarf", "blue", "happy", "left", "lantern", None),
            Person(("Tobo", "\u6258\u6ce2"), "robot", "blue", "cape", "red", "surprised", "right", "flower", "help"),
        ),
        place="castle", time="day", weather="clear", thing="key", event="dig", ending="dance", style=11,
    ),
    "zh": Scene(
        people=(
            Person(("Milo", "\u7c73\u6d1b"), "dragon", "red", "hat", "green", "happy", "left", "lantern", None),
            Person(("Kana", "\u5361\u5a1c"), "cat", "white", "scarf", "purple", "calm", "right", "umbrella", "cheer"),
        ),
        place="forest", time="night", weather="snow", thing="bell", event="repair", ending="sing", style=5,
    ),
}  # fmt: skip


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "assets"
    for language, scene in SCENES.items():
        draw_image(scene).save(folder / f"demo_picture.{language}.png", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
