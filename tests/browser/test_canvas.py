"""The canvas workflow in the real front end: it opens whole, runs at the press of a button, and shows its result."""

import json

import pytest

from comfy_server import DEMO_MODEL, NODES, PANELS, PICTURE, ROOT
from page import ComfyPage, until
from tools.runner.client import run_error
from tools.runner.paths import WORK
from tools.runner.workflow import Workflow

CANVAS = ROOT / "example_workflows" / "comic_script.json"
CHANGED = {("LoadImage", "image"), ("LoadImage", "upload"), ("A3BLoadModel", "checkpoint"), ("A3BGenerate", "seed")}


@pytest.fixture
def page(chromium, server):
    server.client.upload_image(PICTURE)
    opened = ComfyPage(chromium, server.url)
    opened.load_file(CANVAS)
    return opened


def test_five_nodes_show_their_widgets(page, server):
    nodes = {node["type"]: node for node in page.nodes()}
    described = server.client.object_info()
    for name in NODES:
        assert name in nodes and nodes[name]["known"], name
        assert nodes[name]["width"] > 150 and nodes[name]["height"] > 40
        fields = {**described[name]["input"].get("required", {}), **described[name]["input"].get("optional", {})}
        assert set(fields) <= set(nodes[name]["widgets"]) | set(nodes[name]["inputs"]), name
        assert nodes[name]["outputs"] == described[name]["output_name"]
    assert all(node["known"] for node in nodes.values()), [name for name, node in nodes.items() if not node["known"]]
    assert page.errors() == []
    page.screenshot(WORK / "results" / f"canvas-{server.host.name}.png")


def test_canvas_and_api_forms_are_one_workflow(page):
    """U13: every widget value lands in its own input."""
    made = {node["class_type"]: node["inputs"] for node in page.as_api().values()}
    kept = Workflow.load()
    for node in kept.graph.values():
        name = node["class_type"]
        for field, value in node["inputs"].items():
            if (name, field) not in CHANGED and not isinstance(value, list):
                assert made[name][field] == value, (name, field)
    assert len(page.as_api()) == len(kept.graph)


def test_run_button_makes_the_comic(page, server):
    for name, field, value in (
        ("LoadImage", "image", PICTURE.name),
        ("A3BLoadModel", "checkpoint", DEMO_MODEL.name),
        ("A3BGenerate", "format", "short comic script"),
        ("A3BGenerate", "panels", PANELS),
        ("A3BGenerate", "rounds", 1),
        ("A3BGenerate", "seed", 91),
        ("A3BParsePanels", "panel_count", PANELS),
    ):
        page.set_widget(name, field, value)
    before = set(server.client.get("/history"))
    page.press_run()
    new = until(lambda: set(server.client.get("/history")) - before, 300, "the run ends")
    entry = server.client.history(new.pop())
    assert run_error(entry) == ""
    until(lambda: any(node["pictures"] == PANELS for node in page.nodes()), 30, "the pictures appear on a node")
    page.screenshot(WORK / "results" / f"result-{server.host.name}.png")
    assert page.errors() == []


def test_typed_braces_and_comments_survive(page):
    """U06, U08: the front end takes {a|b} and comments out of text widgets unless they forbid it."""
    text, system = "see https://a.test/x /* keep me */ {one|two}", 'Return {"panels":[]} // always'
    page.set_widget("A3BBuildPrompt", "text", text)
    page.set_widget("A3BBuildPrompt", "system", system)
    made = next(node["inputs"] for node in page.as_api().values() if node["class_type"] == "A3BBuildPrompt")
    assert (made["text"], made["system"]) == (text, system)


def test_saved_workflow_opens_again_unchanged(page, tmp_path):
    """U13: save, reload, and every value is where it was."""
    page.set_widget("A3BGenerate", "max_new_tokens", 777)
    page.set_widget("A3BParsePanels", "base_seed", 2**40)
    first = page.as_api()
    saved = page.driver.execute_script("return JSON.stringify(app.graph.serialize())")
    copy = tmp_path / "saved.json"
    copy.write_text(json.dumps(json.loads(saved)), encoding="utf-8")
    page.load_file(copy)
    assert page.as_api() == first
