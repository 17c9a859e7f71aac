"""Neighbours of the bug-report rows: the same kinds of damage in other forms, alone and in pairs."""

import json

import pytest

from a3b_engine.errors import ScriptError
from a3b_engine.script.drawable import blank_panels
from a3b_engine.script.panels import NEUTRAL_PROMPT, panel_lists
from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import SHOTS

BOTH = [{"index": 1, "shot": "wide", "action": "a"}, {"index": 2, "shot": "close", "action": "b"}]
SCRIPT = json.dumps({"panels": BOTH}, separators=(",", ":"))
REFUSAL = "I'm sorry, but I can't assist with that request."


def read(text):
    result = parse_script(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
    return result, [(panel.shot, panel.action) for panel in result.script.panels] if result.script else None


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT.replace(",", ",,"),
        SCRIPT.replace('"shot":', '"shot" '),
        SCRIPT.replace('"shot":', '"shot:').replace('"action":', 'action":'),
        SCRIPT.replace('"wide"', 'wide"').replace('"a"', 'a"'),
        SCRIPT.replace('"wide"', '"wide').replace('"a"', '"a'),
        SCRIPT.replace('"wide"', 'u"wide"').replace('"a"', "r'a'"),
        SCRIPT.replace('"shot":', '"shot"::'),
        SCRIPT.replace('},{"index"', '},"index"'),
        json.dumps({"panels": BOTH}, indent=1).replace('"b"', '"b').replace('"index": 2', '"index: 2'),
        SCRIPT.replace("{", "{{").replace("}", "}}"),
        SCRIPT.replace('[{"index"', '["index"'),
        SCRIPT.replace("[{", "[ <!-- first --> {").replace("},{", "}, -- second\n{"),
        SCRIPT.replace("[{", "[,{").replace("]}", ', ...], "title": "T"}'),
        SCRIPT.replace("]}", ',"title":"T"}'),
        "".join({'"': "\uff02", ":": "\uff1a", ",": "\uff0c", "{": "\uff5b", "}": "\uff5d"}.get(c, c) for c in SCRIPT),
        SCRIPT.replace('"panels"', "\u00abpanels\u00bb").replace('"a"', "\u00aba\u00bb"),
        "~~~JSON5\n" + SCRIPT.replace('"', "'") + "\n~~~",
    ],
)
def test_j_damage_loses_and_invents_nothing(text):
    result, panels = read(text)
    assert panels == [("wide", "a"), ("close", "b")] and result.status == "repaired"


@pytest.mark.parametrize("remark", ["// and ran", "# and ran"])
def test_j35_comment_signs_after_an_unescaped_quote_are_text(remark):
    result, panels = read('{"panels":[{"shot":"wide","action":"he said "go" %s","light":"x"},{"shot":"close","action":"b"}]}' % remark)
    assert panels == [("wide", f'he said "go" {remark}'), ("close", "b")] and result.status == "repaired"


def test_j21_escaped_closing_mark_does_not_swallow_the_next_panel():
    _, panels = read(SCRIPT.replace('"a"', '"C:\\dir\\"'))
    assert panels == [("wide", "C:\\dir\\"), ("close", "b")]


@pytest.mark.parametrize("escape, text", [("\\x41", "A"), ("\\q", "\\q"), ("\\u12", "\\u12")])
def test_j21_escapes_of_other_languages_are_reported(escape, text):
    result, panels = read(SCRIPT.replace('"a"', f'"{escape}"'))
    assert panels[0][1] == text and result.status == "repaired"
    assert any("panels[0].action: escapes" in line for line in result.report)


def test_half_a_surrogate_pair_is_reported():
    assert read(SCRIPT.replace('"a"', '"\ud83d"'))[0].status == "repaired"


def test_parts_of_an_unreadable_object_are_never_ok():
    result, panels = read('{"panels":[{"shot" ? "wide"},{"shot":"close","action":"b"}]}')
    assert panels == [("close", "b")] and result.status == "repaired"
    assert any("only parts of it" in line for line in result.report)


