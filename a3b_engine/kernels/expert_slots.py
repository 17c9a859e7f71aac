"""Experts that come and go: slots of the device for a part of a layer's experts, chosen by the device itself.

A decode step launches `TakeSlots` and `Fetch` behind its router: experts that are not on the device take the slots of those
that were not asked for the longest, and their records are read from pinned memory in place. Many tokens go another way,
`Visit` and `Fetch`: experts without a slot come to staging memory for as long as their layer is at work, and slots stay
as they are. The host is asked nothing, so that both can be captured.

Nothing of Triton is imported until a plan is made: the tables and the references work everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Callable, NamedTuple, Sequence

import torch

from .configs import TABLE_COLUMNS, next_power_of_two
from .support import Target, UnsupportedByKernel, self_test

LONG_AGO = 1 << 20  # steps: of slots not used for longer than that, none is older than the others
_AT_ONCE = 16  # records that a launch of `Fetch` works on at the same time


class FetchShape(NamedTuple):
    """Programs that share one record, int32 they take at once, their warps, and how they read. PCIe 5 x16 needs 55 GB/s x 2 us
    = 110 KB in flight; 32 programs with two pieces of 8 KiB each have 512 KiB for one record alone."""

    programs: int = 32
    block: int = 2048
    warps: int = 4
    cache: str = ".cg"


@dataclass(frozen=True)
class LayerTables:
    """What the device knows of one layer's E experts and its E places for slots. The tensors never move.

    slots int64 [E]: address of the record in each slot, 0 where there is no slot. occupant int32 [E]: expert in each slot, -1
    where it is empty. slot_of int32 [E]: slot of each expert, -1 where it is not on the device. stamp int64 [E]: the clock
    when each slot was last used. home int64 [E]: address of each expert's record in memory that the device reads
    in place, 0 where it has none. clock int64 [1]: shared by all layers. counts int64 [2]: experts asked for and experts
    given a slot. host_serves int32 [1]: 1 where the host brings experts without a home, so that those may be evicted too.
    pointers int64 [E + 1, 12]: rows of ExpertTable, the shared expert's last. offsets int64 [12]: of the parts in a
    record, in the same order. advances: the kernels of this layer (the first) move the clock on.
    """

    slots: torch.Tensor
    occupant: torch.Tensor
    slot_of: torch.Tensor
    stamp: torch.Tensor
    home: torch.Tensor
    clock: torch.Tensor
    counts: torch.Tensor
    host_serves: torch.Tensor
    pointers: torch.Tensor
    offsets: torch.Tensor
    advances: bool = False

    @property
    def experts(self) -> int:
        return self.slots.shape[0]

    def copied(self, device: torch.device | str) -> LayerTables:
        """The same in tensors of their own."""
        return LayerTables(*(getattr(self, field.name).to(device, copy=True) for field in fields(self)[:-1]), advances=self.advances)

    def checked(self) -> LayerTables:
        """Itself; `UnsupportedByKernel` where a kernel cannot read it."""
        count = self.experts
        whole, half = torch.int64, torch.int32
        expected = (
            ((count,), whole), ((count,), half), ((count,), half), ((count,), whole), ((count,), whole), ((1,), whole), ((2,), whole), ((1,), half),
            ((count + 1, TABLE_COLUMNS), whole), ((TABLE_COLUMNS,), whole),
        )  # fmt: skip
        for field, (shape, dtype) in zip(fields(self), expected):
            tensor = getattr(self, field.name)
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise UnsupportedByKernel(f"expert slots with {field.name} of {tensor.dtype} {list(tensor.shape)}")
        if not 1 <= count <= 1024:
            raise UnsupportedByKernel(f"slots for {count} experts")
        return self


def _launcher(name: str, target: Target, pdl: bool, **constants: object) -> Callable[..., None]:
    from . import expert_slots_programs as programs
    from .launcher import Launcher

    return Launcher(getattr(programs, name), replace(target, pdl=pdl and target.pdl), **constants)


class TakeSlots:
    """A slot for each of the `top_k` experts a decode step chose. One launch.

    `copies` int64 [top_k, 2] afterwards holds what `Fetch` has to copy: (source, destination); (0, 0) for an expert that was
    there; (-(expert + 1), destination) for one without a home, which the host has to bring. Where no slot may be taken for an
    expert it stays away, and the row is (-(expert + 1), 0); top_k slots that are empty or may be evicted, beside those of
    the experts chosen, rule that out. pdl: started early, behind a kernel that may still be at work.
    """

    def __init__(self, tables: LayerTables, top_k: int, target: Target, *, pdl: bool = False) -> None:
        if not 1 <= top_k <= min(tables.experts, 64):
            raise UnsupportedByKernel(f"{top_k} of {tables.experts} experts")
        self.copies = torch.zeros((top_k, 2), dtype=torch.int64, device=target.device)
        tables.checked()
        self._tables = tuple(getattr(tables, field.name) for field in fields(tables)[:-1])
        self._launch = _launcher(
            "take_slots_kernel", target, pdl, EXPERTS=tables.experts, WIDTH=max(16, next_power_of_two(tables.experts)), TOP_K=top_k,
            TOP_WIDTH=next_power_of_two(top_k), ADVANCES=tables.advances, num_warps=1,
        )  # fmt: skip

    def __call__(self, ids: torch.Tensor) -> None:
        """ids int32 [top_k], each below E."""
        self._launch((1, 1, 1), ids, *self._tables, self.copies)


class Fetch:
    """Copies what `copies` int64 [n, 2] says as (source, destination) where source > 0: records of `record_bytes`. One launch.

    Sources and destinations are multiples of 16. Read in place, pinned memory comes as fast as the bus carries it. With
    programmatic dependent launch, what was complete when the kernel ahead let this one start is complete when this one
    lets the next start, and so is what the kernel ahead wrote.
    """

    def __init__(self, copies: torch.Tensor, record_bytes: int, target: Target, *, pdl: bool = False, shape: FetchShape = FetchShape()) -> None:
        if record_bytes % 16 or not 0 < record_bytes < 1 << 32 or copies.dtype != torch.int64 or copies.ndim != 2 or copies.shape[1] != 2:
            raise UnsupportedByKernel(f"records of {record_bytes} bytes, copies of {copies.dtype} {list(copies.shape)}")
        self.copies, words = copies, record_bytes // 4
        rows, programs = copies.shape[0], max(1, min(shape.programs, -(-words // shape.block)))
        self._grid = (min(rows, _AT_ONCE), programs, 1)
        self._launch = _launcher(
            "fetch_kernel", target, pdl, ROWS=rows, STRIDE=self._grid[0], WORDS=words, PARTS=programs, BLOCK=shape.block,
            CACHE=shape.cache, num_warps=shape.warps,
        )  # fmt: skip

    def __call__(self) -> None:
        self._launch(self._grid, self.copies)


class VisitScratch:
    """What the visits of all layers write, one after another: `chosen` int32 [E], all zeros between visits; `copies` int64
    [E, 2] for `Fetch`; `visiting` int64 [E + 1, 12], the table by which the layer's experts are found during the visit."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.chosen = torch.zeros(experts, dtype=torch.int32, device=device)
        self.copies = torch.zeros((experts, 2), dtype=torch.int64, device=device)
        self.visiting = torch.zeros((experts + 1, TABLE_COLUMNS), dtype=torch.int64, device=device)


