"""Writes the table of a script's fields into the help pages of JSON Parse Panels, from the models in schema.py.

    python tools/make_script_tables.py

Chinese texts stand in script_fields.zh.json, by model and field.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from a3b_engine.script.document import VERSION_KEY  # noqa: E402
from a3b_engine.script.schema import SCHEMA_VERSION, Character, ComicScript, DialogueLine, Panel  # noqa: E402

PAGES = {"en": ROOT / "web/docs/A3BParsePanels.md", "zh": ROOT / "web/docs/A3BParsePanels/zh.md"}
BEGIN, END = "<!-- fields: written by tools/make_script_tables.py -->", "<!-- end of fields -->"
MODELS = {"": ComicScript, "characters[]": Character, "dialogue[]": DialogueLine, "panels[]": Panel}
VERSION = "version of this form; absent means 1; the pack sets it, the model is not asked for it"


def table(language: str) -> str:
    words = json.loads(Path(__file__).with_name("script_fields.zh.json").read_text(encoding="utf-8")) if language == "zh" else {}

    def told(key: str, english: str) -> str:
        return words[key] if words else english

    kinds = ("text", "number", "list of texts", "list of objects", "one of")
    names = {kind: told(kind, kind) for kind in kinds}
    heads = [told(head, head) for head in ("field", "type", "default", "meaning and use")]
    rows = [heads, ["---"] * 4, [f"`{VERSION_KEY}`", names["number"], f"`{SCHEMA_VERSION}`", told(VERSION_KEY, VERSION)]]
    for place, model in MODELS.items():
        for name, field in model.model_fields.items():
            default = json.dumps(field.get_default(call_default_factory=True))
            path = f"{place}.{name}" if place else name
            rows.append([f"`{path}`", _kind(field.annotation, names), f"`{default}`", told(path, field.description)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _kind(annotation: Any, names: dict[str, str]) -> str:
    if annotation is str:
        return names["text"]
    if annotation is int:
        return names["number"]
    if get_origin(annotation) is list:
        return names["list of texts" if get_args(annotation) == (str,) else "list of objects"]
    return f"{names['one of']} {', '.join(f'`{value}`' for value in get_args(annotation))}"


def page(language: str) -> str:
    """The help page with the table of today between its two marks."""
    before, _, rest = PAGES[language].read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGES[language]} lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(language)}\n\n{END}{after}"


if __name__ == "__main__":
    for name, path in PAGES.items():
        path.write_text(page(name), encoding="utf-8", newline="\n")
        print(path)
