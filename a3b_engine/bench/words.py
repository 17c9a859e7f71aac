"""Made-up words and texts: what the synthetic vocabulary is built of, and what benchmark prompts say. Nothing is drawn
from the system: one seed, one text, on every machine and Python version."""

from __future__ import annotations

import random
from typing import Callable, Iterator, Sequence, TypeVar

_Item = TypeVar("_Item")

ONSETS = (
    "b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl fr gl gr ph pl pr qu sc sh sk sl sm sn sp st str sw th tr tw wh"
).split()
VOWELS = "a e i o u ai ea ee ie oo ou".split()
CODAS = ["", *"b ck ct d f g l ll m n nd ng nk nt p r rd rk rm rn rt s sh st t th x".split()]

# A few hundred common words of the kind that stories and comic scripts use.
COMMON = (
    "the a an and or but if then so as of to in on at by for from with without into over under near behind before after is are was were be "
    "been has have had do does did not no yes this that these those it its he she they them his her their we you your I me my who what when "
    "where why how all each every some any one two three four small large old new young tall dark bright cold warm quiet loud slow quick red "
    "blue green yellow white black grey golden fox cat dog bird boy girl woman man child robot king queen captain friend stranger river forest "
    "mountain street house room door window table lamp letter map key book sword train bridge market school garden tower ship boat sky sea rain "
    "snow wind sun moon star night morning evening light shadow smile eyes face hand hair coat hat looks turns walks runs stands sits holds "
    "opens closes finds loses says asks answers whispers shouts laughs waits follows falls rises returns remembers never always again still "
    "suddenly slowly together alone close wide panel scene title style speaker line caption"
).split()

# Common Chinese characters and their neighbours; enough for texts in both of the pack's languages.
CJK_FIRST, CJK_LAST = 0x4E00, 0x9FA5


def pick(rng: random.Random, items: Sequence[_Item]) -> _Item:
    """One of `items`. Only `Random.random` is promised to be the same in every version of Python."""
    return items[int(rng.random() * len(items))]


def made_word(rng: random.Random) -> str:
    """A lower-case word of one to four syllables that could be English."""
    count = 1 + sum(rng.random() < chance for chance in (0.75, 0.4, 0.2))
    return "".join(pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, CODAS) for _ in range(count))


def sentences(rng: random.Random) -> Iterator[str]:
    """Words of a text without end, each with the space or punctuation in front: two thirds common, the rest made up."""
    left, start = 0, ""
    while True:
        if left == 0:
            left = 5 + int(rng.random() * 12)
            word = pick(rng, COMMON) if rng.random() < 0.66 else made_word(rng)
            yield start + word.capitalize()
            start = pick(rng, (". ", "! ", "? ", ".\n"))
        else:
            word = pick(rng, COMMON) if rng.random() < 0.66 else made_word(rng)
            yield (", " if rng.random() < 0.08 else " ") + word
        left -= 1


def text_of(count_tokens: Callable[[str], int], tokens: int, seed: int) -> str:
    """A text that `count_tokens` counts as `tokens` tokens, where its tokenizer makes every digit a token of its own.

    With another tokenizer it may be a few tokens off; `tokens` below 1 gives an empty text.
    """
    if tokens < 1:
        return ""
    words, source = [], sentences(random.Random(seed))
    while count_tokens("".join(words)) < tokens:
        words += [next(source) for _ in range(max(8, tokens // 4))]
    low, high = 0, len(words)  # the most words that do not exceed it
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_tokens("".join(words[:middle])) <= tokens else (low, middle - 1)
    text = "".join(words[:low])
    return text + "7" * (tokens - count_tokens(text))