@pytest.mark.parametrize(
    "value",
    [
        {"panel_one": BOTH[0], "panel_two": BOTH[1]},
        {"\u7b2c\u4e00\u683c": {"shot": "wide", "action": "a"}, "\u7b2c\u4e8c\u683c": {"shot": "close", "action": "b"}},
        {"panels": {"\u7b2c\u4e8c\u683c": {"shot": "close", "action": "b"}, "\u7b2c\u4e00\u683c": {"shot": "wide", "action": "a"}}},
        {"intro": {"shot": "wide", "action": "a"}, "end": {"shot": "close", "action": "b"}},
        {"page1": {"panels": BOTH[:1]}, "page2": {"panels": BOTH[1:]}},
        {"scenes": [{"location": "dock", "panels": BOTH[:1]}, {"location": "room", "panels": BOTH[1:]}]},
        {"metadata": {"setting": "dock"}, "comic": {"panels": BOTH}},
        {"draft": {"panels": BOTH[:1]}, "final": {"panels": BOTH}},
        {"panels": [json.dumps(panel) for panel in BOTH]},
        {"panels": f"```json\n{json.dumps(BOTH)}\n```"},
        {"output": f"Here: {SCRIPT}"},
        {"choices": [{"message": {"role": "assistant", "content": f"Sure:\n```json\n{SCRIPT}\n```"}}]},
        json.dumps(json.dumps(json.dumps({"panels": BOTH}))),
        '{"page":1,"panels":[{"index":1,"shot":"wide","action":"a"}]}\n{"page":2,"panels":[{"index":1,"shot":"close","action":"b"}]}',
        '{"dialogue":[{"panel":1,"speaker":"A","line":"x","panels":' + json.dumps(BOTH) + "}",
        '{"dialogue":[{"panel":1,"speaker":"A","line":"x"},"panels":' + json.dumps(BOTH) + "}",
    ],
)
def test_j30_j32_every_panel_is_found_wherever_it_stands(value):
    result, panels = read(value)
    assert panels == [("wide", "a"), ("close", "b")] and result.status == "repaired"


@pytest.mark.parametrize("value", [{"panels": ["%s"]}, {"panels": [{"shot": "wide", "action": "%s"}]}])
def test_j33_one_panel_never_holds_the_page(value):
    text = json.dumps(value) % "Panel 1: rain. Panel 2: door. Panel 3: face."
    assert [action for _, action in read(text)[1]] == ["rain.", "door.", "face."]


@pytest.mark.parametrize("text", ["1\u30b3\u30de\u76ee\uff1a%s\n2\u30b3\u30de\u76ee\uff1a%s", "Case 1 : %s\nCase 2 : %s", "Vi\u00f1eta 1: %s Vi\u00f1eta 2: %s"])
def test_j33_prose_in_other_languages(text):
    assert [action for _, action in read(text % ("x.", "y."))[1]] == ["x.", "y."]


@pytest.mark.parametrize(
    "value",
    [
        {"panels": [{"shot": "wide", "action": REFUSAL}]},
        {"panels": [REFUSAL]},
        {"panels": [{"index": 1, "shot": "close", "action": REFUSAL, "background": "n/a"}]},
        {"panels": [{"shot": "wide", "action": "\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u7ee7\u7eed\u751f\u6210\u3002"}]},
        {"role": "assistant", "content": REFUSAL},
        {"refusal": "no", "content": REFUSAL},
        {"error": {"message": "rate limit", "content": "later"}},
    ],
)
def test_j36_a_refusal_inside_json_is_no_picture(value):
    result, panels = read(value)
    assert panels is None and result.status == "failed" and result.cause
    for choice in ("stop", "keep"):
        with pytest.raises(ScriptError):
            panel_lists(result, on_error=choice)
    assert panel_lists(result, on_error="placeholder").prompt == [NEUTRAL_PROMPT]


def test_j36_one_refused_panel_is_emptied_and_named():
    result, panels = read({"panels": [BOTH[0], {"index": 2, "shot": "close", "action": REFUSAL}]})
    assert panels == [("wide", "a"), ("close", "")]
    assert any(line.startswith("warning: panels[1].action") for line in result.report)
    assert blank_panels(result.script) == (2,) and all("sorry" not in prompt for prompt in panel_lists(result, on_error="placeholder").prompt)


