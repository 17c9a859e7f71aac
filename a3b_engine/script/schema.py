"""Fields of a comic script, as pydantic models.

Every field has a documented default, so a model answer that lacks one can still be drawn; `parse.py` reports each
default it uses. Names are those of the CLI output; the descriptions are printed in the help page of JSON Parse Panels.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Shot = Literal["extreme_close", "close", "medium", "full", "wide", "establishing", "over_shoulder", "pov"]
SHOTS: tuple[str, ...] = get_args(Shot)
DEFAULT_SHOT = "medium"

ReadingDirection = Literal["ltr", "rtl", "vertical"]
READING_DIRECTIONS: tuple[str, ...] = get_args(ReadingDirection)
DEFAULT_READING_DIRECTION = "ltr"

# Of the JSON form (`document.py`). It grows when a reader of today would misread a script of tomorrow; a new optional
# field is no reason.
SCHEMA_VERSION = 1
VERSION_KEY = "version"

# A script larger than this is not a comic page but a run-away answer; the parser keeps the first ones and says so.
MAX_PANELS = 512
MAX_DIALOGUE = 4096
MAX_CHARACTERS = 256
MAX_LISTED = 256  # characters or props of one panel
MAX_INDEX = 1_000_000


class Character(BaseModel):
    """One person of the story. `look` is what an image model can draw; the name means nothing to it."""

    model_config = ConfigDict(extra="allow")

    id: str = Field("", description="short key that panels and dialogue rows use; picks a LoRA or a reference picture")
    name: str = Field("", description="name as the reader sees it, for lettering")
    look: str = Field("", description="age, hair, clothes, colours: written out in every prompt the character is in")


class DialogueLine(BaseModel):
    """One speech balloon, bound to its panel; in reading order (also the order for text-to-speech)."""

    model_config = ConfigDict(extra="allow")

    panel: int = Field(1, ge=1, le=MAX_INDEX, description="index of the panel the balloon stands in")
    speaker: str = Field("", description="who speaks (id or name), for the balloon's tail and the voice; empty for an unknown voice")
    line: str = Field("", description="the words in the balloon, for lettering and text-to-speech")
    emotion_tag: str = Field("", description="one word for the tone, for lettering and text-to-speech")


class Panel(BaseModel):
    """One picture of the page. Order of the list is story order, whatever the reading direction."""

    model_config = ConfigDict(extra="allow")

    index: int = Field(1, ge=1, le=MAX_INDEX, description="1-based place in the story; binds pictures and dialogue, offsets the seed")
    shot: Shot = Field(DEFAULT_SHOT, description="framing, a closed set; picks the prompt's shot words and the size of the picture")
    characters: list[str] = Field(default_factory=list, description="ids of the characters in the picture, or empty; their looks are written into the prompt")
    action: str = Field("", description="what is done; part of a composed prompt")
    micro_expression: str = Field("", description="what the face shows; part of a composed prompt")
    background: str = Field("", description="place; the same words for the same place keep the set constant")
    light: str = Field("", description="source, direction and colour of the light; part of a composed prompt")
    props: list[str] = Field(default_factory=list, description="things that matter for the story; part of a composed prompt")
    caption: str = Field("", description="narration box, for lettering")
    sfx: str = Field("", description="sound word, for lettering")
    scene_tag: str = Field("", description="same tag = same place; panels of one tag may share a seed")
    visual_prompt: str = Field("", description="self-contained image prompt; composed from the other fields if empty")
    negative: str = Field("", description="negative image prompt of this panel; may be empty")


class ComicScript(BaseModel):
    """A whole script: constants of the page, the dialogue rows, the panels."""

    title: str = Field("", description="title of the page; may name the saved files")
    style: str = Field("", description="drawing style shared by all panels; last in a composed prompt, before the style suffix")
    language: str = Field("", description="language of dialogue and captions, for lettering and text-to-speech")
    reading_direction: ReadingDirection = Field(
        DEFAULT_READING_DIRECTION, description="metadata for page layout; never changes the order of the lists"
    )
    characters: list[Character] = Field(default_factory=list, description="everyone who is in a panel or speaks")
    dialogue: list[DialogueLine] = Field(default_factory=list, description="all balloons of the page, in reading order")
    panels: list[Panel] = Field(default_factory=list, description="the pictures, in story order")
