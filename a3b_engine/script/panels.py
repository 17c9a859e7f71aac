"""Lists for image nodes: one entry a panel, all of one length, at least one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..errors import ScriptError
from .compose import Composer, clip_tokens, join_pieces
from .parse import ParseResult
from .schema import ComicScript, DialogueLine, Panel
from .sizes import panel_size

ON_ERROR = ("stop", "keep", "placeholder")
SEED_SPACE = 2**64
CLIP_WINDOW = 75
MAX_PLACEHOLDERS = 64
# What is drawn where a panel is missing: a plain picture, with nothing of the failure in it.
NEUTRAL_PROMPT = "plain light grey backdrop, soft even light, empty scene"


@dataclass
class PanelLists:
    """Lists of equal length >= 1, in story order, and what belongs to the whole page.

    prompt, negative, caption, dialogue (one text a panel, a line a row: `speaker: line`): str. seed: int in
    0..2^64-1. width, height: int, multiples of 64. index: int, the panels' numbers. count: their number. joined: the
    page as readable text. script_json: the script as JSON text. report: lines of the parser and of this step.
    """

    prompt: list[str]
    negative: list[str]
    caption: list[str]
    dialogue: list[str]
    seed: list[int]
    width: list[int]
    height: list[int]
    index: list[int]
    count: int
    joined: str
    script_json: str
    status: str
    reading_direction: str
    report: list[str] = field(default_factory=list)


def apply_on_error(result: ParseResult, on_error: str = "stop") -> ComicScript:
    """The script to draw, by the user's choice. Raises ScriptError.

    stop: a failed or truncated result, or one without panels, is an error that says why and shows the start of the
    text. keep: panels the end of the text cut off are left out; nothing whole is an error. placeholder: never an
    error; missing panels (up to the expected number, at least one) are neutral pictures.
    """
    if on_error not in ON_ERROR:
        raise ScriptError(f"on_error: {on_error!r} is not known. Use one of {', '.join(ON_ERROR)}.")
    script = result.script.model_copy(deep=True) if result.script else ComicScript()
    if on_error == "stop":
        if result.status in ("failed", "truncated"):
            raise ScriptError(result.cause)
        if not script.panels:
            raise ScriptError(_no_panels(script))
        return script
    if on_error == "keep":
        script.panels = [panel for panel in script.panels if panel.index not in result.partial]
        if not script.panels:
            raise ScriptError(f"on_error is keep, but no panel is whole. {result.cause or _no_panels(script)}")
        return script
    wanted = min(max(result.expected_panels or 1, 1), MAX_PLACEHOLDERS)
    while len(script.panels) < wanted:
        last = script.panels[-1].index if script.panels else 0
        script.panels.append(Panel(index=last + 1, visual_prompt=NEUTRAL_PROMPT))
    return script


def panel_lists(
    result_or_script: ParseResult | ComicScript,
    *,
    style_prefix: str = "",
    style_suffix: str = "",
    base_seed: int = 0,
    size_family: str = "sdxl",
    on_error: str = "stop",
    seed_per_scene: bool = False,
) -> PanelLists:
    """The lists of a script. Seeds are base_seed + index modulo 2^64; with `seed_per_scene` panels of one scene_tag
    share the seed of the first of them. Raises ScriptError by `on_error`, and for an unknown size family."""
    result = result_or_script
    if isinstance(result, ComicScript):
        result = ParseResult("ok", result)
    script = apply_on_error(result, on_error)
    composer = Composer(script, style_prefix, style_suffix)
    prompts = [
        join_pieces([style_prefix, NEUTRAL_PROMPT, style_suffix]) if panel.visual_prompt == NEUTRAL_PROMPT else composer.prompt(panel)
        for panel in script.panels
    ]
    dialogue = [dialogue_text(script.dialogue, panel.index) for panel in script.panels]
    seeds = _seeds(script.panels, base_seed, seed_per_scene)
    sizes = [panel_size(panel.shot, size_family) for panel in script.panels]
    report = [*result.report, *(f"info: {note}" for note in composer.notes), *_long_prompts(script.panels, prompts)]
    added = len(script.panels) - len(result.script.panels if result.script else [])
    if added > 0:
        report.append(f"warning: panels: {added} neutral placeholders stand for missing panels")
    elif added < 0:
        report.append(f"warning: panels: {-added} cut-off panels are left out (on_error is keep)")
    return PanelLists(
        prompt=prompts,
        negative=[panel.negative for panel in script.panels],
        caption=[panel.caption for panel in script.panels],
        dialogue=dialogue,
        seed=seeds,
        width=[width for width, _ in sizes],
        height=[height for _, height in sizes],
        index=[panel.index for panel in script.panels],
        count=len(script.panels),
        joined=_readable(script, prompts, dialogue),
        script_json=json.dumps(script.model_dump(), ensure_ascii=False, indent=2),
        status=result.status,
        reading_direction=script.reading_direction,
        report=report,
    )


def dialogue_text(rows: list[DialogueLine], index: int) -> str:
    """The rows of one panel, a line each; empty if it has none."""
    return "\n".join(f"{row.speaker}: {row.line}" if row.speaker.strip() else row.line for row in rows if row.panel == index)


def _no_panels(script: ComicScript) -> str:
    found = f"{len(script.dialogue)} dialogue rows" if script.dialogue else "nothing else"
    return f"The text holds no panels, only {found}. Ask for a list named panels, or set on_error to placeholder."


def _seeds(panels: list[Panel], base_seed: int, per_scene: bool) -> list[int]:
    first: dict[str, int] = {}
    seeds = []
    for panel in panels:
        seed = (base_seed + panel.index) % SEED_SPACE
        tag = panel.scene_tag.strip().casefold()
        seeds.append(first.setdefault(tag, seed) if per_scene and tag else seed)
    return seeds


def _long_prompts(panels: list[Panel], prompts: list[str]) -> list[str]:
    lengths = [(panel.index, clip_tokens(prompt)) for panel, prompt in zip(panels, prompts)]
    return [
        f"info: panel {index}: the prompt has about {length} CLIP tokens; SD1.5 and SDXL read {CLIP_WINDOW} in one window"
        for index, length in lengths
        if length > CLIP_WINDOW
    ][:20]


def _readable(script: ComicScript, prompts: list[str], dialogue: list[str]) -> str:
    blocks = [script.title] if script.title.strip() else []
    for panel, prompt, spoken in zip(script.panels, prompts, dialogue):
        lines = [f"Panel {panel.index} ({panel.shot}): {prompt}"]
        lines += [f"Caption: {panel.caption}"] if panel.caption.strip() else []
        lines += [f"SFX: {panel.sfx}"] if panel.sfx.strip() else []
        lines += [spoken] if spoken else []
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
