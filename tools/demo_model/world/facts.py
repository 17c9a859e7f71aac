"""Reads an answer and says which facts of the picture and of the story are right in it.

Scripts are read with the pack's own parser, so a script that JSON cannot read counts as wrong in every fact.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import ComicScript, Panel

from . import traits
from .script import attitude_action

Score = dict[str, tuple[int, int]]

PICTURE_FACTS = ("kind", "colour", "clothing", "expression", "position", "prop", "place", "time", "weather", "count")
# What the outline gives away is told, not seen, and counted apart.
STORY_FACTS = ("kind_told", "position_told", "count_told", "names", "event", "thing", "attitude", "ending", "language")
FORM_FACTS = ("valid",)

_ABOUT = {
    "kind_at": "kind",
    "has": "kind",
    "garment": "clothing",
    "who_feels": "expression",
    "who_wears": "clothing",
    "who_holds": "prop",
}
_CJK = re.compile("[\u4e00-\u9fff]")


def score(answer: str, facts: dict[str, Any]) -> Score:
    """(right, asked) of each fact that `facts` (of a lesson) can be measured by; for a list of tags only "tag": those that
    are right, out of the wanted ones and any other that was given."""
    tally = _Tally()
    if facts["form"] == "question":
        _questions(answer, facts, tally)
    elif facts["form"] == "tags":
        given, wanted = [tag.strip() for tag in answer.split(",")], facts["tags"]
        for tag in wanted:
            tally.add("tag", tag in given)
        for tag in given:
            if tag not in wanted:
                tally.add("tag", False)
    elif facts["form"] in ("inventory", "describe"):
        _picture_text(answer, facts, tally)
    else:
        _script(answer, facts, tally)
    return tally.counts


def add(total: Score, more: Score) -> Score:
    """Both scores together."""
    none = (0, 0)
    names = {**total, **more}
    return {
        name: (total.get(name, none)[0] + more.get(name, none)[0], total.get(name, none)[1] + more.get(name, none)[1])
        for name in names
    }


class _Tally:
    def __init__(self) -> None:
        self.counts: Score = {}

    def add(self, name: str, right: bool) -> None:
        good, asked = self.counts.get(name, (0, 0))
        self.counts[name] = (good + bool(right), asked + 1)


@lru_cache(maxsize=None)
def _pattern(group: str, language: str) -> tuple[re.Pattern, dict[str, str]]:
    """Finds the words of a trait, the longest first; and which key each word stands for."""
    keys = {traits.word(group, key, language): key for key in _GROUPS[group]}
    words = sorted(map(re.escape, keys), key=len, reverse=True)
    text = "|".join(words)
    return re.compile(rf"\b(?:{text})\b" if language == "en" else text, re.IGNORECASE), keys


_GROUPS = {
    "colours": traits.COLOURS, "kinds": traits.KINDS, "garments": traits.GARMENTS, "expressions": traits.EXPRESSIONS,
    "positions": traits.POSITIONS, "props": traits.PROPS, "places": traits.PLACES, "times": traits.TIMES,
    "weathers": traits.WEATHERS,
}  # fmt: skip


def _all(group: str, text: str, language: str = "en") -> list[str]:
    pattern, keys = _pattern(group, language)
    return [keys[found.group().lower()] for found in pattern.finditer(text)]


def _only(group: str, text: str, language: str = "en") -> str | None:
    """The one value of a trait in a text; None if there is none, or more than one."""
    found = set(_all(group, text, language))
    return found.pop() if len(found) == 1 else None


def read_look(text: str, language: str = "en") -> dict[str, str | None]:
    """kind, colour, garment and garment_colour in a text that speaks of one character."""
    garment = _only("garments", text, language)
    clothes = None
    pattern, keys = _pattern("colours", language)
    spots = list(pattern.finditer(text))
    if garment:
        at = text.lower().find(traits.word("garments", garment, language))
        before = [spot for spot in spots if 0 <= at - spot.end() <= 1]  # a space or one Chinese character between
        if before:
            clothes = before[-1]
    bodies = {keys[spot.group().lower()] for spot in spots if spot is not clothes}
    return {
        "kind": _only("kinds", text, language),
        "colour": bodies.pop() if len(bodies) == 1 else None,
        "garment": garment,
        "garment_colour": keys[clothes.group().lower()] if clothes else None,
    }


def _person(tally: _Tally, wanted: dict[str, Any], text: str, language: str, kind_name: str = "kind") -> None:
    seen = read_look(text, language)
    tally.add(kind_name, seen["kind"] == wanted["kind"])
    tally.add("colour", seen["colour"] == wanted["colour"])
    clothing = ("garment", "garment_colour")
    tally.add("clothing", all(seen[key] == wanted[key] for key in clothing))


def _questions(answer: str, facts: dict[str, Any], tally: _Tally) -> None:
    lines = [line.strip().rstrip(".\u3002").lower() for line in answer.strip().splitlines()]
    for number, question in enumerate(facts["questions"]):
        given = lines[number] if number < len(lines) else ""
        tally.add(_ABOUT.get(question["about"], question["about"]), given == question["answer"])


def _picture_text(answer: str, facts: dict[str, Any], tally: _Tally) -> None:
    language = facts["language"]
    clauses = [clause for clause in re.split(r"\n|\u3002|\.(?:\s|$)", answer) if clause.strip()]
    people = [clause for clause in clauses if _all("positions", clause, language) and _all("kinds", clause, language)]
    rest = "\n".join(clause for clause in clauses if clause not in people)
    for group in ("place", "time", "weather"):
        tally.add(group, _only(f"{group}s", rest, language) == facts[group])
    tally.add("count", len(people) == len(facts["people"]))
    for wanted in facts["people"]:
        by_kind = [clause for clause in people if wanted["kind"] in _all("kinds", clause, language)]
        by_place = [clause for clause in people if wanted["position"] in _all("positions", clause, language)]
        clause = (by_place or by_kind or [""])[0]
        _person(tally, wanted, clause, language)
        tally.add("position", clause in by_kind and clause in by_place)
        tally.add("expression", _only("expressions", clause, language) == wanted["expression"])
        tally.add("prop", _only("props", clause, language) == wanted["prop"])


def _script(answer: str, facts: dict[str, Any], tally: _Tally) -> None:
    result = parse_script(answer, expected_panels=facts["panels"])
    script = result.script or ComicScript()
    whole = result.status == "ok" and len(script.panels) == facts["panels"] and len(script.dialogue) == facts["rounds"]
    tally.add("valid", whole)
    brief, people = facts["form"] == "script_short", facts["people"]
    panels = script.panels
    first = panels[0] if panels else Panel()
    _setting(panels, facts, tally)
    tally.add("count_told", _count(script, brief) == len(people))
    for number, wanted in enumerate(people):
        panel = panels[number] if number < len(panels) else Panel()
        character = script.characters[number] if number < len(script.characters) else None
        text = panel.action if brief else character.look if character else ""
        _person(tally, wanted, text, "en", "kind_told" if facts["binding"] == "kind" else "kind")
        position = "position_told" if facts["binding"] == "position" else "position"
        tally.add(position, _position(panel.action if brief else first.visual_prompt, wanted["kind"]) == wanted["position"])
        tally.add("expression", _expression(script, panel, number, facts["rounds"], wanted["expression"]))
        tally.add("prop", [key for key in traits.PROPS if key in panel.props] == [wanted["prop"]] * bool(wanted["prop"]))
    _story(script, first, facts, tally, brief)


def _setting(panels: list[Panel], facts: dict[str, Any], tally: _Tally) -> None:
    """Place and light must be right in every panel."""
    wanted = {
        "place": ("background", traits.BACKGROUNDS[facts["place"]]),
        "time": ("light", traits.LIGHTS[facts["time"]]),
        "weather": ("light", traits.AIRS[facts["weather"]]),
    }
    for name, (field, words) in wanted.items():
        tally.add(name, bool(panels) and all(words in getattr(panel, field) for panel in panels))


def _count(script: ComicScript, brief: bool) -> int:
    """How many characters the script shows; a short one can only be read by the kinds in its panels."""
    if not brief:
        return len(script.characters)
    return len({kind for panel in script.panels for kind in _all("kinds", panel.action)})


def _position(text: str, kind: str) -> str | None:
    """The first position after the kind and before another kind."""
    pattern, _ = _pattern("kinds", "en")
    for found in pattern.finditer(text):
        if found.group().lower() == kind:
            after = pattern.search(text, found.end())
            places = _all("positions", text[found.end() : after.start() if after else len(text)])
            return places[0] if places else None
    return None


def _expression(script: ComicScript, panel: Panel, number: int, rounds: int, wanted: str) -> bool:
    """The face in the character's own panel, and the tone of its first row."""
    tone = [script.dialogue[number].emotion_tag if number < len(script.dialogue) else ""] if number < rounds else []
    return _only("expressions", panel.micro_expression) == wanted and all(tag == wanted for tag in tone)


