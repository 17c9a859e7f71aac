"""Reads the values of a script field by field into the models, with a report line for each thing done.

A missing value becomes the default of the schema; nothing that is not in the source is ever written into a script.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from . import schema
from .binding import Row, bind_rows, number_panels
from .refusals import is_doubtful, is_refusal
from .report import Report, quote
from .samples import is_left_out
from .kinds import number_of_key
from .shapes import Shape, are_pairs
from .unfold import unfold
from .values import Values, unquoted
from .vocabulary import aliases, find_shots, normalise_key, nothing_words

_SPEAKER = re.compile(r"\s*([^:\uff1a\n]{1,40})(?:(?<!\d)[:\uff1a]|[:\uff1a](?!\d))(?!//)\s*(.+)", re.DOTALL)
# "**Rin:** Run!", "_Rin_: Run!": the marks belong to the name
_BOLD_SPEAKER = re.compile(r"\s*(\*{1,3}|_{1,3})([^:\uff1a*_\n]{1,40})(?:[:\uff1a]\s?\1|\1\s?[:\uff1a])\s*(.+)", re.DOTALL)
_CORNER_QUOTES = re.compile(r"\s*([^\s\u300c\u300d\u300e]{1,20})\u300c([^\u300c\u300d]+)\u300d\s*\Z")  # name, then the words in brackets
_TEXT_FIELDS = ("action", "micro_expression", "background", "light", "caption", "sfx", "scene_tag", "visual_prompt", "negative")
_PLAIN_INDEX = re.compile(r"\s*\d+\s*\Z")
_DRAWN = ("action", "micro_expression", "background", "light", "visual_prompt")
_REPORTED = ("characters", *_TEXT_FIELDS[:4], "props", *_TEXT_FIELDS[4:])


@dataclass
class Built:
    """A script, and which of its panels (by index) the end of the text cut off. `says` is whether the source says
    anything of a panel at all, if only its shot."""

    script: schema.ComicScript
    partial: tuple[int, ...] = ()
    says: bool = True


@dataclass
class _PanelItem:
    place: str
    values: dict[str, Any]
    index: int | None
    rows: list[Row] = field(default_factory=list)
    partial: bool = False
    framed: bool = False  # the source names its shot

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw in it."""
        drawn = [self.values[name] for name in (*_DRAWN, "characters", "props")]
        return not any(value.strip() if isinstance(value, str) else value for value in drawn)


