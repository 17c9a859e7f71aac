"""How a budget is divided: never over it, experts last to leave, refusals that name the sum."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from a3b_engine.memory.placement import Placement, Sizes, place, row_bytes, working_area

GB = 10**9
CARD = torch.device("cuda", 0)
WHOLE = Sizes(
    rest=int(2.5 * GB), embedding=GB, vision=int(0.9 * GB), record=3_146_496, row=row_bytes(3_146_496, 40, CARD), layers=40, experts=256, top_k=8,
    vision_passing=GB // 8,
)  # fmt: skip


@given(st.integers(1, 10**7), st.integers(1, 100))
def test_a_row_takes_what_the_allocator_takes(record, layers):
    """On a card whole steps of 2 MiB, where a row is large enough to have memory of its own."""
    exact, on_card = row_bytes(record, layers, torch.device("cpu")), row_bytes(record, layers, CARD)
    assert exact == record * layers <= on_card < exact + 2 * 1024**2
    assert on_card % (2 * 1024**2) == 0 if exact >= 10 * 1024**2 else on_card == exact


def test_with_room_to_spare_everything_is_there():
    assert place(WHOLE, math.inf, GB, GB) == Placement(256, True, True)


def test_embedding_rows_leave_first_then_the_vision_tower_then_experts():
    working = GB
    tight = WHOLE.all + max(working, 100)
    assert place(WHOLE, tight, working, 100) == Placement(256, True, True)
    assert place(WHOLE, tight - 1, working, 100) == Placement(256, False, True)
    assert place(WHOLE, tight - WHOLE.embedding - 1, working, 100) == Placement(256, False, False)
    fewer = place(WHOLE, tight - WHOLE.embedding - WHOLE.vision - 1, working, 100)
    assert 200 < fewer.rows < 256 and not fewer.embedding and not fewer.vision


def test_the_fewest_experts_are_three_tokens_worth():
    assert WHOLE.fewest_rows == 24
    assert Sizes(1, 1, 1, 1, 4, 4, experts=16, top_k=8).fewest_rows == 16
    assert place(WHOLE, WHOLE.smallest, GB, GB) is None


def sizes_of(record, layers, more, **others):
    return Sizes(record=record, row=record * layers + more, layers=layers, **others)


@given(
    st.builds(
        sizes_of, rest=st.integers(1, 10**4), embedding=st.integers(0, 10**4), vision=st.integers(0, 10**4), record=st.integers(1, 100),
        layers=st.integers(1, 10), more=st.integers(0, 50), experts=st.integers(1, 64), top_k=st.integers(1, 4),
    ),
    st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**4),
)  # fmt: skip
def test_a_placement_fits_and_more_room_never_makes_it_smaller(sizes, room, working, seeing):
    found, more = place(sizes, room, working, seeing), place(sizes, room + 500, working, seeing)
    if found is None:
        return
    assert found.nbytes(sizes) + working_area(sizes, found.rows, working, seeing, found.vision) <= room
    assert sizes.fewest_rows <= found.rows <= more.rows <= sizes.experts


@pytest.mark.parametrize("rows", [24, 100, 256])
def test_blocks_of_the_tower_count_where_it_has_no_place(rows):
    assert working_area(WHOLE, rows, 0, 7, vision=True) == max(7, (256 - rows) * WHOLE.record)
    assert working_area(WHOLE, rows, 0, 7, vision=False) == max(7 + WHOLE.vision_passing, (256 - rows) * WHOLE.record)
