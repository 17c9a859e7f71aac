"""The nodes around a script in a real ComfyUI, without a model: lists into core nodes, edit, save, load, pick."""

import json

import pytest

from comfy_server import cached_nodes, finished, succeeded, witnessed
from tools.runner.client import PromptRejected, run_error
from tools.runner.workflow import Workflow

SCRIPT = {
    "title": "\u96e8\u591c Rain",
    "characters": [{"id": "mina", "name": "Mina", "look": "pilot, red scarf"}],
    "dialogue": [
        {"panel": 2, "speaker": "mina", "line": "\u4f60\u597d", "emotion_tag": "calm"},
        {"panel": 3, "speaker": "bolt", "line": "Beep", "emotion_tag": ""},
        {"panel": 3, "speaker": "mina", "line": "Go", "emotion_tag": ""},
        {"panel": 3, "speaker": "bolt", "line": "Now", "emotion_tag": ""},
    ],
    "panels": [
        {"index": 1, "shot": "wide", "action": "a plane lands", "scene_tag": "pier"},
        {"index": 2, "shot": "close", "characters": ["mina"], "visual_prompt": "Mina waves", "scene_tag": "pier"},
        {"index": 3, "shot": "medium", "action": "rain"},
    ],
}
TEXT = "Here you are:\n```json\n" + json.dumps(SCRIPT, ensure_ascii=False).replace("}]", "},]") + "\n```"


@pytest.fixture(scope="module")
def described(server):
    return server.client.object_info()


def defaults(described, node, **inputs):
    """A node with the defaults its description states, as the editor would queue it."""
    required = described[node]["input"]["required"]
    known = {name: entry[1]["default"] for name, entry in required.items() if len(entry) > 1 and "default" in entry[1]}
    return {"class_type": node, "inputs": {**known, **inputs}}


def slot(described, node, output):
    return described[node]["output_name"].index(output)


def with_witness(described, graph, **sources):
    """The graph with the witness node; sources: name=(key, output)."""
    links = {name: [key, slot(described, graph[key]["class_type"], output)] for name, (key, output) in sources.items()}
    witness = {"class_type": "A3BTestWitness", "inputs": {f"value_{n}": link for n, link in enumerate(links.values())}}
    return Workflow({**graph, "witness": witness}), dict(zip(links, range(len(links))))


def seen(server, described, graph, **sources):
    """What comes over each of the links in a run that succeeds; and the run's history entry."""
    workflow, slots = with_witness(described, graph, **sources)
    entry = succeeded(server, workflow)
    return witnessed(entry, slots), entry


def images(entry, node):
    return entry["outputs"][node]["images"]


def test_lists_drive_core_nodes_each_by_its_own_length(server, described):
    """U10, U12: one picture a panel, one run a spoken row."""
    parse = {name: slot(described, "A3BParsePanels", name) for name in ("width", "height", "people", "speakers")}
    graph = {
        "parse": defaults(described, "A3BParsePanels", text=TEXT, size_family="sd15", seed_per_scene=True),
        "blank": {
            "class_type": "EmptyImage",
            "inputs": {"width": ["parse", parse["width"]], "height": ["parse", parse["height"]], "batch_size": 1, "color": ["parse", parse["people"]]},
        },
        "pictures": {"class_type": "SaveImage", "inputs": {"images": ["blank", 0], "filename_prefix": "panel"}},
        "dot": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
        "voices": {"class_type": "SaveImage", "inputs": {"images": ["dot", 0], "filename_prefix": ["parse", parse["speakers"]]}},
    }
    names = ("lines", "line_panels", "emotions", "looks", "people", "seed", "cast", "report")
    values, entry = seen(server, described, graph, **{name: ("parse", name) for name in names})
    assert len(images(entry, "pictures")) == 3
    assert [image["filename"].split("_")[0] for image in images(entry, "voices")] == ["Mina", "bolt", "Mina", "bolt"]
    assert values["lines"] == ["\u4f60\u597d", "Beep", "Go", "Now"] and values["line_panels"] == [2, 3, 3, 3]
    assert values["emotions"] == ["calm", "", "", ""] and values["looks"] == ["", "pilot, red scarf", ""]
    assert values["people"] == [0, 1, 0] and values["seed"] == [1, 1, 3] and values["cast"] == ["Mina: pilot, red scarf"]
    assert "repair: " in values["report"][0]


