"""Build [[IMG]] Prompt: texts and pictures -> one prompt, checked before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ..a3b_engine.errors import PromptError
from ..a3b_engine.prompt import Prompt, build_messages
from ..a3b_engine.script.instructions import LANGUAGES, NO_PRESET, PRESET_NAMES, form_of, system_text
from ..a3b_engine.script.presets import choose_form
from .annotations import Choice, Flag, Output, Socket, Text, node
from .sockets import A3B_IMAGES, A3B_PROMPT

AS_ASKED = "as in the text"


@node(
    "A3BBuildPrompt",
    "Build [[IMG]] Prompt",
    category="A3B",
    search=("prompt", "system prompt", "story", "comic", "manga", "caption", "describe", "tags", "translate", "ocr"),
)
def A3BBuildPrompt(
    text: Annotated[
        str,
        Text(
            tooltip="Your story or question. [[IMG]] puts the next picture here, [[IMG:2]] the second one; "
            "pictures without a marker go before the text. Braces and comments stay as typed."
        ),
    ] = "",
    system: Annotated[str, Text(tooltip="Standing instructions. A preset below is put before them.")] = "",
    language: Annotated[
        str, Choice((AS_ASKED, *LANGUAGES), tooltip="Language of the answer. For a comic script: of captions and dialogue. For translate: the one to translate into.")
    ] = AS_ASKED,
    label_images: Annotated[
        bool, Flag(tooltip='Writes "Picture 1: " and so on before each picture, so that the text can speak of them by number.')
    ] = False,
    images: Annotated[tuple | None, Socket(A3B_IMAGES, optional=True, tooltip="From Encode Image 384px.")] = None,
    preset: Annotated[
        str,
        Choice(
            PRESET_NAMES,
            optional=True,
            tooltip="Ready instructions. Comics: manga to children; Generate puts its own panels and rounds where {{panels}} "
            "and {{rounds}} stand in them. Plain jobs: describe or tags of the picture, enhance_image / enhance_video for a "
            "prompt, read_text (in the picture), translate.",
        ),
    ] = NO_PRESET,
    prompt_language: Annotated[
        str,
        Choice(
            LANGUAGES,
            optional=True,
            tooltip="Language of what the image model reads in a comic script: looks, action, place, light, prompts. English "
            "suits most image models.",
        ),
    ] = "English",
) -> tuple[
    Annotated[Prompt, Output(A3B_PROMPT, "prompt", "For Generate.")],
    Annotated[str, Output("STRING", "preview", "The turns as the model gets them, pictures as [picture 1: 12x12 tokens].")],
]:
    """Puts text, instructions and pictures together. Markers are counted here: one picture too few is an error
    before the model is touched."""
    if not text.strip() and not images and (preset != NO_PRESET or not system.strip()):
        raise PromptError("text: is empty and no image is connected. Write a story or a question, or connect an image")
    chosen = None if language == AS_ASKED else language
    instructions = system_text(preset, system, chosen, prompt_language)
    prompt = Prompt(user=text, system=instructions, images=tuple(images or ()), label_images=label_images, form=form_of(preset))
    return prompt, _preview(prompt)


def _preview(prompt: Prompt) -> str:
    """Only Generate knows the form of a script: what it may add for the short one is left out here."""
    prompt = dataclasses.replace(prompt, system=choose_form(prompt.system, short=False))
    turns = build_messages(prompt)  # raises PromptError for wrong counts and for an empty prompt
    return "\n\n".join(f"[{turn['role']}]\n{_readable(turn['content'], prompt.images)}" for turn in turns)


def _readable(content: str | list[dict], images: tuple) -> str:
    if isinstance(content, str):
        return content
    return "".join(item["text"] if item["type"] == "text" else _picture(item["index"], images) for item in content)


def _picture(index: int, images: tuple) -> str:
    rows, columns = images[index].grid
    return f"[picture {index + 1}: {columns}x{rows} tokens]"
