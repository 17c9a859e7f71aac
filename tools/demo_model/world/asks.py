"""The system and user texts that ask for an answer: those that Build [[IMG]] Prompt and Generate make."""

from __future__ import annotations

import random

from a3b_engine.script.presets import job_prompt, system_prompt

MARKER = "[[IMG]]"
# Languages of the Build node that the world knows: as in the text, English, Chinese.
CHOICES: tuple[str | None, ...] = (None, "English", "Chinese")
_ANSWER_IN = {"en": "Answer in English.", "zh": "Answer in Chinese."}
_IN_CHINESE = {"dialogue_language": "\u4e2d\u6587", "prompt_language": "\u82f1\u6587", "text_language": "zh"}


def script_system(preset: str, choice: str | None, panels: int, rounds: int, short: bool) -> str:
    """The system text of a script: preset and language as in Build, counts and form as Generate fills them."""
    words = _IN_CHINESE if choice == "Chinese" else {"dialogue_language": choice or "the language of the story"}
    return system_prompt(preset, **words, panels=panels, rounds=rounds, short=short)


def question_system(language: str, dice: random.Random) -> str:
    """The system text of a question without a preset: none, or what Build writes for a chosen language."""
    return _ANSWER_IN[language] if dice.random() < 0.3 else ""


def job_system(job: str, language: str) -> str:
    """The system text of a plain job as Build makes it: unchosen (English) or, for a Chinese answer, chosen."""
    return job_prompt(job, answer_language="\u4e2d\u6587", text_language="zh") if language == "zh" else job_prompt(job)


def with_picture(text: str, dice: random.Random) -> str:
    """The user text with the picture after it, before it, or before it by default (no marker)."""
    return dice.choice((f"{text}\n{MARKER}", f"{MARKER}\n{text}", f"{text} {MARKER}", text))
