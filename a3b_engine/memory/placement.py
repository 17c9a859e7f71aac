"""How a budget is divided: what stays on the device, and how many expert slots the rest is good for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_GRAIN = 2 * 1024**2  # torch's allocator takes memory from CUDA in steps of this,
_GRAINED = 10 * 1024**2  # for tensors of at least so many bytes


def row_bytes(record: int, layers: int, device: torch.device) -> int:
    """Bytes of a row, one expert (`record` bytes) of every layer, in memory of the device."""
    nbytes = record * layers
    return nbytes if device.type != "cuda" or nbytes < _GRAINED else -(-nbytes // _GRAIN) * _GRAIN


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a model. rest: what every token needs. record: one expert. row: see `row_bytes`."""

    rest: int
    embedding: int
    vision: int
    record: int
    row: int
    layers: int
    experts: int
    top_k: int
    whole_only: bool = False  # experts cannot be in slots
    vision_passing: int = 0  # of the vision tower at a time, where its blocks come for a picture only

    @property
    def fewest_rows(self) -> int:
        """Slots of a layer below which experts would be fetched over and over within a few tokens."""
        return self.experts if self.whole_only else min(self.experts, 3 * self.top_k)

    @property
    def all(self) -> int:
        """Everything on the device."""
        return self.rest + self.embedding + self.vision + self.row * self.experts

    @property
    def smallest(self) -> int:
        """The least that a model can run with."""
        return self.rest + self.row * self.fewest_rows


@dataclass(frozen=True)
class Placement:
    """What is on the device: slots for every layer, and whether embedding rows and the vision tower are there all the time."""

    rows: int
    embedding: bool
    vision: bool

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes of weights on the device."""
        return sizes.rest + sizes.row * self.rows + sizes.embedding * self.embedding + sizes.vision * self.vision


def working_area(sizes: Sizes, rows: int, working: int, seeing: int, vision: bool) -> int:
    """Bytes to keep free beside the weights: for an answer (`working`, and room for the experts that a prompt visits), or for a
    picture before it (`seeing`, and parts of the vision tower where they come for the picture only)."""
    answering = working + (sizes.experts - rows) * sizes.record
    return max(answering, seeing + (0 if vision else sizes.vision_passing))


def place(sizes: Sizes, room: float, working: int, seeing: int) -> Placement | None:
    """The best placement within `room` bytes for everything; None where not even the smallest fits.

    Embedding rows (one of 4 KB is read a token) leave the device before any expert does, then the vision tower, which comes
    back for every picture.
    """
    for embedding, vision in ((True, True), (False, True), (False, False)):
        rows = most_rows(sizes, room, working, seeing, embedding, vision)
        if rows == sizes.experts:
            return Placement(rows, embedding, vision)
    return Placement(rows, False, False) if rows >= sizes.fewest_rows else None


def most_rows(sizes: Sizes, room: float, working: int, seeing: int, embedding: bool, vision: bool) -> int:
    """The most rows for which weights and `working_area` fit; -1 where not even none does."""
    left = room - Placement(0, embedding, vision).nbytes(sizes)
    # A further row makes the room for visiting experts smaller by one record.
    answering, step = left - working - sizes.experts * sizes.record, sizes.row - sizes.record
    seen = left - seeing - (0 if vision else sizes.vision_passing)
    if min(answering, seen) < 0:
        return -1
    limits = [sizes.experts, *(have // each for have, each in ((answering, step), (seen, sizes.row)) if each > 0 and have < math.inf)]
    return int(min(limits))
