"""Brings any JSON value to the shape of a script: other key names, bare lists, wrappers, lists inside strings.

Nothing is changed here but where a value stands; `fields.py` reads the values themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Iterable

from .kinds import (
    LOOK_AT, NUMBERED, are_panels, could_be_panels, has_panels, hold_panels, holds_list_of_panels, is_foreign, kind_of, number_in,
)
from .locate import scan, strict
from .reader import Fuel, Unreadable, read_value
from .report import quote
from .samples import is_schema
from .vocabulary import aliases, normalise_key

MAX_NESTING = 5
_LISTS = ("panels", "dialogue", "characters")
_COLON = re.compile("[:\uff1a]")
_CALL = frozenset(("arguments", "parameters", "input", "function"))  # beside a name these are the call of a tool
_ABOUT = frozenset(("meta", "metadata", "info", "comic_info", "story_info", "header"))  # what a writer puts about the page
_ABOUT_PAGE = ("title", "style", "language", "reading_direction", "characters")


@dataclass
class Shape:
    """Values under the field names of a script, and how they got there."""

    values: dict[str, Any]
    kind: str = "script"  # script, panel, row or character: what the value was
    repairs: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def panels(self) -> list:
        """The raw panels, possibly none."""
        return self.values.get("panels") or []


def shape(value: Any, fuel: Fuel, depth: int = 0) -> Shape | None:
    """The script, panel or dialogue row that a value holds; None if it holds none of them."""
    if isinstance(value, str):
        return _in_string(value, fuel, depth)
    if isinstance(value, list):
        return _in_list(value, fuel, depth)
    if isinstance(value, dict) and value and not is_schema(value) and not is_foreign(value):
        return _in_object(value, fuel, depth)
    return None


def unstring(value: Any, fuel: Fuel) -> Any:
    """The list or object that a string holds as JSON, else the value itself."""
    if not isinstance(value, str) or not value.lstrip()[:1] or value.lstrip()[0] not in '[{"':
        return value
    try:
        inner = strict(value)[0]
        if isinstance(inner, str):
            return unstring(inner, fuel) if len(inner) < len(value) and inner.lstrip()[:1] in ("{", "[", '"') else value
    except (ValueError, RecursionError):
        if value.lstrip()[0] == '"':
            return value
        try:
            inner = read_value(value, len(value) - len(value.lstrip()), fuel).value
        except Unreadable:
            return value
    return inner if isinstance(inner, (list, dict)) and inner else value


def _in_string(value: str, fuel: Fuel, depth: int) -> Shape | None:
    if depth >= MAX_NESTING:
        return None
    inner = unstring(value, fuel)
    found = _in_text(value, fuel, depth) if inner is value else shape(inner, fuel, depth + 1)
    if found:
        found.repairs.append(("", "the JSON stood inside a string"))
    return found


def _in_text(value: str, fuel: Fuel, depth: int) -> Shape | None:
    """A script that stands in a text inside a string: between sentences, in a fence."""
    if not ("{" in value or "[" in value or "\uff5b" in value):
        return None
    found = scan(value, fuel, lambda inner: shape(inner, fuel, depth + 1) is not None)
    parts = [part for part in (shape(candidate.value, fuel, depth + 1) for candidate in found.candidates[:LOOK_AT]) if part]
    scripts = [part for part in parts if part.kind == "script" and part.panels]
    if scripts:
        return max(scripts, key=lambda part: len(part.panels))
    return join(parts) if parts else None


def _in_list(items: list, fuel: Fuel, depth: int) -> Shape | None:
    kinds = [kind_of(item) for item in items[:LOOK_AT]] if not hold_panels(items) else []
    for kind, name in (("panel", "panels"), ("row", "dialogue"), ("character", "characters")):
        if kinds and kinds.count(kind) * 2 > len(kinds):
            return Shape({name: items}, repairs=[(name, "a bare list is read as this field")])
    if depth >= MAX_NESTING:
        return None
    found = [part for part in (shape(item, fuel, depth + 1) for item in items[:LOOK_AT]) if part and part.values]
    if not found:
        return None
    return _joined(found, "a list of several parts is read as one script")


def _in_object(value: dict, fuel: Fuel, depth: int) -> Shape | None:
    result = Shape({})
    numbered = []
    for key, entry in value.items():
        name = aliases("script").get(normalise_key(key))
        number = NUMBERED.match(normalise_key(key))
        if name in _LISTS:
            inner = unstring(entry, fuel)
            if inner is not entry:
                result.repairs.append((name, "the list stood inside a string"))
            if name == "panels" and (not could_be_panels(inner, key) or hold_panels(inner)):
                name = None
            elif name not in result.values or key == name:
                if key != name:
                    result.repairs.append((name, f"read from the key {quote(key)}"))
                result.values[name] = _as_list(inner, name, result, fuel)
                continue
        if name == "title" and key != name and _CALL & set(value):
            name = None  # the name of a tool that is called
        if number and isinstance(entry, (dict, str)) and name is None and not (isinstance(entry, dict) and has_panels(entry)):
            numbered.append((key, number_in(number), entry))
        elif name and name not in _LISTS and (name not in result.values or key == name):
            if key != name:
                result.repairs.append((name, f"read from the key {quote(key)}"))
            result.values[name] = entry
        else:
            result.extras[key] = entry
    if "panels" not in result.values and are_panels(numbered):
        result.values["panels"] = [_with_index(entry, number) for _, number, entry in numbered]
        result.repairs.append(("panels", "numbered keys are read as a list of panels"))
    else:
        result.extras.update((key, entry) for key, _, entry in numbered)
    if result.panels:
        _look_about(result)
        return result
    if any(isinstance(entry, str) and "{" in entry for entry in result.extras.values()):
        inside = _nested(value, result, fuel, depth)  # {"content": "Sure: {...}"} is no panel
        if inside and inside.panels:
            return inside
    if any(map(holds_list_of_panels, result.extras.values())):  # {"count": 2, "items": [{...}, {...}]} is no panel
        return _nested(value, result, fuel, depth)
    return _single(value) or _nested(value, result, fuel, depth)


def _single(value: dict) -> Shape | None:
    kind = kind_of(value)
    if kind == "panel":
        return Shape({"panels": [value]}, "panel", remarks=[("panels", "a single panel object is read as a list of one")])
    if kind == "row":
        return Shape({"dialogue": [value]}, "row", remarks=[("dialogue", "a single dialogue row is read as a list of one")])
    if kind == "character":
        return Shape({"characters": [value]}, "character", remarks=[("characters", "a single character is read as a list of one")])
    return None


def _look_about(result: Shape) -> None:
    """What a script lacks and an object of remarks about the page has: {"meta": {"style": "ink"}, "panels": [...]}."""
    for key, entry in list(result.extras.items())[:LOOK_AT]:
        if normalise_key(key) not in _ABOUT or not isinstance(entry, dict):
            continue
        rest = dict(entry)
        for inner, told in entry.items():
            name = aliases("script").get(normalise_key(inner))
            if name in _ABOUT_PAGE and name not in result.values:
                result.values[name] = rest.pop(inner)
                result.repairs.append((name, f"read from inside the key {quote(key)}"))
        if len(rest) < len(entry):
            del result.extras[key]
            result.remarks += [(f"{key[:40]}.{inner[:40]}", "not a field of a script; left out") for inner in list(rest)[:LOOK_AT]]


def _nested(value: dict, outer: Shape, fuel: Fuel, depth: int) -> Shape | None:
    """A script one or two levels down ({"comic": {...}}, {"pages": [{...}, {...}]}), with the outer title and so on."""
    if depth < MAX_NESTING:
        found: dict[str, Shape] = {}
        for key, entry in list(outer.extras.items())[:LOOK_AT]:
            part = shape(entry, fuel, depth + 1) if isinstance(entry, (dict, list, str)) else None
            if part and (part.panels or "dialogue" in part.values and "dialogue" not in outer.values):
                found[key] = part
        if found:
            _look_about(outer)
            inner = _best(found)
            inner.repairs += outer.repairs
            inner.remarks += outer.remarks
            lost = [key for key, entry in outer.extras.items() if key not in found and entry not in (None, "", [], {})]
            lost += [name for name in outer.values if name in inner.values and outer.values[name] not in (None, "", [], {}, inner.values[name])]
            inner.remarks += [(key[:40], "not a field of a script, or given further inside; left out") for key in lost[:LOOK_AT]]
            inner.values = {**outer.values, **inner.values}
            return inner
    return outer if outer.values.get("dialogue") or outer.values.get("characters") else None


def _best(found: dict[str, Shape]) -> Shape:
    """Of the parts under several keys: the numbered pages or the named panels together, else the longest script."""
    scripts = {key: part for key, part in found.items() if part.kind == "script" and part.panels}
    used = scripts or found
    if len(used) > 1 and (not scripts or all(NUMBERED.match(normalise_key(key)) for key in used)):
        return _joined(list(used.values()), f"the parts under the keys {quote(', '.join(used))} are read as one script")
    key = max(reversed(used), key=lambda name: len(used[name].panels))
    inner = used[key]
    inner.repairs.append(("", f"the script was found under the key {quote(key)}"))
    for other in used:
        if other != key:
            inner.repairs.append((other[:40], "another script stands here and is not used"))
    return inner


def _with_index(entry: Any, number: int) -> Any:
    if isinstance(entry, dict) and not any(aliases("panel").get(normalise_key(key)) == "index" for key in entry):
        return {"index": number, **entry}
    return {"index": number, "action": entry} if isinstance(entry, str) else entry


def _as_list(value: Any, name: str, result: Shape, fuel: Fuel) -> Any:
    """A list for an object of numbered or named entries; a list of lists is flattened by one level."""
    if isinstance(value, list):
        if value and all(isinstance(item, list) for item in value) and not (name == "dialogue" and are_pairs(value)):
            result.repairs.append((name, "a list of lists is read as one list"))
            return [item for part in value for item in part]
        if name == "panels" and any(isinstance(item, str) and item.lstrip()[:1] == "{" for item in value):
            result.repairs.append((name, "the objects stood inside strings"))
            return [unstring(item, fuel) for item in value]
        return value
    if not isinstance(value, dict) or name == "characters":
        return value
    holds = any(map(holds_list_of_panels, value.values()))
    if kind_of(value) in ("panel", "row") and not holds:
        result.repairs.append((name, "a single object is read as a list of one"))
        return [value]
    entries = list(value.items())
    if name == "panels" and len(lists := [entry for entry in entries if holds_list_of_panels(entry[1])]) == 1:
        entries = lists
    if len(entries) == 1 and isinstance(entries[0][1], list):
        result.repairs.append((name, f"the list was found under the key {quote(entries[0][0])}"))
        return entries[0][1]
    if name == "dialogue":
        return value
    result.repairs.append((name, "an object of entries is read as a list"))
    numbers = [NUMBERED.match(normalise_key(key)) for key, _ in entries]
    if all(numbers):
        return [_with_index(entry, number_in(number)) for number, (_, entry) in zip(numbers, entries)]
    return [entry for _, entry in entries]


def are_pairs(rows: list) -> bool:
    """Whether all entries of a list of dialogue are `["Rin", "Hello"]`: who speaks, and what is said."""
    return bool(rows) and all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(part, str) for part in row) and len(row[0]) <= 40 and not _COLON.search(row[0])
        for row in rows
    )


def _joined(parts: list[Shape], what: str) -> Shape:
    """One script from several: lists are put together, other values come from the first that has them."""
    if len(parts) == 1:
        return parts[0]
    whole = Shape({}, repairs=[("", what)])
    if sum(bool(part.panels) for part in parts) > 1:
        parts = [_with_rows_in_panels(part) for part in parts]
    for part in parts:
        whole.repairs += part.repairs
        whole.remarks += part.remarks
        whole.remarks += [(key[:40], "not a field of a script; left out") for key, entry in list(part.extras.items())[:LOOK_AT] if entry not in (None, "", [], {})]
        for name, entry in part.values.items():
            if isinstance(entry, list) and isinstance(whole.values.get(name), list):
                whole.values[name] = [*whole.values[name], *entry]
            else:
                whole.values.setdefault(name, entry)
    return whole


def _with_rows_in_panels(part: Shape) -> Shape:
    """A page with its dialogue rows put into its panels, since their numbers count within the page; unchanged if a
    row names no panel of it."""
    rows, panels = part.values.get("dialogue"), part.panels
    if not rows or not isinstance(rows, list) or not all(isinstance(item, dict) for item in [*rows, *panels]):
        return part
    numbers = [_value_of(panel, "panel", "index") for panel in panels]
    if numbers != [n for n in numbers if type(n) is int] or len(set(numbers)) < len(numbers):
        numbers = list(range(1, len(panels) + 1))
    places = [_value_of(row, "row", "panel") for row in rows]
    own = any(_value_of(panel, "panel", "dialogue") for panel in panels)
    if own or any(type(place) is not int or place not in numbers for place in places):
        return part
    told = [{**panel, "dialogue": [row for row, place in zip(rows, places) if place == n]} for panel, n in zip(panels, numbers)]
    return replace(part, values={**part.values, "panels": told, "dialogue": []})


def _value_of(item: dict, level: str, name: str) -> Any:
    return next((entry for key, entry in item.items() if aliases(level).get(normalise_key(key)) == name), None)


def join(parts: Iterable[Shape]) -> Shape:
    """Single panels and rows that stood as objects of their own, as one script."""
    return _joined(list(parts), "several objects are read as one script")
