"""The system text of a prompt: a preset, standing instructions, and what is written into them last.

Panels, rounds and the form of a script are known only where the answer is asked for, as the grammar needs them there. So
that instructions and grammar can never disagree, `system_text` leaves their places open and `with_choices` fills them in.
"""

from __future__ import annotations

import dataclasses

from ..prompt import Prompt
from .presets import JOBS, PRESETS, choose_form, fill, job_prompt, system_prompt

# Instructions are given in Chinese for a Chinese answer; these words then stand in a Chinese sentence.
_IN_CHINESE = {
    "Chinese": "\u4e2d\u6587", "English": "\u82f1\u6587", "Japanese": "\u65e5\u6587", "Korean": "\u97e9\u6587",
    "French": "\u6cd5\u6587", "German": "\u5fb7\u6587", "Spanish": "\u897f\u73ed\u7259\u6587", "Portuguese": "\u8461\u8404\u7259\u6587",
    "Russian": "\u4fc4\u6587",
}  # fmt: skip
LANGUAGES = ("English", "Chinese", *(name for name in _IN_CHINESE if name not in ("English", "Chinese")))
NO_PRESET = "none"
PRESET_NAMES = (NO_PRESET, *PRESETS, *JOBS)
_OPEN_COUNTS = {"panels": "{{panels}}", "rounds": "{{rounds}}"}
_UNCHOSEN = {
    "read_text": "as in the picture",
    "translate": "English, or into Chinese where it is English already",
}


def system_text(preset: str, system: str, language: str | None, prompt_language: str = "English") -> str:
    """The instructions of one of `PRESET_NAMES`, then `system`. `language`: see `preset_instructions`; with no preset it
    is asked for in a sentence."""
    parts = [] if preset == NO_PRESET else [preset_instructions(preset, language, prompt_language)]
    parts += [system] if system.strip() else []
    if language and preset == NO_PRESET:
        parts.append(f"Answer in {language}.")
    return "\n\n".join(parts)


def preset_instructions(preset: str, language: str | None, prompt_language: str = "English") -> str:
    """`language`: of the answer, in a comic of captions and dialogue; None: that of the story, or what suits the job.
    `prompt_language`: of what an image model reads in a comic script."""
    chinese = language == "Chinese"
    text_language = "zh" if chinese else "en"
    if preset in JOBS:
        answer_language = _IN_CHINESE[language] if chinese else language or _UNCHOSEN.get(preset, "English")
        return job_prompt(preset, answer_language=answer_language, text_language=text_language)
    if chinese:
        language, prompt_language = _IN_CHINESE[language], _IN_CHINESE[prompt_language]
    return system_prompt(
        preset,
        dialogue_language=language or "the language of the story",
        prompt_language=prompt_language,
        text_language=text_language,
        **_OPEN_COUNTS,
        short=None,
    )


def with_choices(prompt: Prompt, panels: int, rounds: int, short: bool) -> Prompt:
    """The prompt with both counts and the form written into its system text; any other braces stay as typed."""
    system = fill(choose_form(prompt.system, short), panels=str(panels), rounds=str(rounds))
    return dataclasses.replace(prompt, system=system)


def form_of(preset: str) -> str:
    """What a preset asks for, as `Prompt.form`: "comic script" or "text"."""
    return "comic script" if preset in PRESETS else "text"
