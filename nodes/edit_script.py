"""Edit Script: a user's changes to a comic script before it is drawn."""

from __future__ import annotations

from typing import Annotated

from ..a3b_engine.script.document import script_json
from ..a3b_engine.script.edit import edit_script
from ..a3b_engine.script.replace_text import SCOPES
from .annotations import Choice, Flag, Output, Shown, Text, node
from .script_text import blank_lines, whole_script


@node(
    "A3BEditScript",
    "Edit Script",
    category="A3B",
    search=("json patch", "merge patch", "find and replace", "change panel", "comic script"),
)
def A3BEditScript(
    script: Annotated[str, Text(tooltip="The script output of JSON Parse Panels, or any comic script as JSON, damaged or not.")] = "",
    patch: Annotated[
        str,
        Text(
            tooltip='What to change, as a JSON merge patch: {"title": "Rain", "panels": {"2": {"light": "dusk"}}} sets the title and the '
            'light of panel 2. null removes, the key "+" adds. Empty: nothing.'
        ),
    ] = "",
    replace: Annotated[
        str,
        Text(tooltip='Find and replace after the patch, one pair a line: old => new. Plain text; double quotes keep spaces: " red" => "".'),
    ] = "",
    scope: Annotated[
        str,
        Choice(
            SCOPES,
            tooltip="Where replace looks. pictures: what is drawn (style, looks, action, light, prompts...). words: what is read or "
            "spoken (title, names, lines, captions, sound words). Ids, shots and keys stay.",
        ),
    ] = SCOPES[0],
    whole_words: Annotated[bool, Flag(tooltip='on: "art" is not found inside "heart". Leave off for Chinese and Japanese.')] = False,
    match_case: Annotated[bool, Flag(tooltip='on: "Red" and "red" are different texts.')] = True,
    replace_ids: Annotated[
        bool,
        Flag(tooltip="on: replace also changes ids of characters, wherever they stand, and scene tags; use it to rename a character."),
    ] = False,
) -> tuple[
    Annotated[str, Output("STRING", "script", "The changed script as JSON: connect it to JSON Parse Panels, Pick Panel or Save Script.")],
    Annotated[str, Output("STRING", "report", "What was changed, one remark a line; a pair that was found nowhere is a warning.")],
]:
    """Changes a comic script before it is drawn: by a JSON merge patch, by find and replace, or both in this order.

    The result is checked: a wrong field, shot or panel number is an error that names it, and nothing is drawn."""
    found, remarks = whole_script(script, "script")
    changed, report = edit_script(
        found,
        patch=patch,
        replace=replace,
        scope=scope,
        whole_words=whole_words,
        match_case=match_case,
        ids=replace_ids,
    )
    lines = "\n".join([*remarks, *report, *blank_lines(changed)]) or "info: nothing to change"
    return Shown((script_json(changed), lines), lines)
