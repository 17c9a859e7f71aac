"""Brings any JSON value to the shape of a script: other key names, bare lists, wrappers, lists inside strings.

Nothing is changed here but where a value stands; `fields.py` reads the values themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Iterable

from .locate import strict
from .reader import Fuel, Unreadable, read_value
from .report import quote
from .vocabulary import aliases, find_shots, normalise_key, prose_markers

MAX_NESTING = 3
_LOOK_AT = 64  # entries of a container that are looked at to see what it is
_LISTS = ("panels", "dialogue", "characters")
_PANEL_SIGNS = frozenset(
    "shot action micro_expression background light props caption sfx scene_tag visual_prompt negative".split()
)
_NUMBERED = re.compile(rf"(?:{'|'.join(map(re.escape, prose_markers()))})?_?(?:\u7b2c)?(\d{{1,4}})(?:\u683c)?$")
_PLACEHOLDER = re.compile(
    r"\s*(?:\.{2,}|\u2026+|<[^<>]*>|\{[^{}]*\}|\[[^\[\]]*\]|string|str|text|integer|int|number|todo|tbd|_+|-+|x{2,})?\s*$",
    re.IGNORECASE,
)
_ELLIPSIS = re.compile(r"\s*(?:\.{2,}|\u2026+)\s*$")
_SPOKEN = ("line", "caption", "sfx", "dialogue")  # where "..." is silence, not a placeholder


@dataclass
class Shape:
    """Values under the field names of a script, and how they got there."""

    values: dict[str, Any]
    kind: str = "script"  # script, panel or row: what the value was
    repairs: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def panels(self) -> list:
        """The raw panels, possibly none."""
        return self.values.get("panels") or []


def is_schema(value: Any) -> bool:
    """Whether a value describes data instead of being data."""
    if not isinstance(value, dict):
        return False
    if "$schema" in value or "$defs" in value:
        return True
    if isinstance(value.get("properties"), dict) and ("type" in value or "required" in value):
        return True
    panels = value.get("panels")
    return isinstance(panels, dict) and "type" in panels and ("items" in panels or "properties" in panels)


def kind_of(item: Any) -> str:
    """panel, row, character or nothing ("") for one object, by its keys."""
    if not isinstance(item, dict) or is_schema(item):
        return ""
    if len(item) == 1:
        only = next(iter(item.values()))
        if isinstance(only, dict):
            return kind_of(only) if kind_of_keys(only) else ""
    return kind_of_keys(item)


def kind_of_keys(item: dict) -> str:
    """As `kind_of`, without looking through a wrapper."""
    keys = [normalise_key(key) for key in list(item)[:_LOOK_AT]]
    panel = [key for key in keys if aliases("panel").get(key) in _PANEL_SIGNS]
    row = {aliases("row")[key] for key in keys if key in aliases("row")} - {"panel"}
    person = {aliases("character")[key] for key in keys if key in aliases("character")}
    if {"look", "name"} <= person and len(panel) < 2 and "line" not in row - {"speaker"}:
        return "character"
    if panel and (len(panel) >= len(row) or "line" not in row) and any(key not in aliases("row") for key in panel):
        return "panel"
    if "line" in row and (len(row) > 1 or "line" in keys):
        return "row"
    if "look" in person and len(panel) < 2 and "id" in person and not any(isinstance(v, int) for v in item.values()):
        return "character"
    return "panel" if panel else ""


def shape(value: Any, fuel: Fuel, depth: int = 0) -> Shape | None:
    """The script, panel or dialogue row that a value holds; None if it holds none of them."""
    if isinstance(value, str):
        return _in_string(value, fuel, depth)
    if isinstance(value, list):
        return _in_list(value, fuel, depth)
    if isinstance(value, dict) and value and not is_schema(value):
        return _in_object(value, fuel, depth)
    return None


def unstring(value: Any, fuel: Fuel) -> Any:
    """The list or object that a string holds as JSON, else the value itself."""
    if not isinstance(value, str) or not value.lstrip()[:1] or value.lstrip()[0] not in "[{":
        return value
    try:
        inner = strict(value)[0]
    except (ValueError, RecursionError):
        try:
            inner = read_value(value, len(value) - len(value.lstrip()), fuel).value
        except Unreadable:
            return value
    return inner if isinstance(inner, (list, dict)) and inner else value


def _in_string(value: str, fuel: Fuel, depth: int) -> Shape | None:
    inner = unstring(value, fuel)
    found = shape(inner, fuel, depth + 1) if inner is not value and depth < MAX_NESTING else None
    if found:
        found.repairs.append(("", "the JSON stood inside a string"))
    return found


def _in_list(items: list, fuel: Fuel, depth: int) -> Shape | None:
    kinds = [kind_of(item) for item in items[:_LOOK_AT]]
    for kind, name in (("panel", "panels"), ("row", "dialogue"), ("character", "characters")):
        if kinds.count(kind) * 2 > len(kinds):
            return Shape({name: items}, repairs=[(name, "a bare list is read as this field")])
    if depth >= MAX_NESTING:
        return None
    found = [part for part in (shape(item, fuel, depth + 1) for item in items[:_LOOK_AT]) if part and part.values]
    if not found:
        return None
    return _joined(found, "a list of several parts is read as one script")


def _in_object(value: dict, fuel: Fuel, depth: int) -> Shape | None:
    result = Shape({})
    numbered = []
    for key, entry in value.items():
        name = aliases("script").get(normalise_key(key))
        number = _NUMBERED.match(normalise_key(key))
        if name in _LISTS:
            inner = unstring(entry, fuel)
            if inner is not entry:
                result.repairs.append((name, "the list stood inside a string"))
            if name == "panels" and not _could_be_panels(inner):
                name = None
            elif name not in result.values or key == name:
                if key != name:
                    result.repairs.append((name, f"read from the key {quote(key)}"))
                result.values[name] = _as_list(inner, name, result)
                continue
        if number and isinstance(entry, (dict, str)) and name is None:
            numbered.append((int(number[1]), entry))
        elif name and name not in _LISTS and (name not in result.values or key == name):
            if key != name:
                result.repairs.append((name, f"read from the key {quote(key)}"))
            result.values[name] = entry
        else:
            result.extras[key] = entry
    if "panels" not in result.values and numbered and (len(numbered) > 1 or isinstance(numbered[0][1], dict)):
        result.values["panels"] = [_with_index(entry, number) for number, entry in numbered]
        result.repairs.append(("panels", "numbered keys are read as a list of panels"))
    if result.panels:
        return result
    return _single(value) or _nested(value, result, fuel, depth)


def _single(value: dict) -> Shape | None:
    kind = kind_of(value)
    if kind == "panel":
        return Shape({"panels": [value]}, "panel", remarks=[("panels", "a single panel object is read as a list of one")])
    if kind == "row":
        return Shape({"dialogue": [value]}, "row", remarks=[("dialogue", "a single dialogue row is read as a list of one")])
    return None


def _nested(value: dict, outer: Shape, fuel: Fuel, depth: int) -> Shape | None:
    """A script one or two levels down ({"comic": {...}}, {"pages": [{...}, {...}]}), with the outer title and so on."""
    if depth < MAX_NESTING:
        for key, entry in list(outer.extras.items())[:_LOOK_AT]:
            inner = shape(entry, fuel, depth + 1) if isinstance(entry, (dict, list, str)) else None
            if inner and (inner.panels or "dialogue" in inner.values and "dialogue" not in outer.values):
                inner.repairs.append(("", f"the script was found under the key {quote(key)}"))
                inner.repairs += outer.repairs
                inner.remarks += outer.remarks
                inner.values = {**outer.values, **inner.values}
                return inner
    return outer if outer.values.get("dialogue") or outer.values.get("characters") else None


def _could_be_panels(value: Any) -> bool:
    return isinstance(value, (list, dict)) and not (isinstance(value, dict) and "items" in value and "type" in value)


def _with_index(entry: Any, number: int) -> Any:
    if isinstance(entry, dict) and not any(aliases("panel").get(normalise_key(key)) == "index" for key in entry):
        return {"index": number, **entry}
    return {"index": number, "action": entry} if isinstance(entry, str) else entry


def _as_list(value: Any, name: str, result: Shape) -> Any:
    """A list for an object of numbered or named entries; a list of lists is flattened by one level."""
    if isinstance(value, list):
        if value and all(isinstance(item, list) for item in value):
            result.repairs.append((name, "a list of lists is read as one list"))
            return [item for part in value for item in part]
        return value
    if not isinstance(value, dict) or name == "characters":
        return value
    if kind_of(value) in ("panel", "row"):
        result.repairs.append((name, "a single object is read as a list of one"))
        return [value]
    entries = list(value.items())
    if len(entries) == 1 and isinstance(entries[0][1], list):
        result.repairs.append((name, f"the list was found under the key {quote(entries[0][0])}"))
        return entries[0][1]
    if name == "dialogue":
        return value
    result.repairs.append((name, "an object of entries is read as a list"))
    numbers = [_NUMBERED.match(normalise_key(key)) for key, _ in entries]
    if all(numbers):
        return [_with_index(entry, int(number[1])) for number, (_, entry) in zip(numbers, entries)]
    return [entry for _, entry in entries]


def _joined(parts: list[Shape], what: str) -> Shape:
    """One script from several: lists are put together, other values come from the first that has them."""
    if len(parts) == 1:
        return parts[0]
    whole = Shape({}, repairs=[("", what)])
    for part in parts:
        whole.repairs += part.repairs
        whole.remarks += part.remarks
        for name, entry in part.values.items():
            if isinstance(entry, list) and isinstance(whole.values.get(name), list):
                whole.values[name] = [*whole.values[name], *entry]
            else:
                whole.values.setdefault(name, entry)
    return whole


def join(parts: Iterable[Shape]) -> Shape:
    """Single panels and rows that stood as objects of their own, as one script."""
    return _joined(list(parts), "several objects are read as one script")


def is_placeholder(found: Shape) -> bool:
    """Whether all the content of a script is of the kind "..." or "<text>" or "close|medium|wide"."""
    texts, shots = [], []
    items = [*found.panels, *_rows(found)][: _LOOK_AT * 4]
    for item in items:
        if not isinstance(item, dict):
            texts.append(item)
            continue
        for key, entry in item.items():
            name = aliases("panel").get(normalise_key(key))
            if name == "shot":
                shots.append(entry)
            elif name != "index" and not (name in _SPOKEN and isinstance(entry, str) and _ELLIPSIS.match(entry)):
                texts += entry if isinstance(entry, list) else [entry]
    texts = [text for text in texts if isinstance(text, str)]
    listed = [isinstance(shot, str) and (bool(_PLACEHOLDER.match(shot)) or len(set(find_shots(shot))) > 1) for shot in shots]
    if texts:
        return all(_PLACEHOLDER.match(text) for text in texts) and (not shots or any(listed) or any(texts))
    return bool(shots) and all(listed)


def _rows(found: Shape) -> list:
    rows = found.values.get("dialogue")
    return rows if isinstance(rows, list) else []
