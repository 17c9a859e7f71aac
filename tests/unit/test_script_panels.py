"""Panel lists: prompts that stand alone, sizes, seeds, and the user's choice on error."""

import json

import pytest

from a3b_engine.errors import PromptError, ScriptError
from a3b_engine.script.panels import NEUTRAL_PROMPT, panel_lists
from a3b_engine.script.parse import ParseResult, parse_script
from a3b_engine.script.presets import PRESETS, compose_user_text, system_prompt
from a3b_engine.script.schema import SHOTS, ComicScript
from a3b_engine.script.sizes import SIZE_FAMILIES, panel_size

RIN = {"id": "rin", "name": "Rin", "look": "girl of ten, red hair, yellow raincoat"}
TOM = {"id": "tom", "name": "Tom", "look": "old man with a grey beard"}


def lists(*panels, **options):
    script = ComicScript.model_validate(
        {"characters": [RIN, TOM], "style": "ink", "panels": [{"index": n, **panel} for n, panel in enumerate(panels, 1)]}
    )
    return panel_lists(script, **options)


def test_composed_prompt_in_order():
    panel = {
        "shot": "close", "characters": ["rin"], "action": "Rin opens the door. Rin's hand shakes.", "micro_expression": "wide eyes",
        "background": "narrow street", "light": "blue dusk", "props": ["brass key", "lamp"],
    }
    out = lists(panel, style_prefix="manga page", style_suffix="best quality")
    assert out.prompt == [
        "manga page, close-up, girl of ten, red hair, yellow raincoat opens the door. girl of ten's hand shakes, wide eyes,"
        " narrow street, blue dusk, brass key, lamp, ink, best quality"
    ]


def test_looks_of_those_the_action_does_not_name():
    prompt = lists({"shot": "wide", "characters": ["Rin", "tom", "a crowd"], "action": "Tom waves"}).prompt[0]
    assert prompt == "wide shot, girl of ten, red hair, yellow raincoat, a crowd, old man with a grey beard waves, ink"


def test_own_visual_prompt_is_kept_between_prefix_and_suffix():
    out = lists({"visual_prompt": "a lamp, at night", "action": "x"}, style_prefix="A", style_suffix="B")
    assert out.prompt == ["A, a lamp, at night, B"]
    assert lists({"visual_prompt": " a lamp. "}).prompt == ["a lamp."]


def test_names_are_words_in_their_own_spelling():
    script = ComicScript.model_validate(
        {"characters": [{"id": "rose", "name": "Rose", "look": "tall woman"}], "panels": [{"action": "Rose holds a primrose, Rosemary"}]}
    )
    assert panel_lists(script).prompt == ["medium shot, tall woman holds a primrose, Rosemary"]


@pytest.mark.parametrize("family", SIZE_FAMILIES)
def test_sizes_are_multiples_of_64_near_the_area(family):
    for shot in SHOTS:
        width, height = panel_size(shot, family)
        assert width % 64 == 0 and height % 64 == 0
        assert 0.8 < width * height / SIZE_FAMILIES[family] < 1.2
    assert panel_size("wide", family)[0] > panel_size("wide", family)[1]
    assert panel_size("close", family)[0] < panel_size("close", family)[1]


def test_sdxl_sizes_are_its_buckets():
    assert {shot: panel_size(shot, "sdxl") for shot in ("medium", "close", "full", "wide", "establishing")} == {
        "medium": (1024, 1024), "close": (896, 1152), "full": (832, 1216), "wide": (1216, 832), "establishing": (1344, 768),
    }


def test_seeds_wrap_and_may_follow_the_scene():
    panels = [{"scene_tag": tag, "action": "rain"} for tag in ("dock", "", "Dock")]
    assert lists(*panels, base_seed=2**64 - 2).seed == [2**64 - 1, 0, 1]
    assert lists(*panels, base_seed=10, seed_per_scene=True).seed == [11, 12, 11]


@pytest.mark.parametrize("option, value", [("size_family", "sd99"), ("on_error", "ignore")])
def test_unknown_choices_are_named(option, value):
    with pytest.raises(ScriptError, match=f"{option}: '{value}'"):
        lists({"shot": "wide", "action": "rain"}, **{option: value})


def test_placeholders_fill_up_to_the_expected_number():
    result = parse_script('{"panels":[{"shot":"wide","action":"a"}]}', expected_panels=3)
    out = panel_lists(result, on_error="placeholder", style_prefix="ink")
    assert out.count == 3 and out.index == [1, 2, 3]
    assert out.prompt[1:] == [f"ink, {NEUTRAL_PROMPT}"] * 2
    failed = panel_lists(parse_script("I cannot help with that.", expected_panels=2), on_error="placeholder")
    assert failed.prompt == [NEUTRAL_PROMPT] * 2 and "cannot" not in failed.joined


