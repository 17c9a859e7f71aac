"""The comic workflow in the real front end: it runs at the press of a button, shows its result, and keeps what is typed."""

import json

import pytest

from comfy_server import PANELS, PICTURE, RANDOM_MODEL, ROOT
from page import ComfyPage, until
from tools.runner.client import run_error
from tools.runner.paths import WORK

CANVAS = ROOT / "example_workflows" / "comic_script.json"


@pytest.fixture
def page(chromium, server):
    server.client.upload_image(PICTURE)
    opened = ComfyPage(chromium, server.url)
    opened.load_file(CANVAS)
    return opened


def test_run_button_makes_the_comic(page, server):
    for name, field, value in (
        ("LoadImage", "image", PICTURE.name),
        ("A3BLoadModel", "checkpoint", RANDOM_MODEL.name),
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
