"""Load Script: a comic script from a file in ComfyUI's input or output folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from ..a3b_engine.errors import ScriptError
from ..a3b_engine.script.document import script_json
from ..a3b_engine.script.files import find_script, read_text, script_names
from . import host
from .annotations import Choice, Output, Shown, Text, node
from .script_text import blank_lines, whole_script

NOTHING_FOUND = "(no script found)"


def names() -> list[str]:
    return script_names(host.script_folders()) or [NOTHING_FOUND]


def _wanted(file, path) -> tuple[str, str]:
    """The name that counts, and the widget it stands in. Core makes the text None of a null in an API prompt."""
    return (path, "path") if isinstance(path, str) and path.strip() not in ("", "None") else (file, "file")


def _find(file: str, path: str) -> Path:
    """The file. Raises ScriptError, beginning with the widget's name."""
    name, widget = _wanted(file, path)
    if name == NOTHING_FOUND:
        raise ScriptError(f"{widget}: there is no *.json in ComfyUI's input or output folder. Save a script first, or put one there")
    try:
        return find_script(name, host.script_folders())
    except ScriptError as problem:
        raise ScriptError(f"{widget}: {problem}") from None


def check(file=None, path="") -> bool | str:
    """Takes over core's list check: a typed path counts instead of the list, and names saved on Windows are understood.
    An input that an API prompt leaves out is not passed; core itself says that one is required."""
    if path is None or not isinstance(_wanted(file, path)[0], str):
        return True  # linked from another node, known only when it runs
    try:
        _find(file, path)
    except ScriptError as problem:
        return str(problem)
    return True


def fingerprint(file=None, path="") -> str:
    """Changes with the contents of the file, so that an edited script runs again."""
    if path is None or not isinstance(_wanted(file, path)[0], str):
        return "linked"  # the value upstream is part of its own cache key
    try:
        return hashlib.sha256(read_text(_find(file, path)).encode("utf-8")).hexdigest()
    except ScriptError:
        return "not found"  # the node itself says why


@node(
    "A3BLoadScript",
    "Load Script",
    category="A3B",
    validate=check,
    fingerprint=fingerprint,
    search=("load json", "open script", "read script", "comic script"),
)
def A3BLoadScript(
    file: Annotated[
        str,
        Choice(names, tooltip="A script saved by Save Script, or any *.json below ComfyUI's input or output folder. Press R to refresh."),
    ],
    path: Annotated[
        str,
        Text(
            multiline=False,
            optional=True,
            tooltip="Instead of file: a path typed or linked, relative to the input or output folder, such as the file output of Save Script.",
        ),
    ] = "",
) -> tuple[
    Annotated[str, Output("STRING", "script", "The script as JSON: connect it to JSON Parse Panels, Pick Panel or Edit Script.")],
    Annotated[str, Output("STRING", "title", "Title of the script; may be empty.")],
    Annotated[int, Output("INT", "count", "Number of panels.")],
    Annotated[str, Output("STRING", "report", "What was repaired or missing, one remark a line.")],
]:
    """Reads a comic script from a file, so that a page can be drawn again without the language model.

    A file that you edit is read again at the next run."""
    widget, source = _wanted(file, path)[1], _find(file, path)
    try:
        text = read_text(source)
    except ScriptError as problem:
        raise ScriptError(f"{widget}: {problem}") from None
    found, report = whole_script(text, f"{widget}: {source.name}")
    lines = "\n".join([*report, *blank_lines(found)])
    return Shown((script_json(found), found.title, len(found.panels), lines), f"{found.title}\n{len(found.panels)} panels".strip())
