"""Reads a script written in the block form of YAML: keys, dashes and indentation.

A strict reader of the plain form only, in one pass: no anchors, tags, merges or types beyond null, true, false and
numbers, so that a hostile text costs no more than its length. A line that does not fit ends the outline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .flow import flow_items
from .numerals import number
from .reader import Fuel, Reading, Unreadable, read_value
from .report import quote
from .kinds import number_of_key
from .strings import decode
from .vocabulary import aliases, normalise_key

MAX_TEXT, MAX_DEPTH = 200_000, 16
MAX_OUTLINES = 16
_KEY = re.compile(
    r"(\"[^\"]{1,80}\"|'[^']{1,80}'|[^\s\-#\"'\[\]{}|>:\uff1a][^:\uff1a]{0,60}?)[ ]*(?::(?=[ ]|$)|\uff1a)[ ]*(.*)$"
)
_FENCE = re.compile(r"[ ]{0,8}(?:```|~~~)")
_BLOCK = re.compile(r"([|>])[+-]?\d?[+-]?[ ]*(?:#.*)?$")
_COMMENT = re.compile(r"(?:^|[ ]+)#(?:[ ].*)?$")  # "sign #3" is text
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?$")
_REFERENCE = re.compile(r"[&*][\w-]+(?:[ ]|$)|!!\w|<<$")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "false": False, "False": False}


@dataclass
class _Line:
    indent: int
    text: str
    start: int


def outlines(text: str, fuel: Fuel) -> list[Reading]:
    """Every outline in a text that starts with a key of a script or with a list of panels."""
    text = text[:MAX_TEXT]
    lines = _lines(text)
    found: list[Reading] = []
    at = 0
    while at < len(lines) and len(found) < MAX_OUTLINES:
        if not _starts(lines, at):
            at += 1
            continue
        reader = _Outline(lines, fuel)
        try:
            value, after = reader.block(at, lines[at].indent, 0)
        except Unreadable:
            at += 1
            continue
        fenced = any(_FENCE.match(line.text) for line in lines[:at]) and _open_fence(lines[:at])
        reading = Reading(value, lines[after].start if after < len(lines) else len(text), reader.notes)
        reading.notes.insert(0, ("", "the outline (YAML) is read as JSON"))
        if after < len(lines) and lines[after].indent and not _FENCE.match(lines[after].text):
            reading.notes.append(("", f"the outline ends at a line that does not fit: {quote(lines[after].text)}"))
        if fenced and after >= len(lines):
            _cut(reading, whole_line=text.endswith("\n"))
        found.append(reading)
        at = max(after, at + 1)
    return found


def _lines(text: str) -> list[_Line]:
    lines, start = [], 0
    for raw in text.split("\n"):
        flat = raw.rstrip().expandtabs(4)
        body = flat.lstrip(" \u00a0\u3000")
        lines.append(_Line(len(flat) - len(body), body, start))
        start += len(raw) + 1
    while lines and not lines[-1].text:
        lines.pop()
    return lines


def _open_fence(lines: list[_Line]) -> bool:
    return sum(bool(_FENCE.match(line.text)) for line in lines) % 2 == 1


def _starts(lines: list[_Line], at: int) -> bool:
    text = lines[at].text
    dash = text.startswith("- ")
    found = _KEY.match(text[1:].lstrip() if dash else text)
    if not found:
        return text == "-" and at + 1 < len(lines) and bool(_KEY.match(lines[at + 1].text))
    word = normalise_key(_unquoted(found[1]))
    if dash:
        return word in aliases("panel")
    return word in aliases("script") or number_of_key(word) is not None and not found[2]


def _unquoted(word: str) -> str:
    return word[1:-1] if word[0] in "\"'" and word[-1] == word[0] and len(word) > 1 else word


def _cut(reading: Reading, whole_line: bool) -> None:
    """The text ends in an outline: what it ends in is open, and a value whose line is not whole is not kept."""
    containers = []
    value = reading.value
    while isinstance(value, (dict, list)) and value:
        containers.append(value)
        value = value[-1] if isinstance(value, list) else next(reversed(value.values()))
    if containers and not whole_line:
        last = containers[-1]
        del last[-1 if isinstance(last, list) else next(reversed(last))]
    reading.truncated, reading.open_ids = True, frozenset(map(id, containers))
    reading.notes.append(("", "the text ends before its fence is closed; a value it ends in is not kept"))


class _Outline:
    """One outline: methods take the line where something starts and return its value and the line after it."""

    def __init__(self, lines: list[_Line], fuel: Fuel) -> None:
        self.lines = lines
        self.fuel = fuel
        self.notes: list[tuple[str, str]] = []

    def at(self, n: int) -> _Line | None:
        """The line, None at the end and at a fence."""
        line = self.lines[n] if n < len(self.lines) else None
        return None if line is None or _FENCE.match(line.text) else line

    def next(self, n: int) -> int:
        """The next line that is not empty or a comment."""
        while n < len(self.lines) and (not self.lines[n].text or self.lines[n].text.startswith("# ")):
            n += 1
        return n

    def block(self, n: int, indent: int, depth: int) -> tuple[Any, int]:
        """The list or object whose first line is `n`."""
        if depth > MAX_DEPTH:
            raise Unreadable("an outline that is nested too deeply")
        dash = self.lines[n].text == "-" or self.lines[n].text.startswith("- ")
        return self.items(n, indent, depth) if dash else self.entries(n, indent, depth)

    def items(self, n: int, indent: int, depth: int) -> tuple[Any, int]:
        values: list[Any] = []
        while (line := self.at(n)) and line.indent == indent and (line.text == "-" or line.text.startswith("- ")):
            self.fuel.burn()
            rest = line.text[1:].lstrip()
            inner = indent + len(line.text) - len(rest)
            if not rest:
                value, n = self.below(n + 1, indent, depth)
            elif _KEY.match(rest) or rest.startswith("- "):
                self.lines[n] = _Line(inner, rest, line.start)
                value, n = self.block(n, inner, depth + 1)
            else:
                value, n = self.scalar(rest, n, indent)
            values.append(value)
            n = self.next(n)
        return self.joined(values), n

    def joined(self, values: list[Any]) -> Any:
        """One object from a list with a field of a panel on each dash; other lists as they are."""
        if len(values) < 2 or not all(isinstance(value, dict) and len(value) == 1 for value in values):
            return values
        keys = [next(iter(value)) for value in values]
        if len(set(keys)) < len(keys) or not all(normalise_key(key) in aliases("panel") for key in keys):
            return values
        self.notes.append(("", "a dash before each field is left out"))
        return {key: inner for value in values for key, inner in value.items()}

    def entries(self, n: int, indent: int, depth: int) -> tuple[dict, int]:
        values: dict[str, Any] = {}
        while (line := self.at(n)) and line.indent == indent and (found := _KEY.match(line.text)):
            self.fuel.burn()
            key, rest = _unquoted(found[1]), _COMMENT.sub("", found[2]) if found[2].startswith("#") else found[2]
            if key in values:
                self.notes.append(("", f"the key {key[:40]} stands twice in one object; the last one counts"))
            if rest:
                values[key], n = self.scalar(rest, n, indent)
            else:
                after = self.next(n + 1)
                following = self.at(after)
                same = following and following.indent == indent and following.text.startswith("- ")
                values[key], n = self.items(after, indent, depth + 1) if same else self.below(n + 1, indent, depth)
            n = self.next(n)
        return values, n

    def below(self, n: int, indent: int, depth: int) -> tuple[Any, int]:
        """The value on the lines that are indented deeper; None if there are none."""
        n = self.next(n)
        line = self.at(n)
        if not line or line.indent <= indent:
            return None, n
        if _KEY.match(line.text) or line.text == "-" or line.text.startswith("- "):
            return self.block(n, line.indent, depth + 1)
        return self.scalar(line.text, n, indent)

    def scalar(self, first: str, n: int, indent: int) -> tuple[Any, int]:
        """A value that starts on line `n` with the text `first`, and its further lines."""
        block = _BLOCK.match(first)
        if block:
            return self.text_block(n + 1, indent, folded=block[1] == ">")
        rows, after = [first], n + 1
        while (line := self.at(after)) and line.text and line.indent > indent:
            if first[0] not in "\"'[{" and (_KEY.match(line.text) or line.text.startswith("- ")):
                break
            self.fuel.burn()
            rows.append(line.text)
            after += 1
        return self.value(" ".join(rows)), after

    def text_block(self, n: int, indent: int, folded: bool) -> tuple[str, int]:
        rows = []
        while (line := self.at(n)) and (line.indent > indent or not line.text):
            self.fuel.burn()
            rows.append(line)
            n += 1
        while rows and not rows[-1].text:
            rows.pop()
        least = min((row.indent for row in rows if row.text), default=0)
        texts = [" " * max(row.indent - least, 0) + row.text for row in rows]
        return (" " if folded else "\n").join(texts), n

    def value(self, text: str) -> Any:
        if text[0] in "\"'":
            body = text if text[-1] == text[0] and len(text) > 1 else _COMMENT.sub("", text)
            if body[-1] == body[0] and len(body) > 1:
                return decode(body[1:-1]) if body[0] == '"' else body[1:-1].replace("''", "'")
            return text
        if text[0] in "[{":
            items = flow_items(text) if text[0] == "[" and ": " not in text else None
            if items is not None:
                return [item.text if item.quoted else self.value(item.text) for item in items]
            try:
                inner = read_value(text, 0, self.fuel)
            except Unreadable:
                return text
            return inner.value if not inner.truncated and not _COMMENT.sub("", text[inner.end :]).strip() else text
        if _REFERENCE.match(text):
            raise Unreadable("an outline with anchors, references or tags")
        text = _COMMENT.sub("", text).strip()
        return _WORDS[text] if text in _WORDS else number(text) if _NUMBER.match(text) else text
