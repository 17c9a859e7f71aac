"""Edit Script: merge patches by the RFC and by entry, find and replace, and what is refused."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_strategies import QUICK, scripts, texts

from a3b_engine.errors import ScriptError
from a3b_engine.script.document import script_json
from a3b_engine.script.edit import edit_script
from a3b_engine.script.merge_patch import merge
from a3b_engine.script.parse import parse_script
from a3b_engine.script.replace_text import MAX_CHARACTERS, Pair, read_pairs
from a3b_engine.script.schema import ComicScript

SCRIPT = ComicScript.model_validate(
    {
        "title": "Rain",
        "characters": [{"id": "rin", "name": "Rin", "look": "girl, red hair"}, {"id": "tom", "name": "Tom", "look": "old man"}],
        "dialogue": [
            {"panel": 1, "speaker": "rin", "line": "Red sky"},
            {"panel": 2, "speaker": "Tom", "line": "Yes."},
            {"panel": 2, "speaker": "rin", "line": "Go!"},
        ],
        "panels": [
            {"index": 1, "shot": "wide", "characters": ["rin"], "action": "Rin looks up", "scene_tag": "rin's pier", "props": ["red cup"]},
            {"index": 2, "shot": "close", "characters": ["tom"], "action": "nods", "light": "noon"},
            {"index": 3, "shot": "medium", "action": "waves"},
        ],
    }
)


def edited(patch=None, **options):
    return edit_script(SCRIPT, patch=json.dumps(patch) if patch is not None else "", **options)


def refused(patch, **options):
    with pytest.raises(ScriptError) as caught:
        edit_script(SCRIPT, patch=patch if isinstance(patch, str) else json.dumps(patch), **options)
    return str(caught.value)


# The table of RFC 7386, appendix A


@pytest.mark.parametrize(
    "target, patch, result",
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_of_the_rfc(target, patch, result):
    before = json.dumps(target)
    assert merge(target, patch) == result and json.dumps(target) == before


# Patches


def test_fields_change_and_the_rest_stays():
    script, report = edited({"title": "Sun", "panels": {"2": {"light": "dusk", "shot": "full"}}})
    wanted = SCRIPT.model_copy(deep=True)
    wanted.title, wanted.panels[1].light, wanted.panels[1].shot = "Sun", "dusk", "full"
    assert script == wanted
    assert report == ['info: patch: title set to "Sun"', "info: patch: panels.2: shot, light changed"]
    assert SCRIPT.title == "Rain"


def test_a_list_replaces_a_list():
    script, _ = edited({"dialogue": [], "panels": [{"index": 7, "action": "x"}]})
    assert [panel.index for panel in script.panels] == [7] and script.dialogue == []


def test_null_resets_a_field_and_removes_an_entry_with_its_dialogue():
    script, _ = edited({"panels": {"1": {"props": None}, "2": None}, "characters": {"Tom": None}})
    assert [panel.index for panel in script.panels] == [1, 3] and script.panels[0].props == []
    assert [row.line for row in script.dialogue] == ["Red sky"] and [person.id for person in script.characters] == ["rin"]


def test_entries_are_added():
    new = [{"panel": 1, "speaker": "tom", "line": "New"}, {"panel": 3, "line": "End"}]
    script, report = edited({"panels": {"+": {"action": "sunrise"}}, "dialogue": {"+": new}, "characters": {"+": {"id": "bo", "look": "dog"}}})
    assert [panel.index for panel in script.panels] == [1, 2, 3, 4] and script.panels[3].action == "sunrise"
    assert [row.line for row in script.dialogue] == ["Red sky", "New", "Yes.", "Go!", "End"]
    assert script.characters[2].id == "bo"
    assert "info: patch: dialogue: 3 rows before, 5 now; 2 of them new" in report


def test_rows_count_as_they_stand_also_beside_a_removed_panel():
    script, _ = edited({"panels": {"1": None}, "dialogue": {"3": {"line": "Stop!"}}})
    assert [row.line for row in script.dialogue] == ["Yes.", "Stop!"]


def test_a_panel_may_get_another_number():
    script, _ = edited({"panels": {"3": {"index": 9}}})
    assert [panel.index for panel in script.panels] == [1, 2, 9]


@pytest.mark.parametrize(
    "patch, words",
    [
        ("{", ["patch: not valid JSON at line 1, column 2"]),
        ("[1]", ["patch: an object", "a list was found"]),
        ('{"title": "a", "title": "b"}', ['"title" stands twice']),
        ('{"title": NaN}', ["NaN"]),
        ('{"title": "\\ud83d"}', ["half a surrogate pair"]),
        ('{"a":' * 5000 + "1" + "}" * 5000, ["nested too deeply"]),
        ({"panel": {}}, ["panel is not a field", "panels"]),
        ({"panels": {"2": {"shot": "close-up"}}}, ['panels.2.shot: "close-up" is not one of', "extreme_close"]),
        ({"panels": {"8": {}}}, ["panels.8: there is no such panel", "1, 2, 3", '"+"']),
        ({"panels": {"2": "x"}}, ["panels.2: an object of fields or null", "a text was found"]),
        ({"panels": {"1": {"index": 2}}}, ["two panels have the index 2"]),
        ({"panels": {"2": {"index": 8}}}, ["dialogue.2.panel: there is no panel 2", "1, 3, 8"]),
        ({"panels": {"1": {"index": 1.5}}}, ["panels.1.index", "a whole number is expected"]),
        ({"panels": {"1": {"index": True}}}, ["panels.1.index", "a whole number is expected"]),
        ({"panels": {"1": {"props": "cup"}}}, ["panels.1.props", "a list [...] is expected"]),
        ({"panels": {"1": {"note": {"a": 1}}}}, ["panels.1.note", "only a text or a number"]),
        ({"panels": {"1": None, "2": None, "3": None}}, ["no panel would be left"]),
        ({"panels": [1]}, ["panels.1", "an object {...} is expected"]),
        ({"panels": None}, ["no panel would be left"]),
        ({"dialogue": {"4": {}}}, ["dialogue.4: there is no such row", "has 3"]),
        ({"dialogue": {"1": {"panel": 7}}}, ["dialogue.1.panel: there is no panel 7", "1, 2, 3"]),
        ({"dialogue": {"1": {"line": 5}}}, ["dialogue.1.line", "a text in quotes is expected"]),
        ({"dialogue": {"+": "x"}}, ["dialogue.+", "an object of fields"]),
        ({"dialogue": "x"}, ["dialogue", "a list [...] is expected"]),
        ({"characters": {"bo": {}}}, ["characters.bo", "rin, tom"]),
        ({"characters": {"rin": {"look": "a"}, "Rin": {"look": "b"}}}, ["characters.Rin and characters.rin name the same entry"]),
        ({"characters": {"rin": {"look": ["a"]}}}, ["characters.rin.look", "a text in quotes"]),
        ({"reading_direction": "up"}, ["reading_direction", "ltr, rtl or vertical"]),
        ({"version": 2}, ["version", "Leave it out"]),
        ({"characters": {"tom": {"id": "rin"}}}, ["2 characters would have the id rin", "an id of its own"]),
        ({"characters": {"tom": {"id": "RIN"}}}, ["2 characters would have the id"]),
        ({"characters": {"+": {"id": "tom", "look": "dog"}}}, ["2 characters would have the id tom"]),
        ({"characters": {"tom": {"id": ""}}}, ["characters.2.id would be empty (it was tom)"]),
        ({"characters": [{"id": "a"}, {"id": "a"}]}, ["2 characters would have the id a"]),
        ({"x" * 5000: 1}, ["x" * 40]),
    ],
)
def test_a_wrong_patch_names_the_field(patch, words):
    message = refused(patch)
    assert message.startswith("patch: ") and len(message) < 400
    assert all(word in message for word in words), message


def test_a_patch_that_changes_nothing_says_so():
    assert edited({"title": "Rain"})[1] == ["warning: patch: it changes nothing"]
    assert edited({"version": 1})[1] == []
    assert edit_script(SCRIPT, patch=" \n", replace="\n \n") == (SCRIPT, [])


def test_own_keys_travel():
    script, _ = edited({"panels": {"1": {"lora": "rin_v2", "weight": 0.8}}})
    again = parse_script(script_json(script)).script
    assert again.panels[0].model_extra == {"lora": "rin_v2", "weight": 0.8}


def test_what_the_parser_would_change_is_changed_now_and_said():
    script, report = edited({"panels": {"1": {"not a name!": "x"}}})
    assert script.panels[0].model_extra == {} or report  # kept, or its loss is reported
    script, report = edited({"dialogue": {"1": {"speaker": "", "line": ""}}})
    assert len(script.dialogue) == 2 and any("an empty row is left out" in line for line in report)


@QUICK
@given(scripts(), st.integers(0, 2), st.sampled_from(["action", "light", "visual_prompt", "negative"]), texts)
def test_one_field_is_changed_and_nothing_else(value, place, field, text):
    before = parse_script(json.dumps(value)).script
    panel = before.panels[place % len(before.panels)]
    after, _ = edit_script(before, patch=json.dumps({"panels": {str(panel.index): {field: text}}}))
    wanted = before.model_copy(deep=True)
    setattr(wanted.panels[place % len(before.panels)], field, text)
    assert after == wanted or after == parse_script(script_json(wanted)).script
    assert parse_script(script_json(after)).script == after


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["1", "2", "9", "+", "rin", "index", "panel", "panels", "dialogue", "characters", "shot", "id", "title"]), inner, max_size=4),
    max_leaves=12,
)


@QUICK
@given(json_values)
def test_any_patch_gives_a_valid_script_or_the_documented_error(patch):
    try:
        script, report = edit_script(SCRIPT, patch=json.dumps(patch))
    except ScriptError as error:
        assert str(error).startswith("patch: ")
    else:
        assert parse_script(script_json(script)).script == script and all(isinstance(line, str) for line in report)


def test_an_id_that_panels_or_rows_still_have_is_a_warning():
    script, report = edited({"characters": {"rin": {"id": "zoe", "name": "Zoe"}}})
    assert script.characters[0].id == "zoe"
    lines = [line for line in report if line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("warning: patch: rin is no character any more, but stands in panels.1.characters, dialogue.1.speaker, dialogue.3.speaker;")
    gone = edited({"characters": {"tom": None}})[1]
    assert [line.split(",")[0] for line in gone if line.startswith("warning")] == ["warning: patch: tom is no character any more", "warning: patch: Tom is no character any more"]
    followed = edited({"characters": {"tom": {"id": "bo"}}, "panels": {"2": {"characters": ["bo"]}}})[1]
    assert not any(line.startswith("warning") for line in followed)  # the speaker is his name


def test_ids_that_stood_twice_before_do_not_stop_other_changes():
    twice = ComicScript.model_validate({"characters": [{"id": "a", "look": "x"}, {"id": "a", "look": "y"}], "panels": [{"action": "a"}]})
    assert edit_script(twice, patch='{"title": "T"}')[0].title == "T"


def test_a_byte_order_mark_in_front_is_no_text():
    script, _ = edit_script(SCRIPT, patch='\ufeff{"title": "Sun"}', replace="\ufeffred => blue")
    assert script.title == "Sun" and script.characters[0].look == "girl, blue hair"


# Find and replace


def test_pairs_are_read():
    text = 'a => b\n\n  c d=>  \n" e" => "f\\n"\n"say \\"x\\"" => y\n"g => h" => "=>"\n"a" and b => "c" or d\n'
    assert [(pair.old, pair.new) for pair in read_pairs(text)] == [
        ("a", "b"),
        ("c d", ""),
        (" e", "f\n"),
        ('say "x"', "y"),
        ("g => h", "=>"),
        ('"a" and b', '"c" or d'),
    ]
    assert read_pairs('"\\ud800" => b')[0] == Pair("?", "b", 1)


@pytest.mark.parametrize("text, words", [("a\nb => c", "line 1 has no =>"), ("a => b\n => c", "line 2: nothing stands before"), ('"" => b', "line 1: nothing")])
def test_a_wrong_pair_names_the_line(text, words):
    with pytest.raises(ScriptError, match=f"^replace: .*{words}"):
        read_pairs(text)


def test_texts_change_and_keys_ids_shots_and_numbers_do_not():
    script, report = edited(replace="red => blue\nwide => broad\nrin => lin\n1 => 2\naction => x")
    assert script.characters[0].look == "girl, blue hair" and script.panels[0].props == ["blue cup"]
    assert script.dialogue[0].line == "Red sky" and script.dialogue[0].speaker == "rin"
    assert script.panels[0].shot == "wide" and script.panels[0].characters == ["rin"] and script.panels[0].scene_tag == "rin's pier"
    assert [line.split(":")[0] for line in report] == ["info", "warning", "warning", "warning", "warning"]
    assert report[0].endswith('"red" => "blue": 2 changed') and "found nowhere in all texts" in report[1]


def test_case_words_and_scope():
    assert edited(replace="red => blue", match_case=False)[0].dialogue[0].line == "blue sky"
    assert edited(replace="look => stare", whole_words=True)[0].panels[0].action == "Rin looks up"
    assert edited(replace="red => blue\nRed => Blue", scope="words")[0].characters[0].look == "girl, red hair"
    pictures, report = edited(replace="Red => Blue", scope="pictures")
    assert pictures.dialogue[0].line == "Red sky" and "found nowhere in pictures" in report[0]


def test_ids_change_everywhere_when_asked():
    script, _ = edited(replace="rin => lin\nRin => Lin\ntom => bo", ids=True)
    assert [person.id for person in script.characters] == ["lin", "bo"] and script.characters[0].name == "Lin"
    assert [row.speaker for row in script.dialogue] == ["lin", "Tom", "lin"]
    assert script.panels[0].characters == ["lin"] and script.panels[0].scene_tag == "lin's pier"


@pytest.mark.parametrize("scope", ["all texts", "pictures", "words"])
def test_ids_change_in_a_chain(scope):
    script, _ = edited(replace="rin => zoe\nzoe => ann", ids=True, scope=scope)
    assert script.characters[0].id == "ann" and script.panels[0].characters == ["ann"]
    assert [row.speaker for row in script.dialogue] == ["ann", "Tom", "ann"]


@pytest.mark.parametrize("pair, words", [("tom => rin", "2 characters would have the id rin"), ("tom => ", "characters.2.id would be empty (it was tom)")])
def test_a_pair_that_would_mix_up_ids_is_refused(pair, words):
    with pytest.raises(ScriptError) as caught:
        edited(replace=pair, ids=True)
    assert str(caught.value).startswith("replace: ") and words in str(caught.value)


def test_a_name_that_lists_have_as_an_id_is_a_warning():
    script = SCRIPT.model_copy(deep=True)
    script.characters[0].name, script.panels[0].characters = "Kate", ["Kate"]
    _, report = edit_script(script, replace="Kate => Zoe")
    assert any(line.startswith("warning: replace: Kate is no character any more, but stands in panels.1.characters") for line in report)


def test_a_name_as_speaker_is_a_text_and_an_id_as_speaker_is_none():
    script, _ = edited(replace="Tom => Bo\nrin => lin")
    assert [row.speaker for row in script.dialogue] == ["rin", "Bo", "rin"]


def test_pairs_follow_each_other_and_new_texts_are_literal():
    script, _ = edited(replace="girl => \\1 $& (boy)\n(boy) => child")
    assert script.characters[0].look == "\\1 $& child, red hair"


def test_patch_first_then_replace():
    assert edited({"title": "red"}, replace="red => blue")[0].title == "blue"


def test_patterns_are_plain_text_and_cannot_hang():
    long = SCRIPT.model_copy(deep=True)
    long.panels[0].action = "a" * 100_000
    begin = time.process_time()
    script, report = edit_script(long, replace="(a+)+$ => x\n(a|a)*b => y\n.* => z", whole_words=True, match_case=False)
    assert time.process_time() - begin < 2 and all("found nowhere" in line for line in report) and script == long


def test_texts_cannot_grow_without_end():
    pairs = "\n".join(["a => " + "a" * 50] * 12)
    with pytest.raises(ScriptError, match=f"^replace: line .*beyond {MAX_CHARACTERS} characters"):
        edited({"title": "aaaa"}, replace=pairs)


def test_work_is_bounded():
    long = SCRIPT.model_copy(deep=True)
    long.panels[0].action = "a" * 1_000_000
    begin = time.process_time()
    with pytest.raises(ScriptError, match="^replace: 10 pairs are too many for a script of 1000"):
        edit_script(long, replace="\n".join(["a" * 60 + "b => c"] * 10), match_case=False)
    assert time.process_time() - begin < 2


def test_unknown_scope_is_named():
    with pytest.raises(ScriptError, match="scope: 'none'"):
        edited(replace="a => b", scope="none")


@QUICK
@given(scripts(), texts.filter(str.strip), texts, st.booleans(), st.booleans(), st.booleans())
def test_any_pair_gives_a_script_that_reads_back(value, old, new, words, case, ids):
    before = parse_script(json.dumps(value)).script
    line = f"{json.dumps(old)} => {json.dumps(new)}"
    try:
        after, report = edit_script(before, replace=line, whole_words=words, match_case=case, ids=ids)
    except ScriptError as error:
        assert ids and str(error).startswith("replace: ") and "id" in str(error)
        return
    assert parse_script(script_json(after)).script == after
    assert report and (after != before or "found nowhere" in report[0] or old == new or not case)
    assert [panel.shot for panel in after.panels] == [panel.shot for panel in before.panels]
