"""Expert slots: kernels against their references, code for every architecture, and the references without Triton."""

import random
import sys

import pytest
import torch
from compiling import report_of
from interpreted import needs_triton, run_cases

from a3b_engine.kernels.expert_slots import LONG_AGO, LayerTables, take_slots_reference, visit_reference


@needs_triton
def test_slot_kernels_under_the_interpreter():
    run_cases("interpreted_expert_slots.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """At the 35B sizes nothing spills; records go in pieces of 16 bytes; the choice of slots is made by one warp without shared
    memory; from sm_90 on every kernel waits before it lets the next one start, which the experts' kernels rest on."""
    report = report_of("compiled_expert_slots.py")
    for architecture, kernels in report.items():
        assert sorted(kernels) == ["fetch_kernel", "mark_kernel", "take_slots_kernel", "visit_kernel"]
        for name, facts in kernels.items():
            assert facts["stack"] == 0 and facts["shared"] <= 8192, f"{name} on sm_{architecture}"
            assert facts["waits"] == (int(architecture) >= 90), f"{name} on sm_{architecture}"
        assert kernels["fetch_kernel"]["loads"] == ["v4.b32"] and kernels["fetch_kernel"]["stores"] == ["v4.b32"]
        assert kernels["take_slots_kernel"]["shared"] == 0 and kernels["take_slots_kernel"]["warmed"] == (5 if int(architecture) >= 90 else 0)


def tables_of(experts, present):
    """Slots 0 to present - 1 at 1000, 2000, ... and empty; homes at 100001, 100002, ..."""

    def whole(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype)

    half = torch.int32
    return LayerTables(
        whole([1000 * (slot + 1) if slot < present else 0 for slot in range(experts)]), whole([-1] * experts, half), whole([-1] * experts, half),
        whole([0] * experts), whole([100001 + expert for expert in range(experts)]), whole([0]), whole([0, 0]), whole([0], half),
        torch.zeros(experts + 1, 12, dtype=torch.int64), torch.arange(12), advances=True,
    )  # fmt: skip


def test_the_reference_keeps_what_was_used_last():
    """Against a list in order of use: as many experts as there are slots, those asked for last."""
    tables, chance, order = tables_of(30, 12), random.Random(3), []
    fetched = 0
    for step in range(300):
        ids = chance.sample(range(30), 4) if step % 3 else chance.sample(range(8), 4)
        copies = take_slots_reference(tables, torch.tensor(ids))
        came = {expert for expert in ids if expert not in order}
        fetched += len(came)
        order = [expert for expert in order if expert not in ids] + sorted(ids, key=lambda expert: int(tables.slot_of[expert]))
        order = order[-12:]
        assert {expert for expert in tables.occupant.tolist() if expert >= 0} == set(order)
        for expert, (source, destination) in zip(ids, copies.tolist()):
            slot = int(tables.slot_of[expert])
            assert (source, destination) == ((100001 + expert, 1000 * (slot + 1)) if expert in came else (0, 0))
            assert tables.occupant[slot] == expert and tables.stamp[slot] == step + 1
            assert tables.pointers[expert].tolist() == [1000 * (slot + 1) + part for part in range(12)]
        for slot, expert in enumerate(tables.occupant.tolist()):
            assert expert < 0 or tables.slot_of[expert] == slot
        assert int((tables.slot_of >= 0).sum()) == int((tables.occupant >= 0).sum())
    assert tables.counts.tolist() == [1200, fetched] and int(tables.clock) == 300


def test_a_slot_unused_for_a_million_steps_is_no_older_than_another():
    tables = tables_of(6, 3)
    take_slots_reference(tables, torch.tensor([0, 1, 2]))
    tables.stamp[:3] = torch.tensor([5, 0, 7])
    tables.clock.fill_(LONG_AGO + 9)
    take_slots_reference(tables, torch.tensor([3]))
    assert tables.occupant.tolist()[:3] == [3, 1, 2]
    tables.clock.fill_(LONG_AGO + 5)
    take_slots_reference(tables, torch.tensor([4]))
    assert tables.occupant.tolist()[:3] == [3, 4, 2]


def test_a_visit_leaves_slots_as_they_are():
    tables = tables_of(10, 4)
    tables.home[8] = 0
    take_slots_reference(tables, torch.tensor([1, 2, 3]))
    before = tables.copied("cpu")
    copies, visiting = visit_reference(tables, torch.tensor([[8, 2], [5, 8], [2, 9], [9, 3]]), 64, 5000, 2)
    assert copies.tolist() == [[100006, 5000], [-9, 5064]] + [[0, 0]] * 8  # 9 found no place any more
    assert visiting[5].tolist() == list(range(5000, 5012)) and visiting[8].tolist() == list(range(5064, 5076))
    rest = [expert for expert in range(11) if expert not in (5, 8)]
    assert torch.equal(visiting[rest], before.pointers[rest]) and torch.equal(tables.pointers, before.pointers)
    assert torch.equal(tables.occupant, before.occupant) and int(tables.clock) == 2
    assert tables.stamp[tables.slot_of[[2, 3]].long()].tolist() == [2, 2] and tables.stamp[tables.slot_of[1]] == 1
