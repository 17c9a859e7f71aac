"""tools/demo_model/world: pictures, outlines and scripts by seed, and the checks that read an answer."""

import dataclasses
import itertools
import json
import random
import re

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from fake_comfy import load_pack, part

from a3b_engine.prompt import Prompt, place_images
from a3b_engine.script.grammar import comic_json_schema
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script
from a3b_engine.script.presets import PRESETS
from tools.demo_model.world import (
    FORM_FACTS,
    PICTURE_FACTS,
    STORY_FACTS,
    WEIGHTS,
    add,
    sample,
    score,
    traits,
)
from tools.demo_model.world.asks import CHOICES, job_system, script_system
from tools.demo_model.world.draw import draw
from tools.demo_model.world.facts import read_look
from tools.demo_model.world.scene import is_held_out, make_scene
from tools.demo_model.world.script import look

SCRIPTS = ("script_full", "script_short")
BOTH = list(itertools.product(SCRIPTS, traits.LANGUAGES))
ALL = list(itertools.product(WEIGHTS, traits.LANGUAGES))
CJK = re.compile("[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def lessons():
    """Sixty lessons as they come, a third of them held out."""
    return [sample(seed, held_out=seed % 3 == 0) for seed in range(60)]


# ---- seeds


def same(first, second):
    rest = (dataclasses.replace(lesson, picture=None) for lesson in (first, second))
    return np.array_equal(first.picture, second.picture) and next(rest) == next(rest)


@pytest.mark.parametrize("kind, language", ALL)
def test_a_lesson_is_a_function_of_its_seed(kind, language):
    state = random.getstate()
    first, other = sample(11, kind=kind, language=language), sample(12, kind=kind, language=language)
    assert same(first, sample(11, kind=kind, language=language)) and not same(first, other)
    assert random.getstate() == state
    assert (first.kind, first.language) == (kind, language)
    assert first.picture.shape == (384, 384, 3) and first.picture.dtype == np.uint8
    json.dumps(first.facts)


def test_held_out_changes_the_scene_and_unknown_names_are_refused():
    assert make_scene(3) != make_scene(3, held_out=True)
    with pytest.raises(ValueError, match="script_full"):
        sample(0, kind="poem")
    with pytest.raises(ValueError, match="zh"):
        sample(0, language="fr")


def test_every_kind_and_language_comes_up():
    found = {(lesson.kind, lesson.language) for lesson in (sample(seed) for seed in range(150))}
    assert found == set(ALL)


# ---- the held-out rule


def combinations(scene):
    return {(person.colour, person.kind, scene.place, scene.event) for person in scene.people}


def test_held_out_combinations_are_never_trained_on():
    trained = set().union(*(combinations(make_scene(seed)) for seed in range(4000)))
    held = {(s.hero.colour, s.hero.kind, s.place, s.event) for s in (make_scene(seed, held_out=True) for seed in range(2000))}
    assert len(trained) > 3000 and len(held) > 700
    assert not trained & held
    assert not any(is_held_out(*one) for one in trained) and all(is_held_out(*one) for one in held)


def test_an_eighth_of_the_combinations_is_held_out_and_no_value_is():
    whole = list(itertools.product(traits.COLOURS, traits.KINDS, traits.PLACES, traits.EVENTS))
    held = [one for one in whole if is_held_out(*one)]
    assert 0.11 < len(held) / len(whole) < 0.14
    for place in range(4):  # every value is both trained on and held out, in about its share
        for value in {one[place] for one in whole}:
            mine = [one for one in whole if one[place] == value]
            assert 0.07 < sum(is_held_out(*one) for one in mine) / len(mine) < 0.19


# ---- closed vocabularies


def test_scenes_use_the_closed_sets():
    for seed in range(400):
        scene = make_scene(seed, held_out=seed % 2 == 0)
        assert 1 <= len(scene.people) <= 3
        for name in ("place", "time", "weather", "thing", "event", "ending"):
            assert getattr(scene, name) in getattr(traits, f"{name}s".upper())
        for name in ("kind", "colour", "expression", "position"):
            assert {getattr(person, name) for person in scene.people} <= set(getattr(traits, f"{name}s".upper()))
        for name in ("kind", "position", "name"):
            assert len({getattr(person, name) for person in scene.people}) == len(scene.people)
        for person in scene.people:
            assert person.garment in (None, *traits.GARMENTS) and person.prop in (None, *traits.PROPS)
            assert (person.garment is None) == (person.garment_colour is None) and person.colour != person.garment_colour
        assert [person.attitude in traits.ATTITUDES for person in scene.people] == [False] + [True] * (len(scene.people) - 1)


def test_words_of_a_set_differ_in_both_languages():
    groups = "colours kinds garments expressions positions props places times weathers things measures events attitudes endings"
    for group in groups.split():
        keys = getattr(traits, group.upper(), traits.THINGS)
        for language in traits.LANGUAGES:
            words = [traits.word(group, key, language) for key in keys]
            assert all(words) and (group == "measures" or len(set(words)) == len(words))
            assert all(bool(CJK.search(word)) == (language == "zh") for word in words) or (group, language) == ("measures", "en")


# ---- pictures


def changed(scene, **values):
    people = (dataclasses.replace(scene.hero, **values), *scene.people[1:])
    return dataclasses.replace(scene, people=people)


def difference(first, second):
    """Share of pixels that plainly differ, and where (top, bottom, left, right)."""
    apart = np.abs(first.astype(int) - second).max(axis=2) > 40
    rows, columns = np.nonzero(apart)
    return apart.mean(), (rows.min(), rows.max(), columns.min(), columns.max()) if len(rows) else None


TRAITS = {
    "kind": traits.KINDS,
    "colour": traits.COLOURS,
    "garment": (*traits.GARMENTS, None),
    "expression": traits.EXPRESSIONS,
    "prop": (*traits.PROPS, None),
}


@pytest.mark.parametrize("trait", TRAITS)
def test_one_trait_of_a_character_changes_only_its_part_of_the_picture(trait):
    base = next(
        s for s in map(make_scene, range(500)) if len(s.people) == 1 and s.hero.position == "left" and s.weather == "clear"
    )
    base = changed(base, garment="hat", garment_colour="black", colour="green")
    pictures = [draw(changed(base, **{trait: value})) for value in TRAITS[trait]]
    for first, second in itertools.combinations(pictures, 2):
        share, (_, _, _, right) = difference(first, second)
        assert share > 0.002 and right < 192  # at least 300 pixels, on the left


@pytest.mark.parametrize("trait", ["place", "time", "weather"])
@pytest.mark.parametrize("place", ["forest", "room"])
def test_one_trait_of_the_scene_changes_the_picture(trait, place):
    base = dataclasses.replace(make_scene(1), place=place, time="day", weather="clear")
    pictures = [draw(dataclasses.replace(base, **{trait: value})) for value in getattr(traits, f"{trait}s".upper())]
    for first, second in itertools.combinations(pictures, 2):
        assert difference(first, second)[0] > 0.01


def test_position_and_style_change_the_picture():
    base = make_scene(next(seed for seed in range(100) if len(make_scene(seed).people) == 1))
    for first, second in itertools.combinations(traits.POSITIONS, 2):
        assert difference(draw(changed(base, position=first)), draw(changed(base, position=second)))[0] > 0.1
    assert difference(draw(base), draw(dataclasses.replace(base, style=base.style + 1)))[0] > 0.02


def test_what_is_only_told_is_not_drawn():
    base = make_scene(5)
    told = dataclasses.replace(base, thing="key", event="dream", ending="run")
    told = changed(told, name=("Zora", "\u4f50\u62c9"))
    assert np.array_equal(draw(base), draw(told))


# ---- requests


def test_system_texts_are_those_of_the_nodes():
    build = load_pack().NODE_CLASS_MAPPINGS["A3BBuildPrompt"]
    with_choices = part("a3b_engine.script.instructions").with_choices
    node = build()

    def built(preset, choice):
        widgets = {"text": "x", "system": "", "language": choice or "as in the text", "label_images": False, "preset": preset}
        prompt = getattr(node, build.FUNCTION)(**widgets)
        return prompt["result"][0] if isinstance(prompt, dict) else prompt[0]

    for preset, choice, short in itertools.product(PRESETS, CHOICES, (False, True)):
        assert with_choices(built(preset, choice), 3, 4, short).system == script_system(preset, choice, 3, 4, short)
    for job in ("describe", "tags"):
        assert built(job, None).system == job_system(job, "en")
        assert built(job, "Chinese").system == job_system(job, "zh")


def test_requests_hold_one_picture_and_tell_nothing_that_must_be_seen(lessons):
    for lesson in lessons:
        parts = place_images(lesson.user, 1)
        assert parts.count(0) == 1 and len(parts) == 1 + bool(lesson.user)
        assert lesson.user or lesson.kind in ("describe", "tags")  # whose preset asks already
        Prompt(user=lesson.user, system=lesson.system, images=(lesson.picture,))
        if lesson.kind in SCRIPTS:
            told = re.findall(r"[a-z]+", lesson.user.lower())
            words = (*traits.COLOURS, *traits.GARMENTS, *traits.EXPRESSIONS, *traits.PLACES, *traits.TIMES, *traits.WEATHERS)
            assert not set(told) & set(words)
            groups = ("colours", "garments", "expressions", "places", "weathers")
            for group in groups:
                keys = getattr(traits, group.upper())
                assert not any(traits.word(group, key, "zh") in lesson.user for key in keys)


def test_outlines_bind_names_to_kinds():
    bound = 0
    for seed in range(40):
        lesson = sample(seed, kind="script_short", language="en")
        if lesson.facts["binding"] == "kind" and not CJK.search(lesson.user):
            bound += 1
            for person in lesson.scene.people:
                name, kind = person.called("en"), person.kind
                assert re.search(rf"{name} the {kind}|the {kind} {name}|{name}, a {kind}", lesson.user, re.IGNORECASE)
    assert bound > 10


# ---- scripts


@pytest.fixture(scope="module")
def matchers():
    """A fresh matcher for a form and counts; grammars are compiled once."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    made = {}

    def matcher(panels, rounds, brief):
        key = panels, rounds, brief
        if key not in made:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(comic_json_schema(panels, rounds, brief=brief)))
            made[key] = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        return made[key].deep_copy()

    return matcher


@pytest.mark.parametrize("kind, language", BOTH)
def test_every_script_is_whole_and_the_grammar_lets_every_token_pass(kind, language, matchers):
    for seed in range(40):
        lesson = sample(seed, held_out=seed % 4 == 0, kind=kind, language=language)
        result = parse_script(lesson.answer, expected_panels=lesson.panels)
        assert result.status == "ok", result.report
        assert len(result.script.panels) == lesson.panels and len(result.script.dialogue) == lesson.rounds
        assert f"exactly {lesson.panels} panels and exactly {lesson.rounds} rows" in lesson.system or CJK.search(lesson.system)
        state, tokens = matchers(lesson.panels, lesson.rounds, kind == "script_short"), list(lesson.answer.encode("utf-8"))
        accepted = state.validate_tokens(tokens)
        assert accepted == len(tokens), lesson.answer[:accepted]
        assert state.consume_tokens(tokens) and state.is_accepting()


@pytest.mark.parametrize("kind, language", BOTH)
def test_a_script_says_what_is_seen_and_told(kind, language):
    for seed in range(20):
        lesson = sample(seed, kind=kind, language=language)
        script, scene = json.loads(lesson.answer), lesson.scene
        spoken = " ".join(row["line"] for row in script["dialogue"])
        assert bool(CJK.search(spoken)) == (language == "zh")
        for person in scene.people:
            where = script["characters"] if kind == "script_full" else script["panels"]
            assert any(look(person) in (entry.get("look") or entry["action"]) for entry in where)
        if kind == "script_full":
            assert [entry["name"] for entry in script["characters"]] == [person.called(language) for person in scene.people]
            for panel in script["panels"]:
                assert panel["visual_prompt"].isascii() and traits.BACKGROUNDS[scene.place] in panel["visual_prompt"]
                assert not any(person.called("en") in panel["visual_prompt"] for person in scene.people)


def test_a_full_script_gives_image_prompts_without_remarks():
    for seed in range(10):
        lesson = sample(seed, kind="script_full", language="en")
        lists = panel_lists(parse_script(lesson.answer, expected_panels=lesson.panels))
        assert lists.count == lesson.panels and not [line for line in lists.report if line.startswith(("warning", "repair"))]


# ---- facts


@pytest.mark.parametrize("kind, language", ALL)
def test_the_right_answer_has_every_fact_right(kind, language):
    total = {}
    for seed in range(25):
        lesson = sample(seed, held_out=seed % 2 == 0, kind=kind, language=language)
        total = add(total, score(lesson.answer, lesson.facts))
    assert total and all(right == asked for right, asked in total.values()), total
    assert set(total) <= ({"tag"} if kind == "tags" else {*PICTURE_FACTS, *STORY_FACTS, *FORM_FACTS})
    if kind in SCRIPTS:
        assert {*FORM_FACTS, *STORY_FACTS, *PICTURE_FACTS} - set(total) <= {"count"}
    elif kind == "inventory":
        assert set(total) == set(PICTURE_FACTS)


def others(values, right):
    return [value for value in values if value != right]


@pytest.mark.parametrize("kind, language", ALL)
def test_another_picture_s_answer_scores_low(kind, language):
    total = {}
    for seed in range(25):
        lesson, other = (sample(seed + step, kind=kind, language=language) for step in (0, 1000))
        total = add(total, score(other.answer, lesson.facts))
    names = [name for name in ("colour", "clothing", "expression", "place", "time", "weather", "prop", "event", "tag") if name in total]
    assert names and all(total[name][0] / total[name][1] < 0.75 for name in names), total


WRONG = {
    "colour": lambda scene, other: changed(scene, colour=other),
    "expression": lambda scene, other: changed(scene, expression=other),
    "prop": lambda scene, other: changed(scene, prop=other),
    "place": lambda scene, other: dataclasses.replace(scene, place=other),
    "time": lambda scene, other: dataclasses.replace(scene, time=other),
    "weather": lambda scene, other: dataclasses.replace(scene, weather=other),
    "thing": lambda scene, other: dataclasses.replace(scene, thing=other),
    "event": lambda scene, other: dataclasses.replace(scene, event=other),
}


@pytest.mark.parametrize("kind, language", BOTH)
@pytest.mark.parametrize("fact", WRONG)
def test_one_wrong_trait_costs_its_fact_and_no_other(kind, language, fact, monkeypatch):
    for seed in range(4):
        lesson = sample(seed, kind=kind, language=language)
        scene, values = lesson.scene, getattr(traits, f"{fact}s".upper())
        right = getattr(scene, fact, None) or getattr(scene.hero, fact)
        others_here = {person.prop for person in scene.people} | {scene.hero.garment_colour, right}
        wrong = WRONG[fact](scene, next(value for value in values if value not in others_here))
        monkeypatch.setattr("tools.demo_model.world.lessons.make_scene", lambda *_, wrong=wrong: wrong)
        given = sample(seed, kind=kind, language=language).answer
        monkeypatch.undo()
        missed = {name for name, (good, asked) in score(given, lesson.facts).items() if good < asked}
        related = {"thing": {"thing", "attitude"}}.get(fact, {fact})
        assert fact in missed and missed <= related, (missed, given)


def test_broken_answers_have_no_valid_script():
    lesson = sample(2, kind="script_short")
    for text in ("", "I cannot do that.", lesson.answer[: len(lesson.answer) // 2], "[]"):
        total = score(text, lesson.facts)
        assert total["valid"] == (0, 1)
        assert all(total[name][0] == 0 for name in ("names", "event") if text in ("", "[]"))


def test_swapped_positions_are_noticed():
    lesson = next(x for x in (sample(seed, kind="inventory", language="en") for seed in range(50)) if len(x.scene.people) == 2)
    places = [person.position for person in lesson.scene.by_position()]
    swapped = re.sub("|".join(places), lambda found: others(places, found.group())[0], lesson.answer)
    right, asked = score(swapped, lesson.facts)["position"]
    assert (right, asked) == (0, 2)


def test_looks_are_read_back():
    for seed in range(60):
        for person in make_scene(seed).people:
            seen = read_look(look(person))
            assert seen == {key: getattr(person, key) for key in ("kind", "colour", "garment", "garment_colour")}
    assert read_look("a red cat with a scarf")["garment_colour"] is None
    assert read_look("a red and blue cat")["colour"] is None
