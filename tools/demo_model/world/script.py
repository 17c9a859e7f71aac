"""The script that fits a scene: looks, place, hour and weather from the picture, names and events from the outline."""

from __future__ import annotations

import json
import random
from functools import lru_cache

from a3b_engine.script.compose import SHOT_WORDS
from a3b_engine.script.presets import PRESETS
from a3b_engine.script.schema import Character, ComicScript, DialogueLine, Panel

from . import traits
from .outline import event_text, everyone, phrases
from .scene import Person, Scene

STYLES = {
    "manga": "black and white ink, screentone",
    "manhua": "full colour, soft light",
    "western": "bold ink lines, flat colours",
    "storyboard": "grey pencil sketch",
    "children": "warm watercolour",
}
LANGUAGE_NAMES = {"en": "English", "zh": "\u4e2d\u6587"}
NEGATIVE = "blurry, text"
COUNTS = {1: "one character", 2: "two characters", 3: "three characters"}
WHERE = {"left": "on the left", "middle": "in the middle", "right": "on the right"}

_BRIEF_KEYS = ("title", "dialogue", "panels")
_BRIEF_PANEL_KEYS = ("index", "shot", "action", "micro_expression", "background", "light", "props")
_ATTITUDE_ACTIONS = {
    "help": "helps with the {thing}",
    "doubt": "shakes the head",
    "want": "reaches for the {thing}",
    "warn": "lifts a warning hand",
    "cheer": "claps and cheers",
}
_HERO_ACTIONS = ("looks at the {thing}", "takes a step forward", "turns around slowly", "stands very still")


@lru_cache(maxsize=None)
def _lines(language: str) -> dict:
    return traits.read_words(f"lines.{language}")


def look(person: Person) -> str:
    """What is seen of a character, in English: "a red cat with a blue scarf"."""
    if person.kind in traits.PERSONS:
        text = f"a {person.kind} in {person.colour}"
    else:
        text = traits.with_article(f"{person.colour} {person.kind}")
    if person.garment:
        text += f" with {traits.with_article(f'{person.garment_colour} {person.garment}')}"
    return text


def background(scene: Scene) -> str:
    return traits.BACKGROUNDS[scene.place]


def light(scene: Scene) -> str:
    return f"{traits.LIGHTS[scene.time]}, {traits.AIRS[scene.weather]}"


def write_script(
    scene: Scene, language: str, dice: random.Random, *, panels: int, rounds: int, preset: str = "manga", brief: bool = False
) -> ComicScript:
    """The script of a scene. `brief`: what the short form holds (names speak, and each action names the look).

    In panel i (counted from 0) stands character i % n first; so with at least n panels every character of the picture
    has one that shows its face and what it holds. `rounds` rows go round the characters, too.
    """
    rows = _dialogue(scene, language, dice, panels, rounds, brief)
    cast = [Character(id=_id(person), name=person.called(language), look=look(person)) for person in scene.people]
    return ComicScript(
        title=_title(scene, language, dice),
        style=STYLES[preset],
        language=LANGUAGE_NAMES[language],
        reading_direction=PRESETS[preset].reading_direction,
        characters=[] if brief else cast,
        dialogue=rows,
        panels=[_panel(scene, language, dice, number, panels, rows, brief) for number in range(panels)],
    )


def to_text(script: ComicScript, *, brief: bool = False) -> str:
    """JSON as the grammar of the form writes it: its keys in its order, ", " and ": " between, no other white space."""
    value = script.model_dump()
    if brief:
        value = {key: value[key] for key in _BRIEF_KEYS}
        value["panels"] = [{key: panel[key] for key in _BRIEF_PANEL_KEYS} for panel in value["panels"]]
    return json.dumps(value, ensure_ascii=False)


def attitude_action(attitude: str, thing: str) -> str:
    """What a panel shows of an attitude: "reaches for the letter"."""
    return _ATTITUDE_ACTIONS[attitude].format(thing=thing)


def _id(person: Person) -> str:
    return person.called("en").lower()


def _title(scene: Scene, language: str, dice: random.Random) -> str:
    thing = traits.word("things", scene.thing, language)
    return dice.choice(phrases(language)["title"]).format(hero=scene.hero.called(language), thing=thing, Thing=thing.capitalize())


