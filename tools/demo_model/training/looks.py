"""What is drawn, as class numbers: the targets of the eyes' own lessons. No torch here."""

from __future__ import annotations

import numpy as np

from tools.demo_model.world import traits
from tools.demo_model.world.scene import Scene

# Of whoever stands in one third of a picture; class 0: nobody, or without.
PERSON_TRAITS: dict[str, tuple[str, ...]] = {
    "kind": traits.KINDS, "colour": traits.COLOURS, "garment": traits.GARMENTS, "garment_colour": traits.COLOURS,
    "expression": traits.EXPRESSIONS, "prop": traits.PROPS,
}  # fmt: skip
SCENE_TRAITS: dict[str, tuple[str, ...]] = {"place": traits.PLACES, "time": traits.TIMES, "weather": traits.WEATHERS}
THIRDS = len(traits.POSITIONS)
LABELS = THIRDS * len(PERSON_TRAITS) + len(SCENE_TRAITS)


def labels(scene: Scene) -> np.ndarray:
    """int64 [LABELS]: the person traits of each third from left to right, then the scene traits."""
    there = {person.position: person for person in scene.people}
    row = []
    for position in traits.POSITIONS:
        person = there.get(position)
        for name, values in PERSON_TRAITS.items():
            value = getattr(person, name) if person else None
            row.append(1 + values.index(value) if value else 0)
    row += [values.index(getattr(scene, name)) for name, values in SCENE_TRAITS.items()]
    return np.array(row, dtype=np.int64)
