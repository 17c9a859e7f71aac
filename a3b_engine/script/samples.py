"""Tells data from a description of data: a JSON schema, a sample with placeholders, an ellipsis for the rest."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .vocabulary import aliases, find_shots, normalise_key, sample_words

if TYPE_CHECKING:
    from .shapes import Shape

_LOOK_AT = 256  # entries of a list that are looked at
_PLACEHOLDER = re.compile(
    r"\s*(?:\.{2,}|\u2026+|<[^<>]*>|string|str|text|integer|int|number|todo|tbd|_+|-+|x{2,})?\s*$",
    re.IGNORECASE,
)
# In a sample that lists several shots as the value of one: "string, what happens", "(what happens)".
_DESCRIBED = re.compile(
    r"\s*(?:(?:string|str|text|integer|int|number|list|array)\b\s*[,:;(|\-].*|\([^()]*\)|\uff08[^\uff08\uff09]*\uff09)\s*\Z",
    re.IGNORECASE | re.DOTALL,
)
_BRACKETED = re.compile(r"\s*(?:\{([^{}]*)\}|\[([^\[\]]*)\])\s*\Z")
_SCHEMA_WORDS = frozenset("type enum items properties $ref anyOf oneOf allOf const description".split())
_ELLIPSIS = re.compile(r"\s*(?:\.{2,}|\u2026+)\s*$")
_WRAPPERS = ("schema", "json_schema", "parameters", "function", "response_format")  # of a schema, in a request
_SPOKEN = ("line", "caption", "sfx", "dialogue")  # where "..." is silence, not a placeholder


def is_schema(value: Any, depth: int = 0) -> bool:
    """Whether a value describes data instead of being data."""
    if not isinstance(value, dict):
        return False
    if "$schema" in value or "$defs" in value:
        return True
    if isinstance(value.get("properties"), dict) and ("type" in value or "required" in value):
        return True
    inner = value.get("properties")
    if isinstance(inner, dict) and inner and all(isinstance(v, dict) and _SCHEMA_WORDS & set(v) for v in inner.values()):
        return True
    panels = value.get("panels")
    if isinstance(panels, dict) and "type" in panels and ("items" in panels or "properties" in panels):
        return True
    if isinstance(panels, list) and panels and all(map(_describes, panels[:_LOOK_AT])):
        return True
    return depth < 3 and any(is_schema(value[key], depth + 1) for key in _WRAPPERS if key in value)


def _is_blank(text: str) -> bool:
    """Whether a text is a placeholder: "...", "<text>", "string", or words of the format in brackets, `[description]`.
    What else stands in brackets, `[Rin runs]`, is data."""
    found = _BRACKETED.match(text)
    return bool(_PLACEHOLDER.match(text)) or bool(found) and _names_a_field(found[1] or found[2] or "")


def _describes(entry: Any) -> bool:
    """Whether every field of an object has a type instead of a value."""
    fields = list(entry.values())[:_LOOK_AT] if isinstance(entry, dict) else []
    return bool(fields) and all(isinstance(f, dict) and isinstance(f.get("type"), str) and set(f) <= _SCHEMA_WORDS for f in fields)


def is_placeholder(found: Shape) -> bool:
    """Whether all the content of a script is of the kind "..." or "<text>" or "close|medium|wide"."""
    texts, shots = [], []
    items = [*found.panels, *_rows(found)][:_LOOK_AT]
    for item in items:
        if not isinstance(item, dict):
            texts.append(item)
            continue
        for key, entry in item.items():
            name = aliases("panel").get(normalise_key(key))
            if name == "shot":
                shots.append(entry)
            elif name != "index" and not (name in _SPOKEN and isinstance(entry, str) and _ELLIPSIS.match(entry)):
                texts += entry if isinstance(entry, list) else [entry]
    texts = [text for text in texts if isinstance(text, str)]
    listed = [isinstance(shot, str) and (_is_blank(shot) or len(set(find_shots(shot))) > 1) for shot in shots]
    if texts and any(listed) and all(_is_blank(text) or _DESCRIBED.match(text) for text in texts):
        return True
    if texts and shots and all(listed) and all(_is_blank(text) or _DESCRIBED.match(text) or _names_a_field(text) for text in texts):
        return True
    if texts:
        return all(_is_blank(text) for text in texts) and (not shots or any(listed) or any(texts))
    return bool(shots) and all(listed)


def is_left_out(entry: Any) -> bool:
    """Whether an entry of a list of real panels only stands for more of them ("...", {"...": "..."}), or is a sample
    between them: its shot and all its texts are placeholders."""
    if isinstance(entry, str):
        return bool(_ELLIPSIS.match(entry))
    if not isinstance(entry, dict) or not entry:
        return False
    if all(_ELLIPSIS.match(key) for key in entry):
        return True
    panel = {aliases("panel").get(normalise_key(key)): value for key, value in entry.items()}
    texts = [value for name, value in panel.items() if name != "index"]
    return isinstance(panel.get("shot"), str) and all(isinstance(text, str) and text.strip() and _is_blank(text) for text in texts)


@lru_cache(maxsize=1)
def _field_words() -> re.Pattern:
    return re.compile("|".join(rf"\b{re.escape(word)}\b" if word.isascii() else re.escape(word) for word in sample_words()))


def _names_a_field(text: str) -> bool:
    """Whether a text has only words that name or describe a field: "what the character does"."""
    return len(text) <= 120 and not re.search(r"\w", _field_words().sub(" ", text.casefold().replace("_", " ")))


def _rows(found: Shape) -> list:
    rows = found.values.get("dialogue")
    return rows if isinstance(rows, list) else []
