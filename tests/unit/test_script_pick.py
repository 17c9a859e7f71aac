"""One panel by its number gives what the lists hold there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_strategies import QUICK, scripts

from a3b_engine.errors import ScriptError
from a3b_engine.script.panels import NEUTRAL_PROMPT, panel_lists
from a3b_engine.script.parse import parse_script
from a3b_engine.script.pick import pick_panel
from a3b_engine.script.sizes import SIZE_FAMILIES

SAME = ("prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index", "speakers", "looks", "people")
GAPS = json.dumps({"panels": [{"index": n, "shot": "wide", "action": f"act {n}", "scene_tag": "pier"} for n in (2, 5, 9)]})
CUT = '{"panels":[{"index":1,"shot":"wide","action":"runs"},{"index":2,"shot":"close","action":"her ey'


@QUICK
@given(scripts(), st.sampled_from(sorted(SIZE_FAMILIES)), st.integers(0, 2**64 - 1), st.booleans())
def test_every_panel_is_that_of_the_lists(script, family, seed, per_scene):
    result = parse_script(json.dumps(script))
    options = {"style_prefix": "A", "style_suffix": "B", "base_seed": seed, "size_family": family, "seed_per_scene": per_scene}
    lists = panel_lists(result, **options)
    for place, number in enumerate(lists.index):
        picked = pick_panel(result, number, **options)
        assert {name: getattr(picked, name) for name in SAME} == {name: getattr(lists, name)[place] for name in SAME}
        assert picked.count == lists.count and picked.report == lists.report


def test_numbers_are_those_of_the_script():
    picked = pick_panel(parse_script(GAPS), 5, seed_per_scene=True, base_seed=100)
    assert picked.prompt == "wide shot, act 5" and picked.index == 5 and picked.count == 3
    assert picked.seed == 102  # that of panel 2, the first of the scene


def test_an_absent_number_says_what_there_is():
    with pytest.raises(ScriptError, match="^number: there is no panel 3; the script has 3 panels: 2, 5, 9. Choose"):
        pick_panel(parse_script(GAPS), 3)
    with pytest.raises(ScriptError, match="the script has 1 panel, number 1"):
        pick_panel(parse_script('{"panels":[{"index":1,"shot":"wide","action":"a"}]}'), 2)


def test_last_takes_the_last_whole_panel_and_says_so():
    picked = pick_panel(parse_script(GAPS), 3, when_absent="last")
    assert picked.index == 9 and "panel 9, the last, is taken" in picked.report[-1]
    cut = pick_panel(parse_script(CUT), 2, when_absent="last")
    assert cut.index == 1 and cut.prompt == "wide shot, runs"


def test_a_placeholder_is_neutral_and_keeps_the_rest():
    picked = pick_panel(parse_script(GAPS), 3, when_absent="placeholder", style_prefix="ink", base_seed=7)
    assert (picked.prompt, picked.negative, picked.dialogue, picked.seed) == (f"ink, {NEUTRAL_PROMPT}", "", "", 10)
    assert (picked.index, picked.count) == (3, 3) and any("there is no panel 3" in line for line in picked.report)
    there = pick_panel(parse_script(GAPS), 5, when_absent="placeholder")
    assert there.prompt == "wide shot, act 5"


BLANK = json.dumps({"panels": [{"index": 1, "shot": "wide", "action": "a"}, {"index": 2, "shot": "close", "caption": "Then."}, {"index": 3, "shot": "wide", "action": "c"}]})


def test_a_panel_with_nothing_to_draw_counts_as_absent():
    result = parse_script(BLANK)
    assert pick_panel(result, 3).prompt == "wide shot, c"  # the others are no concern of this one
    with pytest.raises(ScriptError, match="^number: panel 2 has nothing to draw; the script has 2 panels: 1, 3."):
        pick_panel(result, 2)
    last = pick_panel(result, 2, when_absent="last")
    assert last.index == 3 and "panel 2 has nothing to draw; panel 3, the last, is taken" in last.report[-1]
    neutral = pick_panel(result, 2, when_absent="placeholder")
    assert (neutral.prompt, neutral.caption) == (NEUTRAL_PROMPT, "Then.") and any("nothing to draw" in line for line in neutral.report)


def test_a_refusal_is_an_error_or_neutral():
    refusal = parse_script("I'm sorry, I can't continue this scene.")
    for choice in ("stop", "last"):
        with pytest.raises(ScriptError):
            pick_panel(refusal, 1, when_absent=choice)
    picked = pick_panel(refusal, 4, when_absent="placeholder")
    assert picked.prompt == NEUTRAL_PROMPT and (picked.index, picked.count) == (4, 0)


def test_a_cut_script_stops():
    with pytest.raises(ScriptError):
        pick_panel(parse_script(CUT), 1)


def test_unknown_choice_is_named():
    with pytest.raises(ScriptError, match="when_absent: 'first'"):
        pick_panel(parse_script(GAPS), 2, when_absent="first")
