"""The JSON form of a script: its version, and reading back what was written."""

import json

import pytest
from hypothesis import given
from script_strategies import QUICK, scripts

from a3b_engine.script.document import script_json
from a3b_engine.script.grammar import comic_json_schema
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import SCHEMA_VERSION, Character, ComicScript, DialogueLine, Panel

BODY = {"title": "T", "panels": [{"index": 1, "shot": "wide", "action": "runs"}]}


def read(**more):
    return parse_script(json.dumps({**more, **BODY}))


def test_the_form_states_its_version_first():
    value = json.loads(script_json(ComicScript.model_validate(BODY)))
    assert list(value)[0] == "version" and value["version"] == SCHEMA_VERSION == 1
    assert list(value)[1:] == list(ComicScript.model_fields)


def test_a_known_version_is_no_remark_and_absent_means_the_first():
    bare, stated = read(), read(version=1)
    assert stated.status == bare.status == "ok"
    assert stated.report == bare.report and stated.script == bare.script


@pytest.mark.parametrize("version, told", [(2, "2"), ("1.1", '"1.1"'), (0, "0"), (True, "true"), ({"a": 1}, '{"a": 1}'), (10**30, "1000")])
def test_an_unknown_version_is_read_as_far_as_it_goes_and_reported(version, told):
    result = read(version=version, lettering={"font": "x"})
    assert result.script == ComicScript.model_validate(BODY)
    lines = [line for line in result.report if "version" in line]
    assert len(lines) == 1 and lines[0].startswith("warning: version: ") and told in lines[0] and "update the pack" in lines[0]
    assert max(map(len, result.report)) < 250


def test_a_damaged_script_keeps_its_version():
    result = parse_script(json.dumps({"version": 2, **BODY})[:-1] + ",}")
    assert result.status == "repaired" and any(line.startswith("warning: version: ") for line in result.report)
    assert not any("version" in line for line in parse_script(json.dumps({"version": 1, **BODY})[:-1] + ",}").report)


def test_the_model_is_not_asked_for_a_version():
    assert "version" not in comic_json_schema(2, 2)["properties"]
    assert "version" not in ComicScript.model_fields


@QUICK
@given(scripts())
def test_what_is_written_is_read_back_unchanged(script):
    first = panel_lists(parse_script(json.dumps(script))).script_json
    result = parse_script(first)
    assert result.status == "ok", result.report
    assert script_json(result.script) == first


def test_every_field_is_documented():
    for model in (ComicScript, Character, DialogueLine, Panel):
        assert all(len(field.description or "") > 10 for field in model.model_fields.values()), model
