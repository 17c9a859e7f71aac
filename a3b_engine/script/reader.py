"""Reads one JSON-like value that `json` refuses, by our own rules, in one pass and bounded time.

Rules: comments, Python literals, other quotation marks and full-width punctuation, unquoted keys and words, missing or
surplus commas, missing or surplus brackets, unescaped quotation marks and raw newlines inside strings, a text that
ends early. Each rule used is noted with its place. What none of the rules covers raises `Unreadable`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from . import strings
from .brackets import PANEL_LISTS, Brackets
from .frame import Frame
from .numerals import number
from .report import quote
from .strings import CLOSE_ARRAY, CLOSE_OBJECT, COLONS, COMMAS, OPEN_ARRAY, OPEN_OBJECT, QUOTES
from .vocabulary import normalise_key

MAX_DEPTH = 48
MAX_NOTES = 400
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_STRING_PREFIX = re.compile(r"[uUrRbBfF]{1,2}(?=[\"'])")
_LITERAL = re.compile(r"(true|false|null|none|undefined|nil|nan|infinity)\b", re.IGNORECASE)
_LITERALS = {"true": True, "false": False}
_JSON_LITERALS = ("true", "false", "null")
_ELLIPSIS = re.compile(r"\.{2,}|\u2026+")
_WORD_END = re.compile(r"[,\uff0c\u060c\n{}\[\]\uff5b\uff5d\uff3b\uff3d]")
_WORD_START = re.compile(r"[^\W_]|[_$<(-]")
_CODE = re.compile(r"[=(]")  # in a list such a word is program text, not an entry
_FENCE = "```"


class Unreadable(ValueError):
    """None of the rules covers the text at this point."""


class Fuel:
    """Steps left for one whole parse, so that a hostile text ends in bounded time."""

    def __init__(self, steps: int = 120_000) -> None:
        self.steps = steps

    def burn(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise Unreadable("the text is too large or too tangled")


@dataclass
class Reading:
    """A value read by the rules. `open_ids`: ids of the containers that the end of the text cut off."""

    value: Any
    end: int
    notes: list[tuple[str, str]] = field(default_factory=list)  # (place, what)
    truncated: bool = False
    open_ids: frozenset[int] = frozenset()


def read_value(text: str, start: int, fuel: Fuel) -> Reading:
    """Read the object or array that opens at `start`. Raises Unreadable."""
    return _Reader(text, fuel).read(start)


class _Reader(Brackets):
    def __init__(self, text: str, fuel: Fuel) -> None:
        self.text = text
        self.fuel = fuel
        self.stack: list[Frame] = []
        self.reading = Reading(None, 0)
        self.restart: int | None = None  # where the writer began the script again

    def note(self, what: str, element: bool = False) -> None:
        if len(self.reading.notes) < MAX_NOTES:
            self.reading.notes.append((self.stack[-1].path(element) if self.stack else "", what))

    def note_style(self, what: str) -> None:
        """A habit of the whole text; counted, without a place."""
        if len(self.reading.notes) < MAX_NOTES:
            self.reading.notes.append(("", what))

    def read(self, pos: int) -> Reading:
        pos = self.open(pos)
        self.reading.value = self.stack[0].value
        while self.stack:
            pos = strings.skip(self.text, self.comment_noted(pos))
            if pos >= len(self.text):
                return self.cut(pos)
            if self.fuel.steps <= 0:
                self.note("the text is too large; what follows is not read")
                return self.cut(len(self.text))
            self.fuel.burn()
            if self.text.startswith(_FENCE, pos):
                self.note("the fence ends before the brackets are closed; they are closed here")
                break
            pos = self.step(pos)
        self.reading.end = pos
        if not self.reading.notes:
            self.note_style("a spelling that JSON does not allow is read")
        return self.reading

    def comment_noted(self, pos: int) -> int:
        after = strings.SPACE.match(self.text, pos).end()
        if self.text.startswith(strings.COMMENTS, after):
            self.note_style("a comment is left out")
        return after

    def cut(self, pos: int) -> Reading:
        self.reading.truncated = True
        self.reading.open_ids = frozenset(id(frame.value) for frame in self.stack)
        self.reading.end = pos if self.restart is None else self.restart
        if self.restart is None:
            self.note("the text ends here before the brackets are closed")
        return self.reading

    def step(self, pos: int) -> int:
        """Read the next piece inside the innermost container; returns where it ends."""
        frame, char = self.stack[-1], self.text[pos]
        if char in CLOSE_OBJECT or char in CLOSE_ARRAY:
            return self.close(pos, char in CLOSE_OBJECT)
        if char in COMMAS:
            return self.comma(frame, pos, char)
        skipped = _ELLIPSIS.match(self.text, pos)
        if skipped and frame.key is None:
            self.note('"..." stands for something that is not there; left out')
            return skipped.end()
        if frame.needs_comma:
            self.note("a missing comma is read as if it stood there")
            frame.needs_comma = False
        if frame.is_object and frame.key is None:
            return self.key(frame, pos, char)
        if frame.is_object and char in COLONS:
            self.note("a surplus colon is left out")
            return pos + 1
        if not frame.is_object and char in QUOTES and self.key_in_list(frame, pos):
            return pos
        return self.value(frame, pos, char)

    def comma(self, frame: Frame, pos: int, char: str) -> int:
        if frame.key is not None:
            self.note("a value is missing; read as null")
            self.put(frame, None)
        elif not frame.needs_comma:
            self.note("a surplus comma is left out")
        if char != ",":
            self.note_style("another separator is read as a comma")
        frame.needs_comma, frame.after_comma = False, True
        return pos + 1

    def open(self, pos: int) -> int:
        if len(self.stack) >= MAX_DEPTH:
            raise Unreadable(f"brackets are nested more than {MAX_DEPTH} deep")
        if self.text[pos] not in "{[":
            self.note_style("full-width brackets are read as JSON brackets")
        frame = Frame(self.text[pos] in OPEN_OBJECT, self.stack[-1] if self.stack else None, pos)
        self.stack.append(frame)
        return pos + 1

    def key(self, frame: Frame, pos: int, char: str) -> int:
        if char in OPEN_OBJECT:
            after = self.object_among_keys(frame, pos)
            if after is not None:
                return after
        if char in QUOTES:
            if strings.is_doubled(self.text, pos):
                self.note_style("a surplus quotation mark before a key is left out")
                pos += 1
            end = strings.key_end(self.text, pos)
            if end is None:
                raise Unreadable(f"no colon after the key {quote(self.text[pos : pos + 40])}")
            if end.kind == "cut":
                return len(self.text)
            word = strings.decode(self.text[pos + 1 : end.stop])
            if end.kind == "half":
                self.note_style("a missing quotation mark of a key is read as if it stood there")
            if char != '"':
                self.note_style("other quotation marks are read as JSON quotation marks")
            pos = end.end
        else:
            bare = strings.BARE_KEY.match(self.text, pos, pos + 80)
            half = None if bare else strings.half_key(self.text, pos)
            if not bare and not half:
                rest = self.text[pos : pos + 80]
                if pos + len(rest) == len(self.text) and re.fullmatch(r"[\w$ -]+", rest):
                    return len(self.text)
                raise Unreadable(f"no key at {quote(rest, 40)}")
            if bare:
                word, pos, frame.bare = bare[1], bare.end(1), True
                self.note_style("a key without quotation marks is read as a key")
            else:
                word, pos = self.text[pos : half.stop], half.end
                self.note_style("a missing quotation mark of a key is read as if it stood there")
        pos = strings.skip(self.text, pos)
        if pos >= len(self.text):
            return pos
        no_colon = self.text[pos] in QUOTES or self.text[pos] in OPEN_OBJECT + OPEN_ARRAY or self.text[pos].isdecimal()
        if self.text[pos] == "=":
            self.note_style("= is read as a colon")
            pos += self.text.startswith("=>", pos)
        elif no_colon:
            self.note_style("a missing colon is read as if it stood there")
            pos -= 1  # nothing to pass over
        elif self.text[pos] not in COLONS:
            raise Unreadable(f"no colon at {quote(self.text[pos : pos + 40])}")
        elif self.text[pos] != ":":
            self.note_style("a full-width colon is read as a colon")
        if self.starts_again(word, frame):
            self.note("the script begins again here; what stood before is not whole")
            self.stack.pop()
            self.stack[-1].value.pop()
            self.restart = frame.start
            return len(self.text)
        if normalise_key(word) in PANEL_LISTS and frame.value and len(self.stack) > 2 and self.in_side_list():
            self.note(f"a missing }} and ] are read as if they stood before {quote(word)}")
            self.pop()
            self.pop()
            frame = self.stack[-1]
        if word in frame.value and len(self.stack) > 1 and not self.stack[-2].is_object and word == next(iter(frame.value)):
            self.note("the first key of the object comes again: a missing }, { is read before it")
            frame = self.next_object(frame)
        elif word in frame.value:
            self.note(f"the key {quote(word)} stands twice; the last one counts")
        frame.key, frame.after_comma = word, False
        return pos + 1

    def value(self, frame: Frame, pos: int, char: str) -> int:
        prefix = _STRING_PREFIX.match(self.text, pos)
        if prefix:
            self.note_style("the letter before a quotation mark is left out")
            pos = prefix.end()
            char = self.text[pos]
        if char in QUOTES:
            return self.string(frame, pos, char)
        if char in OPEN_OBJECT or char in OPEN_ARRAY:
            frame.after_comma = False
            pos = self.open(pos)
            inner = self.stack[-1].value
            if frame.is_object:
                frame.value[frame.key] = inner
            else:
                frame.value.append(inner)
            return pos
        found = _NUMBER.match(self.text, pos)
        if found and self.delimited(found.end()):
            if found.end() >= len(self.text):
                return found.end()  # more digits may have followed: not a whole value
            return self.put(frame, number(found.group()), found.end())
        found = _LITERAL.match(self.text, pos)
        if found and self.delimited(found.end()):
            if found.group() not in _JSON_LITERALS:
                self.note(f"{found.group()} is read as {'null' if found[1].lower() not in _LITERALS else found[1].lower()}", element=True)
            return self.put(frame, _LITERALS.get(found[1].lower()), found.end())
        return self.word(frame, pos)

    def delimited(self, pos: int) -> bool:
        after = strings.skip(self.text, pos)
        return after >= len(self.text) or self.text[after] in "}],\uff0c;\u060c\u061b\uff5d\uff3d\u3011\"" or "\n" in self.text[pos:after]

    def put(self, frame: Frame, value: Any, end: int = 0) -> int:
        if frame.is_object:
            frame.value[frame.key] = value
        else:
            frame.value.append(value)
        self.placed(frame)
        return end

    def placed(self, frame: Frame) -> None:
        frame.key, frame.needs_comma, frame.after_comma = None, True, False

    def string(self, frame: Frame, pos: int, opener: str) -> int:
        place = strings.Place(
            frame.is_object,
            any(not f.is_object for f in self.stack[:-1]),
            any(f.is_object for f in self.stack[:-1]),
            len(self.stack),
            frame.bare,
        )
        end = strings.value_end(self.text, pos, place)
        self.fuel.burn(end.stray)
        if end.kind == "hopeless":
            raise Unreadable("a string holds too many quotation marks")
        if end.kind == "cut":
            self.note(f"the text ends inside this value; {quote(self.text[pos + 1 : end.stop])} is not kept", element=True)
            return len(self.text)
        start = pos + (3 if end.kind == "triple" else 1)
        doubled = strings.doubled_mark(self.text, start, end) if end.kind == "closed" else (0, 0)
        if any(doubled):
            self.note("a doubled quotation mark is read as one", element=True)
            start, end = start + doubled[0], end._replace(stop=end.stop - doubled[1], stray=0)
        if opener != '"' or end.kind in ("mixed", "triple"):
            self.note_style("other quotation marks are read as JSON quotation marks")
        if end.stray:
            self.note("unescaped quotation marks inside the value are kept as text", element=True)
        if end.raw_newline:
            self.note("a raw line break inside the value is kept", element=True)
        if end.kind == "newline":
            self.note("the missing end of the value is set at the end of the line", element=True)
        if end.kind == "unmarked":
            self.note("the missing end of the value is set before the next key", element=True)
        if end.kind == "escaped":
            self.note("a backslash before the closing quotation mark is kept as text", element=True)
        elif strings.has_foreign_escapes(self.text[start : end.stop]):
            self.note("escapes that JSON does not know: those of Python are resolved, others kept as they stand", element=True)
        return self.put(frame, strings.decode(self.text[start : end.stop]), end.end)

    def word(self, frame: Frame, pos: int) -> int:
        """An unquoted word or phrase, up to a comma that a key follows, a bracket or the end of the line."""
        if not _WORD_START.match(self.text, pos) or (not frame.is_object and len(self.stack) == 1):
            raise Unreadable(f"no value at {quote(self.text[pos : pos + 40])}")
        at = pos
        while True:
            self.fuel.burn()
            found = _WORD_END.search(self.text, at)
            if not found:
                return len(self.text)
            at = found.end()
            if found.group() not in ",\uff0c\u060c" or not frame.is_object:
                break
            after = strings.skip(self.text, at)
            if strings.key_follows(self.text, after, frame.bare) or self.text[after : after + 1] in ("}", "]"):
                break
        word = self.text[pos : found.start()].strip()
        if not frame.is_object and _CODE.search(word):
            raise Unreadable(f"program text at {quote(word, 40)}")
        if not frame.is_object and frame.value and isinstance(frame.value[-1], dict):
            self.note(f"{quote(word)} between objects is no entry; left out", element=True)
            return found.start()
        if word[-1:] in QUOTES and word.count(word[-1]) == 1:
            word = word[:-1]  # only its first mark is missing
        self.note(f"{quote(word)} without quotation marks is read as text", element=True)
        return self.put(frame, word, found.start())
