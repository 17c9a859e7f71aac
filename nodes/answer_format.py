"""The `format` widget of the Generate node -> the constraint that decoding runs under."""

from __future__ import annotations

import json

from ..a3b_engine.errors import GrammarError
from ..a3b_engine.prompt import Prompt
from ..a3b_engine.script.grammar import comic_json_schema

TEXT, COMIC_SCRIPT, JSON_SCHEMA, REGEX, SHORT_SCRIPT = "text", "comic script", "JSON schema", "regex", "short comic script"
BY_PRESET = "as the preset asks"
FORMATS = (TEXT, COMIC_SCRIPT, JSON_SCHEMA, REGEX, SHORT_SCRIPT, BY_PRESET)


def chosen_format(widget: str, prompt: Prompt) -> str:
    """The format to answer in: the widget's, or that of the preset the prompt was built with."""
    return (prompt.form or TEXT) if widget == BY_PRESET else widget


def constraint(kind: str, panels: int, rounds: int, schema: str, regex: str) -> dict:
    """Keyword arguments `schema` / `regex` of Engine.generate. Raises GrammarError naming the widget to fill in."""
    if kind in (COMIC_SCRIPT, SHORT_SCRIPT):
        return {"schema": comic_json_schema(panels, rounds, brief=kind == SHORT_SCRIPT)}
    if kind == JSON_SCHEMA:
        return {"schema": _parsed_schema(schema)}
    if kind == REGEX:
        if not regex.strip():
            raise GrammarError('regex: is empty, but format is "regex". Fill it in, or set format to "text"')
        return {"regex": regex.strip("\r\n")}
    return {}


def _parsed_schema(schema: str) -> dict:
    if not schema.strip():
        raise GrammarError('schema: is empty, but format is "JSON schema". Paste a JSON schema, or set format to "text"')
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"schema: {schema.strip()[:80]!r} is not JSON ({problem}). Paste a JSON schema object") from None
    if not isinstance(parsed, dict):
        raise GrammarError(f"schema: expected a JSON object such as {{\"type\": \"object\"}}, found {schema.strip()[:80]!r}")
    return parsed


_ESCAPES = {"\\n": "\n", "\\t": "\t"}


def stop_texts(widget: str) -> tuple[str, ...]:
    r"""One stop text a line; \n and \t stand for line feed and tab. Empty lines are ignored."""
    texts = []
    for line in widget.splitlines():
        for escape, character in _ESCAPES.items():
            line = line.replace(escape, character)
        if line:
            texts.append(line)
    return tuple(texts)
