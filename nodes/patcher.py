"""An engine as ComfyUI's memory manager sees it: a `ModelPatcher` whose weights come, grow, shrink and leave.

Two hosts are served: current ComfyUI calls `partially_load` / `partially_unload` / `detach`, the one of early 2024
`patch_model` / `patch_model_lowvram` / `unpatch_model`. What each of them may count on is checked against their own
`comfy.model_management` in tests/host.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import lru_cache
from typing import Any

import torch

from ..a3b_engine.errors import MemoryBudgetError
from ..a3b_engine.runtime.report import size
from . import host
from .memory_advice import GB, levers

log = logging.getLogger(__name__)

OFFLOAD_DEVICE = torch.device("cpu")

# Held while weights move and while an engine computes, so that nothing is freed under a running generation.
LOCK = threading.RLock()


class A3BEngine(torch.nn.Module):
    """What the patcher calls its model: an empty module (ComfyUI logs its class name and hangs attributes on it).

    The engine's tensors are deliberately not registered here: ComfyUI would walk over them with `.to()`.
    """


class EnginePatcher:
    """What both hosts share; mixed into the host's ModelPatcher by `patcher_class`.

    resident: has the engine and its handle. needed: bytes that the coming use takes beside what is on the device already
    (KV cache, activations); set before ComfyUI is asked to load.
    """

    needed = 0

    def __init__(self, resident: Any, load_device: torch.device):
        self.resident = resident  # first: the 2024 base class asks for model_size() while it is built
        super().__init__(A3BEngine(), load_device, OFFLOAD_DEVICE, size=self.model_size())

    # -- sizes

    def model_size(self) -> int:
        """Bytes that the weights take with room to spare: nobody has to leave for what vram_gb or --novram keeps off."""
        engine = self.resident.engine
        wanted = engine.smallest_bytes if host.keeps_models_off_the_device() else engine.most_bytes
        return max(1, wanted, engine.loaded_bytes)

    def loaded_size(self) -> int:
        return self.resident.engine.loaded_bytes

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.resident.engine.is_loaded else self.offload_device

    def memory_required(self, input_shape) -> int:
        return 0  # generation asks for its own working memory through load_models_gpu

    def clone(self, *args, **kwargs):
        return self  # one engine; there are no patches a copy could carry

    def partially_unload_ram(self, *args, **kwargs) -> int:
        return 0

    def pinned_memory_size(self) -> int:
        return 0

    def loaded_ram_size(self) -> int:
        return 0

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        return 0, 0

    def free_beside(self) -> int:
        """Bytes free on the device beside ComfyUI's reserve and what the coming use needs; negative: so much is missing."""
        # Under dynamic VRAM the base class also counts what core models would give up.
        ask = getattr(super(), "get_free_memory", host.free_memory)
        return int(ask(self.load_device)) - host.reserved_memory(self.load_device) - self.needed

    # -- moving weights

    def fit(self, allowed: float) -> int:
        """Load, grow or shrink, taking at most `allowed` more bytes. Returns the bytes that arrived (negative: that left).

        ComfyUI says 1e32 where it has no figure (--highvram, --cpu), and less than nothing where room is missing. A model
        that is not loaded raises if its smallest part has no room; a loaded one never does.
        """
        engine = self.resident.engine
        before = engine.loaded_bytes
        if host.keeps_models_off_the_device():
            allowed = 0
        try:
            if engine.is_loaded:
                self._adjust(allowed)
            else:
                self._load(allowed)
        except BaseException:
            # ComfyUI has taken this model off its list: what is left of it would be out of every unload's reach.
            self.release()
            raise
        return engine.loaded_bytes - before

    def _load(self, allowed: float) -> None:
        engine = self.resident.engine
        free = self.free_beside()
        if free + self.needed < engine.least_bytes:
            raise MemoryBudgetError(self._too_small(free + self.needed))
        room = max(min(allowed, free), engine.least_room)  # the smallest part works in less memory than was asked for
        began = time.perf_counter()
        engine.load_weights(progress=host.loading_progress(), cancel=host.check_interrupt, room=room)
        self.current_device = self.load_device
        seconds = time.perf_counter() - began
        part = "" if engine.loaded_bytes >= engine.weight_bytes else f" of {engine.weight_bytes / GB:.2f}"
        log.info("Loaded %s on %s: %.2f%s GB in %.1f s", engine.name, self.load_device, engine.loaded_bytes / GB, part, seconds)

    def _adjust(self, allowed: float) -> None:
        engine = self.resident.engine
        room = self.free_beside()
        try:
            if room < 0:
                engine.shrink(-room)
            elif min(allowed, room) >= 1 and engine.loaded_bytes < engine.most_bytes:
                engine.grow(min(allowed, room))
        except Exception:  # what is loaded still works
            log.exception("A3B: changing the part of %s on %s failed", engine.name, self.load_device)

    def _too_small(self, free: int) -> str:
        engine, handle = self.resident.engine, self.resident.handle
        total, reserved = host.total_memory(self.load_device), host.reserved_memory(self.load_device)
        helps = "; ".join(levers(engine, handle, engine.smallest_bytes))
        return (
            f"{engine.name} needs at least {size(engine.least_bytes)} on {self.load_device}: {size(engine.smallest_bytes)} of its "
            f"{size(engine.weight_bytes)} of weights, the rest to work in. Of {size(total)} there, other programs and models "
            f"that ComfyUI cannot move leave {size(max(0, free))} ({size(reserved)} are kept free). What helps: "
            f"{helps + '; ' if helps else ''}closing what else uses the device; another device on Load A3B Model"
        )

    def release(self) -> None:
        """Drop all weights and caches. Never raises: it also runs in the middle of out-of-memory handling."""
        try:
            with LOCK:
                self.resident.engine.unload_weights()
        except Exception:
            log.exception("A3B: unloading %s failed", self.resident.handle.path)
        self.current_device = self.offload_device


