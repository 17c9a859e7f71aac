"""Panels whose fields stand one level deeper: {"visual": {"shot": ..., "action": ...}}, or in the character that acts."""

from __future__ import annotations

from typing import Any

from .report import Report, quote
from .vocabulary import aliases, normalise_key

_LISTS = ("characters", "props", "dialogue")
_OWN = ("description", "content", "name", "value", "text")  # inside a named field these are the field itself
_OF_A_CHARACTER = ("action", "micro_expression")


def unfold(panel: dict[str, Any], report: Report, place: str) -> dict[str, Any]:
    """The panel with the fields of inner objects beside its own; what it has itself is never replaced."""
    if not any(isinstance(value, (dict, list)) for value in panel.values()):
        return panel
    have = {aliases("panel").get(normalise_key(key)) for key, value in panel.items() if not isinstance(value, dict)}
    whole: dict[str, Any] = {}
    for key, value in panel.items():
        name = aliases("panel").get(normalise_key(key))
        inner = _fields_of(value, name, have) if isinstance(value, dict) and name not in _LISTS else {}
        if not inner:
            whole[key] = value
            continue
        report.repair(place, f"the fields inside {quote(key)} are read as those of the panel")
        rest = {k: v for k, v in value.items() if k not in inner}
        if name in inner.values():
            whole.update({k: v for k, v in rest.items() if k not in panel})
        elif rest:
            whole[key] = rest
        for inner_key, field in inner.items():
            whole[field] = value[inner_key]
        have |= set(inner.values())
    return _from_characters(whole, have, report, place)


def _fields_of(value: dict[str, Any], name: str | None, have: set) -> dict[str, str]:
    """Keys of an inner object -> the fields of a panel that they are; empty if the object is something else."""
    found: dict[str, str] = {}
    for key in value:
        word = normalise_key(key)
        field = aliases("panel").get(word)
        if field in (None, "index", "speaker", "line", "emotion_tag") or field in have or field in found.values():
            continue
        if name and word in _OWN:
            continue
        found[key] = field
    return found if name or len(found) * 2 > len(value) else {}


def _from_characters(panel: dict[str, Any], have: set, report: Report, place: str) -> dict[str, Any]:
    """What the characters of a panel do, show and say, where the panel itself does not say it."""
    people = next((v for k, v in panel.items() if aliases("panel").get(normalise_key(k)) == "characters"), None)
    people = [person for person in people if isinstance(person, dict)] if isinstance(people, list) else []
    for field in _OF_A_CHARACTER:
        told = [value for person in people if isinstance(value := _value(person, field), str) and value.strip()]
        if told and field not in have:
            report.repair(f"{place}.{field}", "read from the characters of the panel")
            panel = {**panel, field: told[0] if len(told) == 1 else told}
    if "dialogue" not in have and "line" not in have:
        said = [(_name(person), value) for person in people for value in [_value(person, "line") or _value(person, "dialogue")] if isinstance(value, str)]
        rows = [{"speaker": name, "line": line} for name, line in said if line.strip()]
        if rows:
            report.repair(f"{place}.dialogue", "read from the characters of the panel")
            panel = {**panel, "dialogue": rows}
    return panel


def _value(person: dict[str, Any], field: str) -> Any:
    keys = {key for key in person if aliases("panel").get(normalise_key(key)) == field and normalise_key(key) not in aliases("character")}
    return next((person[key] for key in person if key in keys), None)


def _name(person: dict[str, Any]) -> Any:
    named = {aliases("character").get(normalise_key(key)): value for key, value in person.items()}
    return named.get("id") or named.get("name") or ""
