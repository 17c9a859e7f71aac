"""Numbers of a JSON text that keep their spelling where a float would lose it."""

from __future__ import annotations

MAX_NUMBER = 40  # digits of a whole number that becomes an int


class NumberText(float):
    """A number that keeps its spelling, so that text made from it occurs in the source."""

    text: str

    def __new__(cls, text: str) -> "NumberText":
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def integer(text: str) -> int | NumberText:
    """The value of a whole number; long ones are not turned into huge integers."""
    return int(text) if len(text) <= MAX_NUMBER else NumberText(text)


def number(text: str) -> int | NumberText:
    """The value of a JSON number."""
    return integer(text) if text.lstrip("+-").isdecimal() else NumberText(text)
