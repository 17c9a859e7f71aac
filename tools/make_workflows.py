"""Writes example_workflows/: <name>.json and <name>.zh.json (canvas) and <name>.api.json (API).

    python tools/make_workflows.py

All three come from one description in tools/workflows/descriptions. Positional widget values, link tables, slot numbers
and places on the canvas are worked out, never typed by hand. The pictures beside the canvas files are taken from the real
front end by tools/take_screenshots.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.workflows.api import api_form
from tools.workflows.canvas import canvas_form
from tools.workflows.description import LANGUAGES, names, read
from tools.workflows.kinds import ROOT, pack_nodes

__all__ = ["FOLDER", "ROOT", "files", "pack_nodes"]

FOLDER = ROOT / "example_workflows"


def canvas_file(name: str, language: str) -> str:
    return f"{name}.json" if language == LANGUAGES[0] else f"{name}.{language}.json"


def files() -> dict[str, str]:
    """File name -> exact content."""
    forms = {}
    for name in names():
        description = read(name)
        forms |= {canvas_file(name, language): canvas_form(description, language) for language in LANGUAGES}
        forms[f"{name}.api.json"] = api_form(description)
    return {name: json.dumps(form, ensure_ascii=False, indent=2) + "\n" for name, form in forms.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8", newline="\n")
        print(FOLDER / name)
