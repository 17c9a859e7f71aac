"""Brings any JSON value to the shape of a script: other key names, bare lists, wrappers, lists inside strings.

Nothing is changed here but where a value stands; `fields.py` reads the values themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Iterable

from .locate import scan, strict
from .numerals import CJK, WORDS, spelled
from .reader import Fuel, Unreadable, read_value
from .report import quote
from .samples import is_schema
from .vocabulary import aliases, normalise_key, prose_markers

MAX_NESTING = 5
_LOOK_AT = 64  # entries of a container that are looked at to see what it is
_LISTS = ("panels", "dialogue", "characters")
_PANEL_SIGNS = frozenset(
    "shot action micro_expression background light props caption sfx scene_tag visual_prompt negative".split()
)
_NUMBERED = re.compile(
    rf"(?:{'|'.join(map(re.escape, prose_markers()))}|page|chapter|strip|part)?_?(?:\u7b2c)?"
    rf"(\d{{1,4}}|{'|'.join(WORDS)}|[{CJK}]{{1,3}})(?:\u683c|\u5e55|\u955c|\u9801|\u9875|\u30b3\u30de\u76ee?)?$"
)
# Keys of an answer of a server and not of a script: what stands beside them is no picture.
_ENVELOPE = frozenset(("error", "errors", "refusal", "message", "choices", "finish_reason"))
_CHAT_ROLES = ("assistant", "system", "user", "model", "bot", "tool")


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


def kind_of(item: Any) -> str:
    """panel, row, character or nothing ("") for one object, by its keys."""
    if not isinstance(item, dict) or is_schema(item):
        return ""
    if len(item) == 1:
        only = next(iter(item.values()))
        if isinstance(only, dict) and not _is_envelope(item):
            return kind_of(only) if kind_of_keys(only) else ""
    return kind_of_keys(item)


def _is_envelope(item: dict) -> bool:
    """Whether an object is a server's answer or a chat turn around the text."""
    return any(normalise_key(key) in _ENVELOPE for key in list(item)[:_LOOK_AT]) or item.get("role") in _CHAT_ROLES


def kind_of_keys(item: dict) -> str:
    """As `kind_of`, without looking through a wrapper."""
    if _is_envelope(item) and not {"shot", "visual_prompt", "line"} & set(item):
        return ""
    content = item.get("content")
    if isinstance(content, str) and content.lstrip()[:1] in ("{", "[", "`"):
        return ""  # a script may stand in it
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
    parts = [part for part in (shape(candidate.value, fuel, depth + 1) for candidate in found.candidates[:_LOOK_AT]) if part]
    scripts = [part for part in parts if part.kind == "script" and part.panels]
    if scripts:
        return max(scripts, key=lambda part: len(part.panels))
    return join(parts) if parts else None


def _in_list(items: list, fuel: Fuel, depth: int) -> Shape | None:
    kinds = [kind_of(item) for item in items[:_LOOK_AT]] if not _hold_panels(items) else []
    for kind, name in (("panel", "panels"), ("row", "dialogue"), ("character", "characters")):
        if kinds and kinds.count(kind) * 2 > len(kinds):
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
            if name == "panels" and (not _could_be_panels(inner) or _hold_panels(inner)):
                name = None
            elif name not in result.values or key == name:
                if key != name:
                    result.repairs.append((name, f"read from the key {quote(key)}"))
                result.values[name] = _as_list(inner, name, result, fuel)
                continue
        if number and isinstance(entry, (dict, str)) and name is None and not (isinstance(entry, dict) and _has_panels(entry)):
            numbered.append((_number(number), entry))
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
    if any(isinstance(entry, str) and "{" in entry for entry in result.extras.values()):
        inside = _nested(value, result, fuel, depth)  # {"content": "Sure: {...}"} is no panel
        if inside and inside.panels:
            return inside
    if any(map(_holds_list_of_panels, result.extras.values())):  # {"count": 2, "items": [{...}, {...}]} is no panel
        return _nested(value, result, fuel, depth)
    return _single(value) or _nested(value, result, fuel, depth)


