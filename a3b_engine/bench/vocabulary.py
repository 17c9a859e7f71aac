"""A byte-level BPE tokenizer of the published size without a file.

Its tokens are made up, but of the published kind: bytes, Chinese characters and words of two to four of them, syllables
and words with and without the space in front, names of JSON keys, punctuation, runs of spaces. What depends on the size
and lengths of a vocabulary (sampling, grammar masks, decoding) then costs what it costs with the real one.
"""

from __future__ import annotations

import random
from functools import lru_cache

from ..tokenizer import AddedToken, Tokenizer
from .shape import CONTROL_TOKENS, ModelShape
from .words import CJK_FIRST, CJK_LAST, CODAS, COMMON, ONSETS, VOWELS, pick

# The rule by which the published tokenizer cuts a text before merging: contractions, words, single digits, ...
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_REST = r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = f"{_CONTRACTIONS}|{_WORDS}|{_REST}"

_JSON_MARKS = ('"', '":', '",', '"}', '"]', '{"', '["', "},", "],", "}]", '"},', '"],', '{}', "[]", '""', "}}", '":{', '":[', '"}]', "...", "--", "!!", "?!", "()", "//")
_JSON_KEYS = (
    "title style language reading direction characters id name look dialogue speaker line emotion tag panels index shot action micro expression "
    "background light props caption sfx scene visual prompt negative true false null"
).split()
# Shares of the text tokens: Chinese characters and words of 2, 3, 4 characters. The rest are Latin words.
_CJK_SHARES = ((1, 0.05), (2, 0.16), (3, 0.07), (4, 0.05))


class _Vocabulary:
    """Tokens in id order and the merges that make them. A token that exists already, or no longer fits, adds nothing."""

    def __init__(self, size: int) -> None:
        from tokenizers import pre_tokenizers

        self._alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.size = size
        self.ids = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.merges: list[tuple[str, str]] = []
        self._rank: dict[tuple[str, str], int] = {}

    @property
    def full(self) -> bool:
        return len(self.ids) >= self.size

    def spelled(self, text: str) -> str:
        """`text` in the byte alphabet of byte-level BPE: one character a byte."""
        return self._alphabet.pre_tokenize_str(text)[0][0]

    def join(self, left: str, right: str) -> str:
        """The token made of two tokens, in byte spelling. Where either does not exist (the table is full), nothing is added."""
        token = left + right
        if not self.full and token not in self.ids and left in self.ids and right in self.ids:
            self.ids[token] = len(self.ids)
            self._rank[left, right] = len(self.merges)
            self.merges.append((left, right))
        return token

    def chain(self, parts: list[str]) -> str:
        """Join parts from the left, so that every beginning is a token too."""
        token = parts[0]
        for part in parts[1:]:
            token = self.join(token, part)
        return token

    def pieces(self, text: str) -> list[str]:
        """What the merges so far make of `text` (byte spelling): the first merge of the table goes first, as in BPE."""
        parts = list(text)
        while len(parts) > 1:
            best, at = min((self._rank.get(pair, self.size), number) for number, pair in enumerate(zip(parts, parts[1:])))
            if best == self.size:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


def synthetic_tokenizer(shape: ModelShape) -> Tokenizer:
    """The tokenizer of that shape: `shape.text_tokens` byte-level tokens, then the control tokens at the published places.

    Built once a size and process (two seconds for 248,044); the same everywhere.
    """
    return _built(shape.text_tokens)


@lru_cache(maxsize=2)
def _built(text_tokens: int) -> Tokenizer:
    from tokenizers import AddedToken as Added
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = _vocabulary(text_tokens)
    backend = Backend(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([Added(content, special=special, normalized=False) for content, special in CONTROL_TOKENS])
    added = [AddedToken(text_tokens + number, content, special) for number, (content, special) in enumerate(CONTROL_TOKENS)]
    return Tokenizer(backend, added, source="the synthetic tokenizer")


def _vocabulary(size: int) -> _Vocabulary:
    vocabulary, rng = _Vocabulary(size), random.Random(5)
    _marks_and_spaces(vocabulary)
    for word in (*_JSON_KEYS, *COMMON):
        _whole_word(vocabulary, word)
    _chinese(vocabulary, rng)
    while not vocabulary.full:
        _latin(vocabulary, rng)
    return vocabulary


def _marks_and_spaces(vocabulary: _Vocabulary) -> None:
    space, newline = vocabulary.spelled(" "), vocabulary.spelled("\n")
    for mark in _JSON_MARKS:
        vocabulary.join(space, vocabulary.chain(list(mark)))
    for _ in range(2):
        vocabulary.join(newline, newline)
    vocabulary.chain([space] * 24)


def _whole_word(vocabulary: _Vocabulary, word: str) -> None:
    """A word that is one token in every place it may stand: plain, capitalised, after a space and after a quote."""
    space = vocabulary.spelled(" ")
    for spelling in dict.fromkeys((word, word.capitalize())):
        for before in ("", space, '"'):
            vocabulary.chain(vocabulary.pieces(before + spelling))


def _chinese(vocabulary: _Vocabulary, rng: random.Random) -> None:
    every = vocabulary.spelled("".join(map(chr, range(CJK_FIRST, CJK_LAST + 1))))
    characters = [every[at : at + 3] for at in range(0, len(every), 3)]
    budget = {length: int(share * vocabulary.size) for length, share in _CJK_SHARES}
    # A large step through the block spreads the chosen characters over it.
    known = [characters[number * 7919 % len(characters)] for number in range(min(budget[1], len(characters)))]
    for character in known:
        vocabulary.chain(list(character))
    known = [character for character in known if character in vocabulary.ids]
    longer = known
    for length in (2, 3, 4):
        longer = [vocabulary.join(pick(rng, longer), pick(rng, known)) for _ in range(budget[length])] if longer else []
        longer = [token for token in longer if token in vocabulary.ids]


def _latin(vocabulary: _Vocabulary, rng: random.Random) -> None:
    """One made-up word from its syllables: the beginnings become tokens too, plain or behind a space."""
    count = 1 + (rng.random() < 0.6) + (rng.random() < 0.2)
    syllables = [_syllable(vocabulary, pick(rng, ONSETS), pick(rng, VOWELS), pick(rng, CODAS) if rng.random() < 0.5 else "") for _ in range(count)]
    if rng.random() < 0.15:
        syllables[0] = vocabulary.chain(list(syllables[0].capitalize()))
    if rng.random() < 0.6:
        syllables[0] = vocabulary.join(vocabulary.spelled(" "), syllables[0])
    vocabulary.chain(syllables)


def _syllable(vocabulary: _Vocabulary, onset: str, vowel: str, coda: str) -> str:
    parts = [vocabulary.chain(list(part)) for part in (onset, vowel, coda) if part]
    return vocabulary.chain(parts)
