"""Writes example_workflows/comic_script.json and comic_script.zh.json (canvas) and comic_script.api.json (API).

    python tools/make_workflows.py

All come from one description. Positional widget values, link tables and slot numbers are derived here from the node
classes, never typed by hand. Titles, notes and group names stand in workflow_texts.json, by language.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "example_workflows"
PACK = "a3b_pack_for_workflows"
CHECKPOINT = "a3b-random-demo"
SEED_CONTROL = "fixed"  # the drop-down that the front end puts after a seed: same seed, same page, until changed

LANGUAGES = {"en": "English", "zh": "Chinese"}  # of the canvas -> of the answer
TEXTS = json.loads(Path(__file__).with_name("workflow_texts.json").read_text(encoding="utf-8"))


@dataclass
class Kind:
    """A node class: its inputs in order ("SOCKET" types, or widgets with a default) and its outputs."""

    sockets: dict[str, str] = field(default_factory=dict)  # name -> type
    widgets: dict[str, tuple[str, object]] = field(default_factory=dict)  # name -> (type, default)
    outputs: list[tuple[str, str]] = field(default_factory=list)  # (name, type)
    seeds: tuple[str, ...] = ()  # widgets that are followed by a control drop-down
    trailing: tuple = ()  # values of widgets that only the front end has


@dataclass
class Item:
    key: str
    type: str
    pos: tuple[int, int]
    size: tuple[int, int]
    values: dict[str, object] = field(default_factory=dict)
    links: dict[str, tuple[str, str]] = field(default_factory=dict)  # input -> (key, output name)


# Core nodes that exist with these inputs in ComfyUI of 2024 and of today.
CORE = {
    "LoadImage": Kind(widgets={"image": ("COMBO", "example.png")}, outputs=[("IMAGE", "IMAGE"), ("MASK", "MASK")], trailing=("image",)),
    "ImageScale": Kind(
        sockets={"image": "IMAGE"},
        widgets={"upscale_method": ("COMBO", "bicubic"), "width": ("INT", 512), "height": ("INT", 512), "crop": ("COMBO", "center")},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "EmptyImage": Kind(
        widgets={"width": ("INT", 512), "height": ("INT", 512), "batch_size": ("INT", 1), "color": ("INT", 0)},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "ImageBlend": Kind(
        sockets={"image1": "IMAGE", "image2": "IMAGE"},
        widgets={"blend_factor": ("FLOAT", 0.5), "blend_mode": ("COMBO", "normal")},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "SaveImage": Kind(sockets={"images": "IMAGE"}, widgets={"filename_prefix": ("STRING", "ComfyUI")}),
}

ITEMS = [
    Item("note_start", "Note", (20, 80), (340, 230)),
    Item("load", "A3BLoadModel", (20, 360), (340, 170), values={"checkpoint": CHECKPOINT, "context": 16384}),
    Item("picture", "LoadImage", (20, 580), (340, 330)),
    Item(
        "encode",
        "A3BEncodeImage",
        (420, 580),
        (300, 150),
        links={"model": ("load", "model"), "image": ("picture", "IMAGE")},
    ),
    Item(
        "build",
        "A3BBuildPrompt",
        (780, 80),
        (420, 460),
        values={"preset": "western"},
        links={"images": ("encode", "images")},
    ),
    Item(
        "generate",
        "A3BGenerate",
        (1260, 80),
        (400, 720),
        values={"seed": 7, "max_new_tokens": 6144, "panels": 4, "rounds": 4},
        links={"model": ("load", "model"), "prompt": ("build", "prompt")},
    ),
    Item(
        "parse",
        "A3BParsePanels",
        (1720, 80),
        (400, 480),
        values={"panel_count": 4, "base_seed": 20240229, "style_suffix": "comic book style, clean ink lines, flat colours"},
        links={"text": ("generate", "text"), "stats": ("generate", "stats")},
    ),
    Item("note_panels", "Note", (2180, 80), (340, 230)),
    Item(
        "tint",
        "EmptyImage",
        (2180, 360),
        (340, 150),
        links={"width": ("parse", "width"), "height": ("parse", "height"), "color": ("parse", "seed")},
    ),
    Item(
        "cut",
        "ImageScale",
        (2180, 560),
        (340, 170),
        links={"image": ("picture", "IMAGE"), "width": ("parse", "width"), "height": ("parse", "height")},
    ),
    Item(
        "blend",
        "ImageBlend",
        (2580, 460),
        (300, 130),
        values={"blend_factor": 0.35},
        links={"image1": ("cut", "IMAGE"), "image2": ("tint", "IMAGE")},
    ),
    Item("save", "SaveImage", (2940, 360), (420, 550), values={"filename_prefix": "a3b_comic/panel"}, links={"images": ("blend", "IMAGE")}),
]

GROUPS = [
    ((0, 0, 740, 940), "#3f789e"),
    ((760, 0, 460, 940), "#8a6d3b"),
    ((1240, 0, 440, 940), "#5b7f3b"),
    ((1700, 0, 1700, 940), "#7a4f8a"),
]


def pack_nodes() -> dict[str, type]:
    """The node classes of this pack, imported by path as ComfyUI does it."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return sys.modules[PACK].NODE_CLASS_MAPPINGS


