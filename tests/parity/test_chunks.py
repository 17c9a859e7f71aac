"""A prompt fed in pieces leaves the same logits as in one go, whatever the pieces."""

from __future__ import annotations

import pytest
from compare import LIMIT, encode, largest, run_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ALL, WITH_VISION
from small_prompts import prompt, random_ids

SIZES = (1, 2, 3, 5, 7, 16, 31, 63, 64, 65, 100, 129, 4096)


@pytest.mark.parametrize("name", ALL)
def test_chunk_sizes(models, differences, name):
    """Text of 130 tokens in chunks of many sizes; a chunk size of 1 is the decode path all the way."""
    ids = random_ids(130, name, "lengths")
    engine = models.engine(name)
    theirs = models.oracle(name).logits(ids)
    for size in SIZES:
        difference = largest(engine.logits(ids, chunk_size=size), theirs)
        differences.note("fp32 logits, chunked prefill", difference, f"{name}, chunks of {size}", LIMIT)
        assert difference <= LIMIT, size


@pytest.mark.parametrize("name", WITH_VISION)
def test_chunk_borders_inside_pictures(models, differences, name):
    ids, pictures = prompt(name, "mixed images")
    engine = models.engine(name)
    images = encode(engine, pictures)
    theirs = models.oracle(name).logits(ids, pictures)
    for size in (1, 2, 3, 4, 5, 7, 11, 17, 40):
        difference = largest(engine.logits(ids, images=images, chunk_size=size), theirs)
        differences.note("fp32 logits, chunks cutting pictures", difference, f"{name}, chunks of {size}", LIMIT)
        assert difference <= LIMIT, size


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_prompts_shorter_than_the_convolution(models, differences, name, length):
    """The convolution state of a prompt shorter than the kernel starts with zeros, also when it goes on later."""
    ids = random_ids(130, name, "lengths")[:12]
    theirs = models.oracle(name).logits(ids)
    for going_on in (1, 2, 4096):
        ours = run_pieces(models.engine(name), ids, None, [(length, 4096), (12 - length, going_on)])
        difference = differences.note("fp32 logits, prompts of 1 to 3 tokens and on", largest(ours, theirs),
                                      f"{name}, {length} tokens", LIMIT)
        assert difference <= LIMIT


def split_at(ids: list[int], borders: set[int], chunk_size: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(borders), len(ids)]
    return [(stop - start, chunk_size) for start, stop in zip(edges, edges[1:])]


@pytest.mark.parametrize("name", ALL)
def test_any_split(models, differences, name):
    """Pieces of arbitrary lengths, drawn at random; they follow each other in one sequence state."""
    ids = random_ids(130, name, "lengths")
    theirs = models.oracle(name).logits(ids)

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(borders=st.sets(st.integers(1, len(ids) - 1), max_size=12))
    def check(borders):
        ours = run_pieces(models.engine(name), ids, None, split_at(ids, borders, 4096))
        difference = differences.note("fp32 logits, random splits", largest(ours, theirs),
                                      f"{name}, borders {sorted(borders)}", LIMIT)
        assert difference <= LIMIT

    check()


@pytest.mark.parametrize("name", WITH_VISION)
def test_any_split_with_pictures(models, differences, name):
    """Random calls between which the text is cut anywhere, in random chunks, which may cut pictures too."""
    ids, pictures = prompt(name, "mixed images")
    engine = models.engine(name)
    images = encode(engine, pictures)
    theirs = models.oracle(name).logits(ids, pictures)
    pad = engine.config.image_token_id
    outside = [at for at in range(1, len(ids)) if ids[at] != pad or ids[at - 1] != pad]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(borders=st.sets(st.sampled_from(outside), max_size=8), chunk_size=st.integers(1, 40))
    def check(borders, chunk_size):
        ours = run_pieces(engine, ids, images, split_at(ids, borders, chunk_size))
        difference = differences.note("fp32 logits, random splits with pictures", largest(ours, theirs),
                                      f"{name}, borders {sorted(borders)}, chunks of {chunk_size}", LIMIT)
        assert difference <= LIMIT

    check()
