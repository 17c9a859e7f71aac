"""Finds the JSON values in a text: after the thinking, inside or outside fences, between sentences.

Every value is tried with `json` first and is then taken as it stands; `reader.py` reads only what `json` refuses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Callable

from .numerals import integer, number
from .reader import Fuel, Unreadable, read_value
from .strings import is_known_key, join_surrogates

_THINK_NAMES = "think|thinking|thought|thoughts|reasoning|reflection|seed:think|antthinking"
_TAG = rf"[<\[\u25c1](?P<shut>/?)(?:{_THINK_NAMES})\s*[>\]\u25b7]"
_STEP = re.compile(rf"{_TAG}|[{{\[\uff5b\uff3b\u3010]", re.IGNORECASE)
_THINK_OPEN = re.compile(rf"[<\[\u25c1](?:{_THINK_NAMES})\s*[>\]\u25b7]", re.IGNORECASE)
_THINK_CLOSE = re.compile(rf"[<\[\u25c1]/(?:{_THINK_NAMES})\s*[>\]\u25b7]", re.IGNORECASE)
_CLOSE_ALONE = re.compile(rf"^[ \t]*[<\[\u25c1]/(?:{_THINK_NAMES})\s*[>\]\u25b7][ \t]*$", re.IGNORECASE | re.MULTILINE)
_CHANNEL = re.compile(r"<\|channel\|>\s*final\s*<\|message\|>")
_ESCAPED_GAP = r"(?:\s|\\[nrt]){0,80}"
_ESCAPED_START = re.compile(rf"[{{\[]{_ESCAPED_GAP}(?:[{{\[]{_ESCAPED_GAP}){{0,3}}\\\"|[{{\[]\s{{0,8}}\\[nrt]{_ESCAPED_GAP}[\"'{{\[]")
_ESCAPED = re.compile(r"\\([\"'\\/nrt])")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", **{mark: mark for mark in "\"'\\/"}}
_KEYED_START = re.compile(r"[{\uff5b]\s{0,80}[\"'\u201c\uff02]")
_KEY_FIRST = re.compile(r"\s{0,200}(?:```\w{0,12}\s{1,80})?(?=[\"'\u201c]([^\"'\u201d\n]{1,40})[\"'\u201d]\s{0,8}[:\uff1a])")
_STRIP = " \t\r\n\f\v\ufeff\u200b\u200e\u200f\u2060\u00a0\u3000"
MAX_FAILED_STARTS = 200
MAX_CANDIDATES = 1024


@dataclass
class Candidate:
    """One JSON value of the text, at [start, end)."""

    value: Any
    start: int
    end: int
    notes: list[tuple[str, str]] = field(default_factory=list)
    truncated: bool = False
    open_ids: frozenset[int] = frozenset()


@dataclass
class Scan:
    """All values of a text and what stood around them. `thinking` is none, closed or open (never closed)."""

    text: str
    candidates: list[Candidate] = field(default_factory=list)
    thinking: str = "none"
    answer_start: int = 0
    cut_off: bool = False  # the text ends inside a value of which nothing whole is left
    trouble: str = ""
    broken: list[int] = field(default_factory=list)  # where objects start that no rule could read
    escaped_tries: int = 0
    refused: int = -1

    @property
    def answer(self) -> str:
        """The text after the thinking block."""
        return "" if self.thinking == "open" else self.text[self.answer_start :]


def strict(text: str) -> tuple[Any, list[tuple[str, str]]]:
    """The value of a text that is JSON as a whole. Raises ValueError or RecursionError."""
    decoder, notes = _decoder(True)
    return decoder.decode(text.strip(_STRIP)), notes


def refused_at(text: str, error: Exception) -> int:
    """Where a value starts that `strict` has found not to be JSON, so that it need not be tried again; -1 if unknown."""
    known = isinstance(error, json.JSONDecodeError) and error.msg != "Extra data" and "control character" not in error.msg
    return len(text) - len(text.lstrip(_STRIP)) if known else -1


def _decoder(refuse_control: bool) -> tuple[json.JSONDecoder, list[tuple[str, str]]]:
    notes: list[tuple[str, str]] = []

    def pairs(items: list[tuple[str, Any]]) -> dict:
        value = dict(items)
        if len(value) < len(items) and len(notes) < 20:
            notes.append(("", "a key stands twice in one object; the last one counts"))
        return value

    def constant(name: str):
        raise ValueError(f"{name} is not JSON")

    decoder = json.JSONDecoder(
        strict=refuse_control, parse_float=number, parse_int=integer, parse_constant=constant, object_pairs_hook=pairs
    )
    return decoder, notes


def scan(text: str, fuel: Fuel, is_useful: Callable[[Any], bool], refused: int = -1) -> Scan:
    """Every value in the text that `json` or our rules can read, in order; thinking is passed over.

    `refused`: place of a value that `json` is already known to refuse.
    """
    found = Scan(text, answer_start=_after_headers(text), refused=refused)
    if found.answer_start and _CLOSE_ALONE.search(text, 0, found.answer_start):
        found.thinking = "closed"
    pos, failures = _without_first_brace(found, fuel, is_useful), 0
    while len(found.candidates) < MAX_CANDIDATES:
        step = _STEP.search(text, pos)
        if not step:
            break
        if step["shut"] is not None:
            pos = _pass_thinking(found, step)
            continue
        try:
            candidate = _read(found, text, step.start(), fuel, is_useful)
        except Unreadable as trouble:
            found.trouble = str(trouble)
            candidate = None
            if _KEYED_START.match(text, step.start()) and len(found.broken) < 20:
                found.broken.append(step.start())
        if candidate is None:
            failures += 1
            if fuel.steps <= 0 or failures > MAX_FAILED_STARTS:
                break
            pos = step.end()
        else:
            found.candidates.append(candidate)
            pos = max(candidate.end, step.end())
    else:
        found.trouble = f"more than {MAX_CANDIDATES} JSON values stand in the text; the rest is not read"
    return found


def _without_first_brace(found: Scan, fuel: Fuel, is_useful: Callable[[Any], bool]) -> int:
    """Reads a value that begins with its first key; where to go on."""
    text, start = found.text, found.answer_start
    head = _KEY_FIRST.match(text, start)
    if not head or not is_known_key(head[1]):
        return start
    begin = head.end()
    try:
        reading = read_value("{" + text[begin:], 0, fuel)
    except Unreadable:
        return start
    if not is_useful(reading.value):
        return start
    if reading.open_ids == {id(reading.value)} and text.rstrip(_STRIP)[-1:] in ("]", "}"):
        reading.truncated, reading.open_ids = False, frozenset()
    notes = [("", "a missing { is read as if it stood before the first key"), *reading.notes]
    found.candidates.append(Candidate(reading.value, begin, begin + reading.end - 1, notes, reading.truncated, reading.open_ids))
    return begin + reading.end - 1


def _after_headers(text: str) -> int:
    """Where the answer begins if a header says so: a final channel, or a closing tag alone on its line with the
    opening tag in the prompt (as Qwen's template has it)."""
    channels = list(_CHANNEL.finditer(text))
    if channels:
        return channels[-1].end()
    alone = _CLOSE_ALONE.search(text)
    if alone and not _THINK_OPEN.search(text, 0, alone.start()):
        return alone.end()
    return 0


def _pass_thinking(found: Scan, tag: re.Match) -> int:
    if tag["shut"]:  # closing tag without an opening one: all before it was thinking
        found.candidates.clear()
        found.thinking, found.answer_start = "closed", tag.end()
        return tag.end()
    close = _THINK_CLOSE.search(found.text, tag.end())
    if close:
        found.thinking = "closed"
        if not found.candidates:
            found.answer_start = close.end()
        return close.end()
    if found.text[found.text.rfind("\n", 0, tag.start()) + 1 : tag.start()].strip(_STRIP):
        return tag.end()  # in the middle of a line, and never closed: a word of the text
    if not found.candidates:
        found.thinking = "open"
    return len(found.text)


def _read(found: Scan, text: str, start: int, fuel: Fuel, is_useful: Callable[[Any], bool]) -> Candidate | None:
    """The value at `start`; None if it is readable but of no use. Raises Unreadable."""
    fuel.burn(20)
    for refuse_control in (True, False):
        if start == found.refused:
            break
        decoder, notes = _decoder(refuse_control)
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if "control character" in error.msg:
                continue
            break
        except (ValueError, RecursionError):
            break
        if not refuse_control:
            notes = [*notes, ("", "raw line breaks or control characters inside values are kept")]
        return Candidate(value, start, end, notes)
    if _ESCAPED_START.match(text, start):
        found.escaped_tries += 1
        if found.escaped_tries > 2:
            raise Unreadable("escaped quotation marks")
        return _read_escaped(found, text, start, fuel, is_useful)
    reading = read_value(text, start, fuel)
    if not is_useful(reading.value):
        found.cut_off = found.cut_off or reading.truncated
        return None
    return Candidate(reading.value, start, reading.end, reading.notes, reading.truncated, reading.open_ids)


def _read_escaped(found: Scan, text: str, start: int, fuel: Fuel, is_useful: Callable[[Any], bool]) -> Candidate | None:
    """A value whose quotation marks or line breaks are all escaped, as if it stood inside a string."""
    body = _ESCAPED.sub(lambda found: _PLAIN.get(found[1], found[0]), text[start:])
    inner = _read(found, body, 0, fuel, is_useful) if not _ESCAPED_START.match(body) else None
    if inner is None:
        return None
    notes = [("", "the quotation marks or line breaks were escaped one time too many"), *inner.notes]
    return Candidate(inner.value, start, len(text), notes, inner.truncated, inner.open_ids)


def clean(text: str) -> tuple[str, list[tuple[bool, str]]]:
    """The text without a byte order mark, lone surrogates and white space at its end, and what was done (True: it changed a value).

    A line end behind a cut text is none of the model's: who printed or saved it has put it there.
    """
    done = []
    text = text.rstrip()
    if text.startswith("\ufeff"):
        text = text.lstrip("\ufeff")
        done.append((False, "a byte order mark is left out"))
    joined = join_surrogates(text)
    if joined != text:
        lost = joined.count("\ufffd") > text.count("\ufffd")
        done.append((lost, "halves of surrogate pairs are not text; joined or replaced by U+FFFD"))
    return joined, done
