"""System texts that ask a model for a comic script or for one of the plain jobs done daily with pictures and prompts.

The texts are the UTF-8 files in `preset_texts/`: one a preset and language, and the rules that all comics share.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Iterable, NamedTuple

from ..errors import PromptError

TEXT_LANGUAGES = ("en", "zh")  # of the instructions themselves
_FIELD = re.compile(r"\{\{(\w+)\}\}")
_IF_SHORT = re.compile(r"\{\{short\|([^{}]*)\}\}")
_STORY_HEADS = {"en": "Story:", "zh": "\u6545\u4e8b\uff1a"}
_COUNTS = {
    "en": "Write {{panels}} panels and {{rounds}} rows of dialogue.",
    "zh": "\u8bf7\u5199 {{panels}} \u4e2a\u5206\u683c\u3001{{rounds}} \u884c\u5bf9\u767d\u3002",
}


class Preset(NamedTuple):
    """A kind of comic. `reading_direction` is metadata for the page."""

    title: str
    reading_direction: str


PRESETS: dict[str, Preset] = {
    "manga": Preset("Manga", "rtl"),
    "manhua": Preset("Manhua (vertical scroll)", "vertical"),
    "western": Preset("Western comic", "ltr"),
    "storyboard": Preset("Storyboard", "ltr"),
    "children": Preset("Children's book", "ltr"),
}
# What people do daily with a vision model beside an image model. The answer is plain text.
JOBS: dict[str, str] = {
    "describe": "Describe the picture",
    "tags": "Tags of the picture",
    "enhance_image": "Enhance my prompt for an image model",
    "enhance_video": "Enhance my prompt for a video model",
    "read_text": "Read the text in the picture",
    "translate": "Translate",
}


def system_prompt(
    preset: str = "manga",
    *,
    panels: int | str = 3,
    rounds: int | str = 3,
    dialogue_language: str = "English",
    prompt_language: str = "English",
    text_language: str = "en",
    short: bool | None = False,
) -> str:
    """The system text of a comic preset. `dialogue_language` and `prompt_language` are chosen apart, as words
    ("English"); `text_language` (en, zh) is the language of the instructions. `short`: ask for the short form of
    `comic_json_schema(brief=True)`; None leaves that open for `choose_form`. Counts may be given as text, such as
    `{{panels}}` to be filled later. Raises PromptError for an unknown name."""
    _check("preset", preset, PRESETS)
    _check("text_language", text_language, TEXT_LANGUAGES)
    text = f"{_text(preset, text_language)}\n{_text('rules', text_language)}"
    if short is not None:
        text = choose_form(text, short)
    return fill(
        text,
        panels=str(panels),
        rounds=str(rounds),
        dialogue_language=dialogue_language,
        prompt_language=prompt_language,
        reading_direction=PRESETS[preset].reading_direction,
    ).strip()


def job_prompt(job: str, *, answer_language: str = "English", text_language: str = "en") -> str:
    """The system text of one of `JOBS`; `answer_language` as a word. Raises PromptError for an unknown name."""
    _check("job", job, JOBS)
    _check("text_language", text_language, TEXT_LANGUAGES)
    return fill(_text(job, text_language), answer_language=answer_language).strip()


def choose_form(text: str, short: bool) -> str:
    """Keep what stands in `{{short|...}}` for the short form of a script; drop it for the full one."""
    return _IF_SHORT.sub(lambda found: found[1] if short else "", text)


def compose_user_text(story: str, *, panels: int | None = None, rounds: int | None = None, text_language: str = "en") -> str:
    """The user text: the story as it stands (braces and `[[IMG]]` markers too), then the counts if given."""
    _check("text_language", text_language, TEXT_LANGUAGES)
    parts = [f"{_STORY_HEADS[text_language]}\n{story.strip()}"]
    if panels is not None and rounds is not None:
        parts.append(fill(_COUNTS[text_language], panels=str(panels), rounds=str(rounds)))
    return "\n\n".join(parts)


def fill(text: str, **values: str) -> str:
    """Replace `{{name}}` for the given names only; other braces stay as they are, and values are not looked into."""
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), text)


def _check(argument: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise PromptError(f"{argument}: {value!r} is not known. Use one of {', '.join(known)}.")


@lru_cache(maxsize=None)
def _text(name: str, language: str) -> str:
    return (Path(__file__).parent / "preset_texts" / f"{name}.{language}.md").read_text(encoding="utf-8")
