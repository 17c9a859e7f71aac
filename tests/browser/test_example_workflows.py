"""Every canvas file in the real front end: nothing is missing, red or hidden, and it queues what the API form says."""

import json

import pytest

from comfy_server import NODES, PICTURE, ROOT
from page import ComfyPage
from tools.runner.paths import WORK
from tools.runner.workflow import Workflow

FOLDER = ROOT / "example_workflows"
FILES = sorted(path for path in FOLDER.glob("*.json") if not path.name.endswith(".api.json"))
TITLE_BAR = 30
# A file that only a user has; the front end marks its node until one is chosen.
TO_CHOOSE = {"CheckpointLoaderSimple"}


@pytest.fixture(scope="module")
def browser(chromium, server):
    """One page for all files, which are opened one after the other as a person does."""
    server.client.upload_image(PICTURE, "example.png")  # the name in the files is that of ComfyUI's own example
    return ComfyPage(chromium, server.url)


@pytest.fixture(scope="module")
def described(server):
    return server.client.object_info()


def overlapping(nodes):
    """Pairs of titles whose boxes, title bars included, share pixels."""
    found = []
    for number, one in enumerate(nodes):
        for other in nodes[number + 1 :]:
            beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            above = one["y"] + one["height"] + TITLE_BAR <= other["y"] or other["y"] + other["height"] + TITLE_BAR <= one["y"]
            if not beside and not above:
                found.append((one["title"], other["title"]))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_canvas_file_opens_whole(browser, server, described, file):
    browser.load_file(file)
    canvas = json.loads(file.read_text(encoding="utf-8"))
    nodes = browser.nodes()
    assert [node["title"] for node in nodes if not node["known"]] == []
    assert {node["type"] for node in nodes if node["wrong"]} <= TO_CHOOSE
    assert {node["id"]: node["title"] for node in nodes} == {str(node["id"]): node["title"] for node in canvas["nodes"]}
    assert overlapping(nodes) == []
    for node in nodes:
        if node["type"] in NODES:
            node_input = described[node["type"]]["input"]
            fields = {**node_input.get("required", {}), **node_input.get("optional", {})}
            assert set(fields) <= set(node["widgets"]) | set(node["inputs"]), node["title"]
            assert node["outputs"] == described[node["type"]]["output_name"]

    kept = {node["id"]: node for node in canvas["nodes"]}
    wanted = [
        (str(source), kept[source]["outputs"][out]["name"], str(target), kept[target]["inputs"][into]["name"])
        for _, source, out, target, into, _ in canvas["links"]
    ]
    assert sorted((link["from"], link["output"], link["to"], link["input"]) for link in browser.links()) == sorted(wanted)
    assert browser.errors() == []
    browser.screenshot(WORK / "results" / f"{file.stem}-{server.host.name}.png")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_canvas_file_queues_its_api_form(browser, file):
    """U13: every widget value lands in its own input, every link in its own slot."""
    browser.load_file(file)
    stem, *language = file.stem.split(".")
    made, kept = browser.as_api(), Workflow.load(FOLDER / f"{stem}.api.json").graph
    assert set(made) == set(kept)
    for key, node in kept.items():
        there = made[key]["inputs"]
        assert made[key]["class_type"] == node["class_type"] and set(there) - set(node["inputs"]) <= {"upload"}
        differing = {name for name, value in node["inputs"].items() if there.get(name) != value}
        assert differing <= ({"text", "language", "patch"} if language else set()), (node["class_type"], differing)
