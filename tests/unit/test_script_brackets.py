"""One mark of the structure that is missing or doubled never costs more than the value beside it."""

import json

import pytest
from script_checks import check_everything

from a3b_engine.script.parse import parse_script

TOP = {
    "title": "T one",
    "characters": [{"id": "rin", "name": "Rin", "look": "red hair"}, {"id": "mio", "name": "Mio", "look": "blue coat"}],
    "dialogue": [{"panel": 1, "speaker": "rin", "line": "Hi", "emotion_tag": "glad"}, {"panel": 2, "speaker": "mio", "line": "Oh.", "emotion_tag": "cold"}],
    "panels": [
        {"index": 1, "shot": "close", "characters": ["rin"], "action": "smiles", "props": ["cup", "rope"], "light": "lamp"},
        {"index": 2, "shot": "wide", "characters": ["rin", "mio"], "action": "runs", "props": ["bag"], "light": "sun"},
        {"index": 3, "shot": "pov", "characters": [], "action": "falls", "props": [], "light": "dusk"},
    ],
}
INNER = {
    "panels": [
        {"index": 1, "shot": "close", "action": "smiles", "dialogue": [{"speaker": "rin", "line": "Hi"}, {"speaker": "mio", "line": "Yo"}], "light": "lamp"},
        {"index": 2, "shot": "wide", "action": "runs", "dialogue": [{"speaker": "mio", "line": "Oh."}]},
        {"index": 3, "shot": "pov", "action": "falls", "dialogue": []},
    ]
}
TEXTS = [json.dumps(value, indent=indent) for value in (TOP, INNER) for indent in (None, 2)]


def pieces(script):
    """Each value of a script with its place; what one mark may cost is one of them."""
    rows = [(row.panel, name, getattr(row, name)) for row in script.dialogue for name in ("speaker", "line", "emotion_tag")]
    panels = [(panel.index, name, value) for panel in script.panels for name, value in panel.model_dump().items() if name != "index"]
    people = [(person.id, person.look) for person in script.characters]
    return [repr(piece) for piece in (script.title, *rows, *panels, *people)]


@pytest.mark.parametrize("text", TEXTS, ids=["top", "top, indented", "inner", "inner, indented"])
@pytest.mark.parametrize("doubled", [False, True], ids=["missing", "doubled"])
def test_one_mark_costs_one_value_at_most(text, doubled):
    whole = pieces(parse_script(text).script)
    for at, mark in enumerate(text):
        if mark not in '{}[]",:':
            continue
        damaged = text[:at] + mark * 2 * doubled + text[at + 1 :]
        result = parse_script(damaged)
        check_everything(result, damaged)
        where = f"{mark} at {at}: {damaged[max(at - 30, 0) : at + 20]!r}"
        assert result.script is not None, where
        found = pieces(result.script)
        lost = sum(piece not in found for piece in whole)
        assert lost <= 2, where  # the value itself, and where it was cut in two its neighbour
        assert len(found) == len(whole), where
        assert not lost or result.status != "ok", where


@pytest.mark.parametrize(
    "text",
    [
        '{"panels":[{"shot":"wide","action":"a","dialogue":{"speaker":"R","line":"x"}]},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a","dialogue":{"speaker":"R","line":"x"},{"speaker":"M","line":"y"}]},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a","dialogue":{"speaker":"R","line":"x"},{"speaker":"M","line":"y"}],"light":"z"},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","props":"cup","rope"],"action":"a"},{"shot":"close","action":"b"}]}',
        '{"panels":{"shot":"wide","action":"a"},{"shot":"close","action":"b"}]}',
        '{"panels":[{"shot":"wide","action":"a"},{"shot":"close","action":"b"},{"panels":[',
    ],
)
def test_a_missing_opening_bracket_loses_no_neighbour(text):
    result = parse_script(text)
    assert [(panel.shot, panel.action) for panel in result.script.panels] == [("wide", "a"), ("close", "b")]
    assert [row.line for row in result.script.dialogue] == [word for word in "xy" if f'"{word}"' in text]
    assert result.status in ("repaired", "truncated")


@pytest.mark.parametrize("inches", ['5\'10"', '19"'])
def test_an_inch_mark_at_the_end_of_a_value_stays(inches):
    result = parse_script('{"panels":[{"shot":"wide","action":"a man of %s","light":"x"}]}' % inches)
    assert result.script.panels[0].action == f"a man of {inches}" and result.status == "repaired"


@pytest.mark.parametrize("middle", ['"panels":[', '"panels":[{"panels":[', '{"panels":["panels":['])
def test_a_list_that_begins_again_in_itself_is_read_once(middle):
    result = parse_script('{"panels":[%s{"shot":"wide","action":"a"},]}]}' % middle)
    assert [panel.action for panel in result.script.panels] == ["a"] and result.status in ("repaired", "truncated")
    assert not any("the rest is not read" in line or "more than once" in line for line in result.report)
