"""Scenes: what is drawn and what is told, sampled from a seed, and the combinations kept back for measuring."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from . import traits

HELD_OUT_SHARE = 8  # one combination of this many is never trained on
_SALT = "a3b drawn world 1"


@dataclass(frozen=True)
class Person:
    """One character. Everything but `name` and `attitude` is drawn; `garment` and `prop` may be None."""

    name: tuple[str, str]  # English, Chinese
    kind: str
    colour: str
    garment: str | None
    garment_colour: str | None
    expression: str
    position: str
    prop: str | None
    attitude: str | None  # None: the hero

    def called(self, language: str) -> str:
        return self.name[traits.LANGUAGES.index(language)]


@dataclass(frozen=True)
class Scene:
    """One picture and one story. `people[0]` is the hero. Kinds, names and positions differ within a scene.

    `style` seeds everything about the drawing that no fact depends on.
    """

    people: tuple[Person, ...]
    place: str
    time: str
    weather: str
    thing: str
    event: str
    ending: str
    style: int

    @property
    def hero(self) -> Person:
        return self.people[0]

    def by_position(self) -> list[Person]:
        """The characters from left to right."""
        return sorted(self.people, key=lambda person: traits.POSITIONS.index(person.position))


@lru_cache(maxsize=None)
def is_held_out(colour: str, kind: str, place: str, event: str) -> bool:
    """Whether a combination is kept back: about one in eight, by a hash that no other choice depends on."""
    text = "/".join((_SALT, colour, kind, place, event))
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0


def make_scene(seed: int, held_out: bool = False) -> Scene:
    """The scene of a seed.

    held_out False: no character of it makes a held-out combination. held_out True: the hero does. So the two kinds of
    scene never share the hero's (colour, kind, place, event), whatever the seeds.
    """
    dice = random.Random(2 * seed + bool(held_out))
    while True:
        scene = _draw_lots(dice)
        held = [is_held_out(person.colour, person.kind, scene.place, scene.event) for person in scene.people]
        if held[0] if held_out else not any(held):
            return scene


def _draw_lots(dice: random.Random) -> Scene:
    count = dice.choices((1, 2, 3), (4, 4, 3))[0]
    kinds = dice.sample(traits.KINDS, count)
    positions = dice.sample(traits.POSITIONS, count)
    firsts, lasts = dice.sample(traits.FIRST_SYLLABLES, count), dice.sample(traits.LAST_SYLLABLES, count)
    people = []
    for number in range(count):
        colour, garment_colour = dice.sample(traits.COLOURS, 2)
        garment = dice.choice((*traits.GARMENTS, None))
        first, last = firsts[number], lasts[number]
        people.append(
            Person(
                name=(first[0] + last[0], first[1] + last[1]),
                kind=kinds[number],
                colour=colour,
                garment=garment,
                garment_colour=garment_colour if garment else None,
                expression=dice.choice(traits.EXPRESSIONS),
                position=positions[number],
                prop=dice.choice(traits.PROPS) if dice.random() < 0.75 else None,
                attitude=dice.choice(traits.ATTITUDES) if number else None,
            )
        )
    return Scene(
        people=tuple(people),
        place=dice.choice(traits.PLACES),
        time=dice.choice(traits.TIMES),
        weather=dice.choice(traits.WEATHERS),
        thing=dice.choice(traits.THINGS),
        event=dice.choice(traits.EVENTS),
        ending=dice.choice(traits.ENDINGS),
        style=dice.getrandbits(48),
    )
