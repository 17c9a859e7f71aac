"""Pick Panel, Edit Script, Save Script and Load Script, as the editor runs them, and the lists of JSON Parse Panels."""

import json
from pathlib import Path

import pytest
from fake_comfy import comfy, part  # noqa: F401
from node_runs import NODES, errors, parse, run, widgets
from test_script_causes import CAUSES, REFUSALS

SCRIPT = {
    "title": "Rain: one",
    "characters": [{"id": "mina", "name": "Mina", "look": "pilot, red scarf"}],
    "dialogue": [{"panel": 2, "speaker": "mina", "line": "Hello", "emotion_tag": "calm"}],
    "panels": [
        {"index": 1, "shot": "wide", "action": "a plane lands", "scene_tag": "pier"},
        {"index": 2, "shot": "close", "characters": ["mina"], "visual_prompt": "Mina waves", "scene_tag": "pier"},
    ],
}
TEXT = json.dumps(SCRIPT)
CUT = TEXT[: TEXT.index("waves")]
NEW = ("A3BPickPanel", "A3BEditScript", "A3BSaveScript", "A3BLoadScript")


def outputs(node_id, values):
    values = values["result"] if isinstance(values, dict) else values
    return dict(zip(NODES[node_id].RETURN_NAMES, values))


def out(node_id, **inputs):
    return outputs(node_id, run(node_id, **{**widgets(node_id), **inputs}))


def parsed(**inputs):
    return outputs("A3BParsePanels", parse(**inputs))


# JSON Parse Panels


def test_parse_hands_out_spoken_rows_looks_and_cast():
    values = parsed(text=TEXT)
    spoken = {name: values[name] for name in ("speakers", "lines", "emotions", "line_panels")}
    assert spoken == {"speakers": ["Mina"], "lines": ["Hello"], "emotions": ["calm"], "line_panels": [2]}
    assert values["looks"] == ["", "pilot, red scarf"] and values["people"] == [0, 1]
    assert values["cast"] == "Mina: pilot, red scarf"


def test_parse_gives_one_empty_row_when_nobody_speaks():
    values = parsed(text='{"panels":[{"index":3,"shot":"wide","action":"rain"}]}')
    assert [values[name] for name in ("speakers", "lines", "emotions", "line_panels")] == [[""], [""], [""], [3]]


def test_seeds_follow_the_scene_when_asked():
    assert parsed(text=TEXT, base_seed=10)["seed"] == [11, 12]
    assert parsed(text=TEXT, base_seed=10, seed_per_scene=True)["seed"] == [11, 11]


# Messages: what a text lacks, and advice that the node at hand can follow

# Words for widgets of Generate and of JSON Parse Panels.
FOREIGN = ("max_new_tokens", "thinking budget", "thinking off", "format widget", "on_error", "model card", "system text", "Raise", "stop string, or look")
FAULTY = [text for texts in CAUSES.values() for text in texts] + REFUSALS[:3] + [CUT, '{"panels":[{"index":3,"shot":"wide"}]}', '{"dialogue":[{"speaker":"Rin","line":"hi"}]}']


@pytest.mark.parametrize("node_id, options", [("A3BPickPanel", {}), ("A3BPickPanel", {"when_absent": "last"}), ("A3BEditScript", {}), ("A3BSaveScript", {}), ("A3BLoadScript", {"file": "a.json"})])
def test_no_message_names_a_widget_of_another_node(node_id, options, comfy):
    folder = comfy.models_dir.parent / "input"
    folder.mkdir()
    for text in FAULTY:
        if node_id == "A3BLoadScript":
            (folder / "a.json").write_text(text, encoding="utf-8")
        inputs = options if node_id == "A3BLoadScript" else {"script": text, **options}
        if text == CUT and options.get("when_absent") == "last":
            continue  # its first panel is whole
        with pytest.raises(errors.ScriptError) as caught:
            out(node_id, **inputs)
        message = str(caught.value)
        head = message.partition(" The text begins: ")[0]
        assert not any(word in head for word in FOREIGN), message
        assert message.startswith("file: a.json: " if node_id == "A3BLoadScript" else "script: ")
        assert (" set when_absent to" in message) == (node_id == "A3BPickPanel" and bool(text.strip("\ufeff \n\t\u3000")))


def test_a_report_names_no_widget_of_another_node():
    for text in FAULTY:
        report = out("A3BPickPanel", script=text, when_absent="placeholder")["report"]
        heads = [line.partition(" The text begins: ")[0] for line in report.splitlines()]
        assert not any(word in head for word in FOREIGN for head in heads), report


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "In Generate: if thinking was on"),
        ("<think>", "In Generate: raise max_new_tokens"),
        (CUT, "In Generate: raise max_new_tokens or ask for fewer panels. To go on, set on_error to keep or placeholder."),
        ("What style do you want?", "In Generate: answer its question"),
        ('{"error":{"message":"rate limit"}}', "Mend that first. To go on, set on_error to placeholder."),
        ('{"panels":[{"index":1,"shot":"wide","action":"a"},{"index":2}]}', "text: Panel 2 has nothing to draw"),
    ],
)
def test_parse_says_where_its_advice_belongs(text, words):
    with pytest.raises(errors.ScriptError) as caught:
        parse(text=text)
    assert words in str(caught.value)
    with pytest.raises(errors.ScriptError) as caught:
        parse(text="", on_error="keep")
    assert "on_error" not in str(caught.value)


