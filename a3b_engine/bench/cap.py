"""A budget that torch's allocator enforces while something is measured, and what was really taken."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class MemoryCap:
    """While it is entered, torch's allocator on a CUDA card refuses to reserve more than `limit` bytes (None: no bound);
    what it held at most is counted either way. On other devices nobody counts, and every figure is None.

    The bound holds for everything torch takes in this process on the card, caches of its allocator and memory of graphs included. The CUDA
    context (a few hundred MB: driver, compiled kernels) is outside any allocator; `figures` tells it apart.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._limit = limit
        self._counts = device.type == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._counts and device.index is None else device
        self._allocated = self._reserved = 0
        self._before = 1.0

    def __enter__(self) -> MemoryCap:
        if self._counts:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            if self._limit is not None:
                asked = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older torch has none
                self._before = asked(self._device) if asked is not None else 1.0
                total = torch.cuda.get_device_properties(self._device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit / total), self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._counts and self._limit is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)

    def since_here(self) -> tuple[int, int]:
        """Bytes allocated and reserved at most since the last call or the beginning; counting begins anew. (0, 0) where nobody
        counts."""
        if not self._counts:
            return 0, 0
        peaks = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated, self._reserved = max(self._allocated, peaks[0]), max(self._reserved, peaks[1])
        return peaks

    def figures(self) -> dict[str, Any]:
        """GB at most since the beginning, and now beside them what the whole card has in use.

        in_use_gb: on the card, other processes included. outside_allocator_gb: of it what torch's allocator does not hold.
        cap_kept: whether the allocator never held more than the limit.
        """
        limit = None if self._limit is None else round(self._limit / 1e9, 3)
        if not self._counts:
            return {"cap_gb": limit, **dict.fromkeys(("peak_allocated_gb", "peak_reserved_gb", "in_use_gb", "outside_allocator_gb", "cap_kept"))}
        self.since_here()
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cap_gb": limit,
            "peak_allocated_gb": round(self._allocated / 1e9, 3),
            "peak_reserved_gb": round(self._reserved / 1e9, 3),
            "in_use_gb": round((total - free) / 1e9, 3),
            "outside_allocator_gb": round((total - free - torch.cuda.memory_reserved(self._device)) / 1e9, 3),
            "cap_kept": None if self._limit is None else self._reserved <= self._limit,
        }
