"""Where nodes stand on the canvas: columns from left to right, nodes of a column from top to bottom, groups around columns."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from .description import LANGUAGES, Description, Item
from .kinds import NOTE

# Room for all widgets, slots and shown texts in the front ends of 2024 and of today.
SIZES = {
    NOTE: (340, 0),
    "A3BLoadModel": (340, 240),
    "A3BEncodeImage": (340, 130),
    "A3BBuildPrompt": (420, 460),
    "A3BGenerate": (420, 900),
    "A3BParsePanels": (400, 660),
    "A3BPickPanel": (360, 520),
    "A3BEditScript": (400, 420),
    "A3BSaveScript": (340, 190),
    "A3BLoadScript": (400, 200),
    "LoadImage": (340, 330),
    "ImageScale": (320, 170),
    "EmptyImage": (320, 150),
    "ImageBlend": (320, 130),
    "SaveImage": (420, 550),
    "PreviewImage": (320, 320),
    "CheckpointLoaderSimple": (340, 120),
    "CLIPTextEncode": (340, 120),
    "EmptyLatentImage": (340, 130),
    "KSampler": (340, 290),
    "VAEDecode": (240, 70),
}
TITLE_BAR, GAP, WIRES = 30, 30, 60  # height; between nodes of a column; between columns
MARGIN, HEAD = 20, 80  # of a group: left, right and below; above the first node
NOTE_LINE, NOTE_CHARACTER, NOTE_FRAME = 12, 6.0, 40  # pixels of a Note's text


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int


def size_of(description: Description, item: Item) -> tuple[int, int]:
    width, height = item.width or SIZES[item.type][0], item.height or SIZES[item.type][1]
    if item.type == NOTE:
        texts = [description.note(item, language) for language in LANGUAGES]
        height = max(NOTE_FRAME + NOTE_LINE * _rows(text, int((width - 40) / NOTE_CHARACTER)) for text in texts)
    return width, height


def _rows(text: str, columns: int) -> int:
    """Lines of a text that is wrapped at words; Chinese characters are two columns wide."""
    rows = 0
    for line in text.split("\n"):
        wide = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)
        rows += max(1, math.ceil(wide * 1.08 / columns))  # words do not fill a line
    return rows


def place(description: Description) -> tuple[dict[str, Box], list[Box]]:
    """The box of each node by its key (without its title bar), and those of the groups."""
    nodes: dict[str, Box] = {}
    spans, left = [], 0
    for group in description.groups:
        x = left + MARGIN
        for column in group.columns:
            sizes = [size_of(description, item) for item in column]
            y = HEAD
            for item, (width, height) in zip(column, sizes):
                nodes[item.key] = Box(x, y, width, height)
                y += height + GAP + TITLE_BAR
            x += max(width for width, _ in sizes) + WIRES
        right = x - WIRES + MARGIN
        spans.append((left, right - left))
        left = right + WIRES - 2 * MARGIN
    low = max(box.y + box.height for box in nodes.values()) + MARGIN
    return nodes, [Box(start, 0, width, low) for start, width in spans]