class Fields(Values):
    """One use: `Fields(report, open_ids).build(shape)`."""

    def __init__(self, report: Report, open_ids: frozenset[int] = frozenset()) -> None:
        super().__init__(report)
        self.open_ids = open_ids
        self.looks: list[schema.Character] = []
        self.refused = 0  # panels whose picture was a refusal of the model

    def build(self, found: Shape) -> Built:
        """The script of a shape. Panels come out in story order, dialogue rows bound to their indexes."""
        values = found.values
        people = self.characters(values.get("characters"))
        items = self.panels(values.get("panels") or [])
        moved = number_panels(items, self.report)
        rows = bind_rows(self.rows(values.get("dialogue"), "dialogue"), items, moved, self.report, bool(self.open_ids))
        known = {person.id for person in people}
        people += [person for person in self.looks if person.id not in known]
        self.shared_ids(people)
        self.missing(items)
        self.nothing_to_draw(items)
        for key, value in found.extras.items():
            if key == schema.VERSION_KEY:
                self.version(value)
            else:
                self.report.info(key[:40], "not a field of a script; left out")
        script = schema.ComicScript(
            title=self.text(values.get("title"), "title"),
            style=self.text(values.get("style"), "style"),
            language=self.text(values.get("language"), "language"),
            reading_direction=self.direction(values.get("reading_direction")),
            characters=people[: schema.MAX_CHARACTERS],
            dialogue=[schema.DialogueLine(panel=row.panel, **row.values) for row in rows],
            panels=[schema.Panel(index=item.index, **item.values) for item in items],
        )
        return Built(
            script,
            tuple(item.index for item in items if item.partial),
            any(not item.empty or item.framed or item.values["caption"].strip() or item.values["sfx"].strip() for item in items),
        )

    def nothing_to_draw(self, items: list[_PanelItem]) -> None:
        """A line for each panel without a picture; a panel of which a shot is given is a choice, not a loss."""
        for item in items:
            if item.empty and item.framed:
                self.report.info(item.place, "nothing in it can be drawn: it has a shot but no action, prompt, place or character")
            elif item.empty and not item.partial:
                self.report.warning(item.place, "nothing in it can be drawn: no action, prompt, place, character or prop")

    def shared_ids(self, people: list[schema.Character]) -> None:
        """Nobody can tell which of two characters a panel means by an id that both have."""
        ids = [person.id for person in people if person.id.strip()]
        for shared in dict.fromkeys(name for name in ids if ids.count(name) > 1):
            self.report.warning("characters", f"{ids.count(shared)} characters have the id {quote(shared)}; panels and rows that name it mean the first")

    def version(self, value: Any) -> None:
        """What is to say about the version of the form; a model's answer states none, which means 1."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= schema.SCHEMA_VERSION:
            return
        told = json.dumps(value, ensure_ascii=True, default=str)[:60]
        self.report.warning(
            schema.VERSION_KEY,
            f"the script is of form {told}; this pack reads {schema.SCHEMA_VERSION}. Fields it does not know are left out: "
            "update the pack to use them",
        )

    # -- characters ---------------------------------------------------------------------------------------------

    def characters(self, value: Any) -> list[schema.Character]:
        """Characters from a list of objects or names, or an object of name -> look."""
        if value is None:
            return []
        if isinstance(value, dict) and not {"id", "name", "look"} & set(value):
            self.report.repair("characters", "an object of names is read as a list")
            value = [
                {"name": name, **entry} if isinstance(entry, dict) else {"name": name, "look": entry}
                for name, entry in value.items()
            ]
        entries = value if isinstance(value, list) else [value]
        if len(entries) > schema.MAX_CHARACTERS:
            self.report.warning("characters", f"{len(entries)} found; only the first {schema.MAX_CHARACTERS} are kept")
        people = [self.character(entry, f"characters[{i}]") for i, entry in enumerate(entries[: schema.MAX_CHARACTERS])]
        return [person for person in people if person]

    def character(self, entry: Any, place: str) -> schema.Character | None:
        """One character; an id or a name alone serves as the other."""
        if not isinstance(entry, dict):
            name = self.text(entry, place)
            if not name.strip():
                return None
            self.report.repair(place, "a name alone is read as a character without a look")
            return schema.Character(id=name, name=name)
        values, extras = self.fields(entry, "character", place)
        identity = self.text(values.get("id"), f"{place}.id")
        name = self.text(values.get("name"), f"{place}.name")
        look = self.text(values.get("look"), f"{place}.look")
        if not (identity or name or look):
            self.report.warning(place, "an empty character is left out")
            return None
        if not identity or not name:
            self.report.info(place, "id and name: one is missing and stands for both")
        if not look.strip():
            self.report.info(f"{place}.look", "missing; left empty, so prompts cannot describe this character")
        kept = self.kept_extras(extras, schema.Character, place)
        return schema.Character(id=identity or name, name=name or identity, look=look, **kept)

    def cast(self, value: Any, place: str) -> list[str]:
        """The characters of a panel as ids; objects with looks are also put into the list of the script."""
        if not isinstance(value, list) or not any(isinstance(entry, dict) for entry in value):
            return self.listed(value, place)
        names = []
        for number, entry in enumerate(value[: schema.MAX_CHARACTERS]):
            if not isinstance(entry, dict):
                names += self.texts(entry, place)
                continue
            person = self.character(entry, f"{place}[{number}]")
            if person and person.id:
                names.append(person.id)
                if person.look and len(self.looks) < schema.MAX_CHARACTERS and all(p.id != person.id for p in self.looks):
                    self.report.repair(place, f"the look of {quote(person.id)} is put into the list of characters")
                    self.looks.append(person)
        return names

    # -- panels -------------------------------------------------------------------------------------------------

    def panels(self, raw: list) -> list[_PanelItem]:
        """The panels of the list that hold anything, in the order of the source."""
        if len(raw) > schema.MAX_PANELS:
            self.report.warning("panels", f"{len(raw)} found; only the first {schema.MAX_PANELS} are kept")
        items = []
        for number, entry in enumerate(raw[: schema.MAX_PANELS]):
            if is_left_out(entry):
                self.report.warning(f"panels[{number}]", "a placeholder stands there for a panel; left out")
                continue
            item = self.panel(entry, f"panels[{number}]")
            if item:
                items.append(item)
        return items

    def panel(self, entry: Any, place: str) -> _PanelItem | None:
        """One panel from an object, or from a sentence (its action)."""
        if isinstance(entry, str) and entry.strip():
            self.report.repair(place, "a sentence is read as the action of a panel")
            entry = {"action": entry}
        if isinstance(entry, dict) and len(entry) == 1 and isinstance(next(iter(entry.values())), dict):
            self.report.repair(place, f"the panel stood under the key {quote(next(iter(entry)))}")
            entry = next(iter(entry.values()))
        partial = id(entry) in self.open_ids
        if not isinstance(entry, dict):
            self.report.warning(place, "not an object; left out")
            return None
        values, extras = self.fields(unfold(entry, self.report, place), "panel", place)
        index = values.pop("index", None)
        if index is None and isinstance(values.get("background"), int) and not isinstance(values["background"], bool):
            index = values.pop("background")  # {"scene": 3} is a number, {"scene": "harbour"} a place
        elif type(values.get("background")) is int:
            values.setdefault("scene_tag", values.pop("background"))
        if isinstance(values.get("shot"), int) and not isinstance(values["shot"], bool) and index is None:
            index = values.pop("shot")
        if partial and not any(value not in (None, "", [], {}) for value in values.values()):
            self.report.info(place, "nothing of it is whole; left out")
            return None
        item = _PanelItem(place, {}, self.index(index), partial=partial)
        if index is not None and item.index is None:
            self.report.warning(f"{place}.index", f"{quote(index)} is not a panel number; set by the order of the list")
        elif isinstance(index, str) and not _PLAIN_INDEX.match(index):
            self.report.repair(f"{place}.index", f"{quote(index)} is read as {item.index}")
        item.rows = self.rows(values.pop("dialogue", None), f"{place}.dialogue") + self.lone_row(values, place)
        item.values["shot"] = self.shot(values.get("shot"), place)
        item.framed = isinstance(values.get("shot"), str) and bool(find_shots(values["shot"]))
        item.values["characters"] = self.cast(values.get("characters"), f"{place}.characters")
        item.values["props"] = self.listed(values.get("props"), f"{place}.props")
        for name in _TEXT_FIELDS:
            item.values[name] = self.text(values.get(name), f"{place}.{name}")
        self.leave_refusals_out(item)
        item.values.update(self.kept_extras(extras, schema.Panel, place))
        return item

    def leave_refusals_out(self, item: _PanelItem) -> None:
        """The model's failure is no picture: a field that is drawn and is a refusal, as a whole, is emptied."""
        for name in _DRAWN:
            if is_doubtful(item.values[name]) and not is_refusal(item.values[name]):
                self.report.warning(f"{item.place}.{name}", f"{quote(item.values[name])} may be a refusal of the model; kept as it stands")
        refused = [name for name in _DRAWN if is_refusal(item.values[name])]
        for name in refused:
            self.report.warning(f"{item.place}.{name}", f"{quote(item.values[name])} is a refusal, not a picture; left out")
            item.values[name] = ""
        self.refused += bool(refused) and not (item.values["action"].strip() or item.values["visual_prompt"].strip())

    def lone_row(self, values: dict[str, Any], place: str) -> list[Row]:
        """A speaker and line that stand in the panel itself."""
        row = {name: values.pop(name) for name in ("speaker", "line", "emotion_tag") if name in values}
        if "speaker" not in row and "line" not in row:
            if "emotion_tag" in row:
                self.report.info(f"{place}.emotion_tag", "belongs to a dialogue row; left out")
            return []
        self.report.repair(place, "speaker and line in the panel are read as a dialogue row")
        return [Row({name: self.text(row.get(name), f"{place}.{name}") for name in ("speaker", "line", "emotion_tag")}, None, place)]

    def missing(self, items: list[_PanelItem]) -> None:
        """One line for the optional fields no panel has, and one a panel for the rest."""
        absent = [{name for name in _REPORTED if not item.values.get(name)} for item in items]
        everywhere = set.intersection(*absent) if absent else set()
        if everywhere:
            names = ", ".join(name for name in _REPORTED if name in everywhere)
            self.report.info("panels", f"not given in any panel, left empty: {names}")
        for item, names in zip(items, absent):
            rest = [name for name in _REPORTED if name in names - everywhere]
            if rest:
                self.report.info(item.place, f"not given, left empty: {', '.join(rest)}")

    # -- dialogue -----------------------------------------------------------------------------------------------

    def rows(self, value: Any, place: str) -> list[Row]:
        """Dialogue rows from a list of objects or sentences, an object of speaker -> line, or lines of text."""
        if value is None or value == "":
            return []
        if isinstance(value, str) and value.strip().casefold() in nothing_words():
            self.report.repair(place, f"{quote(value)} says that there is none; left empty")
            return []
        if isinstance(value, str):
            self.report.repair(place, "text is read as dialogue rows, one a line")
            value = [line for line in value.splitlines() if line.strip()]
        elif isinstance(value, dict):
            value = self.rows_of_object(value, place)
        if not isinstance(value, list):
            self.report.warning(place, "not a list of rows; left out")
            return []
        if are_pairs(value):
            self.report.repair(place, "pairs of a speaker and a line are read as dialogue rows")
            value = [{"speaker": speaker, "line": line} for speaker, line in value]
        if value and all(isinstance(entry, list) for entry in value):
            self.report.repair(place, "a list of lists is read as one list")
            value = [entry for part in value for entry in part]
        if len(value) > schema.MAX_DIALOGUE:
            self.report.warning(place, f"{len(value)} rows found; only the first {schema.MAX_DIALOGUE} are kept")
        rows = [self.row(entry, f"{place}[{number}]") for number, entry in enumerate(value[: schema.MAX_DIALOGUE])]
        return [row for row in rows if row]

    def rows_of_object(self, value: dict[str, Any], place: str) -> list:
        """An object that is one row, or panel number -> rows, or speaker -> lines, as a list of rows."""
        if any(aliases("row").get(normalise_key(key)) == "line" for key in value):
            return [value]
        numbered = all(number_of_key(key) is not None for key in value)
        self.report.repair(place, f"an object of {'panels' if numbered else 'speakers'} is read as dialogue rows")
        rows = []
        for key, entry in value.items():
            for said in entry if isinstance(entry, list) else [entry]:
                if not numbered:
                    rows.append({"speaker": key, "line": said})
                elif isinstance(said, dict):
                    rows.append({"panel": number_of_key(key), **said})
                elif isinstance(said, str):
                    row = _told(said) or {"line": said}
                    rows.append({"panel": number_of_key(key), **row})
        return rows

    def row(self, entry: Any, place: str) -> Row | None:
        """One dialogue row; None (reported) if it says nothing."""
        if isinstance(entry, str) and entry.strip().casefold() in nothing_words():
            self.report.repair(place, f"{quote(entry)} says that there is none; left out")
            return None
        if isinstance(entry, str) and entry.strip():
            self.report.repair(place, "a sentence is read as a dialogue row")
            row = _told(entry, corner=True) or {"line": entry}
            entry = {**row, "line": unquoted(row["line"])}
        if not isinstance(entry, dict):
            self.report.warning(place, "not an object; left out")
            return None
        if len(entry) == 1 and id(entry) not in self.open_ids:
            (who, said), = entry.items()
            if normalise_key(who) not in aliases("row") and isinstance(said, str):
                self.report.repair(place, "a speaker and a line are read as a dialogue row")
                entry = {"speaker": who, "line": said}
        values, extras = self.fields(entry, "row", place)
        panel = self.index(values.get("panel"))
        if panel is not None and isinstance(values["panel"], str) and not _PLAIN_INDEX.match(values["panel"]):
            self.report.repair(f"{place}.panel", f"{quote(values['panel'])} is read as {panel}")
        texts = {name: self.text(values.get(name), f"{place}.{name}") for name in ("speaker", "line", "emotion_tag")}
        if not any(text.strip() for text in texts.values()):
            self.report.warning(place, "an empty row is left out")
            return None
        if id(entry) in self.open_ids and not texts["line"].strip():
            self.report.info(place, "its line is not whole; the row is left out")
            return None
        if not texts["line"].strip():
            self.report.info(f"{place}.line", "missing; left empty")
        return Row({**texts, **self.kept_extras(extras, schema.DialogueLine, place)}, panel, place)


def _told(text: str, corner: bool = False) -> dict[str, str] | None:
    """Speaker and line of a sentence `Rin: Hello`; `corner`: also of a name before words in corner brackets."""
    bold = _BOLD_SPEAKER.match(text)
    if bold:
        return {"speaker": bold[2].strip(), "line": bold[3]}
    found = _SPEAKER.match(text) or corner and _CORNER_QUOTES.match(text)
    return {"speaker": found[1], "line": found[2]} if found else None
