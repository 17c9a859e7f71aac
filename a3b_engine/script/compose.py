"""An image prompt that stands alone, made of the fields of a panel.

Each panel is encoded by itself: a name means nothing to an image model, so the looks of the characters are written
out wherever their names stand.
"""

from __future__ import annotations

import re

from .schema import Character, ComicScript, Panel

SHOT_WORDS = {
    "extreme_close": "extreme close-up",
    "close": "close-up",
    "medium": "medium shot",
    "full": "full body shot",
    "wide": "wide shot",
    "establishing": "establishing shot, wide view of the place",
    "over_shoulder": "over-the-shoulder shot",
    "pov": "first-person view",
}
_TRIM = " \t\r\n,;.\u3002\uff0c\u3001\uff1b"
_SPACES = re.compile(r"\s+")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_WORD = re.compile(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]")


class Composer:
    """Composes the prompts of one script; `notes` holds what it could not write out."""

    def __init__(self, script: ComicScript, style_prefix: str = "", style_suffix: str = "") -> None:
        self.script = script
        self.prefix = style_prefix
        self.suffix = style_suffix
        self.notes: list[str] = []
        self._people = _by_name(script.characters)
        self._names = _names_pattern(self._people)

    def prompt(self, panel: Panel) -> str:
        """The style prefix, then the panel's own visual prompt or one composed from its fields, then the suffix."""
        if panel.visual_prompt.strip():
            body = [panel.visual_prompt.strip()]
            self._note_names(panel)
        else:
            body = [*self._pieces(panel), self.script.style]
        return join_pieces([self.prefix, *body, self.suffix])

    def _pieces(self, panel: Panel) -> list[str]:
        action, named = self._with_looks(panel.action)
        people = [self._look(word, panel) for word in panel.characters if self._identity(word) not in named]
        return [
            SHOT_WORDS[panel.shot],
            *people,
            action,
            self._with_looks(panel.micro_expression)[0],
            self._with_looks(panel.background)[0],
            panel.light,
            *panel.props,
        ]

    def _identity(self, word: str) -> str:
        person = self._people.get(word.casefold())
        return person.id if person else word

    def _look(self, word: str, panel: Panel) -> str:
        person = self._people.get(word.casefold())
        if person is None:
            return word  # not one of the cast: "an old man", "the crowd"
        if not person.look.strip():
            self.notes.append(f"panel {panel.index}: {person.id} has no look, so the prompt does not show this character")
        return person.look

    def _with_looks(self, text: str) -> tuple[str, set[str]]:
        """The text with each name replaced: by the whole look first, by its first words after that."""
        named: set[str] = set()
        if self._names is None:
            return text, named

        def written_out(found: re.Match) -> str:
            person = self._people[found.group().casefold()]
            look = person.look.strip(_TRIM)
            if person.id in named:
                look = re.split(r"[,;\uff0c\u3001\uff1b]", look)[0]
            named.add(person.id)
            return look

        return self._names.sub(written_out, text), named

    def _note_names(self, panel: Panel) -> None:
        found = self._names.search(panel.visual_prompt) if self._names else None
        if found and self._people[found.group().casefold()].look.casefold() not in panel.visual_prompt.casefold():
            self.notes.append(f"panel {panel.index}: visual_prompt has the name {found.group()} without the look that belongs to it")


def _by_name(people: list[Character]) -> dict[str, Character]:
    names: dict[str, Character] = {}
    for person in people:
        for name in (person.name, person.id):
            if name.strip():
                names.setdefault(name.casefold(), person)
    return names


def _names_pattern(people: dict[str, Character]) -> re.Pattern | None:
    """Names that have a look, as the script spells them ("Rose" the girl is not "rose" the flower), longest first.

    One Latin letter is no name: "A" would be found everywhere.
    """
    spellings = {word for person in people.values() for word in (person.name, person.id)}
    parts = []
    for word in sorted(spellings, key=lambda word: (-len(word), word)):
        person = people.get(word.casefold())
        if person and person.look.strip() and (len(word) > 1 or not word.isascii()):
            parts.append(rf"(?<!\w){re.escape(word)}(?!\w)" if word.isascii() else re.escape(word))
    return re.compile("|".join(parts)) if parts else None


def join_pieces(pieces: list[str]) -> str:
    """Pieces that hold anything, on one line, joined by commas."""
    lines = [_SPACES.sub(" ", piece).strip() for piece in pieces]
    kept = [line for line in lines if line.strip(_TRIM)]
    return ", ".join([*(line.rstrip(_TRIM) for line in kept[:-1]), *kept[-1:]])


def clip_tokens(text: str) -> int:
    """About how many CLIP tokens a prompt takes (a text encoder of SD1.5 or SDXL reads 75 in one window)."""
    return sum(1 if len(word) < 9 else 1 + len(word) // 8 for word in _WORD.findall(text)) + len(_CJK.findall(text))
