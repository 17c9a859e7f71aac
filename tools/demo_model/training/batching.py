"""What a worker process needs to know; plain values that travel to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Batching:
    """tokenizer: its folder. Lessons are the seeds seed * 2**32 + group * n, from group `first_group` on, of `kinds` in
    these shares; none: pictures without words, `batch_lessons` of them in each batch."""

    tokenizer: Path
    image_tokens: int
    vocab_size: int
    side: int
    seed: int
    first_group: int
    group: int
    batch_lessons: int
    batch_tokens: int
    trait_weight: float
    kinds: dict[str, float]
