"""Words people and models use for the fields and the shots, mapped to the names of the schema.

The table itself is `vocabulary.json` (UTF-8, several languages); this module looks words up in it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from .schema import SHOTS

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINERS = re.compile(r"[\s\-./]+")
_NOT_WORD = re.compile(r"[\W_]+")
_LONGEST_KEY = 60
_LONGEST_SHOT_TEXT = 120


@lru_cache(maxsize=1)
def _table() -> dict:
    path = Path(__file__).with_name("vocabulary.json")
    return json.loads(path.read_text(encoding="utf-8"))


def normalise_key(key: str) -> str:
    """`visualPrompt`, `Visual Prompt`, `visual-prompt` -> `visual_prompt`; CJK stays as it is."""
    key = _CAMEL.sub("_", key[:_LONGEST_KEY].strip().strip("*#_\"'`:"))
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
    return _NOT_WORD.sub(" ", word.casefold()).strip()


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
    squeezed = _squeeze(text[:_LONGEST_SHOT_TEXT])
    exact = _shot_words().get(squeezed)
    if exact:
        return [exact]
    return [_shot_words()[found.group()] for found in _shot_phrases().finditer(squeezed)]


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


def refusals() -> list[str]:
    """Phrases (case-folded) that a refusal begins with."""
    return [phrase.casefold() for phrase in _table()["refusals"]]
