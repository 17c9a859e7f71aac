"""Where experts wait that are not on the device: pinned RAM, which the device reads by itself; else the checkpoint's files
or ordinary RAM, from which the host brings them."""

from __future__ import annotations

import logging
from typing import Callable, Sequence

import torch

from ..errors import CheckpointError
from ..model.moe import ExpertWeights
from .pinned import PinnedArena, PinnedMemoryError, Record, pinnable_bytes
from .record import RecordLayout

log = logging.getLogger(__name__)

ReadExperts = Callable[[int, Sequence[int]], "ExpertWeights | None"]


class Homes:
    """Records of experts outside the device, by layer and expert."""

    def __init__(self, layout: RecordLayout, layers: int, experts: int, device: torch.device, read: ReadExperts) -> None:
        """read: experts of a layer from the checkpoint's files, stacks on the CPU; None where they cannot be read one by one."""
        self.layout, self._layers, self._experts, self._read = layout, layers, experts, read
        self._device, self._arena = device, PinnedArena(layout.nbytes, device)
        self._pinned: list[dict[int, Record]] = [{} for _ in range(layers)]
        self._plain: list[dict[int, torch.Tensor]] = [{} for _ in range(layers)]
        self._readable: bool | None = None
        self._planned: set[int] = set()  # for pinned RAM, of every layer
        self._outside: set[int] = set()  # have no slot when they come
        self._refused = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned RAM, taken in large segments."""
        return self._arena.nbytes

    @property
    def plain_bytes(self) -> int:
        """Bytes of ordinary RAM."""
        return sum(len(layer) for layer in self._plain) * self.layout.nbytes

    @property
    def pinned(self) -> int:
        """Experts with a place in pinned RAM."""
        return sum(len(layer) for layer in self._pinned)

    @property
    def has_all(self) -> bool:
        """Whether every expert stands in RAM."""
        return all(len(pinned.keys() | plain.keys()) == self._experts for pinned, plain in zip(self._pinned, self._plain))

    def in_plain_ram(self) -> torch.Tensor:
        """bool [layers, E]: which experts stand in ordinary RAM."""
        table = torch.zeros((self._layers, self._experts), dtype=torch.bool)
        for layer, records in enumerate(self._plain):
            table[layer, list(records)] = True
        return table

    def addresses(self) -> torch.Tensor:
        """int64 [layers, E]: where the device reads each expert, 0 where it cannot."""
        table = torch.zeros((self._layers, self._experts), dtype=torch.int64)
        for layer, records in enumerate(self._pinned):
            for expert, record in records.items():
                table[layer, expert] = record.address
        return table

    def plan(self, rows: int, everything: bool) -> None:
        """Settle which experts `wants` names when `rows` of each layer are on the device: all, as far as pinned RAM goes, and those
        outside the device first. With all of them on the device none is wanted, unless `everything`."""
        outside = list(range(rows, self._experts))
        order = outside + list(range(rows)) if outside or everything else []
        possible = pinnable_bytes() // (self.layout.nbytes * self._layers)
        self._planned = set(order[: max(0, possible)])
        self._arena.prepare(len(self._planned) * self._layers)  # pinned while the files are read
        self._outside = set(outside)
        self._readable = None  # only the load that follows settles it: a cache of rounded experts may have come or gone

    def wants(self, layer: int, expert: int) -> bool:
        """Whether `keep` has use for this expert: it is planned for pinned RAM, or must stand somewhere."""
        return (expert in self._planned or expert in self._outside) and expert not in self._pinned[layer] and expert not in self._plain[layer]

    def keep(self, layer: int, expert: int, record: torch.Tensor) -> None:
        """Copy a record of the plan from the device (queued on the current stream) to pinned RAM; where that is used up, to ordinary
        RAM unless the files have it."""
        self._keep(layer, expert, record, pin=expert in self._planned)

    def _keep(self, layer: int, expert: int, record: torch.Tensor, pin: bool) -> None:
        if pin and not self._refused:
            try:
                place = self._arena.take()
                place.host.copy_(record, non_blocking=True)
                self._pinned[layer][expert] = place
                return
            except PinnedMemoryError as problem:
                self._refused = True
                log.info("%s", problem)
        if not self._is_readable():
            self._plain[layer][expert] = record.to("cpu", copy=True)

    def secure(self, layer: int, expert: int, record: torch.Tensor) -> None:
        """See to it that this expert, which is about to leave the device, can come back."""
        if expert not in self._pinned[layer] and expert not in self._plain[layer]:
            self._keep(layer, expert, record, pin=True)

    def bring(self, layer: int, expert: int, place: torch.Tensor) -> None:
        """Copy an expert's record to `place` uint8 [record]."""
        if expert in self._pinned[layer]:
            place.copy_(self._pinned[layer][expert].host, non_blocking=True)
        elif expert in self._plain[layer]:
            place.copy_(self._plain[layer][expert])
        else:
            found = self._read(layer, [expert])
            if found is None:
                raise CheckpointError(
                    f"expert {expert} of layer {layer} is not on the device, and its file is gone. Restore the files, or unload the model and load it again."
                )
            record = torch.empty((1, self.layout.nbytes), dtype=torch.uint8)
            self.layout.write(found, record)
            place.copy_(record[0])

    def close(self) -> None:
        """Give back all RAM."""
        self._pinned, self._plain = ([{} for _ in range(self._layers)] for _ in range(2))
        self._planned.clear()
        self._arena.close()
        self._arena, self._refused = PinnedArena(self.layout.nbytes, self._device), False

    def _is_readable(self) -> bool:
        if self._readable is None:
            self._readable = self._read(0, [0]) is not None
        return self._readable
