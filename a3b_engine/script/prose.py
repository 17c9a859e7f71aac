"""Panels written as sentences or labelled lines: "Panel 1: rain. Panel 2: door." instead of a list."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from .numerals import CJK, WORDS, spelled
from .vocabulary import aliases, normalise_key, prose_markers, whole_shot

MAX_TEXT = 200_000
_LABEL = re.compile(r"^[ \t]{0,8}(?:[-*\u2022]{1,3}[ \t]{0,4})?[*_]{0,3}([^\W\d][\w \-]{0,30})[*_]{0,3}[:\uff1a][*_]{0,3}[ \t]*(.*)$")
_INLINE_LABEL = re.compile(r"(?:(?<=[.;\u3002\uff1b])[ \t]{0,4}|[ \t]{1,4}[|/][ \t]{1,4})[*_]{0,3}([^\W\d_][\w \-]{0,30})[*_]{0,3}[:\uff1a]")
_SPOKEN = re.compile(
    r"^[ \t]{0,8}(?:[-*\u2022]{1,3}[ \t]{0,4})?[*_]{0,3}([^\W\d][^:\uff1a\n*]{0,30})[*_]{0,3}[:\uff1a][*_]{0,3}[ \t]*"
    r"(?:\"([^\"]+)\"|\u201c([^\u201c\u201d]+)\u201d|\u300c([^\u300c\u300d]+)\u300d)[ \t]*$"
)
_ITEM = re.compile(r"^[ \t]{0,3}(\d{1,3})[.)\u3001][ \t]+", re.MULTILINE)
_HEAD = re.compile(r"\s*([^.\n:\uff1a,\uff0c\u3002]{1,40})(?:[.\n:\uff1a\u3002]|\Z)")
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
        rf"[*_]{{0,3}}[ \t]{{0,4}}(?:[:\uff1a.)\-\u2013\u2014\]\u3011\uff09][*_]{{0,3}}[:\uff1a]?|(?=\r?\n))\s{{0,8}}",
        re.IGNORECASE | re.MULTILINE,
    )


def panels_in_prose(text: str) -> list[dict[str, Any]]:
    """The panels of a text whose markers count up by one from 1; empty if there are none."""
    text = text[:MAX_TEXT]
    heads = _counted((found, _number(found[1] or found[2] or found[3])) for found in _marker().finditer(text))
    if len(heads) == 1 and text[: heads[0][0]].strip() and "\n" not in text[: heads[0][0]]:
        return []  # one mention in the middle of a sentence is no list
    bodies = _bodies(text, heads)
    return [{"index": number, **_fields(body)} for number, body in enumerate(bodies, 1)] if any(bodies) else panels_in_items(text)


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


def _fields(body: str) -> dict[str, Any]:
    """Lines `Shot: close` become fields, lines `Rin: "Hello"` dialogue; everything else is the action, as it stands."""
    values: dict[str, Any] = {}
    rows: list[dict[str, str]] = []
    rest = []
    for line in _lines(body):
        found = _LABEL.match(line)
        name = _field(found[1]) if found else None
        said = None if name else _SPOKEN.match(line)
        if name and name not in values:
            values[name] = found[2].strip()
        elif said:
            rows.append({"speaker": said[1].strip(), "line": said[2] or said[3] or said[4]})
        else:
            rest.append(line)
    if rows and "dialogue" not in values:
        values["dialogue"] = rows
    text = "\n".join(rest).strip()
    head = _HEAD.match(text) if "shot" not in values else None
    if head and whole_shot(head[1]):
        values["shot"], text = head[1].strip(), text[head.end() :].strip()
    free = next((name for name in ("action", "caption") if name not in values), None)
    if text and free:
        values[free] = text
    return values
