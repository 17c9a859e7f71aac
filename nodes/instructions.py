"""The system text of a preset of Build, and what Generate writes into it.

Panels, rounds and the form of a script are widgets of Generate, where the grammar needs them. So that instructions and
grammar can never disagree, Build leaves their places open and Generate fills them in.
"""

from __future__ import annotations

import dataclasses

from ..a3b_engine.prompt import Prompt
from ..a3b_engine.script.presets import JOBS, PRESETS, choose_form, fill, job_prompt, system_prompt

# Instructions are given in Chinese for a Chinese answer; these words then stand in a Chinese sentence.
_CHINESE, _ENGLISH_IN_CHINESE = "\u4e2d\u6587", "\u82f1\u6587"
_OPEN_COUNTS = {"panels": "{{panels}}", "rounds": "{{rounds}}"}
_UNCHOSEN = {
    "read_text": "as in the picture",
    "translate": "English, or into Chinese where it is English already",
}


def preset_instructions(preset: str, language: str | None) -> str:
    """`language`: of the answer, in a comic of captions and dialogue; None: that of the story, or what suits the job.
    Image prompts of a comic stay English."""
    chinese = language == "Chinese"
    if preset in JOBS:
        answer_language = _CHINESE if chinese else language or _UNCHOSEN.get(preset, "English")
        return job_prompt(preset, answer_language=answer_language, text_language="zh" if chinese else "en")
    if chinese:
        words = {"dialogue_language": _CHINESE, "prompt_language": _ENGLISH_IN_CHINESE, "text_language": "zh"}
    else:
        words = {"dialogue_language": language or "the language of the story"}
    return system_prompt(preset, **words, **_OPEN_COUNTS, short=None)


def with_choices(prompt: Prompt, panels: int, rounds: int, short: bool) -> Prompt:
    """The prompt with both counts and the form written into its system text; any other braces stay as typed."""
    system = fill(choose_form(prompt.system, short), panels=str(panels), rounds=str(rounds))
    return dataclasses.replace(prompt, system=system)


def form_of(preset: str) -> str:
    """What a preset asks for, as `Prompt.form`: "comic script" or "text"."""
    return "comic script" if preset in PRESETS else "text"
