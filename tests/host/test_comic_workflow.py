"""The example workflow from upload to images, and what a second queue run costs."""

import json
import time

from comfy_server import (
    PANELS,
    cached_nodes,
    comic_workflow,
    loads,
    saved_images,
    shown_text,
    succeeded,
    text_workflow,
    watch,
    witnessed,
)
from tools.runner.workflow import Workflow

LISTS = {"prompt": 0, "negative": 1, "caption": 2, "dialogue": 3, "seed": 4, "width": 5, "height": 6, "index": 7}
SINGLES = {"count": 8, "script": 9, "report": 10, "joined": 11}


def test_story_and_picture_become_a_script_and_images(server):
    workflow = comic_workflow(server, seed=11)
    entry = succeeded(server, workflow)
    script = json.loads(shown_text(entry, workflow, "A3BGenerate"))
    assert [panel["index"] for panel in script["panels"]] == list(range(1, PANELS + 1))
    images = saved_images(entry)
    assert len(images) % PANELS == 0 and len(images) >= PANELS, images
    for image in images:
        assert server.client.view(image)[:4] == b"\x89PNG"
    kept, readable = shown_text(entry, workflow, "A3BSaveScript").splitlines()
    assert json.loads((server.work / "output" / kept).read_text(encoding="utf-8"))["dialogue"] == script["dialogue"]
    assert (server.work / "output" / readable).is_file()


def test_lists_have_one_length(server):
    """U12: blanks where a panel has no dialogue or caption, never a shorter list."""
    workflow = watch(comic_workflow(server, seed=12), "A3BParsePanels", {**LISTS, **SINGLES})
    values = witnessed(succeeded(server, workflow), {**LISTS, **SINGLES})
    assert {name: len(values[name]) for name in LISTS} == dict.fromkeys(LISTS, PANELS)
    assert values["index"] == [1, 2, 3] and values["count"] == [PANELS]
    assert all(width % 8 == 0 and height % 8 == 0 for width, height in zip(values["width"], values["height"]))
    assert all(
        isinstance(value, str) for name in ("prompt", "negative", "caption", "dialogue") for value in values[name]
    )
    assert len(json.loads(values["script"][0])["panels"]) == PANELS


def test_a_new_seed_does_not_load_again(server):
    workflow = text_workflow(server, seed=1)
    first = shown_text(succeeded(server, workflow), workflow, "A3BGenerate")
    before = loads(server)
    texts = {first}
    for seed in (2, 3, 4):
        entry = succeeded(server, workflow.set("A3BGenerate", seed=seed))
        assert workflow.node("A3BGenerate") not in cached_nodes(entry)
        texts.add(shown_text(entry, workflow, "A3BGenerate"))
    assert before >= 1, "the line that tells of a load is missing from the log"
    assert loads(server) == before
    assert len(texts) == 4


def test_the_same_seed_gives_the_same_text(server):
    """Also after the cache is gone."""
    workflow = text_workflow(server, seed=77)
    first = shown_text(succeeded(server, workflow), workflow, "A3BGenerate")
    release(server)
    again = succeeded(server, workflow)
    assert workflow.node("A3BGenerate") not in cached_nodes(again)
    assert shown_text(again, workflow, "A3BGenerate") == first


def test_an_identical_run_is_cached(server):
    """U04"""
    workflow = comic_workflow(server, seed=13)
    succeeded(server, workflow)
    begin = time.monotonic()
    entry = succeeded(server, workflow)
    assert {workflow.node("A3BGenerate"), workflow.node("A3BParsePanels")} <= cached_nodes(entry)
    assert time.monotonic() - begin < 2


def test_a_workflow_without_the_model_in_between_does_not_load_again(server):
    """ComfyUI forgets the loader's output and runs the node anew; the engine behind it is the same."""
    workflow = text_workflow(server, seed=41)
    succeeded(server, workflow)
    before = loads(server)
    between = Workflow(
        {
            "dot": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
            "save": {"class_type": "SaveImage", "inputs": {"images": ["dot", 0], "filename_prefix": "between"}},
        }
    )
    succeeded(server, between)
    entry = succeeded(server, workflow.set("A3BGenerate", seed=42))
    assert workflow.node("A3BLoadModel") not in cached_nodes(entry), "the node was to run again"
    assert loads(server) == before


def test_two_loader_nodes_share_one_engine(server):
    workflow = text_workflow(server, seed=21)
    succeeded(server, workflow)
    before = loads(server)
    workflow.set("A3BGenerate", seed=22)
    for key, node in text_workflow(server, seed=23).graph.items():
        inputs = {
            name: ["twin_" + value[0], value[1]] if isinstance(value, list) else value
            for name, value in node["inputs"].items()
        }
        workflow.graph["twin_" + key] = {**node, "inputs": inputs}
    entry = succeeded(server, workflow)
    assert len(entry["outputs"]) == 2
    assert loads(server) == before


def release(server, **flags):
    """Press an unload button and wait until ComfyUI has acted on it (it does when its queue is idle)."""
    server.client.free(**flags)
    time.sleep(1.5)


def test_free_memory_and_queue_once_more(server):
    workflow = text_workflow(server, seed=31)
    succeeded(server, workflow)
    before = loads(server)
    release(server, unload_models=True, free_memory=True)
    entry = succeeded(server, workflow)
    assert cached_nodes(entry) == set()
    assert loads(server) == before + 1


def test_a_cached_loader_brings_the_model_back(server):
    workflow = text_workflow(server, seed=41)
    succeeded(server, workflow)
    before = loads(server)
    release(server, unload_models=True, free_memory=False)
    entry = succeeded(server, workflow.set("A3BGenerate", seed=42))
    assert workflow.node("A3BLoadModel") in cached_nodes(entry)
    assert loads(server) == before + 1
