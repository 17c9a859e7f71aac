"""Find and replace in the texts of a script: plain text only.

No regular expressions: the standard library cannot stop one that backtracks for hours, and a queue must not hang.
Matching of plain text takes time in proportion to the text, and the size of the result is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ScriptError
from .report import quote

ARROW = "=>"
SCOPES = ("all texts", "pictures", "words")
MAX_PAIRS = 500
MAX_CHARACTERS = 4_000_000  # of all texts together; what the parser reads
MAX_WORK = 500_000_000  # characters of the script times characters looked for: some seconds at worst

_PICTURES = frozenset("style look action micro_expression background light props visual_prompt negative".split())
_WORDS = frozenset("title language name line emotion_tag caption sfx speaker".split())
_IDS = frozenset(("id", "characters", "scene_tag"))
_CLOSED = frozenset(("shot", "reading_direction"))


@dataclass(frozen=True)
class Pair:
    """What is looked for and what is put there; `line` is its place in the list, from 1."""

    old: str
    new: str
    line: int


def read_pairs(text: str) -> list[Pair]:
    """Pairs `old => new`, one a line; blank lines count for nothing. Raises ScriptError naming the line.

    White space around either side does not belong to it. A side in double quotes is read as a JSON string, which
    keeps its spaces, its arrows and \\n.
    """
    pairs = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if not line.strip():
            continue
        old, new = _sides(line.strip(), number)
        if not old:
            raise ScriptError(f"replace: line {number}: nothing stands before {ARROW}. Write old {ARROW} new.")
        pairs.append(Pair(old, new, number))
    if len(pairs) > MAX_PAIRS:
        raise ScriptError(f"replace: {len(pairs)} pairs; at most {MAX_PAIRS} are taken.")
    return pairs


def _sides(line: str, number: int) -> tuple[str, str]:
    if line.startswith('"'):
        try:
            old, end = json.JSONDecoder().raw_decode(line)
        except ValueError:
            old, end = None, 0
        if old is not None and line[end:].lstrip().startswith(ARROW):
            return _text(old), _unquoted(line[end:].lstrip()[len(ARROW) :].strip())
    old, arrow, new = line.partition(ARROW)
    if not arrow:
        raise ScriptError(f"replace: line {number} has no {ARROW}: {quote(line)}. Write old {ARROW} new, one pair a line.")
    return old.strip(), _unquoted(new.strip())


def _unquoted(side: str) -> str:
    if len(side) > 1 and side.startswith('"') and side.endswith('"'):
        try:
            return _text(json.loads(side))
        except ValueError:
            pass  # text that only looks quoted: "a" and "b"
    return side


def _text(value: str) -> str:
    """Without half surrogate pairs, which JSON escapes can spell and no file takes."""
    return value.encode("utf-8", "replace").decode("utf-8")


def replace_texts(
    script: dict[str, Any],
    pairs: list[Pair],
    *,
    scope: str = "all texts",
    whole_words: bool = False,
    match_case: bool = True,
    ids: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """A script (as from `model_dump`) with the pairs applied one after the other, and a report line for each.

    Keys, numbers, shots and the reading direction stay. Ids (of characters, in the panels, as speakers, scene tags)
    change only with `ids`. scope: `pictures` are the fields that are drawn, `words` those that are read or spoken.
    """
    if scope not in SCOPES:
        raise ScriptError(f"scope: {scope!r} is not known. Use one of {', '.join(SCOPES)}.")
    known_ids: set[str] = set()

    def chosen(field: str, text: str) -> bool:
        if field in _CLOSED:
            return False
        if field in _IDS or field == "speaker" and text in known_ids:
            return ids
        return scope == "all texts" or field in (_PICTURES if scope == "pictures" else _WORDS)

    size = 0

    def measure(text: str) -> str:
        nonlocal size
        size += len(text)
        return text

    _mapped(script, lambda field, text: measure(text), "")
    if size * sum(len(pair.old) for pair in pairs) > MAX_WORK:
        raise ScriptError(f"replace: {len(pairs)} pairs are too many for a script of {size} characters. Use fewer or shorter ones.")
    report = []
    for pair in pairs:
        pattern = _pattern(pair.old, whole_words, match_case)
        changes = 0
        known_ids = {person["id"] for person in script["characters"]}  # a pair before this one may have changed them

        def changed(field: str, text: str) -> str:
            nonlocal changes, size
            if not chosen(field, text):
                return text
            found = sum(1 for _ in pattern.finditer(text))
            size += found * (len(pair.new) - len(pair.old))
            if size > MAX_CHARACTERS:
                raise ScriptError(f"replace: line {pair.line}: the script would grow beyond {MAX_CHARACTERS} characters. Shorten the new text.")
            changes += found
            return pattern.sub(lambda _: pair.new, text) if found else text

        script = _mapped(script, changed, "")
        told = f"replace: line {pair.line}: {quote(pair.old)} => {quote(pair.new)}"
        report.append(f"info: {told}: {changes} changed" if changes else f"warning: {told}: found nowhere in {_where(scope, ids)}")
    return script, report


def _where(scope: str, ids: bool) -> str:
    return f"{scope} and ids" if ids else scope


def _pattern(old: str, whole_words: bool, match_case: bool) -> re.Pattern:
    text = re.escape(old)
    if whole_words:
        text = rf"(?<!\w){text}(?!\w)"
    return re.compile(text, 0 if match_case else re.IGNORECASE)


def _mapped(value: Any, change: Callable[[str, str], str], field: str) -> Any:
    """The value with every text changed by `change(field, text)`; texts of a list bear the list's field."""
    if isinstance(value, str):
        return change(field, value)
    if isinstance(value, list):
        return [_mapped(item, change, field) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change, key) for key, item in value.items()}
    return value
