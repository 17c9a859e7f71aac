"""A user's changes to a script before it is drawn: a merge patch, then find and replace, then the schema."""

from __future__ import annotations

from typing import Any

from ..errors import ScriptError
from .advice import split_cause
from .document import script_json
from .merge_patch import merge, patch_entries, read_patch, split_patch
from .parse import parse_script
from .replace_text import read_pairs, replace_texts
from .report import quote
from .schema import SCHEMA_VERSION, VERSION_KEY, ComicScript
from .validity import ENTRIES, LABELS, loose_references, valid_script

_MAX_LINES = 60


def edit_script(script: ComicScript, *, patch: str = "", replace: str = "", **options: Any) -> tuple[ComicScript, list[str]]:
    """The changed script and a report line for each thing done. `options` are those of `replace_texts`.

    Raises ScriptError naming the field (`panels.2.shot`; a panel by its index, a row by its place) and what to do.
    """
    before = script.model_dump()
    changes = read_patch(patch)
    if changes.get(VERSION_KEY, SCHEMA_VERSION) != SCHEMA_VERSION:
        raise ScriptError(f"patch: {VERSION_KEY}: it is set by this pack ({SCHEMA_VERSION}). Leave it out of the patch.")
    changes.pop(VERSION_KEY, None)
    plain, entries = split_patch(changes)
    report = []
    if changes:
        merged = valid_script(merge(before, plain), "patch", script)
        patched = valid_script(patch_entries(merged.model_dump(), entries), "patch", script)
        report = [f"info: patch: {line}" for line in _differences(before, patched.model_dump())]
        report = report or ["warning: patch: it changes nothing"]
        report += [f"warning: patch: {line}" for line in loose_references(script, patched)]
        script = patched
    pairs = read_pairs(replace)
    if pairs:
        changed, lines = replace_texts(script.model_dump(), pairs, **options)
        replaced = valid_script(changed, "replace", script)
        report += [*lines, *(f"warning: replace: {line}" for line in loose_references(script, replaced))]
        script = replaced
    return _as_read_back(script, report)


def _as_read_back(script: ComicScript, report: list[str]) -> tuple[ComicScript, list[str]]:
    """The script as every node behind will read it, with what the parser has to say of it."""
    result = parse_script(script_json(script))
    if result.script is None:
        fact, _, start = split_cause(result.cause)
        raise ScriptError(f"patch: the changed script is no script any more. {fact}{start}")
    if result.script == script:
        return script, report
    return result.script, [*report, *(line for line in result.report if not line.startswith("info:"))]


# -- report ----------------------------------------------------------------------------------------------------------


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What a patch changed, a line each: fields, and entries that came or went."""
    lines = []
    for key, value in after.items():
        if key not in ENTRIES:
            lines += [f"{key} set to {quote(value)}"] if value != before[key] else []
            continue
        if key == "dialogue" and len(value) != len(before[key]):  # the places of the rows have moved
            kept = [row for row in value if row in before[key]]
            lines.append(f"dialogue: {len(before[key])} rows before, {len(value)} now; {len(value) - len(kept)} of them new")
            continue
        old, new = (_named(key, side[key]) for side in (before, after))
        lines += [f"{key}.{name} removed" for name in old if name not in new]
        lines += [f"{key}.{name} added" for name in new if name not in old]
        for name in [name for name in new if name in old]:
            fields = [field for field in {**new[name], **old[name]} if new[name].get(field) != old[name].get(field)]
            lines += [f"{key}.{name}: {', '.join(fields)} changed"] if fields else []
    return lines if len(lines) <= _MAX_LINES else [*lines[:_MAX_LINES], f"{len(lines) - _MAX_LINES} more changes"]


def _named(key: str, entries: list[dict]) -> dict[str, dict]:
    """The entries of a list under the names a patch has for them."""
    return {str(entry.get(LABELS.get(key)) or place)[:40]: entry for place, entry in enumerate(entries, 1)}