class Visit:
    """Which experts many tokens need that have no slot, and where they come to. Two launches.

    The n-th of them, in the order of their numbers, goes to place n of the staging memory and to row n of `copies`, the rest of
    which is zeros; without a home, as in TakeSlots. `visiting` is the layer's table with their rows replaced. Those that
    no place is left for stay away: staging should have room for all that have no slot.
    """

    def __init__(self, tables: LayerTables, scratch: VisitScratch, record_bytes: int, target: Target, *, pdl: bool = False) -> None:
        t = tables.checked()
        if scratch.chosen.shape[0] != t.experts or record_bytes % 16:
            raise UnsupportedByKernel(f"a visit of {t.experts} experts of {record_bytes} bytes")
        self._chosen = scratch.chosen
        self._tensors = (scratch.chosen, t.slot_of, t.stamp, t.home, t.clock, t.pointers, t.offsets, scratch.copies, scratch.visiting)
        self._block = 64 if target.interpreted else 1024
        self._mark = _launcher("mark_kernel", target, pdl, BLOCK=self._block, num_warps=4)
        self._settle = _launcher(
            "visit_kernel", target, pdl, EXPERTS=t.experts, WIDTH=next_power_of_two(t.experts), RECORD=record_bytes, ADVANCES=t.advances, num_warps=8
        )  # fmt: skip

    def __call__(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        """ids int32 [T, top_k], contiguous, T >= 1; staging uint8 [places, record_bytes], from a multiple of 16 bytes on."""
        count = ids.numel()
        self._mark((-(-count // self._block), 1, 1), ids, self._chosen, count)
        self._settle((1, 1, 1), *self._tensors, staging, staging.shape[0])


def take_slots_reference(tables: LayerTables, ids: torch.Tensor) -> torch.Tensor:
    """What TakeSlots does, in plain PyTorch, for ids of any whole-number type [top_k]; returns `copies`. Waits for the device."""
    slots, occupant, slot_of, stamp, home = (
        table.tolist() for table in (tables.slots, tables.occupant, tables.slot_of, tables.stamp, tables.home)
    )  # fmt: skip
    clock, serves, wanted = int(tables.clock), bool(tables.host_serves.item()), ids.tolist()
    now = clock + tables.advances
    in_use = {slot_of[expert] for expert in wanted}
    copies = [[0, 0] for _ in wanted]
    pointers, offsets, fetched = {}, tables.offsets.cpu(), 0
    for row, expert in zip(copies, wanted):
        if slot_of[expert] >= 0:
            continue
        free = [
            (-LONG_AGO - 1 if occupant[slot] < 0 else -min(clock - stamp[slot], LONG_AGO), slot)
            for slot, address in enumerate(slots)
            if address and slot not in in_use and (occupant[slot] < 0 or serves or home[occupant[slot]])
        ]
        row[0] = home[expert] or -(expert + 1)
        if not free:
            row[0] = -(expert + 1)
            continue
        victim = min(free)[1]
        if occupant[victim] >= 0:
            slot_of[occupant[victim]] = -1
        occupant[victim], slot_of[expert], row[1] = expert, victim, slots[victim]
        in_use.add(victim)
        fetched += 1
        pointers[expert] = slots[victim] + offsets
    for expert in wanted:
        if slot_of[expert] >= 0:
            stamp[slot_of[expert]] = now
    for table, values in ((tables.occupant, occupant), (tables.slot_of, slot_of), (tables.stamp, stamp), (tables.clock, [now])):
        table.copy_(torch.tensor(values, dtype=table.dtype))
    for expert, row in pointers.items():
        tables.pointers[expert].copy_(row)
    tables.counts.add_(torch.tensor([len(wanted), fetched], device=tables.counts.device))
    return torch.tensor(copies, dtype=torch.int64, device=tables.slots.device)


def visit_reference(tables: LayerTables, ids: torch.Tensor, record_bytes: int, address: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What Visit does with ids [T, top_k] and `places` places of staging from `address` on, in plain PyTorch: returns
    `copies` [E, 2] and `visiting` [E + 1, 12]."""
    now, chosen = int(tables.clock) + tables.advances, ids.unique().long().to(tables.slots.device)
    tables.clock.fill_(now)
    held = tables.slot_of[chosen].long()
    tables.stamp[held[held >= 0]] = now
    missing = chosen[held < 0][:places]
    destinations = address + torch.arange(len(missing), device=missing.device) * record_bytes
    home = tables.home[missing]
    copies = torch.zeros((tables.experts, 2), dtype=torch.int64, device=missing.device)
    copies[: len(missing), 0] = torch.where(home != 0, home, -(missing + 1))
    copies[: len(missing), 1] = destinations
    visiting = tables.pointers.clone()
    visiting[missing] = destinations[:, None] + tables.offsets
    return copies, visiting


def fetch_reference(copies: torch.Tensor | Sequence[Sequence[int]], lookup: Callable[[int], torch.Tensor]) -> None:
    """What Fetch does, in plain PyTorch: `lookup` finds the record uint8 [record_bytes] at an address."""
    for source, destination in copies.tolist() if isinstance(copies, torch.Tensor) else copies:
        if source > 0:
            lookup(destination).copy_(lookup(source))


@self_test("expert_slots", limit=0.0)
def check(target: Target) -> float:
    """Random steps of the three kernels against their references; infinite where one table or byte differs. On a card the
    records are read from pinned memory."""
    from .expert_slots_check import mistakes

    return float("inf") if mistakes(target) else 0.0
