"""Rows of the bug-report list that touch the parser, each as its right behaviour says, named by its id."""

import json
from pathlib import Path

import pytest

from a3b_engine.errors import ScriptError
from a3b_engine.script.panels import NEUTRAL_PROMPT, panel_lists
from a3b_engine.script.parse import parse_script

FENCED = '```json\n{"panels":[{"shot":"wide"}]}\n```'
LEVELS_OF_CHANGE = ("repair:", "warning:")


def changes(result):
    return [line for line in result.report if line.startswith(LEVELS_OF_CHANGE)]


def test_j01_fence_around_valid_json():
    result = parse_script('```json\n{"panels":[{"shot":"close"}]}\n```')
    assert result.status == "ok" and not changes(result)
    assert [panel.shot for panel in result.script.panels] == ["close"]


def test_j03_backticks_inside_a_value():
    result = parse_script('{"dialogue":[{"speaker":"Rin","line":"type ```ls``` now","emotion_tag":"bored"}]}')
    assert result.status == "ok"
    assert result.script.dialogue[0].line == "type ```ls``` now"


def test_j05_fence_inside_a_value_of_a_damaged_object():
    text = '{"title":"A","note":"```text\\nx\\n```","panels":[{"shot":"wide","action":"he said "go" and ran"}]}'
    result = parse_script(text)
    assert result.status == "repaired" and result.script.title == "A"
    assert [panel.action for panel in result.script.panels] == ['he said "go" and ran']


def test_j06_same_block_twice():
    result = parse_script(f"{FENCED}\n\n{FENCED}")
    assert len(result.script.panels) == 1


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_j07_draft_in_the_thinking(opening):
    result = parse_script(opening + 'maybe {"panels":[{"shot":"wide"}]} first</think>\n{"panels":[{"shot":"close"}]}')
    assert [panel.shot for panel in result.script.panels] == ["close"]


@pytest.mark.parametrize("comma", ["", ","])
def test_j10_think_tag_inside_a_line(comma):
    text = '{"dialogue":[{"speaker":"AI-7","line":"my <think>tag</think> leaked","emotion_tag":"dry"%s}]}' % comma
    assert parse_script(text).script.dialogue[0].line == "my <think>tag</think> leaked"


def test_j11_trailing_commas():
    result = parse_script('{"panels":[{"shot":"wide","props":["cup",],},],}')
    assert len(result.script.panels) == 1 and result.script.panels[0].props == ["cup"]
    assert result.status == "repaired"


CUT = '{"panels":[{"shot":"wide","action":"runs"},{"shot":"close","action":"her ey'


def test_j13_cut_inside_a_string():
    result = parse_script(CUT)
    assert result.status == "truncated" and "max_new_tokens" in result.cause
    first, second = result.script.panels
    assert (first.shot, first.action) == ("wide", "runs")
    assert (second.shot, second.action) == ("close", "")  # the rule: a value that is cut is not kept
    assert result.partial == (2,)
    assert panel_lists(result, on_error="keep").index == [1]
    assert panel_lists(result, on_error="placeholder").index == [1, 2]
    with pytest.raises(ScriptError, match="token limit"):
        panel_lists(result, on_error="stop")


def test_j16_curly_quotes_as_delimiters():
    result = parse_script("{\u201cpanels\u201d:[{\u201cshot\u201d:\u201cclose\u201d,\u201caction\u201d:\u201c\u62ac\u5934\u201d}]}")
    assert [panel.action for panel in result.script.panels] == ["\u62ac\u5934"]


def test_j16_full_width_punctuation():
    text = "\uff5b\u201cpanels\u201d\uff1a\uff3b\uff5b\u201cshot\u201d\uff1a\u201cclose\u201d\uff0c\u201caction\u201d\uff1a\u201c\u8bf4\u201c\u597d\u201d\uff0c\u8d70\u201d\uff5d\uff3d\uff5d"
    assert parse_script(text).script.panels[0].action == "\u8bf4\u201c\u597d\u201d\uff0c\u8d70"


