"""Reads single values: text, lists, shots, numbers, directions, with a report line for whatever is changed.

Text is taken as it stands. Numbers, lists and objects where text is expected become text of their own pieces.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from . import schema
from .flow import flow_items
from .numerals import NumberText, spelled
from .report import Report, quote
from .strings import join_surrogates
from .vocabulary import aliases, find_shots, nothing_words, normalise_key, reading_direction

_SPLIT = re.compile(r"\s*[,;/&\uff0c\u3001\uff1b\u060c\u061b]\s*")
_QUOTED = re.compile(r"\s*(?:\"([^\"]+)\"|\u201c([^\u201c\u201d]+)\u201d|\u300c([^\u300c\u300d]+)\u300d)\s*\Z")
_DIGITS = re.compile(r"(?<![\d.])\d{1,7}(?![\d.])(?!(?!st\b|nd\b|rd\b|th\b)[A-Za-z])")  # not those inside a hash
_EXTRA_NAME = re.compile(r"[^\W\d]\w{0,39}\Z")


class Values:
    """Reads values and reports to `report`; `place` is always the path of the value in the source."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def text(self, value: Any, place: str) -> str:
        """Text as it stands; numbers, lists and objects become text of their own pieces."""
        if value is None:
            return ""
        if isinstance(value, str):
            joined = join_surrogates(value)
            if joined != value:
                self.report.repair(place, "half a surrogate pair is no character; replaced by U+FFFD")
            return joined
        if isinstance(value, bool):
            self.report.warning(place, f"text expected, {str(value).lower()} found; left empty")
            return ""
        if isinstance(value, (int, float)):
            self.report.repair(place, "a number is read as text")
            return str(value)
        pieces = self.texts(value, place)
        self.report.repair(place, "a list or object is read as text, its pieces joined by commas")
        return ", ".join(pieces)

    def texts(self, value: Any, place: str, depth: int = 0) -> list[str]:
        """All pieces of text in a list or object, as they stand."""
        if not isinstance(value, (list, dict)):
            piece = self.text(value, place)
            return [piece] if piece.strip() else []
        if depth > 3:
            self.report.warning(place, "nested too deeply; left out")
            return []
        entries = value.values() if isinstance(value, dict) else value
        return [piece for entry in entries for piece in self.texts(entry, place, depth + 1)]

    def listed(self, value: Any, place: str) -> list[str]:
        """A list of texts, of bounded length; a single text is split at commas."""
        pieces = self.pieces(value, place)
        if len(pieces) > schema.MAX_LISTED:
            self.report.warning(place, f"{len(pieces)} entries found; only the first {schema.MAX_LISTED} are kept")
        return pieces[: schema.MAX_LISTED]

    def pieces(self, value: Any, place: str) -> list[str]:
        """As `listed`, of any length."""
        if isinstance(value, str) and value.strip().casefold() in nothing_words():
            self.report.repair(place, f"{quote(value)} says that there is none; left empty")
            return []
        if isinstance(value, str) and value.strip():
            items = flow_items(value)
            if items:
                self.report.repair(place, "a list written as a text is read as a list")
                return [text for item in items if (text := self.text(item.text, place)).strip()]
            parts = [part for part in _SPLIT.split(self.text(value, place).strip()) if part]
            self.report.repair(place, "a text is read as a list, split at its commas")
            return parts
        if isinstance(value, dict):
            self.report.repair(place, "an object is read as a list")
        return self.texts(value, place)

    def direction(self, value: Any) -> str:
        """One of the reading directions; the default with a report line for anything else."""
        word = self.text(value, "reading_direction")
        if not word.strip():
            return schema.DEFAULT_READING_DIRECTION
        found = reading_direction(word)
        if found is None:
            self.report.warning("reading_direction", f"{quote(word)} is not known; {schema.DEFAULT_READING_DIRECTION} is used")
            return schema.DEFAULT_READING_DIRECTION
        if found != word:
            self.report.repair("reading_direction", f"{quote(word)} is read as {found}")
        return found

    def shot(self, value: Any, place: str) -> str:
        """A member of the closed set; other words and languages are mapped, anything else is the default."""
        word = self.text(value, f"{place}.shot")
        if word in schema.SHOTS:
            return word
        if not word.strip():
            self.report.warning(f"{place}.shot", f"missing; the default {schema.DEFAULT_SHOT} is used")
            return schema.DEFAULT_SHOT
        found = find_shots(word)
        if not found:
            self.report.warning(f"{place}.shot", f"{quote(word)} is not a known shot; the default {schema.DEFAULT_SHOT} is used")
            return schema.DEFAULT_SHOT
        self.report.repair(f"{place}.shot", f"{quote(word)} is read as {found[0]}")
        return found[0]

    def index(self, value: Any) -> int | None:
        """A panel number from 3, 3.0, "3", "Panel 3", "Panel three", "III" or a CJK numeral; None if there is none."""
        if isinstance(value, bool) or value is None:
            return None
        if isinstance(value, (int, float)):
            whole = math.isfinite(value) and value == int(value) and 0 <= value <= schema.MAX_INDEX
            return int(value) if whole else None
        if isinstance(value, str):
            value = unicodedata.normalize("NFKC", value[:80])  # circled numbers are digits
            found = _DIGITS.search(value)
            if found:
                return int(found.group()) if int(found.group()) <= schema.MAX_INDEX else None
            return spelled(value[:20])
        return None

    def fields(self, item: dict, level: str, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values under their field names, and whatever has no field."""
        values: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for key, value in item.items():
            name = aliases(level).get(normalise_key(key))
            if name and key != name and (name in item or name in values):
                name = None
            if name == "index" and key != name and self.index(value) is None:
                name = None
            if name is None:
                extras[key] = value
                continue
            if key != name and value is not None:
                self.report.repair(f"{place}.{name}", f"read from the key {quote(key)}")
            values[name] = value
        if level == "panel":
            self.prefer_known_shot(values, extras, place)
        return values, extras

    def prefer_known_shot(self, values: dict[str, Any], extras: dict[str, Any], place: str) -> None:
        """Of several keys for the framing (`camera`, `shot_type`), the one that names a shot counts."""
        given = values.get("shot")
        if "shot" not in values or isinstance(given, str) and find_shots(given):
            return
        for key, value in extras.items():
            if isinstance(value, str) and aliases("panel").get(normalise_key(key)) == "shot" and find_shots(value):
                self.report.repair(f"{place}.shot", f"read from the key {quote(key)}, which names a shot")
                values["shot"] = extras.pop(key)
                if isinstance(given, str):
                    extras["camera" if key != "camera" else "view"] = given
                elif "index" not in values:
                    values["index"] = given
                return

    def kept_extras(self, extras: dict[str, Any], model: type, place: str) -> dict[str, Any]:
        """Unknown scalar values are kept under their own key; everything else is left out and reported."""
        kept: dict[str, Any] = {}
        for key, value in extras.items():
            fits = _EXTRA_NAME.match(key) and not hasattr(model, key) and key not in model.model_fields
            if value is None:
                continue
            if not fits or not isinstance(value, (str, bool, int, float)) or value in (math.inf, -math.inf):
                self.report.info(f"{place}.{key[:40]}", "not a field of a script; left out")
                continue
            self.report.info(f"{place}.{key}", "not a field of a script; kept as it stands")
            kept[key] = self.text(value, f"{place}.{key}") if isinstance(value, str) else _plain(value)
        return kept


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, NumberText) else value


def unquoted(text: str) -> str:
    """What is said in a sentence `"Wait!"`, without the marks around the whole of it."""
    found = _QUOTED.match(text)
    return found[1] or found[2] or found[3] if found else text
