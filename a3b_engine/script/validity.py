"""Whether changed data is still a script; if not, an error that names the field and says what to write."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import ScriptError
from .report import quote
from .schema import SHOTS, Character, ComicScript, DialogueLine, Panel

ENTRIES = {"characters": Character, "dialogue": DialogueLine, "panels": Panel}
LABELS = {"characters": "id", "panels": "index"}  # what names an entry; a row has its place only
_MAX_PLACES = 5  # named in one line


def valid_script(value: dict[str, Any], widget: str, before: ComicScript) -> ComicScript:
    """The value as a script. Raises ScriptError: a wrong type, an unknown key, a panel number twice or nowhere, an id
    that `before` had once or not at all and that stands for two characters now, or an id that was taken away."""
    from pydantic import ValidationError

    for key in value:
        if key not in ComicScript.model_fields:
            raise ScriptError(f"{widget}: {key:.40} is not a field of a script. Its fields are {', '.join(ComicScript.model_fields)}.")
    try:
        script = ComicScript.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ScriptError(f"{widget}: {_place(first['loc'], value)}: {_wanted(first)}") from None
    _check_numbers(script, widget)
    _check_ids(script, widget, before)
    _check_extras(script, widget)
    return script


def _check_numbers(script: ComicScript, widget: str) -> None:
    twice = [index for index, count in Counter(panel.index for panel in script.panels).items() if count > 1]
    if twice:
        raise ScriptError(f"{widget}: two panels have the index {twice[0]}. Give each panel a number of its own.")
    if not script.panels:
        raise ScriptError(f"{widget}: no panel would be left. Keep at least one.")
    there = {panel.index for panel in script.panels}
    for place, row in enumerate(script.dialogue, 1):
        if row.panel not in there:
            raise ScriptError(
                f"{widget}: dialogue.{place}.panel: there is no panel {row.panel}. Use one of {', '.join(map(str, sorted(there)[:30]))}."
            )


def _check_ids(script: ComicScript, widget: str, before: ComicScript) -> None:
    old, new = (Counter(person.id.casefold() for person in side.characters) for side in (before, script))
    for place, person in enumerate(script.characters, 1):
        count = new[person.id.casefold()]
        if not person.id.strip():
            lost = [other.id for other in before.characters if other.id.strip() and new[other.id.casefold()] == 0]
            if lost and count > old[person.id.casefold()]:
                raise ScriptError(
                    f"{widget}: characters.{place}.id would be empty (it was {lost[0]:.40}). Give the character another id, or take it away."
                )
        elif count > max(old[person.id.casefold()], 1):
            raise ScriptError(f"{widget}: {count} characters would have the id {person.id:.40}. Give each an id of its own.")


def loose_references(before: ComicScript, after: ComicScript) -> list[str]:
    """A line for each word that named a character in `before`, still stands in panels or as a speaker, and names none
    any more."""
    gone = _names(before) - _names(after)
    places: dict[str, list[str]] = {}
    for panel in after.panels:
        for word in panel.characters:
            if word.casefold() in gone:
                places.setdefault(word, []).append(f"panels.{panel.index}.characters")
    for place, row in enumerate(after.dialogue, 1):
        if row.speaker.casefold() in gone:
            places.setdefault(row.speaker, []).append(f"dialogue.{place}.speaker")
    return [
        f"{word:.40} is no character any more, but stands in {', '.join(found[:_MAX_PLACES])}{', ...' if len(found) > _MAX_PLACES else ''};"
        " change it there, too (replace with replace_ids renames a character everywhere)"
        for word, found in places.items()
    ]


def _names(script: ComicScript) -> set[str]:
    return {word.casefold() for person in script.characters for word in (person.id, person.name) if word.strip()}


def _check_extras(script: ComicScript, widget: str) -> None:
    """Keys of the user's own may stand beside the fields of an entry, but only single values travel with a script."""
    for name, model in ENTRIES.items():
        for place, entry in enumerate(getattr(script, name), 1):
            for key, extra in (entry.model_extra or {}).items():
                if isinstance(extra, (dict, list)) or extra is None:
                    raise ScriptError(
                        f"{widget}: {name}.{_label(name, entry, place)}.{key:.40}: not a field ({', '.join(model.model_fields)}), and only a "
                        "text or a number may stand under a key of your own."
                    )


def _label(name: str, entry: Any, place: int) -> str:
    return str(getattr(entry, LABELS.get(name, ""), None) or place)[:40]


def _place(loc: tuple, value: Any) -> str:
    """`panels.2.shot` for ("panels", 1, "shot"): entries as a patch names them."""
    words, name = [], str(loc[0]) if loc else ""
    for step in loc:
        value = _inner(value, step)
        if isinstance(step, int):
            known = value.get(LABELS.get(name)) if isinstance(value, dict) and len(words) == 1 else None
            words.append(str(known if type(known) in (int, str) and known else step + 1)[:40])
        else:
            words.append(str(step)[:40])
    return ".".join(words)


def _inner(value: Any, step: Any) -> Any:
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None


def _wanted(error: dict[str, Any]) -> str:
    """What pydantic found wrong, in a sentence that says what to write."""
    found = quote(error["input"]) if isinstance(error["input"], (str, int, float, bool)) else f"a value of type {type(error['input']).__name__}"
    kind = error["type"]
    if kind == "literal_error":
        allowed = ", ".join(SHOTS) if error["loc"][-1] == "shot" else error["ctx"]["expected"].replace("'", "")
        return f"{found} is not one of {allowed}."
    wanted = {
        "string_type": "a text in quotes",
        "int_type": "a whole number",
        "list_type": "a list [...]",
        "model_type": "an object {...}",
        "dict_type": "an object {...}",
        "string_unicode": "a text without half characters",
    }.get(kind)
    return f"{found} was found, but {wanted} is expected." if wanted else f"{found} was found: {error['msg']}."