def test_j18_unescaped_quoted_word_before_a_comma():
    result = parse_script('{"line":"She called him "captain", then left.","emotion_tag":"cold"}')
    row = result.script.dialogue[0]
    assert (row.line, row.emotion_tag) == ('She called him "captain", then left.', "cold")


def test_j21_valid_escapes_are_not_repaired():
    text = '{"line":"say \\"hi\\", then go"}'
    result = parse_script(text)
    assert result.script.dialogue[0].line == json.loads(text)["line"]
    assert result.status == "ok" and not changes(result)


def test_j23_python_literals():
    panel = parse_script('{"panels":[{"shot":"close","is_flashback":True,"narration":None}]}').script.panels[0]
    assert panel.model_dump()["is_flashback"] is True
    assert panel.caption == ""


def test_j24_none_and_the_word_none():
    script = parse_script('{"narration": None, "speaker": "None"}').script
    assert script.panels[0].caption == "" and script.dialogue[0].speaker == "None"


def test_j25_raw_newline_in_a_value():
    assert parse_script('{"line":"Wait.\nListen to me."}').script.dialogue[0].line == "Wait.\nListen to me."


def test_j27_remark_after_the_object():
    result = parse_script('{"panels":[{"shot":"wide"}]}\nNote: kept under {100} words.')
    assert result.status == "ok" and len(result.script.panels) == 1


def test_j30_list_inside_a_string():
    result = parse_script('{"panels":"[{\\"shot\\":\\"wide\\"}]"}')
    assert [panel.shot for panel in result.script.panels] == ["wide"]
    assert any("panels" in line and "string" in line for line in result.report)


def test_j32_missing_shot_becomes_the_default_with_its_place():
    text = '{"panels":[{"shot":"wide","action":"a"},{"action":"b"},{"shot":"close","action":"c"}]}'
    result = parse_script(text)
    assert [panel.shot for panel in result.script.panels] == ["wide", "medium", "close"]
    assert [panel.action for panel in result.script.panels] == ["a", "b", "c"]
    assert [line for line in changes(result)] == ["warning: panels[1].shot: missing; the default medium is used"]


def test_j33_labelled_lines_under_headings():
    result = parse_script('### Panel 1\nShot: wide\nDialogue: Rin: hello\n### Panel 2\n- **Shot:** close\n- Action: waits')
    assert [(panel.shot, panel.action) for panel in result.script.panels] == [("wide", ""), ("close", "waits")]
    assert [(row.panel, row.speaker, row.line) for row in result.script.dialogue] == [(1, "Rin", "hello")]


def test_j33_one_block_without_numbers_is_no_panel():
    result = parse_script('{"page":"Rain falls. A door opens. A face."}')
    assert result.status == "failed" and "no panels" in result.cause


@pytest.mark.parametrize("wrap", ['{"page":"%s"}', "%s"])
def test_j33_prose_panels(wrap):
    result = parse_script(wrap % "Panel 1: rain. Panel 2: door. Panel 3: face.")
    assert [panel.action for panel in result.script.panels] == ["rain.", "door.", "face."]
    assert result.status == "repaired"


def test_j35_comments_and_a_url():
    result = parse_script('{"panels":[ // first\n{"shot":"wide","action":"reads http://x.test/a aloud"}]}')
    assert [panel.action for panel in result.script.panels] == ["reads http://x.test/a aloud"]


def test_j36_no_json_at_all():
    text = "I'm sorry, I can't continue this scene."
    result = parse_script(text)
    assert result.status == "failed" and text in result.cause and "refused" in result.cause
    with pytest.raises(ScriptError, match="can't continue this scene"):
        panel_lists(result, on_error="stop")
    with pytest.raises(ScriptError):
        panel_lists(result, on_error="keep")
    lists = panel_lists(result, on_error="placeholder")
    assert lists.prompt == [NEUTRAL_PROMPT] and "sorry" not in lists.joined + lists.script_json