def test_edit_save_load_and_pick(server, described):
    graph = {
        "edit": defaults(described, "A3BEditScript", script=TEXT, patch='{"panels": {"1": {"light": "red dusk"}}}', replace="red => blue"),
        "save": defaults(described, "A3BSaveScript", script=["edit", 0], filename_prefix="comic/%title%"),
        "load": {"class_type": "A3BLoadScript", "inputs": {"file": "linked below", "path": ["save", 1]}},
        "pick": defaults(described, "A3BPickPanel", script=["load", 0], number=2, base_seed=40),
        "parse": defaults(described, "A3BParsePanels", text=["load", 0], base_seed=40),
    }
    sources = {"edited": ("edit", "script"), "saved": ("save", "script"), "file": ("save", "file"), "loaded": ("load", "script")}
    sources |= {f"one_{name}": ("pick", name) for name in ("prompt", "seed", "width", "looks")}
    sources |= {f"all_{name}": ("parse", name) for name in ("prompt", "seed", "width", "looks")}
    values, _ = seen(server, described, graph, **sources)
    assert values["edited"] == values["saved"] == values["loaded"]
    script = json.loads(values["loaded"][0])
    assert script["version"] == 1 and script["panels"][0]["light"] == "blue dusk" and script["title"] == SCRIPT["title"]
    for name in ("prompt", "seed", "width", "looks"):
        assert values[f"one_{name}"] == values[f"all_{name}"][1:2]
    assert values["one_prompt"] == ["close-up, pilot, blue scarf waves"]
    name = values["file"][0].removesuffix(" [output]")
    path = server.work / "output" / name
    assert path.read_text(encoding="utf-8") == values["saved"][0]
    assert "\n@Mina\n(calm)\n\u4f60\u597d\n" in path.with_suffix(".fountain").read_text(encoding="utf-8")


def test_a_listed_file_runs_again_only_when_it_is_edited(server, described):
    folder = server.work / "input" / "pages"
    folder.mkdir(exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(SCRIPT), encoding="utf-8")
    assert "pages/mine.json" in server.client.object_info("A3BLoadScript")["A3BLoadScript"]["input"]["required"]["file"][0]
    graph = {"load": {"class_type": "A3BLoadScript", "inputs": {"file": "pages\\mine.json"}}}
    first, _ = seen(server, described, graph, title=("load", "title"), count=("load", "count"))
    assert first == {"title": [SCRIPT["title"]], "count": [3]}
    again, entry = seen(server, described, graph, title=("load", "title"), count=("load", "count"))
    assert "load" in cached_nodes(entry)
    (folder / "mine.json").write_text(json.dumps({**SCRIPT, "title": "New"}), encoding="utf-8")
    edited, entry = seen(server, described, graph, title=("load", "title"), count=("load", "count"))
    assert "load" not in cached_nodes(entry) and edited["title"] == ["New"]


@pytest.mark.parametrize("inputs", [{"file": "gone.json"}, {"file": "gone.json", "path": "../server.log"}, {"file": "../server.log"}])
def test_files_that_are_not_there_or_outside_are_refused_before_the_run(server, described, inputs):
    # the ComfyUI of 2024 checks only what hangs on required inputs
    graph = {"load": {"class_type": "A3BLoadScript", "inputs": inputs}, "parse": defaults(described, "A3BParsePanels", text=["load", 0])}
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(graph)
    assert inputs.get("path", inputs["file"]) in caught.value.sentence()


@pytest.mark.parametrize(
    "node, inputs, words",
    [
        ("A3BPickPanel", {"script": TEXT, "number": 9}, "number: there is no panel 9; the script has 3 panels, 1 to 3"),
        ("A3BEditScript", {"script": TEXT, "patch": '{"panels": {"1": {"shot": "far"}}}'}, 'patch: panels.1.shot: "far" is not one of'),
        ("A3BSaveScript", {"script": TEXT, "filename_prefix": "../../x"}, "filename_prefix: "),
    ],
)
def test_errors_name_the_widget(server, described, node, inputs, words):
    workflow, _ = with_witness(described, {"it": defaults(described, node, **inputs)}, first=("it", described[node]["output_name"][0]))
    message = run_error(finished(server, workflow))
    assert "ScriptError" in message and words in message and "Traceback" not in message
