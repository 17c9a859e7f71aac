"""Reads panels, dialogue rows and characters that stand in Markdown tables."""

from __future__ import annotations

import re
from typing import Any

from .reader import Reading
from .kinds import kind_of_keys, number_of_key

MAX_TEXT = 200_000
MAX_TABLES = 16
_RULE = re.compile(r"[ \t]{0,8}\|?(?:[ \t]{0,40}:?-{1,200}:?[ \t]{0,40}\|){1,64}(?:[ \t]{0,40}:?-{1,200}:?)?[ \t]*$")
_BAR = re.compile(r"(?<!\\)\|")
_BREAK = re.compile(r"<br\s{0,4}/?>", re.IGNORECASE)
_EMPTY = re.compile(r"[-\u2013\u2014]*$")
_LISTS = {"panel": "panels", "row": "dialogue", "character": "characters"}
_NUMBER_SIGNS = ("", "\u2116")


def tables(text: str) -> list[Reading]:
    """Every table of a text whose head names fields of panels, rows or characters, as {list name: entries}."""
    lines = text[:MAX_TEXT].split("\n")
    found: list[Reading] = []
    at = 1
    while at < len(lines) and len(found) < MAX_TABLES:
        if "-" not in lines[at] or "|" not in lines[at - 1] or not _RULE.match(lines[at]):
            at += 1
            continue
        end = at + 1
        while end < len(lines) and "|" in lines[end] and not lines[end].lstrip().startswith("```"):
            end += 1
        last = all(not line.strip() for line in lines[end:])
        reading = _table(_cells(lines[at - 1]), lines[at + 1 : end], whole=not last or not lines[at - 1].rstrip().endswith("|"))
        if reading:
            found.append(reading)
        at = end + 1
    return found


def _table(head: list[str], rows: list[str], whole: bool) -> Reading | None:
    names = [_name(cell) for cell in head]
    columns = [_cells(row) for row in rows]
    turned = len(names) > 1 and all(number_of_key(name) is not None for name in names[1:])
    if turned:
        fields = [_name(cells[0]) for cells in columns if cells]
        entries = [
            {"index": number_of_key(name), **{field: cells[n] for field, cells in zip(fields, columns) if len(cells) > n and not _EMPTY.match(cells[n])}}
            for n, name in enumerate(names[1:], 1)
        ]
        kind = kind_of_keys(dict.fromkeys(fields))
    else:
        entries = [{name: cell for name, cell in zip(names, cells) if not _EMPTY.match(cell)} for cells in columns]
        kind = kind_of_keys(dict.fromkeys(names))
    name = _LISTS.get(kind)
    entries = [entry for entry in entries if entry]
    if name is None or not entries or turned and kind != "panel":
        return None
    reading = Reading({name: entries}, 0, [("", "a table is read as a list, one entry a row")])
    if turned:
        reading.notes = [("", "a table is read as a list, one entry a column")]
    if any(len(cells) > len(names) for cells in columns):
        reading.notes.append((name, "a row has more cells than the head; the surplus ones are left out"))
    if not whole and rows and not rows[-1].rstrip().endswith("|"):
        _cut(reading, entries, turned)
    return reading


def _cut(reading: Reading, entries: list[dict[str, Any]], turned: bool) -> None:
    """The last cell of the text is not whole: it is left out and what it belongs to is open."""
    reading.truncated = True
    if not turned:
        entries[-1].popitem()
        reading.open_ids = frozenset((id(entries[-1]),))
    else:
        reading.open_ids = frozenset(map(id, entries))
    reading.notes.append(("", "the text ends inside a row of the table; its last cell is not kept"))


def _cells(line: str) -> list[str]:
    line = line.strip()
    if line.startswith("|"):
        line = line[1:]
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return [_text(cell) for cell in _BAR.split(line)]


def _text(cell: str) -> str:
    cell = _BREAK.sub("\n", cell).replace("\\|", "|").strip()
    bold = len(cell) > 4 and cell[:2] == cell[-2:] == "**" and "**" not in cell[2:-2]
    return cell[2:-2].strip() if bold else cell


def _name(cell: str) -> str:
    word = cell.strip(" .#*_`\n")
    return "index" if word in _NUMBER_SIGNS else word