def _holds_list_of_panels(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and kind_of(entry[0]) == "panel" and kind_of(entry[-1]) == "panel"


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
        found: dict[str, Shape] = {}
        for key, entry in list(outer.extras.items())[:_LOOK_AT]:
            part = shape(entry, fuel, depth + 1) if isinstance(entry, (dict, list, str)) else None
            if part and (part.panels or "dialogue" in part.values and "dialogue" not in outer.values):
                found[key] = part
        if found:
            inner = _best(found)
            inner.repairs += outer.repairs
            inner.remarks += outer.remarks
            inner.values = {**outer.values, **inner.values}
            return inner
    return outer if outer.values.get("dialogue") or outer.values.get("characters") else None


def _best(found: dict[str, Shape]) -> Shape:
    """Of the parts under several keys: the numbered pages or the named panels together, else the longest script."""
    scripts = {key: part for key, part in found.items() if part.kind == "script" and part.panels}
    used = scripts or found
    if len(used) > 1 and (not scripts or all(_NUMBERED.match(normalise_key(key)) for key in used)):
        return _joined(list(used.values()), f"the parts under the keys {quote(', '.join(used))} are read as one script")
    key = max(reversed(used), key=lambda name: len(used[name].panels))
    inner = used[key]
    inner.repairs.append(("", f"the script was found under the key {quote(key)}"))
    for other in used:
        if other != key:
            inner.repairs.append((other[:40], "another script stands here and is not used"))
    return inner


def _hold_panels(items: Any) -> bool:
    """Whether the entries of a list are scenes or pages that have lists of panels of their own."""
    if not isinstance(items, list) or not items:
        return False
    return sum(isinstance(item, dict) and _has_panels(item) for item in items[:_LOOK_AT]) * 2 > len(items[:_LOOK_AT])


def _has_panels(item: dict) -> bool:
    return any(
        aliases("script").get(normalise_key(key)) == "panels" and isinstance(entry, list) and entry and kind_of(entry[0]) == "panel"
        for key, entry in list(item.items())[:_LOOK_AT]
    )


def number_of_key(key: str) -> int | None:
    """The number of a key such as `panel_2`, `2`, `panel_two` or a CJK one; None if it is no number."""
    found = _NUMBERED.match(normalise_key(key))
    return _number(found) if found else None


def _number(found: re.Match) -> int:
    return int(found[1]) if found[1].isdecimal() else spelled(found[1]) or 0


def _could_be_panels(value: Any) -> bool:
    return isinstance(value, (list, dict)) and not (isinstance(value, dict) and "items" in value and "type" in value)


def _with_index(entry: Any, number: int) -> Any:
    if isinstance(entry, dict) and not any(aliases("panel").get(normalise_key(key)) == "index" for key in entry):
        return {"index": number, **entry}
    return {"index": number, "action": entry} if isinstance(entry, str) else entry


def _as_list(value: Any, name: str, result: Shape, fuel: Fuel) -> Any:
    """A list for an object of numbered or named entries; a list of lists is flattened by one level."""
    if isinstance(value, list):
        if value and all(isinstance(item, list) for item in value):
            result.repairs.append((name, "a list of lists is read as one list"))
            return [item for part in value for item in part]
        if name == "panels" and any(isinstance(item, str) and item.lstrip()[:1] == "{" for item in value):
            result.repairs.append((name, "the objects stood inside strings"))
            return [unstring(item, fuel) for item in value]
        return value
    if not isinstance(value, dict) or name == "characters":
        return value
    holds = any(map(_holds_list_of_panels, value.values()))
    if kind_of(value) in ("panel", "row") and not holds:
        result.repairs.append((name, "a single object is read as a list of one"))
        return [value]
    entries = list(value.items())
    if name == "panels" and len(lists := [entry for entry in entries if _holds_list_of_panels(entry[1])]) == 1:
        entries = lists
    if len(entries) == 1 and isinstance(entries[0][1], list):
        result.repairs.append((name, f"the list was found under the key {quote(entries[0][0])}"))
        return entries[0][1]
    if name == "dialogue":
        return value
    result.repairs.append((name, "an object of entries is read as a list"))
    numbers = [_NUMBERED.match(normalise_key(key)) for key, _ in entries]
    if all(numbers):
        return [_with_index(entry, _number(number)) for number, (_, entry) in zip(numbers, entries)]
    return [entry for _, entry in entries]


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
