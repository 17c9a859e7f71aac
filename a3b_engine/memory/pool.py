"""Expert slots: which experts are on the device, and where the others wait.

A row is one slot for every layer, so that room is taken and given back in steps of one expert a layer. Which expert is
in which slot stands in tables on the device (kernels.expert_slots.LayerTables): a captured decode step fetches what it
misses by itself and rewrites them. The host reads and writes them between answers only.
"""

from __future__ import annotations

import logging
from typing import Sequence

import torch

from ..kernels.configs import TABLE_COLUMNS
from ..kernels.expert_slots import LayerTables, take_slots_reference
from ..model.moe import ExpertWeights
from .homes import Homes
from .placement import row_bytes

log = logging.getLogger(__name__)

_TABLES = ("slots", "occupant", "slot_of", "stamp", "home", "clock", "counts", "host_serves", "pointers", "offsets")  # of LayerTables
CHUNK_BYTES = 64 * 1024**2  # of records that stand beside a layer's stacks while they are taken in


class SlotPool:
    """The routed experts of all layers, in slots of this device and in `homes` outside it."""

    def __init__(self, shapes: ExpertWeights, layers: int, top_k: int, device: torch.device, homes: Homes) -> None:
        """shapes: stacks [E, N, K] as they are loaded, of the meta device."""
        self.layout, self.layers, self.top_k, self.device, self.shapes = homes.layout, layers, top_k, device, shapes
        self.experts = count = shapes.gate.shape[0]
        self.homes = homes
        self._rows: list[torch.Tensor | None] = [None] * count

        def table(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self._slots, self._home, self._stamp = table(layers, count), table(layers, count), table(layers, count)
        self._occupant, self._slot_of = (table(layers, count, fill=-1, dtype=torch.int32) for _ in range(2))
        self._pointers, self._counts, self._clock = table(layers, count + 1, TABLE_COLUMNS), table(layers, 2), table(1)
        self._host_serves, self._offsets = table(1, dtype=torch.int32), torch.tensor(self.layout.offsets, dtype=torch.int64, device=device)
        self.tables = [
            LayerTables(
                self._slots[layer], self._occupant[layer], self._slot_of[layer], self._stamp[layer], self._home[layer], self._clock,
                self._counts[layer], self._host_serves, self._pointers[layer], self._offsets, advances=layer == 0,
            )
            for layer in range(layers)
        ]  # fmt: skip
        self._places: torch.Tensor | None = None
        self.full = self.host_serves = self._ready = False
        self._holes = False  # slots that are empty although experts are missing
        self.without_home = 0  # experts that are neither on the device nor in pinned RAM
        self.in_files = 0  # those of them that are not in ordinary RAM either

    # What is where

    @property
    def rows(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.layout.nbytes, self.layers, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of slots on the device."""
        return self.rows * self.row_bytes

    @property
    def visiting_bytes(self) -> int:
        """Bytes of the places for experts that visit."""
        return 0 if self._places is None else self._places.nbytes

    def places(self) -> torch.Tensor:
        """uint8 [n, record]: places for experts without a slot, for as long as their layer works on many tokens. They stay, in one
        piece, until rows come or go: made for every prompt, they would tear the allocator's memory."""
        count = self.experts - self.rows
        if self._places is None or len(self._places) != count:
            self._places = None
            self._places = torch.empty((count, self.layout.nbytes), dtype=torch.uint8, device=self.device)
        return self._places

    def release_places(self) -> int:
        """Give the places back; returns the bytes."""
        freed = self.visiting_bytes
        self._places = None
        return freed

    def counts(self) -> tuple[int, int]:
        """Experts asked for and experts fetched by decode steps since the pool was made."""
        return tuple(self._counts.sum(0).tolist())

    # Taking experts in

    def take_in(self, layer: int, experts: ExpertWeights) -> None:
        """All experts of a layer, as they come from the files: to their slots and homes, as far as both reach.

        `add_rows` and `homes.plan` come before the first layer, `settle` comes after the last.
        """
        step = max(1, CHUNK_BYTES // self.layout.nbytes)
        for first in range(0, self.experts, step):
            last = min(self.experts, first + step)
            records = torch.empty((last - first, self.layout.nbytes), dtype=torch.uint8, device=self.device)
            self.layout.write(ExpertWeights(*(stack[first:last] for stack in (experts.gate, experts.up, experts.down))), records)
            for expert in range(first, last):
                row = self._rows[expert]
                if row is not None:
                    row[layer].copy_(records[expert - first])
                if self.homes.wants(layer, expert):
                    self.homes.keep(layer, expert, records[expert - first])

    def settle(self) -> None:
        """After the last layer of `take_in`: expert e is in row e, where there is one."""
        occupant = torch.full((self.layers, self.experts), -1, dtype=torch.int32)
        for slot, row in enumerate(self._rows):
            if row is not None:
                occupant[:, slot] = slot
        self._synchronize()
        self._publish(occupant, torch.zeros((self.layers, self.experts), dtype=torch.int64))

    def fill(self) -> None:
        """Put experts into empty slots, from their homes."""
        occupant, stamp = self._occupant.clone().cpu(), self._stamp.clone().cpu()
        try:
            for layer in range(self.layers):
                here = set(occupant[layer].tolist())
                outside = iter([expert for expert in range(self.experts) if expert not in here])
                for slot, row in enumerate(self._rows):
                    if row is None or occupant[layer, slot] >= 0:
                        continue
                    expert = next(outside, None)
                    if expert is None:
                        break
                    self.homes.bring(layer, expert, row[layer])
                    occupant[layer, slot], stamp[layer, slot] = expert, 0
            self._holes = False
        finally:  # what came is there, whatever stopped the rest
            self._publish(occupant, stamp)

    # More and fewer rows

    def add_rows(self, count: int) -> int:
        """Up to `count` more rows, as many as the device has memory for; they are empty. Returns the bytes."""
        taken = 0
        self._places = None
        if count > 0 and self.device.type == "cuda":
            torch.cuda.empty_cache()  # rows cut from large blocks that lie there unused could not be given back one by one
        for slot, row in enumerate(self._rows):
            if taken == count:
                break
            if row is None:
                try:
                    memory = torch.empty(self.row_bytes, dtype=torch.uint8, device=self.device)
                except torch.cuda.OutOfMemoryError:
                    break
                self._rows[slot] = memory[: self.layers * self.layout.nbytes].view(self.layers, self.layout.nbytes)
                taken += 1
        if taken:
            self._holes = True
            self.refresh()
        return taken * self.row_bytes

    def remove_rows(self, count: int) -> int:
        """Give back `count` rows, and with them the experts that were not asked for the longest. Returns the bytes."""
        present = [slot for slot, row in enumerate(self._rows) if row is not None]
        leaving = present[max(0, len(present) - max(0, count)) :]
        staying = present[: len(present) - len(leaving)]
        if not leaving:
            return 0
        self._synchronize()
        occupant, stamp = self._occupant.clone().cpu(), self._stamp.clone().cpu()
        try:
            for layer in range(self.layers):
                self._move_out(layer, leaving, staying, occupant[layer], stamp[layer])
        except BaseException:  # no row leaves, but some experts have moved
            self._holes = True
            self._publish(occupant, stamp)
            raise
        self._synchronize()
        self._places = None
        for slot in leaving:
            self._rows[slot] = None
            occupant[:, slot], stamp[:, slot] = -1, 0
        self._publish(occupant, stamp)
        return len(leaving) * self.row_bytes

    def _move_out(self, layer: int, leaving: list[int], staying: list[int], occupant: torch.Tensor, stamp: torch.Tensor) -> None:
        """Experts of one layer out of rows that leave: the warmer ones into colder slots of rows that stay."""
        hot = sorted((slot for slot in leaving if occupant[slot] >= 0), key=lambda slot: -stamp[slot].item())
        cold = sorted(staying, key=lambda slot: (occupant[slot].item() >= 0, stamp[slot].item()))
        for source, target in zip(hot, cold):
            if occupant[target] >= 0 and stamp[target] >= stamp[source]:
                break
            if occupant[target] >= 0:
                self.homes.secure(layer, int(occupant[target]), self._rows[target][layer])
            self._rows[target][layer].copy_(self._rows[source][layer])
            occupant[target], stamp[target], occupant[source] = occupant[source].item(), stamp[source].item(), -1
        for slot in hot:
            if occupant[slot] >= 0:
                self.homes.secure(layer, int(occupant[slot]), self._rows[slot][layer])

    def make_ready(self) -> None:
        """See to it that no slot is empty and that experts on the device may give way to others: call before an answer. Cheap when
        nothing is to be done.

        Experts that came when all were there have no home yet.
        """
        if self._holes:
            self.fill()
        if not self.full and not self._ready:
            self.secure_all()
            self._ready = True

    def secure_all(self) -> None:
        """Give every expert on the device a home as well, as far as RAM goes."""
        for layer, occupants in enumerate(self._occupant.tolist()):
            for slot, expert in enumerate(occupants):
                if expert >= 0:
                    self.homes.secure(layer, expert, self._rows[slot][layer])
        self._synchronize()
        self.refresh()

    def refresh(self) -> None:
        """Write the tables again after rows or homes have come or gone."""
        self._publish(self._occupant.clone().cpu(), self._stamp.clone().cpu())

    # Experts for the host's own use

    def serve(self, layer: int, copies: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Bring what the device cannot fetch by itself: entries of `copies` int64 [n, 2] whose source is -(expert + 1).

        places: uint8 [m, record] that the destinations point into; None: slots of this layer.
        """
        rows = copies.tolist()
        wanted = [(-source - 1, to) for source, to in rows if source < 0]
        if not wanted:
            return
        slots = self._slots_of(layer) if places is None else {}
        try:
            for expert, to in wanted:
                place = slots[to] if places is None else places[(to - places.data_ptr()) // self.layout.nbytes]
                self.homes.bring(layer, expert, place)
        except BaseException:
            if places is None:  # the device has given the slots away, and its own copies will not follow either
                self._empty(layer, {to for source, to in rows if source})
            raise

    def take(self, layer: int, ids: torch.Tensor) -> None:
        """Give the experts ids int64 [n] slots of their layer as a decode step does, for whoever computes without kernels."""
        self.make_ready()
        device_tables = self.tables[layer]
        tables = LayerTables(*(getattr(device_tables, name).cpu() for name in _TABLES), advances=device_tables.advances)
        ids = ids.cpu()
        copies = take_slots_reference(tables, ids).tolist()
        if self.device.type != "cpu":
            for name in _TABLES:
                getattr(device_tables, name).copy_(getattr(tables, name))
        slots, missing = self._slots_of(layer), {to for source, to in copies if source}
        try:
            for expert, (source, to) in zip(ids.tolist(), copies):
                if source:
                    self.homes.bring(layer, expert, slots[to])
                    missing.discard(to)
        finally:
            if missing:
                self._empty(layer, missing)

    def records(self, layer: int, experts: Sequence[int]) -> torch.Tensor:
        """uint8 [n, record] on the device: copies of these experts' records, wherever they are."""
        slot_of = self._slot_of[layer].tolist()
        out = torch.empty((len(experts), self.layout.nbytes), dtype=torch.uint8, device=self.device)
        for place, expert in zip(out, experts):
            if slot_of[expert] >= 0:
                place.copy_(self._rows[slot_of[expert]][layer])
            else:
                self.homes.bring(layer, expert, place)
        return out

    # Inside

    def _slots_of(self, layer: int) -> dict[int, torch.Tensor]:
        """Slots of a layer by their address."""
        return {row[layer].data_ptr(): row[layer] for row in self._rows if row is not None}

    def _empty(self, layer: int, addresses: set[int]) -> None:
        """Slots at these addresses hold nothing: what was to come there did not."""
        occupant, stamp = self._occupant.clone().cpu(), self._stamp.clone().cpu()
        for slot, address in enumerate(self._slots[layer].tolist()):
            if address in addresses:
                occupant[layer, slot], stamp[layer, slot] = -1, 0
        self._holes = True
        self._publish(occupant, stamp)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _publish(self, occupant: torch.Tensor, stamp: torch.Tensor) -> None:
        """Write the tables from what the host knows: occupant int32 and stamp int64 [layers, E] on the CPU."""
        slot_of = torch.full_like(occupant, -1)
        layer, slot = (occupant >= 0).nonzero(as_tuple=True)
        expert = occupant[layer, slot].long()
        slot_of[layer, expert] = slot.to(torch.int32)
        base = torch.tensor([0 if row is None else row.data_ptr() for row in self._rows], dtype=torch.int64)
        slots = base + torch.arange(self.layers)[:, None] * self.layout.nbytes
        slots[:, base == 0] = 0
        pointers = torch.zeros((self.layers, self.experts, TABLE_COLUMNS), dtype=torch.int64)
        pointers[layer, expert] = slots[layer, slot][:, None] + torch.tensor(self.layout.offsets)
        home = self.homes.addresses()
        outside = torch.ones((self.layers, self.experts), dtype=torch.bool)
        outside[layer, expert] = False
        self.full = not outside.any().item()
        self.without_home = int((outside & (home == 0)).sum())
        self.in_files = int((outside & (home == 0) & ~self.homes.in_plain_ram()).sum())
        self._ready = self.full
        at_home = torch.where(occupant >= 0, home.gather(1, occupant.clamp(min=0).long()) != 0, slots != 0).sum(1)
        self.host_serves = self.without_home > 0 or (not self.full and bool((at_home < self.top_k).any()))
        for table, value in (
            (self._slots, slots), (self._occupant, occupant), (self._slot_of, slot_of), (self._stamp, stamp), (self._home, home),
            (self._pointers[:, : self.experts], pointers), (self._host_serves, torch.tensor([int(self.host_serves)], dtype=torch.int32)),
        ):  # fmt: skip
            table.copy_(value)
