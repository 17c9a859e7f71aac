"""The system text of a comic preset, and the counts that Generate writes into it.

Panels and rounds are widgets of Generate, where the grammar needs them. So that instructions and grammar can never
disagree, Build leaves `{{panels}}` and `{{rounds}}` standing and Generate fills them in.
"""

from __future__ import annotations

import dataclasses

from ..a3b_engine.prompt import Prompt
from ..a3b_engine.script.presets import fill, system_prompt

# Instructions are given in Chinese for a Chinese script; these words then stand in a Chinese sentence.
_IN_CHINESE = {"dialogue_language": "\u4e2d\u6587", "prompt_language": "\u82f1\u6587", "text_language": "zh"}

_OPEN_COUNTS = {"panels": "{{panels}}", "rounds": "{{rounds}}"}


def comic_instructions(preset: str, language: str | None) -> str:
    """`language`: of captions and dialogue; None: that of the story. Image prompts stay English."""
    if language == "Chinese":
        return system_prompt(preset, **_IN_CHINESE, **_OPEN_COUNTS)
    return system_prompt(preset, dialogue_language=language or "the language of the story", **_OPEN_COUNTS)


def with_counts(prompt: Prompt, panels: int, rounds: int) -> Prompt:
    """The prompt with both counts written into its system text; any other braces stay as typed."""
    return dataclasses.replace(prompt, system=fill(prompt.system, panels=str(panels), rounds=str(rounds)))
