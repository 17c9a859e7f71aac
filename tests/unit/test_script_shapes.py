"""Other key names, wrappers, words and languages come to the fields of the schema; samples and schemas never do."""

import json
import sys

import pytest

from a3b_engine.script.drawable import blank_panels
from a3b_engine.script.parse import parse_script
from a3b_engine.script.repair import last_resort
from a3b_engine.script.vocabulary import find_shots

PANELS = [{"shot": "wide", "action": "a"}, {"shot": "close", "action": "b"}]


def actions(value):
    result = parse_script(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return [panel.action for panel in result.script.panels] if result.script else None


@pytest.mark.parametrize("key", ["panels", "Panels", "shots", "scenes", "storyboard", "frames", "comicPanels", "\u5206\u955c", "\u955c\u5934"])
def test_names_of_the_list(key):
    assert actions({key: PANELS}) == ["a", "b"]


@pytest.mark.parametrize(
    "value",
    [
        PANELS,
        {"comic": {"panels": PANELS}},
        {"result": {"script": {"shots": PANELS}}},
        {"panels": {"panel": PANELS}},
        {"panels": {"panel_1": PANELS[0], "panel_2": PANELS[1]}},
        {"panel1": PANELS[0], "panel2": PANELS[1]},
        {"1": PANELS[0], "2": PANELS[1]},
        {"pages": [{"panels": PANELS[:1]}, {"panels": PANELS[1:]}]},
        {"panels": [PANELS]},
        {"panels": [{"panel": PANELS[0]}, {"panel": PANELS[1]}]},
        {"panels": ["a", "b"]},
        {"panels": json.dumps(PANELS)},
        json.dumps(json.dumps({"panels": PANELS})),
        "\n".join(json.dumps(panel) for panel in PANELS),
        f'"panels": {json.dumps(PANELS)}',
        json.dumps({"panels": PANELS}).replace('"', '\\"'),
        '{"panels": [{"index": 1, "action": "a"}]}\n{"panels": [{"index": 2, "action": "b"}]}',
    ],
)
def test_shapes_of_the_list(value):
    assert actions(value) == ["a", "b"]


def test_chinese_fields_and_rows():
    text = json.dumps(
        {
            "\u6807\u9898": "\u96e8",
            "\u89d2\u8272": [{"\u540d\u5b57": "\u5c0f\u6797", "\u5916\u8c8c": "\u7ea2\u53d1"}],
            "\u5206\u955c": [{"\u5e8f\u53f7": 1, "\u666f\u522b": "\u8fd1\u666f", "\u52a8\u4f5c": "\u62ac\u5934", "\u9053\u5177": ["\u4f1e"]}],
            "\u5bf9\u8bdd": [{"\u683c": 1, "\u89d2\u8272": "\u5c0f\u6797", "\u53f0\u8bcd": "\u4f60\u597d", "\u60c5\u7eea": "\u559c"}],
        },
        ensure_ascii=False,
    )
    script = parse_script(text).script
    panel, row, person = script.panels[0], script.dialogue[0], script.characters[0]
    assert (script.title, panel.shot, panel.action, panel.props) == ("\u96e8", "close", "\u62ac\u5934", ["\u4f1e"])
    assert (row.panel, row.speaker, row.line, row.emotion_tag) == (1, "\u5c0f\u6797", "\u4f60\u597d", "\u559c")
    assert (person.name, person.look) == ("\u5c0f\u6797", "\u7ea2\u53d1")


def test_dialogue_and_panels_as_two_objects():
    result = parse_script('{"dialogue":[{"panel":2,"speaker":"A","line":"x"}]}\n\n' + json.dumps({"panels": PANELS}))
    assert len(result.script.panels) == 2 and result.script.dialogue[0].panel == 2


def test_a_revised_script_wins_and_is_reported():
    result = parse_script('{"panels":[{"shot":"wide","action":"old"}]}\nBetter:\n{"panels":[{"shot":"wide","action":"new"}]}')
    assert [p.action for p in result.script.panels] == ["new"]
    assert any("not used" in line for line in result.report)


@pytest.mark.parametrize(
    "word, shot",
    [
        ("Close-Up", "close"), ("extreme close-up on the eyes", "extreme_close"), ("medium shot", "medium"), ("MS", "medium"),
        ("wide angle, low", "wide"), ("over-the-shoulder", "over_shoulder"), ("POV of Rin", "pov"), ("full body", "full"),
        ("establishing shot", "establishing"), ("\u7279\u5199", "close"), ("\u4e2d\u666f\u955c\u5934", "medium"), ("\u8fdc\u666f", "wide"),
        ("\u5927\u7279\u5199", "extreme_close"), ("\u30a2\u30c3\u30d7", "close"), ("gros plan", "close"),
    ],
)
def test_shot_words(word, shot):
    result = parse_script(json.dumps({"panels": [{"shot": word, "action": "a"}]}))
    assert result.script.panels[0].shot == shot
    assert any(line.startswith("repair: panels[0].shot: ") for line in result.report)


def test_every_member_of_the_set_is_itself():
    from a3b_engine.script.schema import SHOTS

    assert [find_shots(shot) for shot in SHOTS] == [[shot] for shot in SHOTS]


def test_unknown_shot_is_the_default_and_quoted():
    result = parse_script('{"panels":[{"shot":"zany","action":"a"}]}')
    assert result.script.panels[0].shot == "medium"
    assert any('panels[0].shot: "zany" is not a known shot' in line for line in result.report)


@pytest.mark.parametrize(
    "text, word",
    [
        ('{"type":"object","properties":{"panels":{"type":"array","items":{}}},"required":["panels"]}', "schema"),
        ('{"panels":[{"shot":"close|medium|wide","action":"..."}]}', "placeholders"),
        ('{"panels":[{"shot":"close","action":"<text>"}],"dialogue":[{"speaker":"...","line":"..."}]}', "placeholders"),
        ('{"panels":[{"shot":"string","action":"string"}]}', "placeholders"),
    ],
)
def test_samples_and_schemas_are_no_data(text, word):
    result = parse_script(text)
    assert result.status == "failed" and word in result.cause
    followed = parse_script(f'{text}\n{json.dumps({"panels": PANELS})}')
    assert [panel.action for panel in followed.script.panels] == ["a", "b"]


def test_silence_is_data():
    result = parse_script('{"panels":[{"shot":"close","caption":"..."}],"dialogue":[{"panel":1,"speaker":"Rin","line":"..."}]}')
    assert result.status == "ok" and result.script.dialogue[0].line == "..."


def test_count_from_zero_duplicates_and_gaps():
    def indexes(*numbers, rows=()):
        script = parse_script(json.dumps({"panels": [{"index": n, "shot": "wide"} for n in numbers], "dialogue": list(rows)})).script
        return [panel.index for panel in script.panels], [row.panel for row in script.dialogue]

    assert indexes(0, 1, 2, rows=[{"panel": 0, "line": "a"}, {"panel": 2, "line": "b"}]) == ([1, 2, 3], [1, 3])
    assert indexes(1, 1, 2) == ([1, 2, 3], [])
    assert indexes(1, 3, 4, rows=[{"panel": 9, "line": "a"}]) == ([1, 3, 4], [4])
    assert indexes("Panel 2", "\u7b2c\u4e00\u683c") == ([1, 2], [])


def test_rows_without_a_panel_go_in_order():
    rows = [{"speaker": "A", "line": str(n)} for n in range(4)]
    result = parse_script(json.dumps({"panels": PANELS, "dialogue": rows}))
    assert [row.panel for row in result.script.dialogue] == [1, 1, 2, 2]
    assert any("dialogue[0].panel: missing" in line for line in result.report)


def test_looks_inside_panels_move_to_the_cast():
    panels = [{"shot": "wide", "characters": [{"name": "Rin", "look": "red hair"}]}]
    script = parse_script(json.dumps({"panels": panels})).script
    assert script.panels[0].characters == ["Rin"] and script.characters[0].look == "red hair"


def test_wrong_types_are_reported_with_their_place():
    result = parse_script('{"panels":[{"shot":"wide","action":7.50,"light":["a","b"],"props":"cup, rope","caption":true}]}')
    panel = result.script.panels[0]
    assert (panel.action, panel.light, panel.props, panel.caption) == ("7.50", "a, b", ["cup", "rope"], "")
    assert {line.split(": ")[1] for line in result.report if not line.startswith("info")} == {
        "panels[0].action", "panels[0].light", "panels[0].props", "panels[0].caption",
    }


def test_panel_count_that_differs_is_a_warning():
    result = parse_script(json.dumps({"panels": PANELS}), expected_panels=3)
    assert len(result.script.panels) == 2 and result.status == "repaired"
    assert any("3 expected, 2 found" in line for line in result.report)


@pytest.mark.parametrize(
    "text",
    [
        '{"panels":[{"shot":"wide","action":"a"}{"shot":"close" "action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a",{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a","shot":"close","action":"b"},]}',
        '{"panels":[{"shot":"wide","action":"a"}},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a"],"panels":[{"shot":"wide","action":"a"},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide",\n"action":"a},\n{"shot":"close","action":"b"}]}',
        "{panels: [{shot: wide, action: a}, {shot = 'close', action => 'b'}]}",
        '{"panels":[{"shot":"wide","action":"""a"""},{"shot":"close","action":"b",...}, ...]}',
        '```json\n{"panels":[{"shot":"wide","action":"a"},{"shot":"close","action":"b"}]\n```',
    ],
)
def test_brackets_commas_and_marks(text):
    assert actions(text) == ["a", "b"]


def test_json_repair_is_checked_against_the_source():
    source = 'note {"panels": [{"shot" "wide", "action" "a"}]}'
    value = last_resort(source)
    assert value is None or all(word in source for word in _strings(value))
    assert last_resort('{"a": "b" ' + "x" * 20_000) is None


def test_json_repair_that_invents_is_refused(monkeypatch):
    import json_repair

    monkeypatch.setattr(json_repair, "loads", lambda *_, **__: {"panels": [{"shot": "wide", "action": "made up"}]})
    assert last_resort('{"panels" [{"shot" "wide"}]}') is None
    monkeypatch.setattr(json_repair, "loads", lambda *_, **__: {"panels": [{"shot": "wide"}]})
    result = parse_script('{"panels" = ("shot" "wide")}')
    assert [panel.shot for panel in result.script.panels] == ["wide"] and any("json-repair" in line for line in result.report)


def _strings(value):
    if isinstance(value, dict):
        return [*value, *(word for entry in value.values() for word in _strings(entry))]
    if isinstance(value, list):
        return [word for entry in value for word in _strings(entry)]
    return [value] if isinstance(value, str) else []


FOREIGN = {
    "a workflow to run": {"2": {"class_type": "KSampler", "inputs": {"positive": ["6", 0], "negative": ["7", 0]}}, "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat"}}},
    "a workflow to edit": {"nodes": [{"id": 1, "type": "KSampler", "order": 0}], "links": [], "extra": {"info": {"description": "x"}}},
    "help of nodes": {"A3BEditScript": {"display_name": "Edit", "description": "x", "inputs": {"patch": {"tooltip": '{"panels": {"2": {"light": "dusk"}}}'}}, "outputs": {"0": {"name": "script"}}}},
    "pictures with captions": {"images": [{"id": 1, "file_name": "a.jpg", "width": 3}], "annotations": [{"id": 2, "image_id": 1, "caption": "a dog"}]},
    "captions": [{"image": "a.jpg", "caption": "a dog"}, {"image": "b.jpg", "caption": "a cat"}],
    "products": {"1": {"name": "Chair", "price": 3}, "2": {"name": "Desk", "price": 4}},
    "described products": {"products": [{"id": 1, "title": "Chair", "description": "oak", "price": 3, "stock": 4, "brand": "x"}]},
    "classes": {"1": "person", "2": "traffic light"},
    "an interface": {"openapi": "3.1.0", "paths": {"/a": {"get": {"description": "x", "responses": {"200": {"description": "OK"}}}}}},
    "numbers": {"images": ["4", 0]},
    "panels without anything": {"panels": [{}, {"index": 2}]},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("indent", [None, 2])
