"""Where spellings stand in a text as words of their own, in scripts with and without spaces between words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_HIRAGANA = "\u3041-\u309f"
_KATAKANA = "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # without the middle dot, which parts names
_HANGUL = "\u1100-\u11ff\uac00-\ud7a3"
_HAN = "\u3005\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CJK = _HIRAGANA + _KATAKANA + _HANGUL + _HAN
_LETTER_OF_CJK = re.compile(f"[{_CJK}]")
# Letters of a script that may follow a name without being part of its word: particles.
_PARTICLES_HIRAGANA = "\u306f\u304c\u3092\u306e\u306b\u3068\u3082\u3078\u3067\u3084"
_PARTICLES_HANGUL = (
    "\uc740\ub294\uc774\uac00\uc744\ub97c\uc758\uc5d0\uc640\uacfc\ub3c4\ub85c\ub791\uc57c\uc544\uc528\ub2d8\ud55c\uaed8"
)
# script of the letter at the edge of a name -> (what must not stand before, what may follow). Han has no borders: words
# follow each other without any, and two characters are rarely part of another word.
_OTHER = (rf"(?<![^\W{_CJK}])", rf"(?![^\W{_CJK}])")
_BORDERS = [
    (re.compile(f"[{_HAN}]"), ("", "")),
    (re.compile(f"[{_HIRAGANA}]"), (f"(?<![{_HIRAGANA}])", f"(?![{_HIRAGANA}])|(?=[{_PARTICLES_HIRAGANA}])")),
    (re.compile(f"[{_KATAKANA}]"), (f"(?<![{_KATAKANA}])", f"(?![{_KATAKANA}])")),
    (re.compile(f"[{_HANGUL}]"), (f"(?<![{_HANGUL}])", f"(?![{_HANGUL}])|(?=[{_PARTICLES_HANGUL}])")),
]
# What a subject of one character is followed by and a longer word is not: prepositions and adverbs, common verbs of
# bodies and faces, the particles of Japanese. "\u6708\u5149" (moonlight) is none, "\u6708\u5728\u7b11" (Yue is smiling) is one.
_AFTER_A_SUBJECT = re.compile(
    "["
    "\u5728\u628a\u88ab\u6b63\u4ece\u5f9e\u5411\u5bf9\u5c0d\u7ed9\u7d66\u548c\u4e0e\u8207\u8ddf\u4e5f\u53c8\u5374\u537b\u5c31\u5df2"
    "\u5c06\u5c07\u8bf4\u8aaa\u7ad9\u5750\u8d70\u8dd1\u8dea\u8eba\u8e72\u62ac\u4f4e\u4e3e\u8209\u62ff\u63e1\u62b1\u770b\u671b\u542c"
    "\u807d\u558a\u7b11\u54ed\u60f3\u8f6c\u8f49\u56de\u63a8\u62c9\u4f38\u51b2\u885d\u8df3\u8ffd\u6253\u7741\u95ed\u9589\u76b1\u7a7f"
    "\u8e29\u6307\u62cd\u6492\u306f\u304c\u3092\u306b\u3068\u3082"
    "]"
)
_WORD_BEFORE = re.compile(r"([^\W\d_]+)[^\S\n]+\Z")
_WORD_AFTER = re.compile(r"[^\S\n]*([^\W\d_]+|-\w)")
_NEXT = 40  # characters looked at on either side
# Words that never make a compound with their neighbour ("robot factory", "toy robot").
_FUNCTION_WORDS = frozenset(
    "a an the this that his her its their our my your one and or but with without of in on at to from by near under over behind "
    "before beside between into onto through across along around as is are was were be being has have had who which while then "
    "not both".split()
)


class SpellingPattern:
    """Finds spellings at the borders of words; of several the longest at a place."""

    def __init__(self, spellings: Iterable[str]) -> None:
        tree: dict = {}
        for word in spellings:
            node = tree
            for letter in word:
                node = node.setdefault(letter, {})
            node[""] = _after(word)
        # One branch a letter, or 500 names take seconds.
        self._pattern = re.compile("|".join(_before(letter) + re.escape(letter) + _branch(node) for letter, node in tree.items())) if tree else None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        return (match.span() for match in self._pattern.finditer(text)) if self._pattern else iter(())


def _before(letter: str) -> str:
    return next((borders[0] for script, borders in _BORDERS if script.match(letter)), _OTHER[0])


def _after(word: str) -> str:
    if is_single_cjk(word):
        return ""  # whether it stands alone decides how sure it is
    border = next((borders[1] for script, borders in _BORDERS if script.match(word[-1])), _OTHER[1])
    return f"(?:{border})" if "|" in border else border


def _branch(node: dict) -> str:
    written = ""
    while len(node) == 1 and "" not in node:  # a run of letters without a choice
        ((letter, node),) = node.items()
        written += re.escape(letter)
    longer = [re.escape(letter) + _branch(inner) for letter, inner in node.items() if letter]
    if not longer:
        return written + node[""]
    return f"{written}(?:{'|'.join([*longer, *([node['']] if '' in node else [])])})"


def is_single_cjk(word: str) -> bool:
    """Whether a name is one character of a script without spaces between words; it is also a word or part of many."""
    return len(word) == 1 and bool(_LETTER_OF_CJK.match(word))


def lone_cjk(text: str, start: int, end: int) -> bool:
    """Whether no letter touches a place, so that the character there is a word of its own."""
    return not (start and text[start - 1].isalnum()) and not text[end : end + 1].isalnum()


def opens_clause(text: str, start: int, end: int) -> bool:
    """Whether a place begins a clause and is followed by what follows a subject."""
    return not (start and text[start - 1].isalnum()) and bool(_AFTER_A_SUBJECT.match(text, end))


def is_word(word: str) -> bool:
    """Whether a spelling may be a common noun or a colour: small letters only (`robot`; not `Robot`, `robot_1`)."""
    return word.islower() and all(letter.isalpha() or letter in " -" for letter in word)


def is_free_word(text: str, start: int, end: int) -> bool:
    """Whether a word stands next to no word that it may be a compound with."""
    before = _WORD_BEFORE.search(text[max(start - _NEXT, 0) : start])
    after = _WORD_AFTER.match(text[end : end + _NEXT])
    touches = start and text[start - 1] == "-"
    return not touches and all(match is None or match[1].casefold() in _FUNCTION_WORDS for match in (before, after))
