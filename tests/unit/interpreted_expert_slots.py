"""Expert slots against their references. Not collected by itself: test_kernels_slots.py runs it under Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import mend_interpreter

mend_interpreter()

from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.expert_slots import Fetch, FetchShape, TakeSlots, Visit, VisitScratch, fetch_reference  # noqa: E402
from a3b_engine.kernels.expert_slots_check import SlotsCase  # noqa: E402

TARGET = support.target("cpu")


def test_the_self_test_passes():
    assert support.usable("expert_slots", "cpu")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_steps_of_any_kind_are_those_of_the_reference(data):
    """Ids with duplicates; slots that come, go and lose their experts; homes that come and go; the host serving or not."""
    experts = data.draw(st.integers(1, 40), "experts")
    top_k, present = data.draw(st.integers(1, min(experts, 9)), "top_k"), data.draw(st.integers(0, experts), "present")
    case = SlotsCase(TARGET, experts, present, top_k, 256, data.draw(st.integers(0, 1000), "seed"), advances=data.draw(st.booleans(), "advances"))
    addresses = [case.slots[slot].data_ptr() for slot in range(experts)]
    homes = case.tables.home.tolist()
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        kind = data.draw(st.sampled_from(("step", "step", "look", "slot", "home", "serve")), "kind")
        which = data.draw(st.integers(0, experts - 1), "which")
        if kind == "step":
            ids = data.draw(st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k), "ids")
            assert case.step(ids) == ""
        elif kind == "look":
            ids = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, experts - 1), min_size=2, max_size=2), min_size=1, max_size=70), "visitors"))
            assert case.look(ids.to(torch.int32), data.draw(st.integers(0, experts), "places")) == ""
        else:
            for tables in (case.tables, case.expected):
                if kind == "serve":
                    tables.host_serves[0] = 1 - tables.host_serves[0]
                elif kind == "home":
                    tables.home[which] = 0 if tables.home[which] else homes[which]
                elif tables.slots[which]:
                    if tables.occupant[which] >= 0:
                        tables.slot_of[tables.occupant[which]] = -1
                    tables.slots[which], tables.occupant[which] = 0, -1
                else:
                    tables.slots[which] = addresses[which]


def case_of(experts=12, present=8, top_k=3, **options):
    """Slots 0 to present - 1, holding experts of the same numbers, used at 10, 11, ...; empty homes nowhere."""
    case = SlotsCase(TARGET, experts, present, top_k, 256, **options)
    for tables in (case.tables, case.expected):
        for slot in range(experts):
            there = slot < present
            tables.slots[slot] = case.slots[slot].data_ptr() if there else 0
            tables.occupant[slot] = tables.slot_of[slot] = slot if there else -1
            tables.stamp[slot] = 10 + slot
        tables.clock[0] = 100
    for slot in range(present):
        case.slots[slot].copy_(case.records[slot])
    return case


def test_the_oldest_go_and_never_those_of_this_step():
    case = case_of()
    assert case.step([0, 9, 10]) == ""  # 0 is the oldest but asked for: 1 and 2 go
    assert case.tables.occupant.tolist()[:4] == [0, 9, 10, 3] and case.tables.stamp.tolist()[:4] == [101, 101, 101, 13]
    assert case.tables.slot_of[[0, 1, 2, 9, 10]].tolist() == [0, -1, -1, 1, 2]
    assert case.tables.counts.tolist() == [3, 2] and int(case.tables.clock) == 101
    assert case.tables.pointers[9].tolist() == [case.slots[1].data_ptr() + 16 * part for part in range(12)]
    assert case.step([1, 2, 11]) == ""
    assert case.tables.occupant.tolist()[:8] == [0, 9, 10, 1, 2, 11, 6, 7]
    assert case.tables.counts.tolist() == [6, 5] and (case.tables.pointers[12] == 7).all()


def test_empty_slots_first_and_ties_by_number():
    case = case_of()
    for tables in (case.tables, case.expected):
        tables.occupant[6] = tables.slot_of[6] = -1
        tables.stamp[:] = 50
    assert case.step([8, 9, 10]) == ""
    assert case.tables.occupant.tolist()[:8] == [9, 10, 2, 3, 4, 5, 8, 7]


def test_an_expert_without_a_home_stays_unless_the_host_serves():
    case = case_of()
    for tables in (case.tables, case.expected):
        tables.home[:2] = 0
        tables.home[11] = 0
    assert case.step([11, 11, 9]) == ""
    assert case.take.copies[0].tolist() == [-12, case.slots[2].data_ptr()] and case.take.copies[1].tolist() == [0, 0]
    assert case.tables.occupant.tolist()[:4] == [0, 1, 11, 9] and case.tables.counts.tolist() == [3, 2]
    for tables in (case.tables, case.expected):
        tables.host_serves[0] = 1
    assert case.step([10, 8, 2]) == ""
    assert case.tables.occupant.tolist()[0] == 10 and case.tables.occupant.tolist()[1] == 8


def test_where_no_slot_may_be_taken_the_expert_stays_away():
    case = case_of(present=3)
    assert case.step([0, 1, 7]) == "" and case.tables.slot_of[7] == 2
    for tables in (case.tables, case.expected):
        tables.home[:] = 0
    before = case.tables.copied("cpu")
    assert case.step([5, 0, 1]) == ""
    assert case.take.copies.tolist() == [[-6, 0], [0, 0], [0, 0]]
    assert torch.equal(case.tables.occupant, before.occupant) and torch.equal(case.tables.pointers, before.pointers)


def test_a_step_that_misses_nothing_moves_nothing():
    case = case_of(advances=False)
    before = case.tables.copied("cpu")
    assert case.step([7, 2, 2]) == ""
    assert not case.take.copies.any() and torch.equal(case.tables.occupant, before.occupant) and int(case.tables.clock) == 100
    assert case.tables.stamp[[7, 2]].tolist() == [100, 100]


def test_512_experts_and_16_choices():
    case = SlotsCase(TARGET, 512, 200, 16, 256, seed=5)
    for _ in range(3):
        assert case.step(case.chance.sample(range(512), 16)) == ""
    assert case.look(torch.randint(0, 512, (40, 16), dtype=torch.int32), 312) == ""


@pytest.mark.parametrize("words", [64, 2048, 2048 * 3 + 64, 2048 * 8 - 64])
@pytest.mark.parametrize("rows, programs", [(1, 3), (5, 2), (19, 3)])
def test_fetch_copies_whole_records_and_nothing_else(words, rows, programs):
    """Some rows are to be left alone, and the bytes between records too."""
    generator = torch.Generator().manual_seed(words + rows)
    homes, places = (torch.randint(0, 256, (rows, words * 4 + 256), dtype=torch.uint8, generator=generator) for _ in range(2))
    copies = torch.tensor([[home.data_ptr(), place.data_ptr()] for home, place in zip(homes, places)])
    copies[::4, 0] = torch.tensor([0, -3])[torch.arange(len(copies[::4])) % 2]
    expected = places.clone()
    records = {home.data_ptr(): home[: words * 4] for home in homes} | {place.data_ptr(): right[: words * 4] for place, right in zip(places, expected)}
    fetch_reference(copies, records.__getitem__)
    Fetch(copies, words * 4, TARGET, shape=FetchShape(programs))()
    assert torch.equal(places, expected)
    assert rows == 1 or torch.equal(places[1, : words * 4], homes[1, : words * 4])


def test_visits_of_layers_share_their_scratch():
    """Marks of one layer do not reach the next."""
    first, second = (SlotsCase(TARGET, 20, 6, 2, 256, seed=seed) for seed in (1, 2))
    second.scratch = first.scratch
    second.visit = Visit(second.tables, first.scratch, 256, TARGET)
    second.fetch_visitors = Fetch(first.scratch.copies, 256, TARGET)
    for case in (first, second, first):
        assert case.look(torch.randint(0, 20, (5, 2), dtype=torch.int32), 20) == ""


def test_what_the_kernels_cannot_take():
    case = SlotsCase(TARGET, 8, 4, 2, 256)
    with pytest.raises(support.UnsupportedByKernel, match="9 of 8"):
        TakeSlots(case.tables, 9, TARGET)
    with pytest.raises(support.UnsupportedByKernel, match="records of 100 bytes"):
        Fetch(case.take.copies, 100, TARGET)
    with pytest.raises(support.UnsupportedByKernel, match="copies of torch.int32"):
        Fetch(case.take.copies.int(), 256, TARGET)
    with pytest.raises(support.UnsupportedByKernel, match="visit of 8 experts"):
        Visit(case.tables, VisitScratch(9, torch.device("cpu")), 256, TARGET)
    object.__setattr__(case.tables, "stamp", case.tables.stamp.int())
    with pytest.raises(support.UnsupportedByKernel, match="stamp of torch.int32"):
        TakeSlots(case.tables, 2, TARGET)
