"""The form that the editor opens and saves: widget values by position, and a table of links."""

from __future__ import annotations

from .description import Description, Item
from .kinds import NOTE, Kind, kinds
from .layout import Box, place

SEED_CONTROL = "fixed"  # the drop-down that the front end puts after a seed: same seed, same page, until changed
GRID = 6  # the shape that marks an output as a list


def canvas_form(description: Description, language: str) -> dict:
    """The graph as the editor saves it. Widgets turned into inputs keep their place in widgets_values."""
    boxes, frames = place(description)
    links: list[list] = []
    nodes = [_node(description, item, language, boxes[item.key], links) for item in description.items]
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in links if link[1:3] == [node["id"], slot]] or None
    headings = zip(description.texts[language]["groups"], description.groups, frames, strict=True)
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [
            {"title": title, "bounding": [box.x, box.y, box.width, box.height], "color": group.color, "font_size": 24}
            for title, group, box in headings
        ],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _node(description: Description, item: Item, language: str, box: Box, links: list[list]) -> dict:
    number = description.number(item.key)
    node = {"id": number, "type": item.type, "pos": [box.x, box.y], "size": [box.width, box.height], "flags": {}}
    node |= {"order": number - 1, "mode": 0, "inputs": [], "outputs": [], "title": description.title(item, language)}
    if item.type == NOTE:
        look = {"color": "#432", "bgcolor": "#653"}
        return node | {"properties": {"text": ""}, "widgets_values": [description.note(item, language)], **look}
    kind = kinds()[item.type]
    for name in kind.sockets:
        node["inputs"].append(_input(description, item, name, len(node["inputs"]), links))
    for name in kind.widgets:
        if name in item.links:
            node["inputs"].append({**_input(description, item, name, len(node["inputs"]), links), "widget": {"name": name}})
    node["outputs"] = [
        {"name": name, "type": type_name, "links": None, "slot_index": slot, **({"shape": GRID} if any(kind.lists[slot : slot + 1]) else {})}
        for slot, (name, type_name) in enumerate(kind.outputs)
    ]
    return node | {"properties": {"Node name for S&R": item.type}, "widgets_values": _by_position(kind, description.values(item, language))}


def _by_position(kind: Kind, values: dict[str, object]) -> list:
    found = []
    for name, value in values.items():
        found += [value, SEED_CONTROL] if name in kind.seeds else [value]
    return [*found, *kind.trailing]


def _input(description: Description, item: Item, name: str, slot: int, links: list[list]) -> dict:
    """The input slot; a link that ends in it is added to the table."""
    type_name, link = kinds()[item.type].input_type(name), None
    if name in item.links:
        source, output = item.links[name]
        link = len(links) + 1
        from_slot = kinds()[description.item(source).type].slot(output)
        links.append([link, description.number(source), from_slot, description.number(item.key), slot, type_name])
    return {"name": name, "type": type_name, "link": link}
