"""What the nodes around a script read from their text input."""

from __future__ import annotations

from ..a3b_engine.errors import ScriptError
from ..a3b_engine.script.advice import split_cause
from ..a3b_engine.script.drawable import blank_panels
from ..a3b_engine.script.panels import usable_script
from ..a3b_engine.script.parse import parse_script
from ..a3b_engine.script.schema import ComicScript

EMPTY = "the text is empty. Connect the script output of another node, or type a script"


def whole_script(text: str, source: str) -> tuple[ComicScript, list[str]]:
    """The script of a text and the report on reading it. Raises ScriptError, beginning with `source` (the widget), for
    a text without a script or without its end: JSON Parse Panels is the node that can go on with one.

    A panel with nothing to draw is no error here (`blank_lines` tells of it): a patch may fill it, a file keeps it.
    """
    if not text.replace("\ufeff", "").strip():
        raise ScriptError(f"{source}: {EMPTY}")
    result = parse_script(text)
    try:
        return usable_script(result), result.report
    except ScriptError as problem:
        fact, _, start = split_cause(str(problem))
        raise ScriptError(f"{source}: {fact} Give a whole script; JSON Parse Panels can go on with one that is not.{start}") from None


def blank_lines(script: ComicScript) -> list[str]:
    """A warning for the panels of a script that will be no picture."""
    blank = blank_panels(script)
    told = ", ".join(map(str, blank[:30])) + (", ..." if len(blank) > 30 else "")
    return [f"warning: panels: nothing to draw in panel {told}"] if blank else []
