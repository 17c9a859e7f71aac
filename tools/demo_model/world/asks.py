"""The system and user texts that ask for an answer: those that Build [[IMG]] Prompt and Generate make."""

from __future__ import annotations

import random

from a3b_engine.script.presets import fill, system_prompt

from .traits import LANGUAGES

MARKER = "[[IMG]]"
# Languages of the Build node that the world knows: as in the text, English, Chinese.
CHOICES: tuple[str | None, ...] = (None, "English", "Chinese")
# What a short script's request may say in the node's own `system` text; the form is else known by the grammar only.
SHORT_NOTES = {
    "en": "Use the short form: only title, dialogue and panels.",
    "zh": "\u8bf7\u7528\u77ed\u683c\u5f0f\uff1a\u53ea\u5199 title\u3001dialogue \u548c panels\u3002",
}
_ANSWER_IN = {"en": "Answer in English.", "zh": "Answer in Chinese."}
_IN_CHINESE = {"dialogue_language": "\u4e2d\u6587", "prompt_language": "\u82f1\u6587", "text_language": "zh"}
_OPEN_COUNTS = {"panels": "{{panels}}", "rounds": "{{rounds}}"}


def script_system(preset: str, choice: str | None, panels: int, rounds: int, note: str = "") -> str:
    """The system text of a script: preset and language as in Build, counts as Generate fills them, `note` as typed below."""
    if choice == "Chinese":
        text = system_prompt(preset, **_IN_CHINESE, **_OPEN_COUNTS)
    else:
        text = system_prompt(preset, dialogue_language=choice or "the language of the story", **_OPEN_COUNTS)
    return fill("\n\n".join([text, note] if note else [text]), panels=str(panels), rounds=str(rounds))


def question_system(language: str, dice: random.Random) -> str:
    """The system text of a question without a preset: none, or what Build writes for a chosen language."""
    return _ANSWER_IN[language] if dice.random() < 0.3 else ""


def script_language(choice: str | None, outline_language: str) -> str:
    """Language of dialogue and captions."""
    return outline_language if choice is None else LANGUAGES[("English", "Chinese").index(choice)]


def with_picture(text: str, dice: random.Random) -> str:
    """The user text with the picture after it, before it, or before it by default (no marker)."""
    return dice.choice((f"{text}\n{MARKER}", f"{MARKER}\n{text}", f"{text} {MARKER}", text))
