"""Reads a list that is written on one line inside of another text: `[cup, "red hat"]`, `('cup', 'hat')`."""

from __future__ import annotations

import re
from typing import NamedTuple

from .strings import decode

_FLOW_ITEM = re.compile(
    r"\s{0,80}(?:\"((?:[^\"\\\n]|\\.){0,400})\"|'((?:[^'\\\n]|''|\\.){0,400})'"
    r"|([^\[\](){}\"',\s][^\[\](){}\",\n]{0,400}))\s{0,80}(,|\Z)"
)


class FlowItem(NamedTuple):
    """One entry of a list on one line; `quoted` if it stood in quotation marks."""

    text: str
    quoted: bool


def flow_items(text: str) -> list[FlowItem] | None:
    """The entries of a list on one line, `[cup, "red hat"]`, or of a Python tuple, `('cup', 'hat')`; None if the text is
    no such list. In round brackets every entry must be quoted, or every remark would be a list."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "()") or len(text) < 2:
        return None
    inner, items, pos = text[1:-1].strip(), [], 0
    while pos < len(inner):
        found = _FLOW_ITEM.match(inner, pos)
        if not found:
            return None
        quoted = found[3] is None
        if not quoted and text[0] == "(":
            return None
        marked = decode(found[1]) if found[1] is not None else decode((found[2] or "").replace("''", "'"))
        items.append(FlowItem(marked if quoted else found[3].strip(), quoted))
        pos = found.end()
    return items
