"""Random layers of expert slots, stepped by the kernels and by their references side by side: the self-test of expert_slots."""

from __future__ import annotations

import random

import torch

from ..memory.pinned import PinnedArena, PinnedMemoryError
from .expert_slots import (
    TABLE_COLUMNS, Fetch, LayerTables, TakeSlots, Visit, VisitScratch, take_slots_reference, visit_reference,
)  # fmt: skip
from .support import Target


class SlotsCase:
    """One layer of `experts` random records, `present` slots and staging for all others.

    Homes are in pinned memory; in memory of the device where the system lets none be pinned. homeless: experts without one.
    """

    def __init__(
        self, target: Target, experts: int, present: int, top_k: int, record_bytes: int, seed: int = 0, *, homeless: int = 0,
        advances: bool = True, pdl: bool = False, top_stamp: int = 3,
    ) -> None:  # fmt: skip
        self.target, self.top_k, self.record_bytes, device = target, top_k, record_bytes, target.device
        self.chance = chance = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.records = torch.randint(0, 256, (experts, record_bytes), dtype=torch.uint8, generator=generator)
        try:
            self._arena = PinnedArena(record_bytes, device, segment_bytes=experts * record_bytes)
            held = self._arena.take_many(experts)
            for record, values in zip(held, self.records):
                record.host.copy_(values)
            addresses = [record.address for record in held]
        except PinnedMemoryError:
            self._sources = self.records.to(device)
            addresses = [row.data_ptr() for row in self._sources]
        self.slots = torch.zeros((experts, record_bytes), dtype=torch.uint8, device=device)
        self.staging = torch.zeros((experts, record_bytes), dtype=torch.uint8, device=device)
        rows = sorted(chance.sample(range(experts), present))
        occupant = [-1] * experts
        for slot, expert in zip(rows, chance.sample(range(experts), present)):
            occupant[slot] = expert if chance.random() < 0.8 else -1
        slot_of = [occupant.index(expert) if expert in occupant else -1 for expert in range(experts)]
        # Some have homes only where they are needed: what is on the device and has none is not to be evicted.
        without = set(chance.sample([expert for expert in range(experts) if slot_of[expert] >= 0], homeless))
        for slot, expert in enumerate(occupant):
            if expert >= 0:
                self.slots[slot].copy_(self.records[expert])

        def table(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        base = self.slots.data_ptr()
        self.tables = LayerTables(
            table([base + slot * record_bytes if slot in rows else 0 for slot in range(experts)]), table(occupant, torch.int32),
            table(slot_of, torch.int32), table([chance.randrange(top_stamp + 1) for _ in range(experts)]),
            table([0 if expert in without else addresses[expert] for expert in range(experts)]), table([top_stamp]), table([0, 0]),
            table([0], torch.int32), table([[0] * TABLE_COLUMNS for _ in range(experts + 1)]),
            table([16 * place for place in range(TABLE_COLUMNS)]), advances=advances,
        )  # fmt: skip
        self.tables.pointers[experts] = 7
        for slot, expert in enumerate(occupant):
            if expert >= 0:
                self.tables.pointers[expert] = self.tables.slots[slot] + self.tables.offsets
        self.expected = self.tables.copied("cpu")
        self.scratch = VisitScratch(experts, device)
        self.take = TakeSlots(self.tables, top_k, target, pdl=pdl)
        self.fetch = Fetch(self.take.copies, record_bytes, target, pdl=pdl)
        self.visit = Visit(self.tables, self.scratch, record_bytes, target, pdl=pdl)
        self.fetch_visitors = Fetch(self.scratch.copies, record_bytes, target, pdl=pdl)

    def step(self, ids: list[int]) -> str:
        """A decode step; empty where tables, copies and the experts' records are what they should be, else what is not."""
        chosen = torch.tensor(ids, dtype=torch.int32)
        copies = take_slots_reference(self.expected, chosen)
        self.take.copies.fill_(-1)
        self.take(chosen.to(self.target.device))
        self.fetch()
        if not torch.equal(self.take.copies.cpu(), copies):
            return f"copies {self.take.copies.tolist()} where {copies.tolist()} are right"
        self._bring(copies)
        return self._differences() or self._wrong_records([expert for expert in set(ids) if self.expected.slot_of[expert] >= 0])

    def look(self, ids: torch.Tensor, places: int) -> str:
        """A visit by ids int32 [T, top_k], likewise."""
        copies, visiting = visit_reference(self.expected, ids, self.record_bytes, self.staging.data_ptr(), places)
        self.staging.zero_()
        self.scratch.copies.fill_(-1)
        self.scratch.visiting.fill_(-1)
        self.visit(ids.to(self.target.device), self.staging[:places])
        self.fetch_visitors()
        if not torch.equal(self.scratch.copies.cpu(), copies) or not torch.equal(self.scratch.visiting.cpu(), visiting):
            return f"visitors {self.scratch.copies.tolist()} where {copies.tolist()} are right, or their table is wrong"
        for place, (source, _) in enumerate(copies.tolist()):
            expert = self._expert_of(source)
            if source > 0 and not torch.equal(self.staging[place].cpu(), self.records[expert]):
                return f"the record of visitor {expert}"
        return "marks are left" if self.scratch.chosen.any() else self._differences()

    def _expert_of(self, source: int) -> int:
        return self.expected.home.tolist().index(source) if source > 0 else -source - 1

    def _bring(self, copies: torch.Tensor) -> None:
        """What the host does for experts without a home."""
        base = self.slots.data_ptr()
        for source, to in copies.tolist():
            if source < 0 and to:
                self.slots[(to - base) // self.record_bytes].copy_(self.records[-source - 1])

    def _differences(self) -> str:
        ours = self.tables.copied("cpu")
        return ", ".join(name for name, right in vars(self.expected).items() if name != "advances" and not torch.equal(getattr(ours, name), right))

    def _wrong_records(self, experts: list[int]) -> str:
        wrong = [expert for expert in experts if not torch.equal(self.slots[self.expected.slot_of[expert]].cpu(), self.records[expert])]
        return f"the records of {wrong}" if wrong else ""


def mistakes(target: Target) -> str:
    """Empty, or the first thing that went wrong. Sizes that are no powers of two, records that do not end with a piece."""
    for experts, present, top_k, record_bytes, homeless in ((40, 17, 5, 9 * 1024 + 256, 4), (21, 21, 6, 256, 0)):
        case = SlotsCase(target, experts, present, top_k, record_bytes, experts, homeless=homeless)
        steps = 6 if target.interpreted else 40
        for step in range(steps):
            problem = case.step(case.chance.sample(range(experts), top_k))
            if not problem and step % 3 == 2:
                problem = case.look(torch.tensor([case.chance.sample(range(experts), top_k) for _ in range(30)], dtype=torch.int32), experts)
            if problem:
                return problem
    return ""
