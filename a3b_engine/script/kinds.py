"""Tells by its keys what a JSON value is: a panel, a dialogue row, a character, or the data of another program."""

from __future__ import annotations

import re
from typing import Any

from .numerals import CJK, WORDS, spelled
from .samples import is_schema
from .vocabulary import aliases, known_keys, normalise_key, prose_markers

LOOK_AT = 64  # entries of a container that are looked at to see what it is
_PANEL_SIGNS = frozenset(
    "shot action micro_expression background light props caption sfx scene_tag visual_prompt negative".split()
)
_LETTERED = frozenset("caption sfx scene_tag negative".split())  # no picture, and found in much that is no script
# Words for fields of a panel that any other data has, too: among more unknown keys they say nothing.
_GENERIC = frozenset("description content items objects location place view order images positive".split())
_ANY_NUMBER = frozenset(("id", "no", "num", "n", "number", "order"))  # numbers of anything, not only of panels
# Keys of what other programs write; what holds one is never a panel or a script.
_FOREIGN = tuple(
    map(
        frozenset,
        (
            ("class_type", "inputs"), ("nodes", "links"), ("display_name", "inputs"), ("display_name", "input"),
            ("openapi", "paths"), ("swagger", "paths"), ("annotations", "images"),
        ),
    )
)
NUMBERED = re.compile(
    rf"(?:{'|'.join(map(re.escape, prose_markers()))}|page|chapter|strip|part)?_?(?:\u7b2c)?"
    rf"(\d{{1,4}}|{'|'.join(WORDS)}|[{CJK}]{{1,3}})(?:\u683c|\u5e55|\u955c|\u9801|\u9875|\u30b3\u30de\u76ee?)?$"
)
# Keys of an answer of a server and not of a script: what stands beside them is no picture.
_ENVELOPE = frozenset(("error", "errors", "refusal", "message", "choices", "finish_reason"))
_LOOSE_LISTS = frozenset(("images", "frames", "cells", "annotations"))
_CHAT_ROLES = ("assistant", "system", "user", "model", "bot", "tool")


def is_foreign(item: dict) -> bool:
    """Whether an object is of a form that another program writes, such as a workflow or the description of an API."""
    return any(keys <= set(item) for keys in _FOREIGN)


def kind_of(item: Any) -> str:
    """panel, row, character or nothing ("") for one object, by its keys."""
    if not isinstance(item, dict) or is_schema(item):
        return ""
    if len(item) == 1:
        only = next(iter(item.values()))
        if isinstance(only, dict) and not is_envelope(item):
            return kind_of(only) if kind_of_keys(only) else ""
    return kind_of_keys(item)


def is_envelope(item: dict) -> bool:
    """Whether an object is a server's answer or a chat turn around the text."""
    return any(normalise_key(key) in _ENVELOPE for key in list(item)[:LOOK_AT]) or item.get("role") in _CHAT_ROLES


def kind_of_keys(item: dict) -> str:
    """As `kind_of`, without looking through a wrapper."""
    if is_envelope(item) and not {"shot", "visual_prompt", "line"} & set(item):
        return ""
    content = item.get("content")
    if isinstance(content, str) and content.lstrip()[:1] in ("{", "[", "`"):
        return ""  # a script may stand in it
    keys = [normalise_key(key) for key in list(item)[:LOOK_AT]]
    panel = [key for key in keys if aliases("panel").get(key) in _PANEL_SIGNS]
    row = {aliases("row")[key] for key in keys if key in aliases("row")} - {"panel"}
    person = {aliases("character")[key] for key in keys if key in aliases("character")}
    if {"look", "name"} <= person and len(panel) < 2 and "line" not in row - {"speaker"}:
        return "character"
    if panel and not _draws(panel, keys):
        panel = []
    if panel and (len(panel) >= len(row) or "line" not in row) and any(key not in aliases("row") for key in panel):
        return "panel"
    if "line" in row and (len(row) > 1 or "line" in keys):
        return "row"
    if "look" in person and len(panel) < 2 and "id" in person and not any(isinstance(v, int) for v in item.values()):
        return "character"
    return "panel" if panel else ""


