"""Lists for image nodes: one entry a panel, all of one length, at least one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ScriptError
from .compose import Composer, clip_tokens, join_pieces
from .document import script_json
from .drawable import blank_panels, stated
from .parse import ParseResult
from .schema import MAX_INDEX, MAX_PANELS, ComicScript, DialogueLine, Panel
from .sizes import panel_size
from .spoken import SpokenRows, cast_text, dialogue_text, looks_text, named_rows, speakers_text, spoken_rows

ON_ERROR = ("stop", "keep", "placeholder")
SEED_SPACE = 2**64
CLIP_WINDOW = 75
MAX_PLACEHOLDERS = 64  # for a text that only names a panel far away; an expected number is filled up to MAX_PANELS
MAX_NOTES = 40  # report lines of one kind; a page of 512 panels has thousands
# What is drawn where a panel is missing: a plain picture, with nothing of the failure in it.
NEUTRAL_PROMPT = "plain light grey backdrop, soft even light, empty scene"
_DRAWN = "visual_prompt, action, micro_expression, background, light, props or characters with a look"


@dataclass
class PanelLists:
    """Lists of equal length >= 1, in story order, and what belongs to the whole page.

    prompt, negative, caption, dialogue (one text a panel, a line a row: `name: line`): str. seed: int in
    0..2^64-1. width, height: int, multiples of 64. index: int, the panels' numbers. speakers, looks: one text a panel,
    one speaker or character a line. people: int, characters in the panel. count: number of panels. joined: the page as
    readable text. spoken: lists of a length of their own, one item a balloon. cast: all characters with their looks.
    script_json: the script as JSON text. report: lines of the parser and of this step.
    """

    prompt: list[str]
    negative: list[str]
    caption: list[str]
    dialogue: list[str]
    seed: list[int]
    width: list[int]
    height: list[int]
    index: list[int]
    speakers: list[str]
    looks: list[str]
    people: list[int]
    spoken: SpokenRows
    cast: str
    count: int
    joined: str
    script_json: str
    status: str
    reading_direction: str
    report: list[str] = field(default_factory=list)


def usable_script(result: ParseResult) -> ComicScript:
    """The script of a text that was read to its end, as it stands. Raises ScriptError for any other text, and for one
    whose panels all have nothing to draw."""
    script = result.script.model_copy(deep=True) if result.script else ComicScript()
    if result.status in ("failed", "truncated"):
        raise ScriptError(result.cause)
    if not script.panels:
        raise ScriptError(_no_panels(script))
    blank = blank_panels(script)
    if len(blank) == len(script.panels):
        raise ScriptError(_nothing_to_draw(blank))
    return script


def apply_on_error(result: ParseResult, on_error: str = "stop") -> ComicScript:
    """The script to draw, by the user's choice. Raises ScriptError.

    stop: a failed or truncated result, one without panels, or a panel with nothing to draw is an error that says why.
    keep: panels the end of the text cut off and panels with nothing to draw are left out; nothing whole is an error.
    placeholder: never an error; missing panels and those with nothing to draw are neutral pictures, up to the expected
    number, or to the last panel that dialogue without panels names, or to one. Dialogue of a panel that is not there
    is left out with it.
    """
    if on_error not in ON_ERROR:
        raise ScriptError(f"on_error: {on_error!r} is not known. Use one of {', '.join(ON_ERROR)}.")
    if on_error == "stop":
        script = usable_script(result)
        blank = blank_panels(script)
        if blank:
            raise ScriptError(_nothing_to_draw(blank))
        return script
    script = result.script.model_copy(deep=True) if result.script else ComicScript()
    blank = blank_panels(script)
    if on_error == "keep":
        script.panels = [panel for panel in script.panels if panel.index not in result.partial and panel.index not in blank]
        if not script.panels:
            why = result.cause or (_nothing_to_draw(blank) if blank else _no_panels(script))
            raise ScriptError(f"No panel is whole. {why}")
        return _without_lost_rows(script)
    for panel in script.panels:
        if panel.index in blank:
            panel.visual_prompt = NEUTRAL_PROMPT
    spoken = 1 if script.panels else min(max((row.panel for row in script.dialogue), default=1), MAX_PLACEHOLDERS)
    wanted = min(max(result.expected_panels or 1, spoken), MAX_PANELS)
    numbers = {panel.index for panel in script.panels}
    while len(numbers) < wanted:
        number = max(numbers, default=0) + 1
        if number > MAX_INDEX:
            number = next(free for free in range(1, wanted + 1) if free not in numbers)
        numbers.add(number)
        script.panels.append(Panel(index=number, visual_prompt=NEUTRAL_PROMPT))
    script.panels.sort(key=lambda panel: panel.index)
    return _without_lost_rows(script)


def _without_lost_rows(script: ComicScript) -> ComicScript:
    """Without the dialogue of panels that are not there: read back, it would go to a neighbour."""
    there = {panel.index for panel in script.panels}
    script.dialogue = [row for row in script.dialogue if row.panel in there]
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
    rows = _rows_by_panel(script)
    dialogue = [dialogue_text(spoken) for spoken in rows]
    seeds = _seeds(script.panels, base_seed, seed_per_scene)
    sizes = [panel_size(panel.shot, size_family) for panel in script.panels]
    report = [*result.report, *_capped([f"info: {note}" for note in composer.notes]), *_lengths(script.panels, prompts)]
    report += _left_and_added(result, script)
    return PanelLists(
        prompt=prompts,
        negative=[panel.negative for panel in script.panels],
        caption=[stated(panel.caption) for panel in script.panels],
        dialogue=dialogue,
        seed=seeds,
        width=[width for width, _ in sizes],
        height=[height for _, height in sizes],
        index=[panel.index for panel in script.panels],
        speakers=[speakers_text(spoken) for spoken in rows],
        looks=[looks_text(panel, script.characters) for panel in script.panels],
        people=[len(set(panel.characters)) for panel in script.panels],
        spoken=spoken_rows(script),
        cast=cast_text(script.characters),
        count=len(script.panels),
        joined=_readable(script, prompts, dialogue),
        script_json=script_json(script),
        status=result.status,
        reading_direction=script.reading_direction,
        report=report,
    )


def _no_panels(script: ComicScript) -> str:
    found = f"{len(script.dialogue)} dialogue rows" if script.dialogue else "nothing else"
    return f"The text holds no panels, only {found}."


def _nothing_to_draw(blank: Sequence[int]) -> str:
    return f"{_named('Panel', blank)} {'has' if len(blank) == 1 else 'have'} nothing to draw: no {_DRAWN}."


def _seeds(panels: list[Panel], base_seed: int, per_scene: bool) -> list[int]:
    first: dict[str, int] = {}
    seeds = []
    for panel in panels:
        seed = (base_seed + panel.index) % SEED_SPACE
        tag = panel.scene_tag.strip().casefold()
        seeds.append(first.setdefault(tag, seed) if per_scene and tag else seed)
    return seeds


def _rows_by_panel(script: ComicScript) -> list[list[DialogueLine]]:
    """The dialogue rows of each panel, in the order of the panels."""
    rows: dict[int, list[DialogueLine]] = {panel.index: [] for panel in script.panels}
    for row in named_rows(script):
        rows.setdefault(row.panel, []).append(row)
    return [rows[panel.index] for panel in script.panels]


def _left_and_added(result: ParseResult, script: ComicScript) -> list[str]:
    """What the choice on error did to the panels and the dialogue."""
    before = result.script or ComicScript()
    there = {panel.index for panel in script.panels}
    blank = blank_panels(before)
    cut = [panel.index for panel in before.panels if panel.index not in there and panel.index not in blank]
    filled = [index for index in blank if index in there]
    gone = [index for index in blank if index not in there]
    added = len(script.panels) + len(cut) + len(gone) - len(before.panels)
    lost = len(before.dialogue) - len(script.dialogue)
    lines = []
    if filled:
        lines.append(f"warning: panels: {_named('panel', filled)}: nothing to draw; a neutral picture stands there, caption and dialogue are kept")
    if gone:
        lines.append(f"warning: panels: {_named('panel', gone)}: nothing to draw; left out")
    if added:
        lines.append(f"warning: panels: {added} neutral placeholders stand for missing panels")
    if cut:
        lines.append(f"warning: panels: {len(cut)} cut-off panels are left out")
    far = max((row.panel for row in before.dialogue), default=0)
    if not before.panels and far > len(script.panels):
        most = f"without panels no more than {MAX_PLACEHOLDERS} neutral pictures are made for it"
        lines.append(f"warning: panels: dialogue goes up to panel {far}; {most}")
    if (result.expected_panels or 0) > MAX_PANELS:
        lines.append(f"warning: panels: {result.expected_panels} panels are expected; a script has {MAX_PANELS} at most")
    if lost:
        lines.append(f"warning: dialogue: {lost} rows of panels that are not there are left out")
    return lines


def _named(word: str, indexes: Sequence[int]) -> str:
    """"panel 3" or "panels 1, 3", the first of many."""
    return f"{word}{'s' if len(indexes) > 1 else ''} {', '.join(map(str, indexes[:30]))}{', ...' if len(indexes) > 30 else ''}"


def _lengths(panels: list[Panel], prompts: list[str]) -> list[str]:
    """How long the prompts are, all in one line, and a line for each that CLIP cannot read in one window."""
    lengths = [(panel.index, clip_tokens(prompt)) for panel, prompt in zip(panels, prompts)]
    told = ", ".join(str(length) for _, length in lengths[:MAX_NOTES]) + (", ..." if len(lengths) > MAX_NOTES else "")
    long = [
        f"info: panel {index}: the prompt has about {length} CLIP tokens; SD1.5 and SDXL read {CLIP_WINDOW} in one window"
        for index, length in lengths
        if length > CLIP_WINDOW
    ]
    return [f"info: prompts: CLIP tokens, about: {told}", *_capped(long)]


def _capped(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_NOTES
    return lines if more <= 0 else [*lines[:MAX_NOTES], f"info: panels: {more} more remarks of this kind are left out"]


def _readable(script: ComicScript, prompts: list[str], dialogue: list[str]) -> str:
    blocks = [script.title] if script.title.strip() else []
    for panel, prompt, spoken in zip(script.panels, prompts, dialogue):
        lines = [f"Panel {panel.index} ({panel.shot}): {prompt}"]
        caption, sound = stated(panel.caption), stated(panel.sfx)
        lines += [f"Caption: {caption}"] if caption.strip() else []
        lines += [f"SFX: {sound}"] if sound.strip() else []
        lines += [spoken] if spoken else []
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
