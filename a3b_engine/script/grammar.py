"""The JSON schema that constrained decoding uses, so that an answer is a script with the asked number of panels.

Keys stand in reading order (llguidance writes them in this order), every text has a longest length and every list a
largest size, so that a script cannot run away.
"""

from __future__ import annotations

from typing import Any

from ..errors import GrammarError
from .schema import DEFAULT_READING_DIRECTION, READING_DIRECTIONS, SHOTS

MAX_GRAMMAR_PANELS = 64
MAX_GRAMMAR_ROUNDS = 128
# Any character but control characters; newlines have no use in these fields and escapes cost tokens.
_CHARACTER = "[^\\u0000-\\u001f\\u007f]"
# Whitespace is fixed, or a small model could go on writing spaces for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FULL_LENGTHS = {
    "title": 80,
    "style": 120,
    "language": 24,
    "id": 24,
    "name": 40,
    "look": 200,
    "line": 160,
    "emotion_tag": 24,
    "action": 200,
    "micro_expression": 100,
    "background": 160,
    "light": 100,
    "prop": 40,
    "caption": 160,
    "sfx": 24,
    "scene_tag": 24,
    "visual_prompt": 480,
    "negative": 120,
}
_BRIEF_LENGTHS = {
    "title": 40,
    "name": 24,
    "line": 80,
    "emotion_tag": 16,
    "action": 120,
    "micro_expression": 48,
    "background": 64,
    "light": 48,
    "prop": 24,
}


def comic_json_schema(panels: int, rounds: int, *, brief: bool = False) -> dict[str, Any]:
    """Schema of a script with exactly `panels` panels (1..64, index 1, 2, ...) and `rounds` dialogue rows (0..128).

    `brief` asks only for title, dialogue and the drawn fields, with short texts: for small models. Whatever the form,
    `parse_script` reads the answer with status ok. Raises GrammarError.
    """
    _check("panels", panels, 1, MAX_GRAMMAR_PANELS)
    _check("rounds", rounds, 0, MAX_GRAMMAR_ROUNDS)
    make = _brief if brief else _full
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "x-guidance": _LAYOUT, **make(panels, rounds)}


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise GrammarError(f"{name}: {value!r} is out of range. Use a whole number from {low} to {high}.")


def _full(panels: int, rounds: int) -> dict[str, Any]:
    length = _FULL_LENGTHS
    character = _object(id=_text(length["id"], 1), name=_text(length["name"], 1), look=_text(length["look"], 1))
    return _object(
        title=_text(length["title"]),
        style=_text(length["style"]),
        language=_text(length["language"]),
        reading_direction={"enum": [DEFAULT_READING_DIRECTION, *(d for d in READING_DIRECTIONS if d != DEFAULT_READING_DIRECTION)]},
        characters=_list(character, 0, 6),
        dialogue=_list(_row(panels, length), rounds, rounds),
        panels=_numbered(
            panels,
            shot={"enum": list(SHOTS)},
            characters=_list(_text(length["id"], 1), 0, 6),
            action=_text(length["action"], 1),
            micro_expression=_text(length["micro_expression"]),
            background=_text(length["background"], 1),
            light=_text(length["light"]),
            props=_list(_text(length["prop"], 1), 0, 6),
            caption=_text(length["caption"]),
            sfx=_text(length["sfx"]),
            scene_tag=_text(length["scene_tag"]),
            visual_prompt=_text(length["visual_prompt"], 1),
            negative=_text(length["negative"]),
        ),
    )


def _brief(panels: int, rounds: int) -> dict[str, Any]:
    length = _BRIEF_LENGTHS
    return _object(
        title=_text(length["title"]),
        dialogue=_list(_row(panels, length), rounds, rounds),
        panels=_numbered(
            panels,
            shot={"enum": ["close", "medium", "wide"]},
            action=_text(length["action"], 1),
            micro_expression=_text(length["micro_expression"]),
            background=_text(length["background"], 1),
            light=_text(length["light"]),
            props=_list(_text(length["prop"], 1), 0, 3),
        ),
    )


def _row(panels: int, length: dict[str, int]) -> dict[str, Any]:
    return _object(
        panel={"enum": list(range(1, panels + 1))},
        speaker=_text(length["name"], 1),
        line=_text(length["line"], 1),
        emotion_tag=_text(length["emotion_tag"]),
    )


def _numbered(count: int, **fields: Any) -> dict[str, Any]:
    """A list of exactly `count` panels whose index is their place."""
    items = [_object(index={"const": number}, **fields) for number in range(1, count + 1)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": count, "maxItems": count}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(longest: int, shortest: int = 0) -> dict[str, Any]:
    """Lengths stand inside the pattern: minLength and maxLength beside one cost llguidance 3 ms a token instead of 0.05."""
    return {"type": "string", "pattern": f"^{_CHARACTER}{{{shortest},{longest}}}$"}
