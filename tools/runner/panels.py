"""The demo's panels: what JSON Parse Panels made of the answer, worked out again from the history and printed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .console import RunnerError, clean_environment, say
from .paths import ROOT
from .workflow import Workflow

# Runs under the Python of the host: the parser needs the pack's packages, the runner does not have them.
READER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script
job = json.loads(sys.stdin.buffer.read())
lists = panel_lists(parse_script(job["text"], expected_panels=job["count"] or None), **job["options"])
names = ("index", "width", "height", "seed", "prompt", "negative", "caption", "dialogue")
sys.stdout.buffer.write(json.dumps({name: list(getattr(lists, name)) for name in names}).encode("ascii"))
"""
OPTIONS = ("style_prefix", "style_suffix", "base_seed", "size_family", "on_error")


def read_panels(python: Path, entry: dict, workflow: Workflow) -> list[dict]:
    """One dict a panel: index, width, height, seed, prompt, negative, caption, dialogue."""
    text = "".join(entry["outputs"][workflow.node("A3BGenerate")]["text"])
    inputs = workflow.inputs("A3BParsePanels")
    job = {"text": text, "count": inputs["panel_count"], "options": {name: inputs[name] for name in OPTIONS}}
    done = subprocess.run(
        [str(python), "-c", READER, str(ROOT)],
        input=json.dumps(job).encode("ascii"),
        env=clean_environment(),
        capture_output=True,
    )
    if done.returncode != 0:
        raise RunnerError("the panels could not be read", details=done.stderr.decode("utf-8", "replace"))
    lists = json.loads(done.stdout)
    return [dict(zip(lists, values)) for values in zip(*lists.values())]


def print_panels(panels: list[dict]) -> None:
    for panel in panels:
        say(f"Panel {panel['index']}   {panel['width']}x{panel['height']}   seed {panel['seed']}")
        for name in ("prompt", "caption", "dialogue"):
            lines = panel[name].splitlines() or ["(none)"]
            say(f"  {name:9} {lines[0]}")
            for line in lines[1:]:
                say(f"  {'':9} {line}")
