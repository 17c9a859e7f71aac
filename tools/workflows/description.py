"""A workflow's description: descriptions/<name>.json, one graph with its texts in every language.

    groups      from left to right: a colour, and columns of nodes from top to bottom. A node has a key, a class and, where
                needed, values, links {input: "key.output"}, width and height.
    texts       by language: the groups' headings, titles and values by node key, and notes. A title left out is that of
                the node's class. Texts of several lines are lists of lines; "@name" stands for a text of texts.json,
                "@folder/file.txt" for the contents of a file of the repository.
"""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

from .kinds import NOTE, ROOT, Kind, kinds

FOLDER = Path(__file__).resolve().parent
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Item:
    """A node of a workflow."""

    key: str
    type: str
    values: dict[str, object]
    links: dict[str, tuple[str, str]]  # input -> (key of the source, output)
    width: int | None
    height: int | None


@dataclass(frozen=True)
class Group:
    color: str
    columns: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True)
class Description:
    name: str
    groups: tuple[Group, ...]
    texts: dict[str, dict]

    @property
    def items(self) -> tuple[Item, ...]:
        """All nodes in reading order; a node's number is its place here, from 1."""
        return tuple(item for group in self.groups for column in group.columns for item in column)

    def item(self, key: str) -> Item:
        return next(item for item in self.items if item.key == key)

    def number(self, key: str) -> int:
        return [item.key for item in self.items].index(key) + 1

    def title(self, item: Item, language: str) -> str:
        return self.texts[language]["titles"].get(item.key) or class_titles(language)[item.type]

    def note(self, item: Item, language: str) -> str:
        return "\n".join(lines(self.texts[language]["notes"][item.key], language))

    def values(self, item: Item, language: str) -> dict[str, object]:
        """All widget values of a node, in the order of its class. Raises ValueError for a name its class has not."""
        kind: Kind = kinds()[item.type]
        given = {**shared()["values"].get(item.type, {}), **item.values}
        for name, value in self.texts[language].get("values", {}).get(item.key, {}).items():
            given[name] = "\n".join(lines(value, language)) if isinstance(value, list) else value
        found = {name: given.pop(name, default) for name, (_, default) in kind.widgets.items()}
        unset = [name for name, value in found.items() if value is inspect.Parameter.empty]
        if given or unset:
            raise ValueError(f"{self.name}, {item.key}: unknown {sorted(given)}, without a value {unset}")
        return found


@functools.cache
def shared() -> dict:
    return json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))


@functools.cache
def class_titles(language: str) -> dict[str, str]:
    """Title of each class, as the menus show it."""
    names = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return {**shared()[language]["classes"], **{name: entry["display_name"] for name, entry in names.items()}}


def lines(texts: list[str], language: str) -> list[str]:
    """The lines of a text, references filled in."""
    found = []
    for line in texts:
        if line.startswith("@") and "/" in line:
            found.append((ROOT / line[1:]).read_text(encoding="utf-8").strip())
        elif line.startswith("@"):
            found.extend(shared()[language]["notes"][line[1:]])
        else:
            found.append(line)
    return found


def _item(entry: dict) -> Item:
    links = {name: tuple(source.split(".")) for name, source in entry.get("links", {}).items()}
    return Item(entry["key"], entry["type"], entry.get("values", {}), links, entry.get("width"), entry.get("height"))


def read(name: str) -> Description:
    """Raises ValueError when two nodes have one key, or a link starts or ends nowhere."""
    raw = json.loads((FOLDER / "descriptions" / f"{name}.json").read_text(encoding="utf-8"))
    groups = (Group(entry["color"], tuple(tuple(map(_item, column)) for column in entry["columns"])) for entry in raw["groups"])
    description = Description(name, tuple(groups), raw["texts"])
    keys = {item.key: item.type for item in description.items}
    if len(keys) != len(description.items):
        raise ValueError(f"{name}: two nodes have the same key")
    for item in description.items:
        for entry, (source, output) in item.links.items():
            inputs = {**kinds()[item.type].sockets, **kinds()[item.type].widgets}
            if entry not in inputs or keys.get(source, NOTE) == NOTE or output not in dict(kinds()[keys[source]].outputs):
                raise ValueError(f"{name}: {item.key}.{entry} <- {source}.{output} is no link")
    return description


def names() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "descriptions").glob("*.json"))
