"""Numbers of a JSON text that keep their spelling where a float would lose it, and numbers spelled as words."""

from __future__ import annotations

import re

WORDS = tuple("one two three four five six seven eight nine ten eleven twelve".split())
CJK = "\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341"
_CJK_NUMBER = re.compile(rf"[{CJK}]{{1,3}}")
_ROMAN = re.compile(r"(?=[IVX])(X{0,2})(IX|IV|V?I{0,3})\Z")

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


def spelled(text: str) -> int | None:
    """The one number that a short text spells: `Panel two`, `II`, or a CJK numeral up to 99; else None."""
    runs = _CJK_NUMBER.findall(text)
    if runs:
        return _cjk(runs[0]) if len(runs) == 1 else None
    words = re.findall(r"[A-Za-z]+", text)
    named = [WORDS.index(word.lower()) + 1 for word in words if word.lower() in WORDS]
    if named:
        return named[0] if len(named) == 1 else None
    roman = _ROMAN.match(words[-1]) if words else None
    return _roman(roman) if roman else None


def _cjk(run: str) -> int | None:
    tens, ten, ones = run.rpartition(CJK[-1])
    if ten and len(tens) <= 1 and len(ones) <= 1 and CJK[-1] not in tens:
        return 10 * (CJK.index(tens) + 1 if tens else 1) + (CJK.index(ones) + 1 if ones else 0)
    return CJK.index(run) + 1 if len(run) == 1 else None


def _roman(found: re.Match) -> int:
    ones = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX").index(found[2])
    return 10 * len(found[1]) + ones