def test_data_of_other_programs_is_no_script(name, indent):
    result = parse_script(json.dumps(FOREIGN[name], indent=indent))
    assert result.script is None and "no panels" in result.cause


@pytest.mark.parametrize(
    "value",
    [
        {"panel_1": "a", "panel_2": "b"},
        {"1": "a door opens", "2": "a face looks"},
        {"1": {"caption": "Once", "dialogue": "Rin: hi"}, "2": {"caption": "Then"}},
        {"panels": {"intro": "a door opens", "end": "a face looks"}},
        {"prompts": ["door", "face"]},
        {"shots": [{"shot_number": n, "description": a, "duration": "3s", "movement": "pan", "transition": "cut"} for n, a in ((1, "a"), (2, "b"))]},
        [{"shot_number": n, "description": a, "duration": "3s", "movement": "pan", "transition": "cut"} for n, a in ((1, "a"), (2, "b"))],
    ],
)
def test_numbered_texts_and_storyboards_are_panels(value):
    assert len(actions(value)) == 2


def test_a_panel_with_nothing_to_draw_is_marked_and_keeps_its_texts():
    panels = [{}, {"index": 2, "caption": "Later"}, {"index": 3, "shot": "close"}, {"index": 4, "shot": "wide", "action": "x"}, {"index": 5, "shot": "wide", "props": ["cup"]}]
    result = parse_script(json.dumps({"panels": panels}))
    assert blank_panels(result.script) == (1, 2, 3) and result.script.panels[1].caption == "Later"
    levels = {line.split(": ")[1]: line.split(": ")[0] for line in result.report if "nothing in it can be drawn" in line}
    assert levels == {"panels[0]": "warning", "panels[1]": "warning", "panels[2]": "info"}
    assert blank_panels(parse_script('{"panels":[{"index":1,"shot":"wide","action":"x"}]}').script) == ()


