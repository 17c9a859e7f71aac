"""Writes locales/en/nodeDefs.json from the node classes, so that English texts stand in one place only.

    python tools/make_locales.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_workflows import ROOT, pack_nodes  # noqa: E402

FILE = ROOT / "locales" / "en" / "nodeDefs.json"


def definition(node: type) -> dict:
    inputs = {name: {"name": name, "tooltip": marker.tooltip} for name, marker in node.MARKERS.items()}
    outputs = {
        str(slot): {"name": name, "tooltip": tooltip}
        for slot, (name, tooltip) in enumerate(zip(node.RETURN_NAMES, node.OUTPUT_TOOLTIPS))
    }
    return {"display_name": node.TITLE, "description": node.DESCRIPTION, "inputs": inputs, "outputs": outputs}


def content() -> str:
    definitions = {name: definition(node) for name, node in pack_nodes().items()}
    return json.dumps(definitions, ensure_ascii=False, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8", newline="\n")
    print(FILE)