def _draws(panel: list[str], keys: list[str]) -> bool:
    """Whether the fields of a panel in an object make it one: some of them are drawn and are not found in any data."""
    fields = {aliases("panel")[key] for key in panel}
    numbered = any(aliases("panel").get(key) == "index" and key not in _ANY_NUMBER for key in keys)
    if fields <= _LETTERED:
        return numbered or bool({"speaker", "line", "dialogue"} & {aliases("panel").get(key) for key in keys})
    unknown = sum(key not in known_keys() for key in keys)
    return numbered or unknown <= 2 or not set(panel) <= _GENERIC


def are_panels(numbered: list[tuple[str, int, Any]]) -> bool:
    """Whether values under numbered keys are panels: objects by their keys; texts if a word stands before the number, or
    if each is more than a word. Bare numbers of a script count from the first panel on; any map of ids has others."""
    if not numbered or len(numbered) == 1 and not isinstance(numbered[0][2], dict):
        return False
    bare = all(key.strip().isdecimal() for key, _, _ in numbered)
    if bare and min(number for _, number, _ in numbered) > 1:
        return False
    entries = [entry for _, _, entry in numbered]
    objects = [entry for entry in entries if isinstance(entry, dict)]
    texts = [entry for entry in entries if isinstance(entry, str)]
    sure = not bare or any(kind_of(entry) == "panel" for entry in objects[:LOOK_AT])
    if objects and sum(_has_fields(entry, sure) for entry in objects[:LOOK_AT]) * 2 <= len(objects[:LOOK_AT]):
        return False
    return not bare or all(len(text.split()) > 1 or not text.isascii() and len(text) > 3 for text in texts)


def _has_fields(entry: dict, sure: bool) -> bool:
    """Whether an object under a number is a panel; if it is `sure` that the numbers are of panels, a caption will do."""
    lettered = sure and not is_envelope(entry) and any(aliases("panel").get(normalise_key(key)) in _LETTERED for key in list(entry)[:LOOK_AT])
    return lettered or kind_of(entry) == "panel"


def holds_list_of_panels(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and kind_of(entry[0]) == "panel" and kind_of(entry[-1]) == "panel"


def hold_panels(items: Any) -> bool:
    """Whether the entries of a list are scenes or pages that have lists of panels of their own."""
    if not isinstance(items, list) or not items:
        return False
    return sum(isinstance(item, dict) and has_panels(item) for item in items[:LOOK_AT]) * 2 > len(items[:LOOK_AT])


def has_panels(item: dict) -> bool:
    return any(
        aliases("script").get(normalise_key(key)) == "panels" and isinstance(entry, list) and entry and kind_of(entry[0]) == "panel"
        for key, entry in list(item.items())[:LOOK_AT]
    )


def number_of_key(key: str) -> int | None:
    """The number of a key such as `panel_2`, `2`, `panel_two` or a CJK one; None if it is no number."""
    found = NUMBERED.match(normalise_key(key))
    return number_in(found) if found else None


def number_in(found: re.Match) -> int:
    return int(found[1]) if found[1].isdecimal() else spelled(found[1]) or 0


def could_be_panels(value: Any, key: str) -> bool:
    """Whether a value can be a list of panels. Under a word that other data uses too (`images`, `frames`), a list of
    objects none of which is a panel is something else."""
    if not isinstance(value, (list, dict)) or isinstance(value, dict) and "items" in value and "type" in value:
        return False
    if isinstance(value, dict) and not any(isinstance(entry, (dict, list)) for entry in value.values()):
        told = all(isinstance(entry, str) and (len(entry.split()) > 1 or not entry.isascii()) for entry in value.values())
        return told or kind_of(value) == "panel" or all(number_of_key(inner) is not None for inner in value)
    if not isinstance(value, list) or normalise_key(key) not in _LOOSE_LISTS:
        return True
    objects = [item for item in value[:LOOK_AT] if isinstance(item, dict) and item]
    if objects:
        return any(map(kind_of, objects))
    return not value or any(isinstance(item, list) or isinstance(item, str) and (len(item.split()) > 1 or not item.isascii()) for item in value[:LOOK_AT])