@pytest.mark.parametrize(
    "text",
    [
        'Character:\n{"name":"Rin","look":"red hair"}\n{"name":"Mio","look":"grey"}\nScript:\n{"panels":[{"shot":"wide","action":"Rin runs"}]}',
        '{"name":"Rin","look":"red hair"}\n{"name":"Mio","look":"grey"}\n{"shot":"wide","action":"Rin runs"}',
        '{"name":"Rin","look":"red hair"}\n{"name":"Mio","look":"grey"}\n\nPanel 1: Rin runs\nPanel 2: Mio waits',
    ],
)
def test_characters_as_objects_of_their_own(text):
    script = parse_script(text).script
    assert [(person.name, person.look) for person in script.characters] == [("Rin", "red hair"), ("Mio", "grey")]
    assert script.panels[0].action == "Rin runs"


def test_what_stands_above_the_panels_is_read_or_reported():
    page = {"meta": {"style": "watercolor", "pages": 1}, "character_sheet": [{"name": "Ana", "look": "girl"}], "mood": "sad", "pages": [{"location": "dock", "panels": [{"shot": "wide", "action": "a"}]}]}
    result = parse_script(json.dumps(page))
    assert result.script.style == "watercolor" and result.script.characters[0].look == "girl"
    assert all(any(line.startswith(f"info: {key}: ") for line in result.report) for key in ("meta.pages", "mood", "location"))
    assert parse_script('{"metadata":{"title":"T"},"panels":[{"shot":"wide","action":"a"}]}').script.title == "T"


