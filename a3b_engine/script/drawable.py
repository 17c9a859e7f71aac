"""Which panels say nothing that an image model could draw."""

from __future__ import annotations

from .schema import ComicScript, Panel
from .vocabulary import nothing_words

# A text of these only ("...", "-") says nothing.
BLANK = " \t\r\n,;:.!?-_*'\"\u2013\u2014\u2026\u3000\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"


def stated(text: str) -> str:
    """The text as it stands; "" where it only says that there is none ("N/A", "none"). The script itself keeps the word."""
    return "" if text.strip().casefold() in nothing_words() else text


def blank_panels(script: ComicScript) -> tuple[int, ...]:
    """Indexes of the panels without a visual prompt and without a field that a prompt is composed of.

    A shot and a style are no picture yet; nor is a character of the cast who has no look.
    """
    looks = {word.casefold(): person.look for person in reversed(script.characters) for word in (person.name, person.id) if word.strip()}
    return tuple(panel.index for panel in script.panels if not _says_anything(panel, looks))


def _says_anything(panel: Panel, looks: dict[str, str]) -> bool:
    people = [looks.get(word.casefold(), word) for word in panel.characters]
    setting = map(stated, (panel.micro_expression, panel.background, panel.light))
    texts = (panel.visual_prompt, panel.action, *setting, *panel.props, *people)
    return any(text.strip(BLANK) for text in texts)