def test_placeholders_fill_up_to_what_a_script_may_hold():
    result = parse_script('{"panels":[{"shot":"wide","action":"a"}]}', expected_panels=100)
    out = panel_lists(result, on_error="placeholder")
    assert out.count == 100 and "warning: panels: 99 neutral placeholders stand for missing panels" in out.report
    far = panel_lists(parse_script("nothing", expected_panels=600), on_error="placeholder")
    assert far.count == 512 and "warning: panels: 600 panels are expected; a script has 512 at most" in far.report


def test_placeholders_find_numbers_behind_the_last_one_there_is():
    result = parse_script('{"panels":[{"index":1000000,"shot":"wide","action":"a"}]}', expected_panels=3)
    result.script.panels[0].index = 1_000_000
    out = panel_lists(result, on_error="placeholder")
    assert out.index == [1, 2, 1_000_000] and out.prompt[2] == "wide shot, a"


def test_words_for_nothing_are_kept_in_the_script_and_not_drawn():
    panel = {"index": 1, "shot": "wide", "action": "runs", "light": "N/A", "background": "none", "caption": "None"}
    result = parse_script(json.dumps({"panels": [panel]}))
    lists = panel_lists(result)
    assert result.status == "ok" and result.script.panels[0].light == "N/A"  # valid JSON is never edited
    assert lists.prompt == ["wide shot, runs"] and lists.caption == [""] and "None" not in lists.joined
    with pytest.raises(ScriptError, match="nothing to draw"):
        panel_lists(parse_script(json.dumps({"panels": [{**panel, "action": ""}]})))


# Panels with nothing to draw

BLANKS = [
    {"shot": "wide"},
    {"caption": "Night.", "sfx": "CRACK", "scene_tag": "dock", "negative": "text"},
    {"visual_prompt": "...", "action": " - ", "props": ["?"]},
    {"characters": ["nolook"]},
]


def with_blank(blank):
    script = {
        "characters": [{"id": "nolook", "name": "No Look"}],
        "dialogue": [{"panel": 2, "speaker": "Rin", "line": "hi"}],
        "panels": [{"index": 1, "shot": "wide", "action": "a"}, {"index": 2, "caption": "Then.", **blank}, {"index": 3, "shot": "close", "action": "c"}],
    }
    return ParseResult("ok", ComicScript.model_validate(script))


@pytest.mark.parametrize("blank", BLANKS)
def test_a_panel_with_nothing_to_draw_is_never_drawn_as_its_shot(blank):
    result = with_blank(blank)
    with pytest.raises(ScriptError, match="^Panel 2 has nothing to draw: no visual_prompt, action, "):
        panel_lists(result)
    kept = panel_lists(result, on_error="keep", style_suffix="ink")
    assert kept.index == [1, 3] and kept.prompt == ["wide shot, a, ink", "close-up, c, ink"] and kept.spoken.line == [""]
    assert "warning: panels: panel 2: nothing to draw; left out" in kept.report
    assert "warning: dialogue: 1 rows of panels that are not there are left out" in kept.report
    filled = panel_lists(result, on_error="placeholder", style_suffix="ink")
    assert filled.index == [1, 2, 3] and filled.prompt[1] == f"{NEUTRAL_PROMPT}, ink"
    assert filled.caption[1] == blank.get("caption", "Then.") and filled.dialogue[1] == "Rin: hi"
    assert "warning: panels: panel 2: nothing to draw; a neutral picture stands there, caption and dialogue are kept" in filled.report
    assert result.script.panels[1].visual_prompt == blank.get("visual_prompt", "")


@pytest.mark.parametrize("field", [{"characters": ["a crowd"]}, {"light": "dusk"}, {"props": ["cup"]}, {"background": "dock"}, {"micro_expression": "smile"}])
def test_one_field_is_enough_to_draw(field):
    assert lists(field).count == 1


def test_a_script_of_such_panels_only_is_an_error_that_names_them():
    script = ComicScript.model_validate({"panels": [{"index": 4}, {"index": 5}]})
    with pytest.raises(ScriptError, match="^Panels 4, 5 have nothing to draw"):
        panel_lists(script)
    with pytest.raises(ScriptError, match="^No panel is whole. Panels 4, 5 have nothing to draw"):
        panel_lists(script, on_error="keep")
    assert panel_lists(script, on_error="placeholder").prompt == [NEUTRAL_PROMPT] * 2


def test_dialogue_without_panels():
    result = parse_script('{"dialogue":[{"speaker":"Rin","line":"hi"}]}')
    for choice in ("stop", "keep"):
        with pytest.raises(ScriptError, match="no panels, only 1 dialogue rows"):
            panel_lists(result, on_error=choice)
    assert panel_lists(result, on_error="placeholder").dialogue == ["Rin: hi"]
    later = parse_script('{"dialogue":[{"panel":3,"speaker":"Rin","line":"hi"},{"panel":900,"speaker":"Rin","line":"far"}]}')
    out = panel_lists(later, on_error="placeholder")
    assert out.count == 64 and out.dialogue[2] == "Rin: hi" and out.spoken.line == ["hi"]
    assert "warning: dialogue: 1 rows of panels that are not there are left out" in out.report
    assert any("dialogue goes up to panel 900" in line and "no more than 64" in line for line in out.report)