def test_the_name_of_a_called_tool_is_no_title():
    for arguments in ({"panels": PANELS}, json.dumps({"panels": PANELS})):
        result = parse_script(json.dumps({"name": "make_comic", "arguments": arguments}))
        assert result.script.title == "" and len(result.script.panels) == 2


@pytest.mark.parametrize("said", ["**Rin:** \"Run!\"", "**Rin**: \"Run!\"", "*Rin:* Run!", "__Rin__: Run!"])
def test_bold_speakers(said):
    (row,) = parse_script(json.dumps({"panels": [{"shot": "wide", "action": "a", "dialogue": said}]})).script.dialogue
    assert (row.speaker, row.line) == ("Rin", "Run!")


@pytest.mark.parametrize("inside", [True, False])
def test_dialogue_in_pairs(inside):
    pairs = [["Boy", "What is this?"], ["Dog", "Woof"]]
    page = {"panels": [{"shot": "wide", "action": "a", "dialogue": pairs}]} if inside else {"panels": [{"shot": "wide", "action": "a"}], "dialogue": pairs}
    assert [(row.speaker, row.line) for row in parse_script(json.dumps(page)).script.dialogue] == [("Boy", "What is this?"), ("Dog", "Woof")]


@pytest.mark.parametrize("numbers, row, bound", [((1, 2, 2, 3), 3, 4), ((1, None, 2), 2, 3), ((1, 1, 2), 1, 1), ((1, 1, 1), 3, 3)])
def test_rows_follow_panels_that_are_numbered_anew(numbers, row, bound):
    page = {"panels": [{"index": n, "shot": "wide", "action": "a"} for n in numbers], "dialogue": [{"panel": row, "speaker": "R", "line": "x"}]}
    result = parse_script(json.dumps(page))
    assert [panel.index for panel in result.script.panels] == list(range(1, len(numbers) + 1)) and result.script.dialogue[0].panel == bound
    assert row == bound or any("the row follows it" in line for line in result.report)


