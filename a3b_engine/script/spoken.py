"""Who speaks and who is to be seen, as flat texts and lists: for voices, balloons and regional prompts."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import Character, ComicScript, DialogueLine, Panel


@dataclass(frozen=True)
class SpokenRows:
    """All balloons of a script in the order they are read; lists of one length >= 1, one item a balloon.

    speaker (the name the reader sees), line, emotion: str. panel: int, the index of the balloon's panel. A script in which nobody speaks gives
    one empty row of the first panel, because a list without items stops every node behind it.
    """

    speaker: list[str]
    line: list[str]
    emotion: list[str]
    panel: list[int]


def named_rows(script: ComicScript) -> list[DialogueLine]:
    """The dialogue with the name of the character where a row says its id: "mina" is a key, "Mina" is for the reader."""
    names: dict[str, str] = {}
    for person in script.characters:
        if person.id.strip() and person.name.strip():
            names.setdefault(person.id, person.name)
    return [row.model_copy(update={"speaker": names.get(row.speaker, row.speaker)}) for row in script.dialogue]


def spoken_rows(script: ComicScript) -> SpokenRows:
    """The dialogue in story order: by panel, then as it stands."""
    rows = sorted(named_rows(script), key=lambda row: row.panel)
    if not rows:
        rows = [DialogueLine(panel=script.panels[0].index if script.panels else 1)]
    return SpokenRows(
        [row.speaker for row in rows],
        [row.line for row in rows],
        [row.emotion_tag for row in rows],
        [row.panel for row in rows],
    )


def dialogue_text(rows: list[DialogueLine]) -> str:
    """The rows of one panel, a line each; empty if it has none."""
    return "\n".join(f"{row.speaker}: {row.line}" if row.speaker.strip() else row.line for row in rows)


def speakers_text(rows: list[DialogueLine]) -> str:
    """Those who speak in one panel, each once, a line each, in the order they begin."""
    return "\n".join(dict.fromkeys(one_line(row.speaker) for row in rows if row.speaker.strip()))


def looks_text(panel: Panel, people: list[Character]) -> str:
    """The look of each character of a panel, a line each, in the order of the panel.

    One who has no look, or is not one of the cast ("a crowd"), stands there by the word the panel has.
    """
    known = {word.casefold(): person for person in reversed(people) for word in (person.name, person.id) if word.strip()}
    words = dict.fromkeys(panel.characters)
    looks = [one_line(known[word.casefold()].look) if word.casefold() in known else "" for word in words]
    return "\n".join(look or one_line(word) for look, word in zip(looks, words))


def cast_text(people: list[Character]) -> str:
    """The cast of a script, a line each: `name: look`."""
    return "\n".join(f"{one_line(person.name or person.id)}: {one_line(person.look)}".rstrip(": ") for person in people)


def one_line(text: str) -> str:
    """Text without line breaks, so that a list with an item a line stays in step."""
    return " ".join(text.split())