def test_j36_people_of_the_story_may_be_sorry():
    result, panels = read({"panels": [{"index": 1, "shot": "close", "action": "I can't sleep"}], "dialogue": [{"panel": 1, "line": REFUSAL}]})
    assert result.status == "ok" and panels == [("close", "I can't sleep")] and result.script.dialogue[0].line == REFUSAL


@pytest.mark.parametrize(
    "value",
    [
        {"properties": {"panels": {"items": {"properties": {"shot": {"enum": ["close"]}}}}}},
        {"panels": [{"index": "integer", "shot": "string (close, medium, wide)", "action": "string, what happens"}]},
        {"panels": [{"shot": "close|medium", "action": "\uff08\u63cf\u8ff0\uff09"}]},
    ],
)
def test_samples_with_descriptions_are_no_data(value):
    assert read(value)[0].status == "failed"


def test_program_text_is_no_panel():
    assert read("{'panels': [dict(shot='wide', action='a'), dict(shot='close', action='b')]}")[1] is None


@pytest.mark.parametrize("second, first", [("two", "one"), ("Panel Two", "Panel One"), ("II", "I"), ("\u7b2c\u5341\u4e8c\u683c", "\u7b2c\u5341\u4e00\u683c"), ("2nd", "1st"), ("\uff12", "\uff11")])
def test_k01_numbers_as_words(second, first):
    assert read({"panels": [{**BOTH[0], "index": second}, {**BOTH[1], "index": first}]})[1] == [("close", "b"), ("wide", "a")]


def test_k03_rows_by_panel_and_by_page():
    rows = {"panel_1": ["Rin: x", "http://a.test"], "2": [{"speaker": "Mio", "line": "y"}]}
    script = read({"panels": BOTH, "dialogue": rows})[0].script
    assert [(row.panel, row.speaker, row.line) for row in script.dialogue] == [(1, "Rin", "x"), (1, "", "http://a.test"), (2, "Mio", "y")]
    pages = [{"panels": BOTH, "dialogue": [{"panel": 2, "line": "p1"}]}, {"panels": BOTH, "dialogue": [{"panel": 1, "line": "p2"}]}]
    script = read({"pages": pages})[0].script
    assert [(row.panel, row.line) for row in script.dialogue] == [(2, "p1"), (3, "p2")]


@pytest.mark.parametrize(
    "panel, shot",
    [
        ({"shot": "extremeCloseUp"}, "extreme_close"), ({"shot": "\uff57\uff49\uff44\uff45"}, "wide"), ({"shot": "Tr\u00e8s gros plan"}, "extreme_close"),
        ({"shot": "Gro\u00dfaufnahme"}, "close"), ({"shot": "\ud074\ub85c\uc988\uc5c5"}, "close"), ({"shot": "birds-eye"}, "establishing"),
        ({"camera": "low angle", "shot_type": "wide"}, "wide"), ({"shot": 2, "shot_type": "pov"}, "pov"), ({"\ufeff\uff53hot": "full"}, "full"),
    ],
)
def test_shot_spellings(panel, shot):
    assert shot in SHOTS and read({"panels": [{**panel, "action": "a"}]})[1] == [(shot, "a")]


@pytest.mark.parametrize("escaped", [True, False])
def test_j13_cut_at_every_character(escaped):
    page = {"title": "\u96e8 \"x\"", "dialogue": [{"panel": 1, "speaker": "Rin", "line": "say \"go\", {now}"}], "panels": BOTH}
    text = json.dumps(page, ensure_ascii=escaped)
    known = {"", "medium", "ltr", page["title"], "Rin", page["dialogue"][0]["line"], "wide", "close", "a", "b"}
    before = 0
    for end in range(len(text)):
        result = parse_script(text[:end])
        assert result.status in ("failed", "truncated")
        words = list(_words(result.script.model_dump())) if result.script else []
        assert set(words) <= known
        assert sum(map(len, words)) >= before
        before = sum(word != "medium" and len(word) for word in words)


def _words(value):
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _words(inner)