def test_dialogue_goes_with_the_panel_that_was_cut_off():
    """Read back, it would be put into the mouth of a neighbour."""
    text = '{"dialogue":[{"panel":1,"speaker":"Rin","line":"hi"},{"panel":2,"speaker":"Tom","line":"no"}],"panels":[{"index":1,"shot":"wide","action":"a"},{"index":2,"shot":"close","action":"b and'
    out = panel_lists(parse_script(text), on_error="keep")
    assert out.index == [1] and out.spoken.line == ["hi"] and "no" not in out.script_json
    assert "warning: dialogue: 1 rows of panels that are not there are left out" in out.report
    assert parse_script(out.script_json).script.dialogue[0].line == "hi"


def test_spoken_rows_are_flat_and_in_reading_order():
    script = ComicScript.model_validate(
        {
            "panels": [{"index": 2, "light": "dusk"}, {"index": 5, "light": "dusk"}],
            "dialogue": [
                {"panel": 5, "speaker": "tom", "line": "c"},
                {"panel": 2, "speaker": "rin", "line": "a", "emotion_tag": "glad"},
                {"panel": 2, "speaker": "", "line": "b"},
                {"panel": 5, "speaker": "tom", "line": "d"},
            ],
        }
    )
    out = panel_lists(script)
    assert (out.spoken.speaker, out.spoken.line) == (["rin", "", "tom", "tom"], ["a", "b", "c", "d"])
    assert (out.spoken.emotion, out.spoken.panel) == (["glad", "", "", ""], [2, 2, 5, 5])
    assert out.speakers == ["rin", "tom"] and out.dialogue == ["rin: a\nb", "tom: c\ntom: d"]


def test_silence_is_one_empty_row_of_the_first_panel():
    script = ComicScript.model_validate({"panels": [{"index": 4, "light": "dusk"}, {"index": 5, "light": "dusk"}]})
    spoken = panel_lists(script).spoken
    assert (spoken.speaker, spoken.line, spoken.emotion, spoken.panel) == ([""], [""], [""], [4])


def test_looks_of_a_panel_are_a_line_each_in_its_order():
    panel = {"characters": ["Tom", "a crowd", "rin", "Tom", "nolook"]}
    nameless = {"id": "nolook", "name": "No Look", "look": ""}
    two_lines = {**RIN, "look": "girl of ten,\nred hair"}
    script = ComicScript.model_validate({"characters": [two_lines, TOM, nameless], "panels": [panel, {"props": ["cup"]}]})
    out = panel_lists(script)
    assert out.looks == ["old man with a grey beard\na crowd\ngirl of ten, red hair\nnolook", ""]
    assert out.people == [4, 0]
    assert out.cast == "Rin: girl of ten, red hair\nTom: old man with a grey beard\nNo Look"


def test_many_remarks_are_cut_short():
    out = lists(*[{"visual_prompt": "word " * 90}] * 60)
    assert sum("CLIP tokens; SD1.5" in line for line in out.report) == 40
    assert any(line == "info: panels: 20 more remarks of this kind are left out" for line in out.report)


def test_long_prompts_are_reported():
    out = lists({"visual_prompt": "word " * 90})
    assert any("about 90 CLIP tokens" in line for line in out.report)
    assert "info: prompts: CLIP tokens, about: 90" in out.report
    short = lists({"visual_prompt": "a lamp"}, {"visual_prompt": "a lamp, at night"})
    assert short.report == ["info: prompts: CLIP tokens, about: 2, 5"]


@pytest.mark.parametrize("text_language", ["en", "zh"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_filled(preset, text_language):
    text = system_prompt(preset, panels=4, rounds=5, dialogue_language="Korean", prompt_language="Finnish", text_language=text_language)
    assert "{{" not in text and "Korean" in text and "Finnish" in text and " 4 " in text and " 5 " in text
    assert PRESETS[preset].reading_direction in text and all(shot in text for shot in SHOTS)
    assert ("\u5206\u683c" in text) == (text_language == "zh")


def test_c07_story_text_is_left_alone():
    story = 'Reply like {"panels":[{"shot":"close"}]} {story} {{panels}} [[IMG:2]]'
    text = compose_user_text(story, panels=3, rounds=2)
    assert story in text and "3 panels and 2 rows" in text
    assert story in system_prompt("manga", dialogue_language=story)


def test_unknown_preset_is_named():
    with pytest.raises(PromptError, match="preset: 'opera'"):
        system_prompt("opera")
    with pytest.raises(PromptError, match="text_language: 'fr'"):
        compose_user_text("x", text_language="fr")


def test_script_json_reads_back_as_ok():
    out = lists({"shot": "close", "characters": ["rin"], "action": "waits", "caption": "\u96e8"})
    again = parse_script(out.script_json)
    assert again.status == "ok" and {"version": 1, **again.script.model_dump()} == json.loads(out.script_json)
