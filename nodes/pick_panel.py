"""Pick Panel: one panel of a script by its number, as single values for a fixed graph."""

from __future__ import annotations

from typing import Annotated

from ..a3b_engine.errors import ScriptError
from ..a3b_engine.script.advice import BEGINS, split_cause
from ..a3b_engine.script.parse import parse_script
from ..a3b_engine.script.pick import WHEN_ABSENT, pick_panel
from ..a3b_engine.script.schema import MAX_INDEX
from .annotations import Choice, Int, Output, Shown, Text, node
from .script_text import EMPTY
from .style_widgets import BaseSeed, SeedPerScene, SizeFamily, StylePrefix, StyleSuffix


@node(
    "A3BPickPanel",
    "Pick Panel",
    category="A3B",
    search=("panel", "select panel", "panel by number", "index", "comic script"),
)
def A3BPickPanel(
    script: Annotated[str, Text(tooltip="The script output of JSON Parse Panels, or any comic script as JSON, damaged or not.")] = "",
    number: Annotated[int, Int(1, MAX_INDEX, tooltip="Index of the panel as the script has it, from 1.")] = 1,
    when_absent: Annotated[
        str,
        Choice(
            tuple(WHEN_ABSENT),
            tooltip="What to do when the script has no such panel, or one with nothing to draw. stop: the run ends and says which panels "
            "there are. last: the last whole panel is taken. placeholder: a neutral picture, also when the text is no script at all.",
        ),
    ] = "stop",
    style_prefix: StylePrefix = "",
    style_suffix: StyleSuffix = "",
    base_seed: BaseSeed = 0,
    size_family: SizeFamily = "sdxl",
    seed_per_scene: SeedPerScene = False,
) -> tuple[
    Annotated[str, Output("STRING", "prompt", "Image prompt.")],
    Annotated[str, Output("STRING", "negative", "Negative image prompt; may be empty.")],
    Annotated[str, Output("STRING", "caption", "Narration box; may be empty.")],
    Annotated[str, Output("STRING", "dialogue", "Speech of the panel, one line each; may be empty.")],
    Annotated[int, Output("INT", "seed", "Seed for the image model.")],
    Annotated[int, Output("INT", "width", "Pixels, a multiple of 64.")],
    Annotated[int, Output("INT", "height", "Pixels, a multiple of 64.")],
    Annotated[str, Output("STRING", "speakers", "Who speaks in the panel, one a line, each once; may be empty.")],
    Annotated[
        str,
        Output("STRING", "looks", "Look of each character in the panel, one a line, in the order of the panel: for regional prompts."),
    ],
    Annotated[int, Output("INT", "people", "Number of characters in the panel = lines of looks.")],
    Annotated[int, Output("INT", "index", "Index of the panel that was taken.")],
    Annotated[int, Output("INT", "count", "Number of panels in the script.")],
    Annotated[str, Output("STRING", "report", "What was repaired or missing, one remark a line.")],
]:
    """Takes one panel out of a comic script: single values where a graph has a fixed place for each panel.

    With the same widgets it gives what the lists of JSON Parse Panels hold at this panel."""
    if when_absent != "placeholder" and not script.replace("\ufeff", "").strip():
        raise ScriptError(f"script: {EMPTY}")
    result = parse_script(script)
    try:
        panel = pick_panel(
            result,
            number,
            when_absent=when_absent,
            style_prefix=style_prefix,
            style_suffix=style_suffix,
            base_seed=base_seed,
            size_family=size_family,
            seed_per_scene=seed_per_scene,
        )
    except ScriptError as problem:
        message = str(problem)
        if message.startswith("number: "):
            raise
        fact, _, start = split_cause(message)
        further = "last or placeholder" if when_absent == "stop" and result.script and result.script.panels else "placeholder"
        raise ScriptError(f"script: {fact} Give a whole script, or set when_absent to {further}.{start}") from None
    report = ["".join(split_cause(line)[::2]) if BEGINS in line else line for line in panel.report]
    values = (panel.prompt, panel.negative, panel.caption, panel.dialogue, panel.seed, panel.width, panel.height)
    values += (panel.speakers, panel.looks, panel.people, panel.index, panel.count, "\n".join(report))
    return Shown(values, f"Panel {panel.index} of {panel.count}: {panel.prompt}")