def test_j39_braced_placeholder_in_the_lead_in():
    assert len(parse_script('For {project}: {"panels":[{"shot":"wide"},],}').script.panels) == 1


def test_t03_budget_spent_thinking():
    result = parse_script("<think>step one, step two")
    assert result.status == "failed" and "spent thinking" in result.cause and "step one" in result.cause
    assert "spent thinking" in parse_script('<think>draft {"panels":[{"shot":"wide"}]}').cause
    assert "empty" in parse_script("").cause


def test_t06_empty_think_wrapper():
    wrapper = "<think>\n\n\n\n</think>\n\n"
    assert parse_script(wrapper + '{"panels":[{"shot":"wide"}]}').status == "ok"
    assert "no JSON" in parse_script(wrapper + "OK.").cause


def test_n03_loop_is_explained():
    cause = parse_script("<think>" + "and then again, " * 60).cause
    assert "thinking" in cause and "repeats itself" in cause


@pytest.mark.parametrize("key", ["index", "id", "panel"])
def test_k01_panels_out_of_order(key):
    text = json.dumps({"panels": [{key: n, "shot": "wide", "action": f"act {n}"} for n in (2, 1, 3)]})
    lists = panel_lists(parse_script(text))
    assert lists.index == [1, 2, 3]
    assert ["act 1" in lists.prompt[0], "act 2" in lists.prompt[1], "act 3" in lists.prompt[2]] == [True] * 3


ROWS = [{"panel": n, "speaker": "Rin", "line": line} for n, line in ((1, "a"), (1, "b"), (3, "c"))]


def test_k03_dialogue_by_panel():
    text = json.dumps({"panels": [{"index": n, "shot": "wide", "action": "a"} for n in (1, 2, 3)], "dialogue": ROWS})
    result = parse_script(text)
    assert result.status == "ok"
    assert panel_lists(result).dialogue == ["Rin: a\nRin: b", "", "Rin: c"]


def test_k03_rows_inside_panels():
    panels = [{"index": n, "shot": "wide", "dialogue": [r for r in ROWS if r["panel"] == n]} for n in (1, 2, 3)]
    result = parse_script(json.dumps({"panels": panels}))
    assert [(row.panel, row.line) for row in result.script.dialogue] == [(1, "a"), (1, "b"), (3, "c")]
    assert "dialogue" not in result.script.panels[0].model_dump()


@pytest.mark.parametrize("direction", ["ltr", "rtl", "vertical"])
def test_k05_direction_is_metadata(direction):
    text = json.dumps({"reading_direction": direction, "panels": [{"index": n, "shot": "wide", "action": "a"} for n in (1, 2)]})
    lists = panel_lists(parse_script(text))
    assert lists.index == [1, 2] and lists.reading_direction == direction


def test_u09_u10_lists_and_one_text():
    text = json.dumps({"panels": [{"index": n, "shot": "wide", "action": f"act {n}", "caption": f"box {n}"} for n in (1, 2, 3)]})
    lists = panel_lists(parse_script(text))
    assert len(lists.prompt) == lists.count == 3
    assert all(f"act {n}" in lists.joined and f"box {n}" in lists.joined for n in (1, 2, 3))
    assert len(json.loads(lists.script_json)["panels"]) == 3


def test_u12_equal_lengths():
    text = json.dumps({"panels": [{"index": n, "shot": "wide", "action": "a"} for n in (1, 2, 3)], "dialogue": ROWS[:2]})
    lists = panel_lists(parse_script(text), base_seed=2**64 - 2)
    names = ("prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index")
    assert [len(getattr(lists, name)) for name in names] == [3] * 8
    assert lists.seed == [2**64 - 1, 0, 1]


def test_sources_are_plain_ascii():
    folder = Path(__file__).resolve().parents[2] / "a3b_engine" / "script"
    assert [path.name for path in folder.glob("*.py") if not path.read_bytes().isascii()] == []
