"""A script as readable text in Fountain syntax (fountain.io), which screenwriting programs open.

For people: the JSON beside it is what is read back. A panel is a scene, a balloon a dialogue block with its emotion as
parenthetical, caption and sound word are blocks of their own, the image prompt is a note.
"""

from __future__ import annotations

import re

from .compose import SHOT_WORDS
from .schema import Character, ComicScript, DialogueLine, Panel
from .spoken import cast_text, one_line

_DIRECTIONS = {"ltr": "left to right", "rtl": "right to left", "vertical": "top to bottom"}
_CAPTION, _SOUND, _UNKNOWN = "CAPTION", "SFX", "VOICE"
# Openings that give a line another meaning than action; "!" in front takes it away.
_MEANT = re.compile(r"[.@!>~#=(]|(?:int|ext|est|i/e)[. /]|.*\bto:\Z", re.IGNORECASE)
_MARKS = re.compile(r"[*_\\]")
_OPENERS = re.compile(r"(?<=\[)(?=\[)|(?<=/)(?=\*)|(?<=\*)(?=/)|(?<=\])(?=\])")


def fountain_text(script: ComicScript) -> str:
    """The script as Fountain text; ends with a line break."""
    blocks = [_title_page(script)]
    if script.characters:
        blocks += ["# Characters", *(f"= {line}" for line in map(_text, cast_text(script.characters).splitlines())), "# Panels"]
    rows: dict[int, list[DialogueLine]] = {}
    for row in script.dialogue:
        rows.setdefault(row.panel, []).append(row)
    names = {person.id: person for person in reversed(script.characters)}
    for panel in script.panels:
        blocks += _panel(panel, rows.get(panel.index, []), names)
    return "\n\n".join(blocks) + "\n"


def _title_page(script: ComicScript) -> str:
    entries = {
        "Title": script.title,
        "Format": f"Comic script, {len(script.panels)} panels, read {_DIRECTIONS[script.reading_direction]}",
        "Style": script.style,
        "Language": script.language,
    }
    return "\n".join(f"{key}: {_text(value)}" for key, value in entries.items() if value.strip())


def _panel(panel: Panel, rows: list[DialogueLine], names: dict[str, Character]) -> list[str]:
    heading = [f"PANEL {panel.index}", SHOT_WORDS[panel.shot].upper(), _text(panel.background)]
    blocks = ["." + " - ".join(piece for piece in heading if piece)]
    blocks += [_action(text) for text in (panel.action, panel.micro_expression, panel.light and f"Light: {panel.light}") if text.strip()]
    blocks += [_action(f"Props: {', '.join(panel.props)}")] if panel.props else []
    blocks += [_block(_CAPTION, "", panel.caption)] if panel.caption.strip() else []
    for row in rows:
        person = names.get(row.speaker)
        blocks.append(_block((person.name if person else "") or row.speaker, row.emotion_tag, row.line))
    blocks += [_block(_SOUND, "", panel.sfx)] if panel.sfx.strip() else []
    notes = {"Image prompt": panel.visual_prompt, "Negative": panel.negative}
    return blocks + [f"[[{key}: {_text(value)}]]" for key, value in notes.items() if value.strip()]


def _block(cue: str, tone: str, words: str) -> str:
    """A character cue, forced with @ so that it keeps its spelling, a parenthetical, and the words."""
    lines = [f"@{_text(cue).rstrip('^ ') or _UNKNOWN}"]  # a caret at the end would mean two who speak at once
    lines += [f"({_text(tone)})"] if tone.strip() else []
    return "\n".join([*lines, *(_text(line) for line in words.splitlines() if line.strip())] if words.strip() else [*lines, "..."])


def _action(text: str) -> str:
    line = _text(text)
    return f"!{line}" if _MEANT.match(line) else line


def _text(text: str) -> str:
    """One line in which nothing is emphasis, a note or a comment."""
    return _OPENERS.sub(" ", _MARKS.sub(r"\\\g<0>", one_line(text)))
