"""JSON Parse Panels: a comic script as text -> lists of one length, one item a panel."""

from __future__ import annotations

import json
import re
from typing import Annotated

from ..a3b_engine.errors import ScriptError
from ..a3b_engine.script.advice import split_cause
from ..a3b_engine.script.panels import ON_ERROR, panel_lists
from ..a3b_engine.script.parse import parse_script
from .annotations import Choice, Int, Output, Shown, Text, node
from .style_widgets import BaseSeed, OptionalSeedPerScene, SizeFamily, StylePrefix, StyleSuffix

# Widgets of the node that most texts come from.
_OF_GENERATE = re.compile(r"max_new_tokens|thinking|format widget|sampling values|\bstop\b|comic script format")


def _list(kind: str, name: str, tooltip: str) -> Output:
    return Output(kind, name, f"List, one item a panel. {tooltip}", is_list=True)


def _spoken(kind: str, name: str, tooltip: str) -> Output:
    return Output(kind, name, f"List, one item a spoken row, in reading order. {tooltip}", is_list=True)


@node(
    "A3BParsePanels",
    "JSON Parse Panels",
    category="A3B",
    output_node=True,
    search=("json", "panels", "list", "comic script", "storyboard"),
)
def A3BParsePanels(
    text: Annotated[str, Text(tooltip="The answer of Generate, or any comic script as JSON, damaged or not.")] = "",
    panel_count: Annotated[
        int,
        Int(
            0,
            512,
            tooltip="Panels you expect; another number is noted in the report; placeholder fills up to it. 0: as many as there are.",
        ),
    ] = 0,
    on_error: Annotated[
        str,
        Choice(
            ON_ERROR,
            tooltip="stop: an unusable or cut-off script, or a panel with nothing to draw, ends the run with the reason. keep: whole "
            "panels are used, the others are left out, and no whole panel is an error. placeholder: neutral pictures stand for "
            "what is missing. None ever draws the model's failure.",
        ),
    ] = "stop",
    style_prefix: StylePrefix = "",
    style_suffix: StyleSuffix = "",
    base_seed: BaseSeed = 0,
    size_family: SizeFamily = "sdxl",
    stats: Annotated[
        str,
        Text(multiline=False, optional=True, tooltip="Connect stats of Generate: names the reason when an answer is empty or cut."),
    ] = "",
    seed_per_scene: OptionalSeedPerScene = False,
) -> tuple[
    Annotated[list, _list("STRING", "prompt", "Image prompt.")],
    Annotated[list, _list("STRING", "negative", "Negative image prompt; may be empty.")],
    Annotated[list, _list("STRING", "caption", "Narration box; may be empty.")],
    Annotated[list, _list("STRING", "dialogue", "Speech of the panel, one line each; may be empty.")],
    Annotated[list, _list("INT", "seed", "Seed for the image model.")],
    Annotated[list, _list("INT", "width", "Pixels.")],
    Annotated[list, _list("INT", "height", "Pixels.")],
    Annotated[list, _list("INT", "index", "Place in the story, from 1.")],
    Annotated[int, Output("INT", "count", "Number of panels.")],
    Annotated[str, Output("STRING", "script", "The whole script as clean JSON.")],
    Annotated[str, Output("STRING", "report", "What was repaired or missing, one remark a line.")],
    Annotated[str, Output("STRING", "joined", "All panels as one readable text.")],
    Annotated[list, _spoken("STRING", "speakers", "Who speaks. Nobody speaks in the whole script: one empty item.")],
    Annotated[list, _spoken("STRING", "lines", "What is said: for text-to-speech.")],
    Annotated[list, _spoken("STRING", "emotions", "Tone of the line; may be empty.")],
    Annotated[list, _spoken("INT", "line_panels", "Index of the panel the row belongs to.")],
    Annotated[list, _list("STRING", "looks", "Look of each character in the panel, one a line: for regional prompts.")],
    Annotated[list, _list("INT", "people", "Number of characters in the panel = lines of looks.")],
    Annotated[str, Output("STRING", "cast", "All characters with their looks, one a line.")],
]:
    """Reads a comic script and hands out its panels as lists: every image node behind them runs once per panel.

    Broken JSON is repaired where its meaning is certain, and the report says what was done."""
    reason = _unfinished(stats)
    result = parse_script(text, expected_panels=panel_count or None)
    try:
        panels = panel_lists(
            result,
            style_prefix=style_prefix,
            style_suffix=style_suffix,
            base_seed=base_seed,
            size_family=size_family,
            on_error=on_error,
            seed_per_scene=seed_per_scene,
        )
    except ScriptError as problem:
        told = _told(str(problem), on_error, bool(result.script and result.script.panels), advised=bool(reason))
        raise ScriptError(f"text: {reason} ({told})" if reason else f"text: {told}") from None
    lists = (
        panels.prompt,
        panels.negative,
        panels.caption,
        panels.dialogue,
        panels.seed,
        panels.width,
        panels.height,
        panels.index,
    )
    report = "\n".join([*([f"warning: answer: {reason}"] if reason else []), *panels.report])
    spoken = panels.spoken
    more = (spoken.speaker, spoken.line, spoken.emotion, spoken.panel, panels.looks, panels.people, panels.cast)
    return Shown((*lists, panels.count, panels.script_json, report, panels.joined, *more), panels.joined)


def _told(problem: str, on_error: str, whole: bool, advised: bool) -> str:
    """What is wrong, and what to do: in Generate, if it wrote the text (unless its stats told that), or with on_error."""
    fact, advice, start = split_cause(problem)
    told = [fact]
    if advice and not advised:
        told.append(f"In Generate: {advice[0].lower()}{advice[1:]}" if _OF_GENERATE.search(advice) else advice)
    if on_error == "stop":
        told.append(f"To go on, set on_error to {'keep or ' if whole else ''}placeholder.")
    return " ".join(told) + start


def _unfinished(stats: str) -> str:
    """Why the answer ended early, from Generate's stats; "" when it did not or nothing is known.

    An empty text is a symptom; "token limit reached while thinking" is the cause a person can act on.
    """
    try:
        facts = json.loads(stats) if stats else {}
    except (ValueError, RecursionError):
        return ""
    status = facts.get("status") if isinstance(facts, dict) and facts.get("finish_reason") in ("length", "cancelled") else ""
    return status if isinstance(status, str) else ""