def test_a_panel_with_nothing_to_draw_is_told_by_every_node(comfy):
    text = '{"panels":[{"index":1,"shot":"wide","action":"a"},{"index":2,"caption":"Then."}]}'
    line = "warning: panels: nothing to draw in panel 2"
    assert line in out("A3BEditScript", script=text)["report"]
    assert line not in out("A3BEditScript", script=text, patch='{"panels": {"2": {"action": "b"}}}')["report"]
    saved = out("A3BSaveScript", script=text, filename_prefix="page")
    assert line in outputs("A3BLoadScript", run("A3BLoadScript", file=saved["file"]))["report"]


# Pick Panel


@pytest.mark.parametrize("number", [1, 2])
def test_pick_is_one_item_of_the_lists(number):
    style = {"style_prefix": "manga", "style_suffix": "ink", "base_seed": 5, "size_family": "sd15", "seed_per_scene": True}
    lists, picked = parsed(text=TEXT, **style), out("A3BPickPanel", script=TEXT, number=number, **style)
    shared = set(lists) & set(picked) - {"count", "report", "speakers"}
    assert len(shared) == 10
    assert {name: picked[name] for name in shared} == {name: lists[name][number - 1] for name in shared}
    assert (picked["count"], picked["report"]) == (lists["count"], lists["report"])
    assert picked["speakers"] == ("Mina" if number == 2 else "")


def test_pick_reads_the_script_output_of_parse():
    script = parsed(text=TEXT)["script"]
    assert out("A3BPickPanel", script=script, number=2)["prompt"] == "close-up, pilot, red scarf waves"


@pytest.mark.parametrize("text, number, words", [(TEXT, 7, "^number: there is no panel 7; the script has 2 panels, 1 to 2"), (CUT, 1, "^script: "), ("Sorry", 1, "^script: ")])
def test_pick_says_what_is_wrong(text, number, words):
    with pytest.raises(errors.ScriptError, match=words):
        out("A3BPickPanel", script=text, number=number)


def test_pick_shows_what_it_took():
    shown = run("A3BPickPanel", **{**widgets("A3BPickPanel"), "script": TEXT, "number": 2})["ui"]["text"][0]
    assert shown.startswith("Panel 2 of 2: close-up")


# Edit Script


def test_edit_patches_then_replaces():
    values = out("A3BEditScript", script=TEXT, patch='{"panels": {"1": {"light": "red dusk"}}}', replace="red => blue\nzzz => y")
    script = json.loads(values["script"])
    assert script["panels"][0]["light"] == "blue dusk" and script["characters"][0]["look"] == "pilot, blue scarf"
    lines = values["report"].splitlines()
    assert "info: patch: panels.1: light changed" in lines and 'info: replace: line 1: "red" => "blue": 2 changed' in lines
    assert lines[-1] == 'warning: replace: line 2: "zzz" => "y": found nowhere in all texts'
    assert parsed(text=values["script"])["script"] == values["script"]


def test_edit_without_changes_gives_the_script_back():
    script = parsed(text=TEXT)["script"]
    assert out("A3BEditScript", script=script)["script"] == script


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"patch": '{"panels": {"1": {"shot": "far"}}}'}, '^patch: panels.1.shot: "far" is not one of'),
        ({"replace": "red"}, "^replace: line 1 has no =>"),
        ({"script": CUT}, "^script: "),
        ({"script": ""}, "^script: "),
        ({"scope": "none"}, "^scope: "),
    ],
)
def test_edit_says_what_is_wrong(inputs, words):
    with pytest.raises(errors.A3BError, match=words):
        out("A3BEditScript", **{"script": TEXT, **inputs})


# Save Script and Load Script


def test_a_saved_script_loads_unchanged(comfy):
    script = parsed(text=TEXT)["script"]
    saved = out("A3BSaveScript", script=script, filename_prefix="comic/%title%")
    assert saved["script"] == script and saved["file"] == "comic/Rain_ one_00001_.json [output]"
    path, readable = Path(saved["json_path"]), Path(saved["text_path"])
    assert path.read_text(encoding="utf-8") == script and path.is_relative_to(comfy.models_dir.parent / "output")
    assert ".PANEL 2 - CLOSE-UP" in readable.read_text(encoding="utf-8")
    for inputs in ({"file": saved["file"]}, {"file": "whatever.json", "path": saved["file"]}):
        loaded = outputs("A3BLoadScript", run("A3BLoadScript", **inputs))
        assert loaded["script"] == script and (loaded["title"], loaded["count"]) == ("Rain: one", 2)
    again = out("A3BSaveScript", script=script, filename_prefix="comic/%title%")
    assert again["file"] == "comic/Rain_ one_00002_.json [output]" and path.read_text(encoding="utf-8") == script


