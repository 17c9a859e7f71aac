"""Finds the names of the cast in a text and writes their looks in their place.

A name is replaced only where it is certain to be one. Where a word may as well be a common noun or part of a longer
word (the name Lin, the character for "wood", inside the word for "forest"; an id `red` before "flowers"), the mention is
not sure: the text stays, and whoever composes the prompt puts the look in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .schema import Character
from .spellings import SpellingPattern, is_free_word, is_single_cjk, is_word, lone_cjk, opens_clause

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


@dataclass(frozen=True)
class Mention:
    """A name in a text. sure: it is certain to mean the person; possessive: "Rin's letter", which does not show Rin."""

    person: Character
    start: int
    end: int
    sure: bool
    possessive: bool


class Cast:
    """The characters of a script, found by id or name."""

    def __init__(self, people: list[Character]) -> None:
        self._people: dict[str, Character] = {}
        for person in people:
            for name in (person.name, person.id):
                if name.strip():
                    self._people.setdefault(name.casefold(), person)
        self._pattern = SpellingPattern(word for word in self._spellings() if len(word) <= _LONGEST_NAME)

    def get(self, word: str) -> Character | None:
        """The character of an id or a name, whatever its case; None for anyone else ("a crowd")."""
        return self._people.get(word.casefold())

    def _spellings(self) -> set[str]:
        """Names that have a look, as the script spells them ("Rose" the girl is not "rose" the flower).

        One Latin letter is no name: "A" would be found everywhere.
        """
        people = [person for person in self._people.values() if person.look.strip()]
        words = {word for person in people for word in (person.name, person.id) if len(word) > 1 or is_single_cjk(word)}
        return {word for word in words if word.strip() and (found := self.get(word)) and found.look.strip()}

    def mentions(self, text: str, listed: Iterable[str] = ()) -> list[Mention]:
        """The names in a text outside of quotation marks, in order.

        listed: ids of those the panel lists. One it does not list is not looked for in words that hardly mean a
        person, and not at all in doubtful words while it lists others.
        """
        listed = frozenset(listed)
        folded = text.casefold()
        counts: dict[str, int] = {}
        found = []
        for start, end in self._places(text):
            word = text[start:end]
            person = self.get(word)
            if is_word(word) and word not in counts:
                counts[word] = folded.count(word.casefold())
            alone = counts.get(word, 1) == 1
            sure = _certainty(person, text, start, end, person.id in listed, bool(listed), alone)
            possessive = bool(_POSSESSIVE.match(text, end))
            if sure or sure is False and (not possessive or person.id in listed):
                found.append(Mention(person, start, end, sure, possessive))
        return found

    def _places(self, text: str) -> list[tuple[int, int]]:
        quoted = [match.span() for match in _QUOTED.finditer(text)]
        found, at = [], 0
        for start, end in self._pattern.spans(text):
            while at < len(quoted) and quoted[at][1] <= start:
                at += 1
            if at == len(quoted) or start < quoted[at][0]:
                found.append((start, end))
        return found


def _certainty(person: Character, text: str, start: int, end: int, there: bool, others: bool, alone: bool) -> bool | None:
    """True: replace the word; False: it may mean the person; None: it is not taken for the person.

    there: the panel lists the person; others: it lists anybody; alone: the word stands once in the text.
    """
    word = text[start:end]
    if is_single_cjk(word):
        if lone_cjk(text, start, end):
            return True if there or not others else None
        return False if there or not others and opens_clause(text, start, end) else None
    if word != person.name and word.casefold() == person.name.casefold():
        return False if there else None  # the id `red` of the girl Red is no second spelling of her name
    if not is_word(word):
        return True
    if there and alone and is_free_word(text, start, end):
        return True
    named_otherwise = bool(person.name.strip()) and word != person.name
    return False if there or not others and not named_otherwise else None


def write_out(text: str, mentions: list[Mention], whole: set[str], allowed: Callable[[Mention], bool]) -> str:
    """The text with names that are sure replaced: by the whole look first, by its first words after that.

    whole: ids of those whose whole look stands in the prompt already; added to. allowed: False leaves the name. A
    possessive ("Rin's hand") gets the first words only; a whole look would not read.
    """
    pieces, end = [], 0
    for mention in mentions:
        if not mention.sure or not allowed(mention):
            continue
        look = mention.person.look.strip(TRIM)
        if mention.possessive or mention.person.id in whole:
            look = _FIRST_WORDS.split(look)[0]
        else:
            whole.add(mention.person.id)
        if _ARTICLE_BEFORE.search(text, max(mention.start - 8, 0), mention.start):
            look = _ARTICLE.sub("", look, count=1) if _ARTICLE.match(look) else look
        pieces += [text[end : mention.start], look]
        end = mention.end
    return "".join([*pieces, text[end:]])


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
