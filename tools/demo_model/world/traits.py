"""The closed vocabularies of the drawn world, in English and Chinese.

Keys are the English words (or short ids for verbs). Every list is closed: a picture, an outline or a script never holds
a trait that is not here. The words themselves are in `words/traits.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

WORDS = Path(__file__).resolve().parent / "words"
LANGUAGES = ("en", "zh")


def read_words(name: str) -> dict:
    """The JSON object in `words/<name>.json`."""
    return json.loads((WORDS / f"{name}.json").read_text(encoding="utf-8"))


_TRAITS = read_words("traits")

COLOURS: tuple[str, ...] = tuple(_TRAITS["colours"])
KINDS: tuple[str, ...] = tuple(_TRAITS["kinds"])
GARMENTS: tuple[str, ...] = tuple(_TRAITS["garments"])  # a character may also wear none
EXPRESSIONS: tuple[str, ...] = tuple(_TRAITS["expressions"])
POSITIONS: tuple[str, ...] = tuple(_TRAITS["positions"])
PROPS: tuple[str, ...] = tuple(_TRAITS["props"])  # held in the picture; a character may also hold none
PLACES: tuple[str, ...] = tuple(_TRAITS["places"])
TIMES: tuple[str, ...] = tuple(_TRAITS["times"])
WEATHERS: tuple[str, ...] = tuple(_TRAITS["weathers"])
THINGS: tuple[str, ...] = tuple(_TRAITS["things"])  # what the story is about; never drawn
EVENTS: tuple[str, ...] = tuple(_TRAITS["events"])  # what the hero does with the thing
ATTITUDES: tuple[str, ...] = tuple(_TRAITS["attitudes"])  # what the others do
ENDINGS: tuple[str, ...] = tuple(_TRAITS["endings"])

# Persons have no fur: their colour is that of the dress or the shirt.
PERSONS = ("girl", "boy")

# Picture facts as an image prompt says them; each starts or ends with a word that no other value has.
BACKGROUNDS = {
    "forest": "a forest of tall pines",
    "city": "a city of high towers",
    "beach": "a beach with a palm tree",
    "mountain": "a mountain valley with peaks",
    "village": "a village of small houses",
    "castle": "a castle with stone towers",
    "desert": "a desert with cacti",
    "room": "a room with a big window",
}
LIGHTS = {"day": "bright daylight", "sunset": "orange sunset light", "night": "pale moonlight"}
AIRS = {"clear": "clear sky", "rain": "heavy rain", "snow": "falling snow", "fog": "thick fog"}
FACES = {
    "happy": "happy, a wide smile",
    "sad": "sad, tears on the cheeks",
    "angry": "angry, a deep frown",
    "surprised": "surprised, wide open eyes",
    "calm": "calm, eyes closed",
}
# The mood in which each ending is told.
ENDING_MOODS = {
    "laugh": "happy", "home": "calm", "sleep": "calm", "wave": "sad",
    "dance": "happy", "stars": "calm", "run": "surprised", "sing": "happy",
}  # fmt: skip

# A name is two syllables; each has one Chinese character, so any name can be written in both languages.
FIRST_SYLLABLES: tuple[tuple[str, str], ...] = (
    ("Mi", "\u7c73"), ("Ka", "\u5361"), ("Lu", "\u9732"), ("To", "\u6258"), ("Ri", "\u745e"), ("No", "\u8bfa"),
    ("Be", "\u8d1d"), ("Sa", "\u8428"), ("Ya", "\u96c5"), ("Ki", "\u5947"), ("Fe", "\u83f2"), ("Do", "\u591a"),
    ("Ta", "\u5854"), ("Ju", "\u6731"), ("Vi", "\u7ef4"), ("Pe", "\u4f69"),
)  # fmt: skip
LAST_SYLLABLES: tuple[tuple[str, str], ...] = (
    ("na", "\u5a1c"), ("ko", "\u79d1"), ("ra", "\u62c9"), ("lo", "\u6d1b"), ("sha", "\u838e"), ("ni", "\u59ae"),
    ("bo", "\u6ce2"), ("ma", "\u739b"), ("tu", "\u56fe"), ("lin", "\u6797"), ("zo", "\u4f50"), ("da", "\u8fbe"),
)  # fmt: skip


def word(group: str, key: str, language: str) -> str:
    """The plain word of a trait: `word("kinds", "cat", "zh")`. Verb groups give the third person in English."""
    entry = _TRAITS[group][key]
    if isinstance(entry, list):
        return entry[LANGUAGES.index(language)]
    return key if language == "en" else entry


def with_article(noun: str) -> str:
    """English: "a book", "an umbrella"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