def _story(script: ComicScript, first: Panel, facts: dict[str, Any], tally: _Tally, brief: bool) -> None:
    people, rows = facts["people"], script.dialogue
    names = [person["name"] for person in people]
    if brief:
        right = [row.speaker for row in rows] == [names[number % len(names)] for number in range(facts["rounds"])]
    else:
        right = [character.name for character in script.characters] == names
        ids = [character.id for character in script.characters]
        right = right and [row.speaker for row in rows] == [ids[number % len(ids)] for number in range(facts["rounds"])]
    tally.add("names", right)
    tally.add("event", f" {traits.word('events', facts['event'], 'en')} " in f" {first.action} ")
    tally.add("thing", f" {facts['thing']} " in f" {first.action} " and facts["thing"] in first.props)
    if facts["ending"]:
        last = script.panels[-1].action if script.panels else ""
        tally.add("ending", last.endswith(traits.word("endings", facts["ending"], "en")))
    for number, attitude in enumerate(facts["attitudes"]):
        if attitude and number < facts["panels"] - 1:
            panel = script.panels[number] if number < len(script.panels) else Panel()
            tally.add("attitude", panel.action.endswith(attitude_action(attitude, facts["thing"])))
    spoken = "".join(row.line for row in rows)
    tally.add("language", bool(spoken) and bool(_CJK.search(spoken)) == (facts["language"] == "zh"))
