"""Driving a real ComfyUI in a test: start it with the pack and the random checkpoint, run workflows, count loads."""

import json
import re
import shutil
import uuid

from hosts import ROOT
from tools.runner.client import run_error
from tools.runner.paths import ASSETS, PACK_NAME, RANDOM_MODEL
from tools.runner.random_model import ensure_random_model
from tools.runner.server import ComfyServer
from tools.runner.workflow import Workflow

WITNESS_PACK = ROOT / "tests" / "host" / "witness_pack"
NESTED_NAME = "Qwen \u6f2b\u753b"  # a folder with a space and Chinese characters
PICTURE = ASSETS / "demo_picture.en.png"
STORY = "Mina and Bolt look for the lighthouse keeper."
NODES = ("A3BLoadModel", "A3BEncodeImage", "A3BBuildPrompt", "A3BGenerate", "A3BParsePanels")
NODES += ("A3BPickPanel", "A3BEditScript", "A3BSaveScript", "A3BLoadScript")
PANELS = 3
# For a browser: not the first visit, so no tour and no template picker lie over the canvas.
CANVAS_SETTINGS = json.dumps({"Comfy.TutorialCompleted": True})
LOADED_LINE = re.compile(r"\bLoaded .*" + re.escape(RANDOM_MODEL.name))


def make_server(host, work, **environment) -> ComfyServer:
    """A server with the pack, the witness node and the random checkpoint, also inside a folder of another root."""
    model = ensure_random_model(host.python)
    nested = work / "checkpoints" / NESTED_NAME
    shutil.copytree(model, nested / model.name, dirs_exist_ok=True)  # one folder, linked twice, is listed once
    return ComfyServer(
        host,
        work,
        packs={PACK_NAME: ROOT, "a3b-test-witness": WITNESS_PACK},
        models=[model, nested],
        environment=environment,
    )


def comic_workflow(server, **generate) -> Workflow:
    """The example workflow on an uploaded picture, small enough for a test."""
    workflow = Workflow.load()
    workflow.set("LoadImage", image=server.client.upload_image(PICTURE))
    workflow.set("A3BLoadModel", checkpoint=RANDOM_MODEL.name)
    workflow.set("A3BBuildPrompt", text=STORY + " [[IMG]]")
    workflow.set("A3BGenerate", **{"format": "short comic script", "panels": PANELS, "rounds": 1, **generate})
    workflow.set("A3BParsePanels", panel_count=PANELS)
    return workflow


def example_workflow(server, name: str, **generate) -> Workflow:
    """An example workflow by its name, on the random checkpoint and an uploaded picture, with short answers."""
    workflow = Workflow.load(ROOT / "example_workflows" / f"{name}.api.json")
    wanted = {
        "A3BLoadModel": {"checkpoint": RANDOM_MODEL.name},
        "LoadImage": {"image": server.client.upload_image(PICTURE)},
        "A3BGenerate": {"format": "short comic script", "panels": PANELS, "rounds": 1, **generate},
        "A3BParsePanels": {"panel_count": PANELS},
    }
    for node in workflow.graph.values():
        node["inputs"].update(wanted.get(node["class_type"], {}))
    return workflow


def text_workflow(server, regex: str = "[a-z ]{40}", text: str = STORY, **generate) -> Workflow:
    """Loader, prompt and Generate alone, with a regex that fixes the answer's length."""
    workflow = comic_workflow(server, format="regex", regex=regex, **generate)
    inputs = workflow.inputs("A3BBuildPrompt")
    workflow.graph = {
        workflow.node(name): workflow.graph[workflow.node(name)]
        for name in ("A3BLoadModel", "A3BBuildPrompt", "A3BGenerate")
    }
    inputs.pop("images", None)
    inputs["text"] = text
    return workflow


def finished(server, workflow: Workflow, timeout: float = 300) -> dict:
    """Queue and wait; the history entry, whatever the run's end."""
    return server.client.wait(server.client.queue(workflow.graph, uuid.uuid4().hex), timeout)


def succeeded(server, workflow: Workflow, timeout: float = 300) -> dict:
    entry = finished(server, workflow, timeout)
    assert run_error(entry) == "" and entry["status"]["status_str"] == "success", (run_error(entry), entry["status"])
    return entry


def shown_text(entry: dict, workflow: Workflow, class_type: str) -> str:
    """The text a node shows, as the history has it."""
    return "".join(entry["outputs"][workflow.node(class_type)]["text"])


def saved_images(entry: dict) -> list:
    """All pictures of a run, as the history names them."""
    return [image for outputs in entry["outputs"].values() for image in outputs.get("images", [])]


def cached_nodes(entry: dict) -> set:
    return {
        node for kind, details in entry["status"]["messages"] if kind == "execution_cached" for node in details["nodes"]
    }


def loads(server) -> int:
    """How many times the pack has read weights since the server started."""
    return len(LOADED_LINE.findall(server.log_text()))


def watch(workflow: Workflow, class_type: str, outputs: dict) -> Workflow:
    """Adds the witness node: what it receives from those outputs {name: slot} stands in the history."""
    source = workflow.node(class_type)
    workflow.graph["witness"] = {
        "class_type": "A3BTestWitness",
        "inputs": {f"value_{slot}": [source, slot] for slot in outputs.values()},
    }
    return workflow


def witnessed(entry: dict, outputs: dict) -> dict:
    values = json.loads(entry["outputs"]["witness"]["text"][0])
    return {name: values[f"value_{slot}"] for name, slot in outputs.items()}
