"""Lessons: a picture, a request and the right answer, by seed.

Scripts are what the model is for. Questions on single traits, lists and descriptions are there for the vision tower:
every word of their answers must be seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from a3b_engine.script.presets import PRESETS

from . import asks, traits
from .draw import draw
from .outline import choose_binding, phrases, write_outline
from .scene import Person, Scene, make_scene
from .script import look, to_text, write_script

# Shares of the lesson kinds, if none are given.
WEIGHTS: dict[str, float] = {
    "script_full": 0.28, "script_short": 0.22, "question": 0.16, "inventory": 0.14, "describe": 0.12, "tags": 0.08
}  # fmt: skip
PANEL_CHOICES, ROUND_CHOICES = ((3, 4), (1, 1)), ((2, 3, 4, 5), (1, 4, 4, 1))
CHINESE_SHARE = 0.4
QUESTIONS = (
    "kind_at", "colour", "garment", "expression", "position", "prop", "place", "time", "weather", "count", "has",
    "who_feels", "who_wears", "who_holds",
)  # fmt: skip


@dataclass(frozen=True)
class Lesson:
    """picture: uint8 [384, 384, 3]. system, user: as the nodes send them; user may hold one [[IMG]] marker.

    facts: what `facts.score` measures an answer against, as plain JSON values. language: of the answer.
    panels, rounds: 0 unless it is a script.
    """

    picture: np.ndarray
    system: str
    user: str
    answer: str
    facts: dict[str, Any]
    kind: str
    language: str
    panels: int
    rounds: int
    scene: Scene


def sample(
    seed: int, held_out: bool = False, kind: str | None = None, language: str | None = None, weights: dict[str, float] = WEIGHTS
) -> Lesson:
    """The lesson of a seed: a pure function of its arguments. `kind` and `language` (en, zh) narrow the choice; `weights`
    are the shares of the kinds.

    Lessons with held_out True never share the hero's (colour, kind, place, event) with lessons without, whatever the seeds.
    """
    if kind is not None and kind not in WEIGHTS:
        raise ValueError(f"kind: {kind!r} is not known. Use one of {', '.join(WEIGHTS)}.")
    if language is not None and language not in traits.LANGUAGES:
        raise ValueError(f"language: {language!r} is not known. Use one of {', '.join(traits.LANGUAGES)}.")
    scene = make_scene(seed, held_out)
    dice = random.Random(scene.style ^ (seed << 1))
    chosen = dice.choices(tuple(weights), tuple(weights.values()))[0]
    tongue = "zh" if dice.random() < CHINESE_SHARE else "en"
    kind, language = kind or chosen, language or tongue
    if kind.startswith("script"):
        return _script(scene, kind, language, dice)
    system, user, answer, more = _ABOUT_PICTURE[kind](scene, language, dice)
    facts = {**_facts(scene, kind, language), **more}
    return Lesson(draw(scene), system, user, answer, facts, kind, language, 0, 0, scene)


def _facts(scene: Scene, kind: str, language: str) -> dict[str, Any]:
    """What is to be seen; `people` from left to right, in scripts in the order of the story."""
    people = scene.people if kind.startswith("script") else scene.by_position()
    return {
        "form": kind,
        "language": language,
        "place": scene.place,
        "time": scene.time,
        "weather": scene.weather,
        "people": [_person_facts(person, language) for person in people],
    }


def _person_facts(person: Person, language: str) -> dict[str, Any]:
    keys = ("kind", "colour", "garment", "garment_colour", "expression", "position", "prop")
    return {"name": person.called(language), **{key: getattr(person, key) for key in keys}}


def _script(scene: Scene, kind: str, language: str, dice: random.Random) -> Lesson:
    brief = kind == "script_short"
    panels = dice.choices(*PANEL_CHOICES)[0]
    rounds = min(dice.choices(*ROUND_CHOICES)[0], 8 - panels)  # keeps the longest answers under 900 tokens
    preset = dice.choice(tuple(PRESETS))
    # The language is that of the outline, or chosen; now and then both differ.
    choice = dice.choice((None, "English" if language == "en" else "Chinese"))
    outline_language = language if choice is None or dice.random() < 0.75 else next(x for x in traits.LANGUAGES if x != language)
    binding, with_ending = choose_binding(scene, dice), dice.random() < 0.75
    outline = write_outline(scene, outline_language, binding, dice, with_ending=with_ending)
    facts = {
        **_facts(scene, kind, language),
        "panels": panels,
        "rounds": rounds,
        "binding": binding,
        "thing": scene.thing,
        "event": scene.event,
        "ending": scene.ending if with_ending else None,
        "attitudes": [person.attitude for person in scene.people],
    }
    script = write_script(scene, language, dice, panels=panels, rounds=rounds, preset=preset, brief=brief)
    return Lesson(
        picture=draw(scene),
        system=asks.script_system(preset, choice, panels, rounds, brief),
        user=asks.with_picture(outline, dice),
        answer=to_text(script, brief=brief),
        facts=facts,
        kind=kind,
        language=language,
        panels=panels,
        rounds=rounds,
        scene=scene,
    )


@lru_cache(maxsize=None)
def words_of(language: str) -> dict:
    """Questions and answers of a language (`words/questions.<language>.json`)."""
    return traits.read_words(f"questions.{language}")


def _question(scene: Scene, language: str, dice: random.Random) -> tuple[str, str, str, dict]:
    asked = dice.sample(QUESTIONS, dice.randint(1, 4))
    rows = [_ask(scene, name, language, dice) for name in asked]
    text = "\n".join(row[0] for row in rows)
    answer = "\n".join(row[1] for row in rows)
    more = {"questions": [{"about": name, "answer": row[1]} for name, row in zip(asked, rows)]}
    return asks.question_system(language, dice), asks.with_picture(text, dice), answer, more


def _ask(scene: Scene, name: str, language: str, dice: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    words = words_of(language)

    def say(group: str, key: str) -> str:
        return traits.word(group, key, language)

    def kinds(people: list[Person]) -> str:
        return phrases(language)["comma"].join(say("kinds", person.kind) for person in people) or words["nobody"]

    people = scene.by_position()
    person = dice.choice(people)
    values: dict[str, str] = {"kind": say("kinds", person.kind)}
    if name == "kind_at":
        where = dice.choice(traits.POSITIONS)
        values["where"] = phrases(language)["where"][where]
        answer = kinds([other for other in people if other.position == where])
    elif name == "colour":
        owner = words["owner"].get(person.kind, words["owner"][""])
        values["owner"], answer = owner.format(**values), say("colours", person.colour)
    elif name == "garment":
        answer = garment_text(person, language) or words["nothing"]
    elif name == "prop":
        answer = say("props", person.prop) if person.prop else words["nothing"]
    elif name in ("expression", "position"):
        answer = say(f"{name}s", getattr(person, name))
    elif name in ("place", "time", "weather"):
        answer = say(f"{name}s", getattr(scene, name))
    elif name == "count":
        answer = str(len(people))
    elif name == "has":
        kind = dice.choice((person.kind, dice.choice(traits.KINDS)))
        values["kind"] = say("kinds", kind)
        answer = words["yes" if any(other.kind == kind for other in people) else "no"]
    elif name == "who_feels":
        mood = dice.choice((person.expression, dice.choice(traits.EXPRESSIONS)))
        values["expression"] = say("expressions", mood)
        answer = kinds([other for other in people if other.expression == mood])
    elif name == "who_wears":
        garment = dice.choice(traits.GARMENTS)
        values["garment"] = say("garments", garment)
        answer = kinds([other for other in people if other.garment == garment])
    else:
        prop = dice.choice((person.prop or "book", dice.choice(traits.PROPS)))
        values["a_prop"] = traits.with_article(prop) if language == "en" else say("props", prop)
        answer = kinds([other for other in people if other.prop == prop])
    return dice.choice(words[name]).format(**values), answer


def garment_text(person: Person, language: str) -> str:
    """ "blue scarf", or "" without."""
    if not person.garment:
        return ""
    colour, garment = traits.word("colours", person.garment_colour, language), traits.word("garments", person.garment, language)
    return words_of(language)["garment_answer"].format(colour=colour, garment=garment)


def _inventory(scene: Scene, language: str, dice: random.Random) -> tuple[str, str, str, dict]:
    words = words_of(language)
    answer = words["inventory"].format(**_scene_words(scene, language), count=len(scene.people))
    for person in scene.by_position():
        answer += words["inventory_person"].format(
            position=traits.word("positions", person.position, language),
            colour=traits.word("colours", person.colour, language),
            kind=traits.word("kinds", person.kind, language),
            garment=garment_text(person, language) or words["no_garment"],
            expression=traits.word("expressions", person.expression, language),
            prop=traits.word("props", person.prop, language) if person.prop else words["no_prop"],
        )
    return asks.question_system(language, dice), asks.with_picture(dice.choice(words["inventory_ask"]), dice), answer, {}


def _describe(scene: Scene, language: str, dice: random.Random) -> tuple[str, str, str, dict]:
    words = words_of(language)
    count = words["count_words"][len(scene.people) - 1]
    answer = dice.choice(words["describe"]).format(**_scene_words(scene, language), air=traits.AIRS[scene.weather], count=count)
    for person in scene.by_position():
        where, holding = phrases(language)["where"][person.position], ""
        if person.prop:
            prop = traits.word("props", person.prop, language)
            holding = words["holding"].format(prop=traits.with_article(prop) if language == "en" else prop)
        answer += dice.choice(words["describe_person"]).format(
            Where=where[0].upper() + where[1:],
            look=look(person) if language == "en" else _look_zh(person),
            expression=traits.word("expressions", person.expression, language),
            holding=holding,
        )
    if dice.random() < 0.5:  # the preset of that name, with or without a word of the user
        ask = dice.choice(("", *words["describe_ask"]))
        return asks.job_system("describe", language), asks.with_picture(ask, dice) if ask else "", answer, {}
    return asks.question_system(language, dice), asks.with_picture(dice.choice(words["describe_ask"]), dice), answer, {}


def _tags(scene: Scene, language: str, dice: random.Random) -> tuple[str, str, str, dict]:
    words = words_of(language)
    tags = [words["count_words"][len(scene.people) - 1].lower()]
    for person in scene.by_position():
        colour, kind = traits.word("colours", person.colour, language), traits.word("kinds", person.kind, language)
        tags += [words["tag_person" if person.kind in traits.PERSONS else "tag_animal"].format(colour=colour, kind=kind)]
        tags += [garment_text(person, language)] * bool(person.garment)
        tags += [traits.word("expressions", person.expression, language)]
        if person.prop:
            tags.append(words["tag_prop"].format(prop=traits.word("props", person.prop, language)))
    tags += [*_scene_words(scene, language).values(), *words["tag_style"]]
    tags = list(dict.fromkeys(tags))
    ask = dice.choice(("", *words["tags_ask"]))
    return asks.job_system("tags", language), ask, ", ".join(tags), {"tags": tags}


def _look_zh(person: Person) -> str:
    colour, kind = traits.word("colours", person.colour, "zh"), traits.word("kinds", person.kind, "zh")
    text = f"\u7a7f{colour}\u8863\u670d\u7684{kind}" if person.kind in traits.PERSONS else f"{colour}\u7684{kind}"
    garment = garment_text(person, "zh")
    return f"{text}\uff0c\u6234\u7740{garment}" if garment else text


def _scene_words(scene: Scene, language: str) -> dict[str, str]:
    keys = ("place", "time", "weather")
    return {key: traits.word(f"{key}s", getattr(scene, key), language) for key in keys}


_ABOUT_PICTURE = {"question": _question, "inventory": _inventory, "describe": _describe, "tags": _tags}
