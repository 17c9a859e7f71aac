"""Panels written as sentences or labelled lines: "Panel 1: rain. Panel 2: door." instead of a list."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from .numerals import CJK, WORDS, spelled
from .vocabulary import aliases, find_shots, normalise_key, prose_markers, remark_labels, whole_shot

MAX_TEXT = 200_000
_BULLET = r"^[ \t]{0,8}(?:[-*\u2022>+]{1,3}[ \t]{0,4})?"
_LABEL = re.compile(_BULLET + r"[*_]{0,3}([^\W\d][\w \-]{0,30})[*_]{0,3}[:\uff1a][*_]{0,3}[ \t]*(.*)$")
_ROW = re.compile(_BULLET + r"(?=\S)(.*)$")
_QUOTED_LINE = re.compile(_BULLET + r"(\"[^\"]+\"|\u201c[^\u201c\u201d]+\u201d|\u300c[^\u300c\u300d]+\u300d)[ \t]*$")
_INLINE_LABEL = re.compile(r"(?:(?<=[.;\u3002\uff1b])[ \t]{0,4}|[ \t]{1,4}[|/][ \t]{1,4})[*_]{0,3}([^\W\d_][\w \-]{0,30})[*_]{0,3}[:\uff1a]")
_SPOKEN = re.compile(
    _BULLET + r"[*_]{0,3}([^\W\d][^:\uff1a\n*]{0,30})[*_]{0,3}[:\uff1a][*_]{0,3}[ \t]*"
    r"(?:\"([^\"]+)\"|\u201c([^\u201c\u201d]+)\u201d|\u300c([^\u300c\u300d]+)\u300d)[ \t]*$"
)
_ITEM = re.compile(r"^[ \t]{0,3}(\d{1,3})[.)\u3001][ \t]+", re.MULTILINE)
_HEAD = re.compile(r"\s*([^.\n:\uff1a,\uff0c\u3002]{1,40})(?:[.\n:\uff1a\u3002]|\Z)")
# What a head says of its panel in brackets: "Panel 1 (Wide shot):"
_ASIDE = r"[(\uff08\[\u3010](?P<aside>[^()\uff08\uff09\[\]\u3010\u3011\n]{1,40})[)\uff09\]\u3011]"
_FIRST_WORDS = re.compile(r"\s*(\S{1,30}(?:[ \t]\S{1,30}){0,3})")
_CONTINUED = ("action", "visual_prompt", "caption", "background", "light", "micro_expression", "negative")  # may run over several lines
_REMARK = re.compile(r"\n[ \t]*\n|\n[ \t]*(?:-{3,}|\*{3,}|```)")


@lru_cache(maxsize=1)
def _marker() -> re.Pattern:
    words = "|".join(map(re.escape, sorted(prose_markers(), key=len, reverse=True)))
    count = rf"(\d{{1,3}}|{'|'.join(WORDS)}|[{CJK}]{{1,3}})"
    ascii_head = rf"(?:{words})[ \t]{{0,4}}#?[ \t]{{0,4}}{count}"
    cjk_head = rf"\u7b2c{count}(?:\u683c|\u5e55|\u955c|\u4e2a\u955c\u5934|\u4e2a\u5206\u955c|\u30b3\u30de)"
    koma_head = rf"{count}\u30b3\u30de(?:\u76ee)?"
    return re.compile(
        rf"(?:^|(?<=[\s.!?\u3002\uff01\uff1f;\uff1b,\"\u201d]))[*#_\-> \t\[\u3010(\uff08]{{0,8}}(?:{ascii_head}|{cjk_head}|{koma_head})"
        rf"[*_]{{0,3}}[ \t]{{0,4}}(?:{_ASIDE}[*_]{{0,3}}[ \t]{{0,4}}(?:[:\uff1a.\-\u2013\u2014][*_]{{0,3}}|(?=\r?\n|\Z)|(?<=[\u3011\uff09]))"
        rf"|[:\uff1a.)\-\u2013\u2014\]\u3011\uff09][*_]{{0,3}}[:\uff1a]?|(?=\r?\n))\s{{0,8}}",
        re.IGNORECASE | re.MULTILINE,
    )


def panels_in_prose(text: str) -> list[dict[str, Any]]:
    """The panels of a text whose markers count up by one from 1; empty if there are none."""
    text = text[:MAX_TEXT]
    asides: dict[int, str] = {}

    def numbered():
        for found in _marker().finditer(text):
            asides[found.end()] = found["aside"] or ""
            yield found, _number(found[1] or found[2] or found[3])

    heads = _counted(numbered())
    if len(heads) == 1 and text[: heads[0][0]].strip() and "\n" not in text[: heads[0][0]]:
        return []  # one mention in the middle of a sentence is no list
    bodies = _bodies(text, heads)
    told = [asides[end].strip() for _, end in heads]
    if not any(bodies) and not any(told):
        return panels_in_items(text)
    return [{"index": number, **_fields(body, aside)} for number, (body, aside) in enumerate(zip(bodies, told), 1)]


def panels_in_items(text: str) -> list[dict[str, Any]]:
    """The panels of a numbered list (`1. Shot: wide`), each item of which has a line that is labelled as a shot, an
    action or a prompt; empty if there is none."""
    bodies = _bodies(text, _counted((found, int(found[1])) for found in _ITEM.finditer(text)))
    panels = [_fields(body) for body in bodies]
    told = [_labels(body) & {"shot", "action", "visual_prompt"} for body in bodies]
    return [{"index": number, **panel} for number, panel in enumerate(panels, 1)] if told and all(told) else []


def _counted(found: Any) -> list[tuple[int, int]]:
    heads: list[tuple[int, int]] = []
    for head, number in found:
        if number == len(heads) + 1:
            heads.append((head.start(), head.end()))
    return heads


def _bodies(text: str, heads: list[tuple[int, int]]) -> list[str]:
    """The text under each head. If only the last one has a second paragraph, that is a remark after the panels."""
    ends = [start for start, _ in heads[1:]] + [len(text)]
    bodies = [text[start:end].strip(" \t\r\n*_#-") for (_, start), end in zip(heads, ends)]
    if len(bodies) > 1 and not any(_REMARK.search(body) for body in bodies[:-1]):
        bodies[-1] = _REMARK.split(bodies[-1], maxsplit=1)[0].rstrip(" \t\r\n*_#-")
    return bodies


def split_panel(entry: Any) -> list[Any]:
    """The panels that stand as prose inside a single one, `Panel 1: rain. Panel 2: door.`; empty if none do."""
    texts = {"": entry} if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
    for key, text in texts.items():
        if not isinstance(text, str) or key and aliases("panel").get(normalise_key(key)) not in ("action", "visual_prompt"):
            continue
        parts = panels_in_prose(text) if _marker().match(text.lstrip()[:200]) else []
        if len(parts) > 1:
            rest = {name: value for name, value in texts.items() if name != key}
            return [{**rest, **parts[0]}, *parts[1:]]
    return []


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() else spelled(word)


def _field(label: str) -> str | None:
    name = aliases("panel").get(normalise_key(label))
    return None if name == "index" else name


def _lines(body: str) -> list[str]:
    """The lines of a body; a known label after the end of a sentence begins a line too."""

    def apart(found: re.Match) -> str:
        return "\n" + found.group().lstrip(" \t|/") if _field(found[1]) else found.group()

    return _INLINE_LABEL.sub(apart, body).split("\n")


def _labels(body: str) -> set[str | None]:
    return {_field(found[1]) for line in _lines(body) if (found := _LABEL.match(line))}


def _fields(body: str, aside: str = "") -> dict[str, Any]:
    """Lines `Shot: close` become fields, lines `Rin: "Hello"` dialogue, labels of remarks (`Mood: tense`) keys of their
    own; everything else is the action, as it stands. `aside`: what the head says in brackets."""
    reading = _Lines(body)
    values = reading.values
    if aside and find_shots(aside) and "shot" not in values:
        values["shot"] = aside
    elif aside:
        values.setdefault("heading", aside)
    text = "\n".join(reading.rest).strip()
    head = _shot_ahead(text) if "shot" not in values else None
    if head:
        values["shot"], text = head
    if text and values.get("action"):
        values["note"] = f"{values['note']}\n{text}" if "note" in values else text  # kept and reported, not drawn
    elif text:
        values["action"] = text
    return values


def _shot_ahead(text: str) -> tuple[str, str] | None:
    """The shot a text begins with, and the rest of the text: `Close-up. Rin smiles`, `WIDE SHOT Rin runs`, `Wide shot of
    a harbour`."""
    head = _HEAD.match(text)
    if head and whole_shot(head[1]):
        return head[1].strip(), text[head.end() :].strip()
    found = _FIRST_WORDS.match(text)
    words = found[1].split() if found else []
    for count in range(len(words), 0, -1):
        phrase = " ".join(words[:count])
        if not whole_shot(phrase):
            continue
        rest = text.lstrip()[len(phrase) :]
        if text.lstrip().startswith(phrase) and (phrase.isupper() or rest.lstrip().startswith("of ")):
            return phrase, rest.strip().removeprefix("of ").lstrip() if not phrase.isupper() else rest.strip()
    return None


class _Lines:
    """The lines of one panel, read in order. `values`: its fields; `rest`: lines that belong to no field."""

    def __init__(self, body: str) -> None:
        self.values: dict[str, Any] = {}
        self.rest: list[str] = []
        self.rows: list[Any] = []
        self.last: str | None = None  # field of the line before, None after an empty line
        lines = _lines(body)
        self.labelled = any(_field(found[1]) for line in lines if (found := _LABEL.match(line)))
        for line in lines:
            self.read(line)
        if len(self.rows) == 1 and isinstance(self.rows[0], str):
            self.values["dialogue"] = self.rows[0]
        elif self.rows:
            self.values["dialogue"] = self.rows

    def read(self, line: str) -> None:
        if not line.strip():
            self.rest.append(line)
            self.last = None if self.last != "dialogue" or self.rows else self.last
            return
        found = _LABEL.match(line)
        name = _field(found[1]) if found else None
        said = None if name else _SPOKEN.match(line)
        remark = found and not name and normalise_key(found[1]) in remark_labels()
        if said and not (remark and self.labelled):
            self.rows.append({"speaker": said[1].strip(), "line": said[2] or said[3] or said[4]})
        elif name:
            self.field(name, found[2].strip(), line)
        elif remark and self.labelled and found[2].strip():
            self.remark(normalise_key(found[1]), found[2].strip())
        elif self.last == "dialogue" and (found or _QUOTED_LINE.match(line)):
            self.rows.append(_ROW.match(line)[1].strip())
        elif self.last in _CONTINUED and not found:
            before = self.values[self.last]
            self.values[self.last] = f"{before}\n{line.strip()}" if before else line.strip()
        else:
            self.rest.append(line)

    def field(self, name: str, text: str, line: str) -> None:
        self.last = name
        if name == "dialogue":
            self.rows += [text] if text else []
        elif not self.values.get(name):
            self.values[name] = text
        elif name in _CONTINUED:
            self.values[name] += "\n" + text
        elif text != self.values[name]:
            self.rest.append(line)

    def remark(self, key: str, text: str) -> None:
        self.last = None
        self.values[key] = f"{self.values[key]}\n{text}" if key in self.values else text