def test_save_shows_both_names(comfy):
    shown = run("A3BSaveScript", script=TEXT, filename_prefix="page")["ui"]["text"][0]
    assert shown.splitlines() == ["page_00001_.json", "page_00001_.fountain"] and NODES["A3BSaveScript"].OUTPUT_NODE


@pytest.mark.parametrize("inputs, words", [({"filename_prefix": "../x"}, "^filename_prefix: "), ({"script": CUT}, "^script: ")])
def test_save_refuses_and_writes_nothing(comfy, inputs, words):
    with pytest.raises(errors.ScriptError, match=words):
        out("A3BSaveScript", **{"script": TEXT, **inputs})
    assert not (comfy.models_dir.parent / "output").exists() and not list(comfy.models_dir.parent.rglob("*.json"))


def test_load_lists_files_as_they_come(comfy):
    files = NODES["A3BLoadScript"].INPUT_TYPES
    assert files()["required"]["file"][0] == ["(no script found)"]
    out("A3BSaveScript", script=TEXT, filename_prefix="page")
    assert files()["required"]["file"][0] == ["page_00001_.json [output]"]


def test_load_checks_before_the_run(comfy):
    check = NODES["A3BLoadScript"].VALIDATE_INPUTS
    out("A3BSaveScript", script=TEXT, filename_prefix="comic/page")
    name = "comic/page_00001_.json [output]"
    assert check(file=name) is True and check(file=name.replace("/", "\\")) is True
    assert check(file="gone.json", path=name) is True  # the path counts
    assert check(file=None, path="") is True and check(file="gone.json", path=None) is True  # links
    assert check(file="gone.json").startswith("file: 'gone.json' was not found")
    assert check(file=name, path="../x.json").startswith("path: '../x.json' is not a name below")
    assert "Save a script first" in check(file="(no script found)")


def test_load_takes_prompts_of_an_api_that_leave_something_out(comfy):
    check, changed = NODES["A3BLoadScript"].VALIDATE_INPUTS, NODES["A3BLoadScript"].IS_CHANGED
    name = out("A3BSaveScript", script=TEXT)["file"]
    assert check(path=name) is True and check(path="../x.json").startswith("path: ")
    assert check(file=name, path="None") is True  # core's text of a null
    assert changed(path=name) == changed(file=name, path="None") == changed(file=name)
    assert outputs("A3BLoadScript", run("A3BLoadScript", file=name, path="None"))["count"] == 2


def test_load_runs_again_when_the_file_is_edited(comfy):
    saved = out("A3BSaveScript", script=TEXT, filename_prefix="page")
    changed = NODES["A3BLoadScript"].IS_CHANGED
    first = changed(file=saved["file"])
    assert changed(file="gone.json", path=saved["file"]) == first == changed(file=saved["file"], path="")
    path = Path(saved["json_path"])
    path.write_text(path.read_text(encoding="utf-8").replace("plane", "kite!"), encoding="utf-8")
    assert changed(file=saved["file"]) != first
    assert changed(file=saved["file"], path=None) == "linked" and changed(file="gone.json") == "not found"


@pytest.mark.parametrize("text, words", [("I'm sorry.", "^file: "), (CUT, "^file: "), (b"\xff\x00\xd8", "^file: .*is not UTF-8")])
def test_load_names_the_file_that_is_no_script(comfy, text, words):
    folder = comfy.models_dir.parent / "input"
    folder.mkdir()
    (folder / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    with pytest.raises(errors.ScriptError, match=words) as caught:
        run("A3BLoadScript", file="a.json")
    assert "a.json" in str(caught.value)


def test_load_reports_what_it_repaired(comfy):
    folder = comfy.models_dir.parent / "input"
    folder.mkdir()
    (folder / "a.json").write_text(TEXT.replace("}]", "},]"), encoding="utf-8")
    loaded = outputs("A3BLoadScript", run("A3BLoadScript", file="a.json"))
    assert "repair: " in loaded["report"] and loaded["count"] == 2


@pytest.mark.parametrize("node_id", NEW)
def test_values_have_the_types_their_sockets_promise(node_id, comfy):
    file = out("A3BSaveScript", script=TEXT)["file"]
    inputs = {"file": file} if node_id == "A3BLoadScript" else {"script": TEXT}
    values = run(node_id, **{**widgets(node_id), **inputs})["result"]
    assert NODES[node_id].OUTPUT_IS_LIST == (False,) * len(values)
    assert [type(value) for value in values] == [{"STRING": str, "INT": int}[kind] for kind in NODES[node_id].RETURN_TYPES]


def test_the_folders_are_those_of_comfyui(comfy):
    host = part("nodes.host")
    assert host.output_folder() == comfy.models_dir.parent / "output"
    assert list(host.script_folders()) == ["input", "output"] and host.script_folders()["input"] == comfy.models_dir.parent / "input"
