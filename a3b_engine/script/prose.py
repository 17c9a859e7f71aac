"""Panels written as sentences: "Panel 1: rain. Panel 2: door." instead of a list."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from .numerals import CJK, WORDS, spelled
from .vocabulary import aliases, normalise_key, prose_markers

_LABEL = re.compile(r"^[ \t]{0,8}(?:[-*\u2022]{1,3}[ \t]{0,4})?[*_]{0,3}([^\W\d][\w \-]{0,30})[*_]{0,3}[:\uff1a][*_]{0,3}[ \t]*(.*)$")
MAX_TEXT = 200_000


@lru_cache(maxsize=1)
def _marker() -> re.Pattern:
    words = "|".join(map(re.escape, sorted(prose_markers(), key=len, reverse=True)))
    count = rf"(\d{{1,3}}|{'|'.join(WORDS)}|[{CJK}]{{1,3}})"
    ascii_head = rf"(?:{words})[ \t]{{0,4}}#?[ \t]{{0,4}}{count}"
    cjk_head = rf"\u7b2c{count}(?:\u683c|\u5e55|\u955c|\u4e2a\u955c\u5934|\u4e2a\u5206\u955c|\u30b3\u30de)"
    koma_head = rf"{count}\u30b3\u30de(?:\u76ee)?"
    return re.compile(
        rf"(?:^|(?<=[\s.!?\u3002\uff01\uff1f;\uff1b,\"\u201d]))[*#_\-> \t]{{0,8}}(?:{ascii_head}|{cjk_head}|{koma_head})"
        rf"[*_]{{0,3}}[ \t]{{0,4}}(?:[:\uff1a.)\-\u2013\u2014][*_]{{0,3}}|(?=\r?\n))\s{{0,8}}",
        re.IGNORECASE | re.MULTILINE,
    )


def panels_in_prose(text: str) -> list[dict[str, Any]]:
    """The panels of a text whose markers count up by one from 1; empty if there are none."""
    text = text[:MAX_TEXT]
    heads = []
    for found in _marker().finditer(text):
        number = _number(found[1] or found[2] or found[3])
        if number == len(heads) + 1:
            heads.append((found.start(), found.end()))
    if len(heads) == 1 and text[: heads[0][0]].strip() and "\n" not in text[: heads[0][0]]:
        return []  # one mention in the middle of a sentence is no list
    ends = [start for start, _ in heads[1:]] + [len(text)]
    bodies = [text[start:end].strip(" \t\r\n*_") for (_, start), end in zip(heads, ends)]
    return [{"index": number, **_fields(body)} for number, body in enumerate(bodies, 1)] if any(bodies) else []


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


def _fields(body: str) -> dict[str, str]:
    """Lines `Shot: close` become fields; everything else is the action, as it stands."""
    values: dict[str, str] = {}
    rest = []
    for line in body.split("\n"):
        found = _LABEL.match(line)
        name = aliases("panel").get(normalise_key(found[1])) if found else None
        if name and name not in values and name != "index":
            values[name] = found[2].strip()
        else:
            rest.append(line)
    action = "\n".join(rest).strip()
    if action and "action" not in values:
        values["action"] = action
    elif action and "caption" not in values:
        values["caption"] = action
    return values
