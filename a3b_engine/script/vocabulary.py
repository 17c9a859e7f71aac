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
_AROUND = re.compile(r"^[\W_]+(?=\w)|^\s*\d{1,2}[.)]\s+(?=[^\W\d])|[\W_]+$")  # pictures, numbers and marks around a key
_ACCENTS = re.compile("[\u0300-\u036f]")
_NOT_WORD = re.compile(r"[\W_]+")
_LONGEST_KEY = 60
_LONGEST_SHOT_TEXT = 120


@lru_cache(maxsize=1)
def _table() -> dict:
    path = Path(__file__).with_name("vocabulary.json")
    return json.loads(path.read_text(encoding="utf-8"))


def normalise_key(key: str) -> str:
    """`visualPrompt`, `Visual Prompt`, `visual-prompt` -> `visual_prompt`, `No.` -> `no`; CJK stays as it is."""
    return _normalised(key[:_LONGEST_KEY])


@lru_cache(maxsize=4096)
def _normalised(key: str) -> str:
    key = _INVISIBLE.sub("", unicodedata.normalize("NFKC", key))
    key = _CAMEL.sub("_", _AROUND.sub("", key))
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


def whole_shot(text: str) -> bool:
    """Whether a text is the name of a shot and nothing else, in at least two words or not in Latin letters."""
    squeezed = _squeeze(text[:_LONGEST_SHOT_TEXT])
    return squeezed in _shot_words() and (" " in squeezed or not squeezed.isascii())


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
def sample_words() -> list[str]:
    """Words (case-folded, longest first) that name or describe a field in a sample of the format."""
    return sorted(map(str.casefold, _table()["sample_words"]), key=len, reverse=True)


@lru_cache(maxsize=1)
def nothing_words() -> frozenset[str]:
    """Words (case-folded) that stand where a panel has no dialogue, no props and so on."""
    return frozenset(map(str.casefold, _table()["nothing_words"]))


@lru_cache(maxsize=1)
def remark_labels() -> frozenset[str]:
    """Normalised labels of lines that say something of a panel, and are no speaker and no field."""
    return frozenset(map(normalise_key, _table()["remark_labels"]))


@lru_cache(maxsize=1)
def corrections() -> re.Pattern:
    """Words between two answers that say that the second replaces the first."""
    words = _table()["corrections"]
    return re.compile("|".join(rf"\b{re.escape(word)}" if word.isascii() else re.escape(word) for word in words), re.IGNORECASE)


def _plain_case(text: str) -> str:
    return text.casefold().replace("\u2019", "'")


@lru_cache(maxsize=1)
def _refusals() -> tuple[str, ...]:
    return tuple(_plain_case(phrase) for phrase in _table()["refusals"])


@lru_cache(maxsize=1)
def _refused() -> tuple[str, ...]:
    return tuple(_plain_case(word) for word in _table()["refused"])


def refusal_parts() -> dict[str, list[str]]:
    """Words of which `refusals.py` builds its patterns, by what they say and the language."""
    return _table()["refusal_parts"]


def sounds_like_refusal(answer: str) -> bool:
    """Whether a whole answer that holds no script is a model that refuses: its first words are enough, or words further
    on that name what is refused. For a value of a script `refusals.py` asks for more."""
    start = _plain_case(answer[:400].strip(" \t\r\n\"'*."))
    if start.startswith(_refusals()):
        return True
    return any(phrase in start for phrase in _refusals()) and any(word in start for word in _refused())


def is_error_message(answer: str) -> bool:
    """Whether an answer is the message of a server or a program that failed."""
    start = answer[:200].casefold()
    return any(sign in start for sign in _table()["error_signs"])