def kind_of(node: type) -> Kind:
    kind = Kind(outputs=list(zip(node.RETURN_NAMES, node.RETURN_TYPES)))
    for name, marker in node.MARKERS.items():
        default = node.DEFAULTS[name]
        if type(marker).__name__ == "Socket":
            kind.sockets[name] = marker.type()
        else:
            callable_list = callable(getattr(marker, "choices", None))
            value_type = "COMBO" if callable_list or isinstance(marker.type(), list) else marker.type()
            kind.widgets[name] = (value_type, default)
            if getattr(marker, "control", False):
                kind.seeds += (name,)
    return kind


def kinds() -> dict[str, Kind]:
    return {**CORE, **{name: kind_of(node) for name, node in pack_nodes().items()}}


def values_of(item: Item, kind: Kind, language: str) -> dict[str, object]:
    """All widget values of a node: its class's defaults, what ITEMS sets, and the story in its language."""
    values = {name: item.values.get(name, default) for name, (_, default) in kind.widgets.items()}
    if item.key == "build":
        story = (ROOT / "assets" / f"demo_story.{language}.txt").read_text(encoding="utf-8").strip()
        values |= {"text": f"{story}\n[[IMG]]", "language": LANGUAGES[language]}
    return values


def api_form() -> dict:
    """node id -> class, inputs (all widgets and links) and title: what POST /prompt takes."""
    known, ids = kinds(), {item.key: str(number) for number, item in enumerate(ITEMS, 1)}
    prompt = {}
    for item in ITEMS:
        if item.type == "Note":
            continue
        kind = known[item.type]
        inputs = values_of(item, kind, "en")
        for name, (source, output) in item.links.items():
            inputs[name] = [ids[source], _slot(known, source, output)]
        prompt[ids[item.key]] = {"class_type": item.type, "inputs": inputs, "_meta": {"title": TEXTS["en"]["titles"][item.key]}}
    return prompt


def _slot(known: dict[str, Kind], source: str, output: str) -> int:
    item = next(item for item in ITEMS if item.key == source)
    return [name for name, _ in known[item.type].outputs].index(output)


def canvas_form(language: str = "en") -> dict:
    """The graph as the editor saves it. Widgets turned into inputs keep their place in widgets_values."""
    known, ids = kinds(), {item.key: number for number, item in enumerate(ITEMS, 1)}
    links: list[list] = []
    nodes = [_canvas_node(item, order, language, known, ids, links) for order, item in enumerate(ITEMS)]
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            going_out = [link[0] for link in links if link[1] == node["id"] and link[2] == slot]
            output["links"] = going_out or None
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [
            {"title": title, "bounding": list(box), "color": color, "font_size": 24}
            for title, (box, color) in zip(TEXTS[language]["groups"], GROUPS, strict=True)
        ],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _canvas_node(item: Item, order: int, language: str, known: dict[str, Kind], ids: dict[str, int], links: list[list]) -> dict:
    texts = TEXTS[language]
    node = {"id": ids[item.key], "type": item.type, "pos": list(item.pos), "size": list(item.size)}
    node |= {"flags": {}, "order": order, "mode": 0, "inputs": [], "outputs": [], "title": texts["titles"][item.key]}
    if item.type == "Note":
        return node | {"properties": {"text": ""}, "widgets_values": ["\n".join(texts["notes"][item.key])], "color": "#432", "bgcolor": "#653"}
    kind = known[item.type]
    for name, type_name in kind.sockets.items():
        node["inputs"].append({"name": name, "type": type_name, "link": _link(item, name, type_name, node, known, ids, links)})
    for name, (type_name, _) in kind.widgets.items():
        if name in item.links:
            link = _link(item, name, type_name, node, known, ids, links)
            node["inputs"].append({"name": name, "type": type_name, "link": link, "widget": {"name": name}})
    node["outputs"] = [
        {"name": name, "type": type_name, "links": None, "slot_index": slot, **_shape(item.type, slot)}
        for slot, (name, type_name) in enumerate(kind.outputs)
    ]
    values = []
    for name, value in values_of(item, kind, language).items():
        values.append(value)
        if name in kind.seeds:
            values.append(SEED_CONTROL)
    return node | {"properties": {"Node name for S&R": item.type}, "widgets_values": [*values, *kind.trailing]}


def _link(item: Item, name: str, type_name: str, node: dict, known: dict[str, Kind], ids: dict[str, int], links: list[list]) -> int | None:
    if name not in item.links:
        return None
    source, output = item.links[name]
    links.append([len(links) + 1, ids[source], _slot(known, source, output), node["id"], len(node["inputs"]), type_name])
    return links[-1][0]


def _shape(type_name: str, slot: int) -> dict:
    node = pack_nodes().get(type_name)
    return {"shape": 6} if node is not None and node.OUTPUT_IS_LIST[slot] else {}  # 6: the grid that marks a list


def files() -> dict[str, str]:
    """File name -> exact content."""
    forms = {"comic_script.json": canvas_form("en"), "comic_script.zh.json": canvas_form("zh"), "comic_script.api.json": api_form()}
    return {name: json.dumps(form, ensure_ascii=False, indent=2) + "\n" for name, form in forms.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8", newline="\n")
        print(FOLDER / name)
