"""Numbers the panels and binds dialogue rows to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from . import schema
from .report import Report


@dataclass
class Row:
    """A dialogue row before it is bound. `panel` is the number it came with, None if it had none."""

    values: dict[str, Any]
    panel: int | None
    place: str


class Numbered(Protocol):
    """What this module needs of a panel: its number, its place in the source, the rows that stood in it."""

    index: int | None
    place: str
    rows: list[Row]


@dataclass(frozen=True)
class Moved:
    """Where the numbers of the source went: `offset` was added to all of them, or each became the one in `numbers`."""

    offset: int = 0
    numbers: dict[int, int] = field(default_factory=dict)


def number_panels(items: list[Numbered], report: Report) -> Moved:
    """Give every panel its index and sort by it (in place); returns where the numbers of the source went.

    Distinct numbers are kept, gaps too. Numbers from 0 on are moved to 1 on. Numbers that are missing or stand twice
    make all panels count in the order of the list.
    """
    numbers = [item.index for item in items]
    if not items:
        return Moved()
    if all(number is None for number in numbers):
        report.info("panels", "index not given; set by the order of the list")
    elif None in numbers or len(set(numbers)) < len(numbers):
        report.repair("panels", "index missing or used twice; all are set by the order of the list")
    else:
        offset = 1 if 0 in numbers else 0
        if offset:
            report.repair("panels", "numbers that count from 0 are moved to count from 1")
            for item in items:
                item.index += 1
        if numbers != sorted(numbers):
            report.repair("panels", "sorted by index")
            items.sort(key=lambda item: item.index)
        if items[-1].index - items[0].index != len(items) - 1 or items[0].index != 1:
            report.info("panels", "the numbers have gaps; kept as they stand")
        return Moved(offset)
    moved: dict[int, int] = {}
    for position, item in enumerate(items, 1):
        if item.index is not None:
            moved.setdefault(item.index, position)  # a number that stands twice: the first panel that has it
        item.index = position
    return Moved(0, moved)


def bind_rows(top: list[Row], items: list[Numbered], moved: Moved, report: Report, cut: bool = False) -> list[Row]:
    """Rows of the script and rows that stood in panels, in one list, each with the index of an existing panel.

    A row without a number belongs to the panel of the same position if there are no more rows than panels, else rows
    are spread over the panels in order. A number that no panel has becomes the nearest that exists. Without panels
    the numbers stay as they are (1 if missing), and so does a number after the last panel if the text is `cut` there.
    Rows follow panels that were given new numbers, unless a row has a number that no panel had: then they count by place.
    """
    indexes = [item.index for item in items]
    offset = moved.offset
    if moved.numbers and {row.panel for row in top if row.panel is not None} <= set(moved.numbers):
        for row in top:
            new = moved.numbers.get(row.panel, row.panel)
            if new != row.panel:
                report.repair(f"{row.place}.panel", f"panel {row.panel} is panel {new} now; the row follows it")
                row.panel = new
    if offset and top and all(row.panel for row in top) and max(row.panel for row in top) > indexes[-1] - offset:
        offset = 0  # panels count from 0 but the rows from 1
    for position, row in enumerate(top):
        row.panel = _bound(row, position, len(top), indexes, offset, report, cut)
    inner = []
    for item in items:
        for row in item.rows:
            row.panel = item.index
            inner.append(row)
    if not inner:
        return top[: schema.MAX_DIALOGUE]
    seen = {_words(row) for row in top}
    fresh = [row for row in inner if _words(row) not in seen]
    report.repair("dialogue", "rows inside panels are put into the list of the script")
    if len(fresh) < len(inner):
        report.info("dialogue", "rows that stand in the panel and in the list are taken once")
    rows = sorted(top + fresh, key=lambda row: row.panel) if top else fresh
    if len(rows) > schema.MAX_DIALOGUE:
        report.warning("dialogue", f"{len(rows)} rows found; only the first {schema.MAX_DIALOGUE} are kept")
    return rows[: schema.MAX_DIALOGUE]


def _words(row: Row) -> tuple:
    return row.panel, row.values.get("speaker"), row.values.get("line")


def _bound(row: Row, position: int, count: int, indexes: list[int], offset: int, report: Report, cut: bool) -> int:
    if not indexes:
        return max(row.panel or 1, 1)
    if row.panel is None:
        slot = position if count <= len(indexes) else position * len(indexes) // count
        report.repair(f"{row.place}.panel", f"missing; bound to panel {indexes[slot]} by the order of the rows")
        return indexes[slot]
    wanted = row.panel + offset
    if wanted in indexes:
        return wanted
    if cut and wanted > indexes[-1]:
        report.info(f"{row.place}.panel", f"panel {wanted} is cut off; the row keeps its number")
        return wanted
    nearest = min(indexes, key=lambda index: (abs(index - wanted), index))
    report.repair(f"{row.place}.panel", f"there is no panel {row.panel}; bound to panel {nearest}")
    return nearest
