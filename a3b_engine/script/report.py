"""What the parser did to a text: one line a thing, with its place."""

from __future__ import annotations

from .strings import join_surrogates

MAX_LINES = 200
_LONGEST_QUOTE = 60


def quote(text: object, limit: int = _LONGEST_QUOTE) -> str:
    """A short one-line quotation of source text for a message."""
    line = " ".join(str(text)[: limit * 2].split())
    return f'"{line[:limit]}..."' if len(line) > limit else f'"{line}"'


class Report:
    """Lines `level: place: what`. `info` lines change nothing in the data; `repair` and `warning` lines do.

    The status of a parse is `ok` only while `changed` is false.
    """

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._left_out = 0
        self.changed = False

    def info(self, place: str, what: str) -> None:
        """Something worth knowing that changed no value."""
        self._add("info", place, what)

    def repair(self, place: str, what: str) -> None:
        """Damaged text was read by a rule, or a value was moved, renamed or mapped."""
        self._add("repair", place, what)

    def warning(self, place: str, what: str) -> None:
        """A required value was missing or unusable, or something was left out."""
        self._add("warning", place, what)

    def _add(self, level: str, place: str, what: str) -> None:
        self.changed = self.changed or level != "info"
        line = join_surrogates(f"{level}: {place}: {what}" if place else f"{level}: {what}")
        if line in self._lines:
            self._lines[line] += 1
        elif len(self._lines) < MAX_LINES:
            self._lines[line] = 1
        else:
            self._left_out += 1

    def lines(self) -> list[str]:
        """All lines, repeated ones once with their count, cut at MAX_LINES with a remark."""
        lines = [line if count == 1 else f"{line} ({count} times)" for line, count in self._lines.items()]
        if self._left_out:
            lines.append(f"info: {self._left_out} more lines are left out")
        return lines
