"""Pictures through the vision tower as captured CUDA graphs, one for each size that comes again.

A picture is many small operations; a graph launches them as one. What it brings is in benchmarks/README.md.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from ..model.vision import VisionModel
from .capture import captured

MOST_GRAPHS = 3
MOST_PATCHES = 2304  # larger pictures keep the card busy by themselves, and their graphs would hold much memory


class _Captured:
    """A graph for pictures of one size, with its input and its result in place."""

    def __init__(self, vision: VisionModel, patches: torch.Tensor, grid: tuple[int, int]) -> None:
        self._patches = patches.to(vision.device, vision.dtype)
        before = torch.cuda.memory_reserved(vision.device)

        def work() -> None:
            self._features = vision.encode(self._patches, grid)

        self._graph = captured(work, vision.device)
        self.nbytes = max(0, torch.cuda.memory_reserved(vision.device) - before) + self._patches.nbytes

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        self._patches.copy_(patches)
        self._graph.replay()
        return self._features


class VisionRunner:
    """`VisionModel.encode` with graphs where they help: on a CUDA device, from the second picture of a size on."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self._graphs: OrderedDict[tuple[int, int], _Captured | None] = OrderedDict()  # least recently used first; None: seen once

    def encode(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """As `VisionModel.encode`; the result stands until the next call."""
        if self._vision.device.type != "cuda" or patches.shape[0] > MOST_PATCHES:
            return self._vision.encode(patches, grid)
        seen = grid in self._graphs
        graph = self._graphs.pop(grid, None)
        if graph is None and seen:
            try:
                graph = _Captured(self._vision, patches, grid)
            except torch.cuda.OutOfMemoryError:
                self._graphs.clear()
        self._graphs[grid] = graph
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return self._vision.encode(patches, grid) if graph is None else graph(patches)

    @property
    def nbytes(self) -> int:
        """Bytes the graphs hold on the device."""
        return sum(graph.nbytes for graph in self._graphs.values() if graph is not None)

    def release(self) -> int:
        """Drop the graphs; returns their bytes. They are made again when a size comes again."""
        freed = self.nbytes
        self._graphs.clear()
        return freed
