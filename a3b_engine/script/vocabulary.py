"""Words people and models use for the fields and the shots, mapped to the names of the schema.

The table itself is `vocabulary.json` (UTF-8, several languages); this module looks words up in it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

from .schema import SHOTS

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINERS = re.compile(r"[\s\-./]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_ACCENTS = re.compile("[\u0300-\u036f]")
_NOT_WORD = re.compile(r"[\W_]+")
_LONGEST_KEY = 60
_LONGEST_SHOT_TEXT = 120


@lru_cache(maxsize=1)
def _table() -> dict:
    path = Path(__file__).with_name("vocabulary.json")
    return json.loads(path.read_text(encoding="utf-8"))


def normalise_key(key: str) -> str:
    """`visualPrompt`, `Visual Prompt`, `visual-prompt` -> `visual_prompt`; CJK stays as it is."""
    return _normalised(key[:_LONGEST_KEY])


@lru_cache(maxsize=4096)
def _normalised(key: str) -> str:
    key = _INVISIBLE.sub("", unicodedata.normalize("NFKC", key))
    key = _CAMEL.sub("_", key.strip().strip("*#_\"'`:"))
    return _JOINERS.sub("_", key).casefold()


@lru_cache(maxsize=None)
def aliases(level: str) -> dict[str, str]:
    """Normalised alias -> field name, for `level` in script, panel, row, character."""
    return {normalise_key(word): field for field, words in _table()[level].items() for word in words}


@lru_cache(maxsize=1)
def known_keys() -> frozenset[str]:
    """Every normalised key of every level: what is likely to be a key in a damaged text."""
    return frozenset(key for level in ("script", "panel", "row", "character") for key in aliases(level))


@lru_cache(maxsize=1)
def script_only_keys() -> frozenset[str]:
    """Keys that stand at the top of a script and never inside a panel, row or character."""
    inner = {key for level in ("panel", "row", "character") for key in aliases(level)}
    return frozenset(set(aliases("script")) - inner) | {"dialogue", "characters"}


def _squeeze(word: str) -> str:
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", _INVISIBLE.sub("", word)))
    return _NOT_WORD.sub(" ", unicodedata.normalize("NFKC", plain).casefold()).strip()


@lru_cache(maxsize=1)
def _shot_words() -> dict[str, str]:
    words = {_squeeze(word): shot for shot, listed in _table()["shots"].items() for word in listed}
    words.update({_squeeze(shot): shot for shot in SHOTS})
    return words


@lru_cache(maxsize=1)
def _shot_phrases() -> re.Pattern:
    # Longest first, so that "extreme close up" wins over "close up". Latin words need word borders, CJK words do not;
    # one-letter CJK words only count alone (exact match), or every sentence would hold one.
    phrases = sorted((w for w in _shot_words() if len(w) > 1), key=len, reverse=True)
    return re.compile("|".join(rf"\b{re.escape(p)}\b" if p.isascii() else re.escape(p) for p in phrases))


def find_shots(text: str) -> list[str]:
    """Every shot the text names, in order, as members of the closed set."""
    for written in (text[:_LONGEST_SHOT_TEXT], _CAMEL.sub(" ", text[:_LONGEST_SHOT_TEXT])):
        squeezed = _squeeze(written)
        exact = _shot_words().get(squeezed)
        found = [exact] if exact else [_shot_words()[phrase.group()] for phrase in _shot_phrases().finditer(squeezed)]
        if found:
            return found
    return []


def reading_direction(text: str) -> str | None:
    """`ltr`, `rtl` or `vertical` for a word in any listed language, else None."""
    squeezed = _squeeze(text[:_LONGEST_SHOT_TEXT])
    for direction, words in _table()["reading_directions"].items():
        for word in map(_squeeze, words):
            if squeezed == word or (len(word) > 3 and word in squeezed):
                return direction
    return None


def prose_markers() -> list[str]:
    """Words that stand before a number at the head of a panel written as prose."""
    return list(_table()["prose_markers"])


@lru_cache(maxsize=1)
def refusals() -> list[str]:
    """Phrases (case-folded) that a refusal begins with."""
    return [phrase.casefold() for phrase in _table()["refusals"]]


def is_refusal(text: str) -> bool:
    """Whether a text is a model that refuses: it begins as one and names what is refused. A person of the story who
    says "I can't sleep" does not."""
    start = text[:300].strip(" \t\r\n\"'*.").casefold()
    return any(start.startswith(phrase) for phrase in refusals()) and any(word in start for word in _table()["refused"])
