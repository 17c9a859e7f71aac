"""JSON merge patch (RFC 7386) on a script, and our way to address single entries of its lists.

A merge patch can only replace a list as a whole. Where the script has one of its three lists (panels, dialogue,
characters) and the patch an object, its keys name entries: a panel by its index, a dialogue row by its place from 1, a
character by id or name. `null` removes the entry; "+" adds one, or several in a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import ScriptError

ADD = "+"
MAX_DEPTH = 32


def read_patch(text: str) -> dict[str, Any]:
    """A merge patch from JSON text; {} for blank text. Raises ScriptError naming the place of the fault."""
    text = text.removeprefix("\ufeff")  # some editors put a byte order mark in front
    if not text.strip():
        return {}
    try:
        patch = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ScriptError(
            f"patch: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}). "
            'Write an object such as {"panels": {"2": {"light": "dusk"}}}.'
        ) from None
    except RecursionError:
        raise ScriptError(f"patch: nested too deeply; a script needs {MAX_DEPTH} levels at most.") from None
    except ValueError as error:
        raise ScriptError(f"patch: {error}.") from None
    try:
        json.dumps(patch, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ScriptError("patch: half a surrogate pair (an escape such as \\ud83d alone) is no character. Write the character.") from None
    if not isinstance(patch, dict):
        raise ScriptError(f"patch: an object {{...}} is expected, {_kind(patch)} was found.")
    return patch


def merge(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386, section 2; neither argument is changed."""
    return _merge(target, patch, 0)


def split_patch(patch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict]]:
    """The part that is a merge patch by the RFC, and the part that addresses entries of the three lists."""
    entries = {key: value for key, value in patch.items() if key in _LISTS and isinstance(value, dict)}
    return {key: value for key, value in patch.items() if key not in entries}, entries


def patch_entries(script: dict[str, Any], entries: dict[str, dict]) -> dict[str, Any]:
    """A valid script (as from `model_dump`) with entries of its lists changed. Raises ScriptError for an entry that is
    not there."""
    result = dict(script)
    for name in [name for name in _LISTS if name in entries]:
        result[name] = _LISTS[name](result[name], entries[name], result)
    return result


def _merge(target: Any, patch: Any, depth: int) -> Any:
    if not isinstance(patch, dict):
        return patch
    if depth > MAX_DEPTH:
        raise ScriptError(f"patch: nested too deeply; a script needs {MAX_DEPTH} levels at most.")
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value, depth + 1)
    return result


# -- entries of a list -----------------------------------------------------------------------------------------------


def _panels(panels: list[dict], patch: dict[str, Any], script: dict[str, Any]) -> list[dict]:
    there = ", ".join(str(panel["index"]) for panel in panels[:30])
    gone = set()

    def find(key: str) -> int:
        places = [place for place, panel in enumerate(panels) if str(panel["index"]) == key.strip()]
        if not places:
            raise ScriptError(f'patch: panels.{key:.40}: there is no such panel; the script has {there or "none"}. Add one with the key "+".')
        if patch[key] is None:
            gone.add(panels[places[0]]["index"])
        return places[0]

    changed, added = _changed("panels", panels, patch, find)
    last = max((panel["index"] for panel in changed if type(panel.get("index")) is int), default=0)
    for number, panel in enumerate(added, 1):
        panel.setdefault("index", last + number)
    # Words of a picture that is taken away go with it; the parser would hand them to a neighbour.
    script["dialogue"] = [row for row in script["dialogue"] if row.get("panel", 1) not in gone]
    result = changed + added
    if all(type(panel.get("index")) is int for panel in result):  # else the schema says what is wrong, by its place
        result.sort(key=lambda panel: panel["index"])
    return result


def _dialogue(rows: list[dict], patch: dict[str, Any], script: dict[str, Any]) -> list[dict]:
    def find(key: str) -> int:
        place = int(key) - 1 if key.strip().isdecimal() and len(key) < 7 else -1
        if not 0 <= place < len(rows):
            raise ScriptError(
                f'patch: dialogue.{key:.40}: there is no such row; the script has {len(rows)}, counted from 1. Add one with the key "+".'
            )
        return place

    changed, added = _changed("dialogue", rows, patch, find)
    for row in added:  # behind what is said in the panels up to its own
        panel = row.get("panel", 1)
        before = [place for place, other in enumerate(changed, 1) if isinstance(panel, int) and other.get("panel", 1) <= panel]
        changed.insert(before[-1] if before else 0, row)
    return changed


def _characters(people: list[dict], patch: dict[str, Any], script: dict[str, Any]) -> list[dict]:
    def find(key: str) -> int:
        for name in ("id", "name"):
            for place, person in enumerate(people):
                if person[name] == key:
                    return place
        there = ", ".join(person["id"] for person in people[:30])
        raise ScriptError(
            f'patch: characters.{key:.40}: there is no such id or name; the script has {there or "none"}. Add one with the key "+".'
        )

    changed, added = _changed("characters", people, patch, find)
    return changed + added


_LISTS: dict[str, Callable[[list[dict], dict[str, Any], dict[str, Any]], list[dict]]] = {
    "dialogue": _dialogue,  # before the panels: rows count as they stand, also those of a panel that is taken away
    "panels": _panels,
    "characters": _characters,
}


def _changed(name: str, entries: list[dict], patch: dict[str, Any], find: Callable[[str], int]) -> tuple[list[dict], list[dict]]:
    """The entries with their patches merged in and those removed that are null; and the entries under "+"."""
    result: list[dict | None] = list(entries)
    touched: dict[int, str] = {}
    for key, value in patch.items():
        if key == ADD:
            continue
        place = find(key)
        if place in touched:
            raise ScriptError(f"patch: {name}.{key:.40} and {name}.{touched[place]:.40} name the same entry. Keep one of them.")
        touched[place] = key
        if value is not None and not isinstance(value, dict):
            raise ScriptError(f"patch: {name}.{key:.40}: an object of fields or null is expected, {_kind(value)} was found.")
        result[place] = None if value is None else merge(entries[place], value)
    new = patch.get(ADD, [])
    new = new if isinstance(new, list) else [new]
    for value in new:
        if not isinstance(value, dict):
            raise ScriptError(f"patch: {name}.{ADD}: an object of fields (or a list of them) is expected, {_kind(value)} was found.")
    return [entry for entry in result if entry is not None], [merge({}, value) for value in new]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {json.dumps(twice[:40])} stands twice in one object. Keep one of them")
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a value of JSON. Write a number")


def _kind(value: Any) -> str:
    names = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