def _panel(
    scene: Scene, language: str, dice: random.Random, number: int, panels: int, rows: list[DialogueLine], brief: bool
) -> Panel:
    star, first_time = _star(scene, number), number < len(scene.people)
    last = number == panels - 1
    shot = _shot(number, last, brief, dice)
    act = _act(scene, star, number, last, dice)
    mood = star.expression if first_time else traits.ENDING_MOODS[scene.ending] if last else star.expression
    place = f" {WHERE[star.position]}" if first_time else ""
    props = [scene.thing] * (number == 0 or last) + [star.prop] * bool(star.prop)
    if brief:
        return Panel(
            index=number + 1,
            shot=shot,
            action=f"{look(star)}{place} {act}",
            micro_expression=traits.FACES[mood],
            background=background(scene),
            light=light(scene),
            props=props,
        )
    shown = [star] if shot == "close" else _shown(scene, star, number, rows)
    holding = f", holding {traits.with_article(star.prop)}," if star.prop else ""
    people = [f"{look(star)} {WHERE[star.position]}{holding} {act}"]
    people += [f"{look(person)} {WHERE[person.position]}" for person in shown if person is not star]
    pieces = [SHOT_WORDS[shot], COUNTS[len(shown)], *people, f"{mood} face", background(scene), light(scene)]
    return Panel(
        index=number + 1,
        shot=shot,
        characters=[_id(person) for person in shown],
        action=act,
        micro_expression=traits.FACES[mood],
        background=background(scene),
        light=light(scene),
        props=props,
        caption=_caption(scene, language, dice, star, number, last),
        sfx=_sound(scene, language, number),
        scene_tag=scene.place,
        visual_prompt=", ".join(pieces),
        negative=NEGATIVE,
    )


def _star(scene: Scene, number: int) -> Person:
    return scene.people[number % len(scene.people)]


def _shown(scene: Scene, star: Person, number: int, rows: list[DialogueLine]) -> list[Person]:
    """Everyone in the first panel; then the star and who speaks there."""
    if number == 0:
        return list(scene.people)
    speakers = {row.speaker for row in rows if row.panel == number + 1}
    return [star, *(person for person in scene.people if person is not star and _id(person) in speakers)]


def _shot(number: int, last: bool, brief: bool, dice: random.Random) -> str:
    if number == 0:
        return "wide" if brief or dice.random() < 0.7 else "establishing"
    if last:
        return dice.choice(("wide", "medium")) if brief else dice.choice(("wide", "medium", "full"))
    return "close" if number == 1 else dice.choice(("medium", "close"))


def _act(scene: Scene, star: Person, number: int, last: bool, dice: random.Random) -> str:
    if number == 0:
        return event_text(scene, "en")
    if last:
        return traits.word("endings", scene.ending, "en")
    if star.attitude:
        return attitude_action(star.attitude, scene.thing)
    return dice.choice(_HERO_ACTIONS).format(thing=scene.thing)


def _caption(scene: Scene, language: str, dice: random.Random, star: Person, number: int, last: bool) -> str:
    words = phrases(language)
    if number == 0:
        time, place = traits.word("times", scene.time, language), traits.word("places", scene.place, language)
        text = dice.choice(words["opening"])
        return text.format(time=time, Time=time.capitalize(), place=place, weather=words["weather"][scene.weather])
    if last:
        all_ = everyone(scene, language)
        ending = traits.word("endings", scene.ending, language)
        return dice.choice(words["closing"]).format(all=all_, All=all_[0].upper() + all_[1:], ending=ending)
    if star.attitude:
        attitude = traits.word("attitudes", star.attitude, language)
        return dice.choice(words["then"]).format(name=star.called(language), attitude=attitude)
    return dice.choice((*words["alone"], "")) if len(scene.people) == 1 else ""


def _sound(scene: Scene, language: str, number: int) -> str:
    sounds = phrases(language)["sound"]
    if number == 0:
        return sounds.get(scene.event, sounds.get(scene.weather, ""))
    return ""


def _dialogue(scene: Scene, language: str, dice: random.Random, panels: int, rounds: int, brief: bool) -> list[DialogueLine]:
    rows, said = [], set()
    for number in range(rounds):
        person = _star(scene, number)
        ends = number == rounds - 1 and number >= len(scene.people)
        line = _line(scene, language, dice, person, number, ends, said)
        said.add(line)
        rows.append(
            DialogueLine(
                panel=1 + number * panels // rounds,
                speaker=person.called(language) if brief else _id(person),
                line=line,
                emotion_tag=traits.ENDING_MOODS[scene.ending] if ends else person.expression,
            )
        )
    return rows


def _line(scene: Scene, language: str, dice: random.Random, person: Person, number: int, ends: bool, said: set[str]) -> str:
    """A line that was not said before, from the templates that fit this row."""
    lines = _lines(language)
    if ends:
        choices = lines["ending"][scene.ending]
    elif number == 0 and dice.random() < 0.75:
        choices = lines["event"][scene.event]
    elif 0 < number < len(scene.people):
        choices = lines["attitude"][person.attitude]
    else:
        group, key = dice.choice(
            (("expression", person.expression),) * 3 + (("time", scene.time), ("weather", scene.weather), ("place", scene.place))
        )
        choices = lines[group][key]
        if number:
            choices = [*choices, *lines["expression"][person.expression]]
    others = [other for other in scene.people if other is not person]
    if not others:
        choices = [choice for choice in choices if "{name}" not in choice]
    # Who is spoken to: the hero by the others, one of the others by the hero.
    other = dice.choice(others[:1] if person.attitude else others) if others else person
    filled = [
        choice.format(thing=traits.word("things", scene.thing, language), name=other.called(language)) for choice in choices
    ]
    return dice.choice([line for line in filled if line not in said] or filled)
