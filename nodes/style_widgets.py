"""Widgets that JSON Parse Panels and Pick Panel share, so that both give the same values for the same panel."""

from __future__ import annotations

from typing import Annotated

from ..a3b_engine.script.sizes import SIZE_FAMILIES
from .annotations import Choice, Flag, Int, Text

StylePrefix = Annotated[str, Text(multiline=False, tooltip="Put before every panel's prompt.")]
StyleSuffix = Annotated[str, Text(multiline=False, tooltip="Put after every panel's prompt.")]
BaseSeed = Annotated[int, Int(0, 2**64 - 1, tooltip="Seed of a panel = base_seed + its index.")]
SizeFamily = Annotated[
    str, Choice(tuple(SIZE_FAMILIES), tooltip="Image model that draws the panels: gives width and height for each shot.")
]
_SEED_PER_SCENE = "on: panels with the same scene_tag share the seed of the first of them, which keeps the place alike. off: a seed a panel."
SeedPerScene = Annotated[bool, Flag(tooltip=_SEED_PER_SCENE)]
OptionalSeedPerScene = Annotated[bool, Flag(tooltip=_SEED_PER_SCENE, optional=True)]