def test_arabic_commas_separate():
    result = parse_script('{"panels":[{"shot":"wide"\u060c "action":"a"}\u060c {"shot":"close"\u061b "action":"b"\u060c "props":"x\u060c y"}]}')
    assert [panel.action for panel in result.script.panels] == ["a", "b"] and result.script.panels[1].props == ["x", "y"]


@pytest.mark.parametrize("text", ["[Rin runs]", "{the sky}", "[\u51db]"])
def test_a_text_in_brackets_is_data(text):
    assert actions({"panels": [{"shot": "wide", "action": text}]}) == [text]


@pytest.mark.parametrize("text", ["[action]", "{description}", "[what the character does]", "[]"])
def test_field_words_in_brackets_are_a_sample(text):
    assert "placeholders" in parse_script(json.dumps({"panels": [{"shot": "wide", "action": text}]})).cause


def test_a_python_tuple_is_a_list():
    assert parse_script("{'panels':[{'shot':'wide','action':'a','props':('cup', 'red hat')}]}").script.panels[0].props == ["cup", "red hat"]


def test_strange_numbers_are_reported():
    result = parse_script(json.dumps({"panels": [{"index": "1/3", "shot": "wide", "action": "a"}, {"index": "-4", "shot": "wide", "action": "b"}]}))
    for place in ("panels[0].index", "panels[1].index"):
        assert any(line.startswith(f"repair: {place}: ") for line in result.report)


def test_japanese_speakers():
    page = {"panels": [{"shot": "wide", "action": "a"}], "dialogue": [{"panel": 1, "\u30ad\u30e3\u30e9\u30af\u30bf\u30fc": "A", "line": "x"}, {"panel": 1, "\u540d\u524d": "B", "line": "y"}]}
    assert [row.speaker for row in parse_script(json.dumps(page)).script.dialogue] == ["A", "B"]


def test_without_json_repair_an_unreadable_text_is_a_failed_parse(monkeypatch):
    monkeypatch.setitem(sys.modules, "json_repair", None)
    assert parse_script('{"panels" = ("shot" "wide")}').status == "failed"
