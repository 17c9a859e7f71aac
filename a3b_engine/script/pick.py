"""One panel of a script by its number, with the values that the panel lists give for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScriptError
from .drawable import blank_panels
from .panels import NEUTRAL_PROMPT, PanelLists, panel_lists, usable_script
from .parse import ParseResult
from .schema import ComicScript, Panel

# What to do when the number is absent -> how the panel lists treat a script that is not whole.
WHEN_ABSENT = {"stop": "stop", "last": "keep", "placeholder": "placeholder"}


@dataclass(frozen=True)
class PickedPanel:
    """Values of one panel, as `PanelLists` has them at its place. count: panels of the script itself."""

    prompt: str
    negative: str
    caption: str
    dialogue: str
    seed: int
    width: int
    height: int
    index: int
    speakers: str
    looks: str
    people: int
    count: int
    report: list[str]


def pick_panel(result: ParseResult, number: int, *, when_absent: str = "stop", **options: Any) -> PickedPanel:
    """The panel with the index `number`; `options` are those of `panel_lists` but for `on_error`.

    when_absent counts, too, for a panel with nothing to draw: `stop` is an error that says which panels there are;
    `last` takes the last whole panel; `placeholder` gives a neutral picture, also for a text that is no script.
    Other panels with nothing to draw are no concern of this one. Raises ScriptError.
    """
    if when_absent not in WHEN_ABSENT:
        raise ScriptError(f"when_absent: {when_absent!r} is not known. Use one of {', '.join(WHEN_ABSENT)}.")
    on_error = WHEN_ABSENT[when_absent]
    count = len(result.script.panels) if result.script else 0
    blank = blank_panels(result.script) if result.script else ()
    if when_absent == "placeholder":
        result = _with_panel(result, number)
    elif when_absent == "stop":
        usable_script(result)
        on_error = "keep" if blank else on_error
    lists = panel_lists(result, on_error=on_error, **options)
    if number in lists.index:
        return _at(lists, lists.index.index(number), count, [])
    absent = f"panel {number} has nothing to draw" if number in blank else f"there is no panel {number}"
    there = _numbers(lists.index)
    if when_absent == "stop":
        raise ScriptError(f"number: {absent}; the script has {there}. Choose one of these, or set when_absent.")
    return _at(lists, -1, count, [f"warning: panels: {absent}; panel {lists.index[-1]}, the last, is taken ({there})"])


def _with_panel(result: ParseResult, number: int) -> ParseResult:
    """The result with a neutral picture under the number, if it has no such panel."""
    script = result.script or ComicScript()
    if any(panel.index == number for panel in script.panels):
        return result
    panels = sorted([*script.panels, Panel(index=number, visual_prompt=NEUTRAL_PROMPT)], key=lambda panel: panel.index)
    line = f"warning: panels: there is no panel {number}; a neutral placeholder stands for it"
    return replace(result, script=script.model_copy(update={"panels": panels}), report=[*result.report, line])


def _at(lists: PanelLists, place: int, count: int, remarks: list[str]) -> PickedPanel:
    return PickedPanel(
        prompt=lists.prompt[place],
        negative=lists.negative[place],
        caption=lists.caption[place],
        dialogue=lists.dialogue[place],
        seed=lists.seed[place],
        width=lists.width[place],
        height=lists.height[place],
        index=lists.index[place],
        speakers=lists.speakers[place],
        looks=lists.looks[place],
        people=lists.people[place],
        count=count,
        report=[*lists.report, *remarks],
    )


def _numbers(indexes: list[int]) -> str:
    """"3 panels, 1 to 3" or, with gaps, "3 panels: 1, 2, 5"."""
    count = f"{len(indexes)} panel" + ("s" if len(indexes) != 1 else "")
    if indexes[-1] - indexes[0] == len(indexes) - 1:
        return f"{count}, {indexes[0]} to {indexes[-1]}" if len(indexes) > 1 else f"{count}, number {indexes[0]}"
    return f"{count}: {', '.join(map(str, indexes[:30]))}" + (", ..." if len(indexes) > 30 else "")
