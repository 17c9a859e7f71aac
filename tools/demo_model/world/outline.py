"""Story outlines in English and Chinese: names, the event, what the others do, the ending. Never colours, clothes or moods.

A name is bound to its character by the kind ("Mina the cat") or by the place in the picture ("Mina, on the left,"); a
hero alone in the picture may have the bare name.
"""

from __future__ import annotations

import random
from functools import lru_cache

from . import traits
from .scene import Person, Scene

BINDINGS = ("kind", "position", "bare")


@lru_cache(maxsize=None)
def phrases(language: str) -> dict:
    """The story phrases of a language (`words/story.<language>.json`)."""
    return traits.read_words(f"story.{language}")


def choose_binding(scene: Scene, dice: random.Random) -> str:
    """How names are bound to characters in an outline of `scene`."""
    if len(scene.people) == 1:
        return dice.choices(BINDINGS, (5, 1, 4))[0]
    return dice.choices(BINDINGS[:2], (7, 3))[0]


def write_outline(scene: Scene, language: str, binding: str, dice: random.Random, *, with_ending: bool) -> str:
    """One phrasing of the story of `scene`."""
    words, parts = phrases(language), []
    called = {person: _refer(person, language, binding, dice) for person in scene.people}
    if dice.random() < 0.3 and binding != "bare":
        cast = [_trim(called[person]) for person in scene.people]
        parts.append(dice.choice(words["cast"]).format(cast=words["comma"].join(cast)))
        called = {person: person.called(language) for person in scene.people}
    parts.append(_sentence(dice.choice(words["event"]), hero=called[scene.hero], event=event_text(scene, language)))
    for person in scene.people[1:]:
        attitude = traits.word("attitudes", person.attitude, language)
        parts.append(_sentence(dice.choice(words["other"]), other=called[person], attitude=attitude))
    if with_ending:
        parts.append(
            _sentence(
                dice.choice(words["ending"]), all=everyone(scene, language), ending=traits.word("endings", scene.ending, language)
            )
        )
    if dice.random() < 0.35:
        parts.insert(dice.choice((0, len(parts))), dice.choice(words["remark"]))
    return words["space"].join(parts)


def event_text(scene: Scene, language: str) -> str:
    """What the hero does: "finds a letter"."""
    verb, thing = traits.word("events", scene.event, language), traits.word("things", scene.thing, language)
    if language == "en":
        return f"{verb} {traits.with_article(thing)}"
    return verb + traits.word("measures", scene.thing, language) + thing


def everyone(scene: Scene, language: str) -> str:
    """Who takes part in the ending."""
    return scene.hero.called(language) if len(scene.people) == 1 else phrases(language)["everyone"]


def _refer(person: Person, language: str, binding: str, dice: random.Random) -> str:
    name, words = person.called(language), phrases(language)
    if binding == "bare":
        return name
    if binding == "position":
        return dice.choice(words["by_position"]).format(name=name, position=words["where"][person.position])
    return dice.choice(words["by_kind"]).format(name=name, kind=traits.word("kinds", person.kind, language))


def _sentence(template: str, **values: str) -> str:
    text = template.format(**values)
    return text[0].upper() + text[1:]


def _trim(text: str) -> str:
    return text.rstrip(",")
