"""The last resort: the `json-repair` package, on what our own rules cannot read, with its result checked.

That package may guess. A result is used only if every key and string of it occurs in the source text.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from .strings import decode

LONGEST = 16_000  # characters; the package is recursive and not linear
_LOG = logging.getLogger(__name__)
_SPACES = re.compile(r"\s+")


def last_resort(text: str) -> Any | None:
    """Value that `json-repair` reads from the first bracket on, or None if it reads none, invents text or is not installed."""
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0 or len(text) - start > LONGEST or _depth(text[start:]) > 40:
        return None
    try:
        import json_repair
    except ImportError:
        _LOG.debug("json-repair is not installed; what our own rules cannot read stays unread")
        return None
    source = text[start:]
    try:
        value = json_repair.loads(source, skip_json_loads=True)
    except Exception as error:  # a foreign parser on hostile text: any failure means "not readable"
        _LOG.debug("json-repair gave up: %s", type(error).__name__)
        return None
    if not isinstance(value, (dict, list)) or not value:
        return None
    return value if _all_from(value, source) else None


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def _all_from(value: Any, source: str) -> bool:
    haystack = _SPACES.sub(" ", source) + "\n" + _SPACES.sub(" ", decode(source))
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str) and _SPACES.sub(" ", item).strip() not in haystack:
            return False
        elif isinstance(item, float) and str(item) not in source:  # "1." would become the text 1.0
            return False
    return True