class CurrentHost(EnginePatcher):
    """ComfyUI since mid-2024."""

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        with LOCK:
            return self.fit(extra_memory)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Kept prompts, graphs and buffers go first, then cold experts. Less than was asked for makes ComfyUI go on to
        detach(True)."""
        try:
            with LOCK:
                return self.resident.engine.release(memory_to_free)
        except Exception:  # this too runs in the middle of out-of-memory handling
            log.exception("A3B: giving back a part of %s failed", self.resident.handle.path)
            return 0

    def detach(self, unpatch_all: bool = True):
        # False comes with every load of an already loaded model and from __del__: weights must stay.
        if unpatch_all:
            self.release()
        return self.model

    def load(self, *args, **kwargs) -> None:
        """Third-party code that would walk over the module finds nothing to move."""

    def patch_model(self, *args, **kwargs):
        return self.model

    def unpatch_model(self, *args, **kwargs) -> None:
        """See `load`; weights leave through `detach`."""


class Host2024(EnginePatcher):
    """ComfyUI of early 2024: it takes a model off the device as a whole."""

    def patch_model(self, device_to=None, patch_weights=True):
        if patch_weights and device_to is not None:
            with LOCK:
                self.fit(float("inf"))
        return self.model

    def patch_model_lowvram(self, device_to=None, lowvram_model_memory=0):
        # Called when weights plus ComfyUI's own reserve exceed the free memory. Its figure is for layers that move in and
        # out for every step; how large a part is worth while is our own reckoning.
        return self.patch_model(device_to)

    def unpatch_model(self, device_to=None, unpatch_weights=True) -> None:
        if unpatch_weights:
            self.release()


@lru_cache(maxsize=None)
def patcher_class(base: type) -> type:
    """The patcher for this host. `base` is always ModelPatcher, never CoreModelPatcher: that one is dynamic."""
    kind = CurrentHost if hasattr(base, "partially_load") else Host2024
    return type("A3BModelPatcher", (kind, base), {})
