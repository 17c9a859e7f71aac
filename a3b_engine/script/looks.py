"""Finds the names of the cast in a text and writes their looks in their place."""

from __future__ import annotations

import re
from collections.abc import Callable

from .schema import Character

TRIM = " \t\r\n,;.\u3002\uff0c\u3001\uff1b"
_FIRST_WORDS = re.compile("[,;\uff0c\u3001\uff1b]")
_POSSESSIVE = re.compile("['\u2019]s\\b")
_ARTICLE = re.compile(r"(?:a|an|the)\s+", re.IGNORECASE)
_ARTICLE_BEFORE = re.compile(r"\b(?:a|an|the)\s+\Z", re.IGNORECASE)
# What is written on a sign or said aloud is lettering, not a person in the picture.
_QUOTED = re.compile(
    '"[^"\n]*"|\u201c[^\u201c\u201d]*\u201d|\u300c[^\u300c\u300d]*\u300d|\u300e[^\u300e\u300f]*\u300f|\u00ab[^\u00ab\u00bb]*\u00bb'
)
_LATIN = re.compile(r"[^\W\d_]{3,}")
_CJK_RUN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
_LONGEST_NAME = 80
_EMPTY_WORDS = frozenset("and the with his her has who for from wears wearing".split())


class Cast:
    """The characters of a script, found by id or name."""

    def __init__(self, people: list[Character]) -> None:
        self._people: dict[str, Character] = {}
        for person in people:
            for name in (person.name, person.id):
                if name.strip():
                    self._people.setdefault(name.casefold(), person)
        self._pattern = self._names_pattern()

    def get(self, word: str) -> Character | None:
        """The character of an id or a name, whatever its case; None for anyone else ("a crowd")."""
        return self._people.get(word.casefold())

    def named(self, text: str) -> dict[str, tuple[Character, bool]]:
        """Those who have a look and whose name stands in a text, by id, in order; and whether it stands there plainly,
        not only as a possessive: "Rin's letter" does not show Rin."""
        found: dict[str, tuple[Character, bool]] = {}
        for match in self._matches(text):
            person = self.get(match.group())
            plain = not _POSSESSIVE.match(text, match.end())
            found[person.id] = (person, plain or found.get(person.id, (person, False))[1])
        return found

    def write_out(self, text: str, whole: set[str], allowed: Callable[[Character, bool], bool]) -> str:
        """The text with names replaced: by the whole look first, by its first words after that.

        whole: ids of those whose whole look stands in the prompt already; added to. allowed: of a character and
        whether the name is possessive ("Rin's hand": the first words do, a whole look would not read); False leaves
        the name.
        """
        pieces, end = [], 0
        for match in self._matches(text):
            person = self.get(match.group())
            possessive = bool(_POSSESSIVE.match(text, match.end()))
            if not allowed(person, possessive):
                continue
            look = person.look.strip(TRIM)
            if possessive or person.id in whole:
                look = _FIRST_WORDS.split(look)[0]
            else:
                whole.add(person.id)
            if _ARTICLE_BEFORE.search(text, max(match.start() - 8, 0), match.start()):
                look = _ARTICLE.sub("", look, count=1) if _ARTICLE.match(look) else look
            pieces += [text[end : match.start()], look]
            end = match.end()
        return "".join([*pieces, text[end:]])

    def _matches(self, text: str) -> list[re.Match]:
        if self._pattern is None:
            return []
        quoted = [match.span() for match in _QUOTED.finditer(text)]
        found, at = [], 0
        for match in self._pattern.finditer(text):
            while at < len(quoted) and quoted[at][1] <= match.start():
                at += 1
            if at == len(quoted) or match.start() < quoted[at][0]:
                found.append(match)
        return found

    def _names_pattern(self) -> re.Pattern | None:
        """Names that have a look, as the script spells them ("Rose" the girl is not "rose" the flower).

        One Latin letter is no name: "A" would be found everywhere.
        """
        spellings = {word for person in self._people.values() for word in (person.name, person.id)}
        names = []
        for word in spellings:
            person = self.get(word)
            if person and person.look.strip() and len(word) <= _LONGEST_NAME and (len(word) > 1 or not word.isascii()):
                names.append(word)
        other, latin = (_any_of([name for name in names if name.isascii() is plain]) for plain in (False, True))
        parts = [other] * bool(other) + [rf"(?<!\w){latin}"] * bool(latin)  # in this order the longest name wins
        return re.compile("|".join(parts)) if parts else None


def _any_of(names: list[str]) -> str:
    """A pattern for the longest of the names that stands at a place; one branch a letter, or 500 names take seconds."""
    tree: dict = {}
    for name in names:
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = r"(?!\w)" if name.isascii() else ""
    return _branch(tree) if names else ""


def _branch(node: dict) -> str:
    written = ""
    while len(node) == 1 and "" not in node:  # a run of letters without a choice
        ((letter, node),) = node.items()
        written += re.escape(letter)
    longer = [re.escape(letter) + _branch(inner) for letter, inner in node.items() if letter]
    if not longer:
        return written + node[""]
    return f"{written}(?:{'|'.join([*longer, *([node['']] if '' in node else [])])})"


class Described:
    """What a text says of looks already."""

    def __init__(self, text: str) -> None:
        self._text = text.casefold()
        self._words = _content_words(text)

    def covers(self, look: str) -> bool:
        """Whether the text says a look, in its words or in most of them."""
        if look.strip(TRIM).casefold() in self._text:
            return True
        words = _content_words(look)
        return bool(words) and 2 * len(words & self._words) >= len(words)


def _content_words(text: str) -> set[str]:
    """Latin words that say something, and pairs of CJK characters."""
    words = {word.casefold() for word in _LATIN.findall(text) if not _CJK_RUN.match(word)} - _EMPTY_WORDS
    return words | {run[i : i + 2] for run in _CJK_RUN.findall(text) for i in range(max(len(run) - 1, 1))}
