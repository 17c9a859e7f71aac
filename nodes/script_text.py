"""What the nodes around a script read from their text input."""

from __future__ import annotations

from ..a3b_engine.errors import ScriptError
from ..a3b_engine.script.panels import apply_on_error
from ..a3b_engine.script.parse import parse_script
from ..a3b_engine.script.schema import ComicScript


def whole_script(text: str, source: str) -> tuple[ComicScript, list[str]]:
    """The script of a text and the report on reading it. Raises ScriptError, beginning with `source` (the widget), for
    a text without a script or without its end: JSON Parse Panels is the node that can go on with one."""
    result = parse_script(text)
    try:
        return apply_on_error(result, "stop"), result.report
    except ScriptError as problem:
        raise ScriptError(f"{source}: {problem}") from None
