"""One engine per checkpoint and option set, known to ComfyUI's memory manager.

Every engine has a `ModelPatcher` in ComfyUI's list of loaded models: ComfyUI makes room before weights arrive, takes
the room back when another model needs it or the user presses "unload models", and asks for the weights again on the
next use. Weights are read only inside the patcher's load call, because only there has room been made.

Two hosts are served: current ComfyUI calls `partially_load` / `partially_unload` / `detach`, the one of early 2024
`patch_model` / `patch_model_lowvram` / `unpatch_model`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from ..a3b_engine.engine import Engine
from ..a3b_engine.errors import CheckpointError, MemoryBudgetError, NotLoadedError
from . import host
from .sockets import ModelHandle

log = logging.getLogger(__name__)

GB = 10**9
OFFLOAD_DEVICE = torch.device("cpu")

# Held while weights move and while an engine computes, so that nothing is freed under a running generation.
LOCK = threading.RLock()


class A3BEngine(torch.nn.Module):
    """What the patcher calls its model: an empty module (ComfyUI logs its class name and hangs attributes on it).

    The engine's tensors are deliberately not registered here: ComfyUI would walk over them with `.to()`.
    """


class Resident:
    """An engine and its patcher. Both stay referenced here: ComfyUI's list holds only weak references."""

    def __init__(self, handle: ModelHandle, fingerprint: str):
        import comfy.model_patcher

        self.handle = handle
        self.fingerprint = fingerprint
        self.engine = _open_engine(handle)
        patcher_class = _patcher_class(comfy.model_patcher.ModelPatcher)
        self.patcher = patcher_class(self, torch.device(handle.device))

    def reopen(self, fingerprint: str) -> None:
        """The files on disk changed: offsets read from the old headers no longer hold. The patcher stays."""
        engine = _open_engine(self.handle)  # a bad new checkpoint leaves the old engine in place
        self.engine.close()
        self.engine, self.fingerprint = engine, fingerprint


_residents: dict[ModelHandle, Resident] = {}


def _open_engine(handle: ModelHandle) -> Engine:
    return Engine.open(
        Path(handle.path),
        device=handle.device,
        dtype=handle.dtype,
        expert_format=handle.expert_format,
        vram_budget=int(handle.vram_gb * GB) or None,
        context=handle.context,
    )


def open_engine(handle: ModelHandle) -> Engine:
    """The engine of a handle, its weights loaded or not. Reads config and headers the first time, never weights."""
    fingerprint = checkpoint_fingerprint(Path(handle.path))
    with LOCK:
        resident = _residents.get(handle)
        if resident is None:
            resident = _residents[handle] = Resident(handle, fingerprint)
        elif resident.fingerprint != fingerprint:
            log.info("A3B: %s changed on disk; reading it again", handle.path)
            resident.reopen(fingerprint)
        return resident.engine


def checkpoint_fingerprint(folder: Path) -> str:
    """Names, sizes and times of the files an engine reads. Never their contents: those are 37.5 GB.

    Raises CheckpointError if the folder is gone, e.g. behind a loader output that ComfyUI has in its cache.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".safetensors"))
        stats = [(path.name, path.stat()) for path in files if path.exists()]
    except OSError as problem:
        raise CheckpointError(
            f"checkpoint: {folder} cannot be read any more ({problem.strerror}). Put it back, or choose another on Load A3B Model"
        ) from None
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def ensure_loaded(handle: ModelHandle, working_bytes: int) -> Engine:
    """Have ComfyUI make room for weights plus `working_bytes` (KV cache, activations) and load what is not there.

    Cheap when everything is resident already. Call it before every use: in between ComfyUI may have unloaded.
    """
    import comfy.model_management as management

    with LOCK:
        engine = open_engine(handle)
        patcher = _residents[handle].patcher
        if management.DISABLE_SMART_MEMORY:
            _warn_no_smart_memory()
        # What earlier runs left on the device is used again: no other model has to leave for it.
        options = {"memory_required": max(0, working_bytes - engine.cached_bytes)}
        if "force_full_load" in inspect.signature(management.load_models_gpu).parameters:
            options["force_full_load"] = True
        management.load_models_gpu([patcher], **options)
        if not engine.is_loaded:
            # The 2024 host trusts its list; an entry whose weights left by another way has to go first.
            listed = management.current_loaded_models
            listed[:] = [entry for entry in listed if entry.model is not patcher]
            management.load_models_gpu([patcher], **options)
        if not engine.is_loaded:
            raise NotLoadedError(f"{engine.name}: ComfyUI's memory manager did not load the model; see its log for the reason")
        return engine


@contextlib.contextmanager
def loaded(handle: ModelHandle, working_bytes: int) -> Iterator[Engine]:
    """`with loaded(handle, n) as engine:` nothing unloads the engine inside the block."""
    with LOCK:
        yield ensure_loaded(handle, working_bytes)


@lru_cache(maxsize=1)
def _warn_no_smart_memory() -> None:
    log.warning("A3B: --disable-smart-memory makes ComfyUI unload the model after every run; each run reads it again")


class EnginePatcher:
    """What both hosts share; mixed into the host's ModelPatcher by `_patcher_class`."""

    def __init__(self, resident: Resident, load_device: torch.device):
        self.resident = resident  # first: the 2024 base class asks for model_size() while it is built
        super().__init__(A3BEngine(), load_device, OFFLOAD_DEVICE, size=self.model_size())

    # -- sizes

    def model_size(self) -> int:
        return max(1, self.resident.engine.weight_bytes)

    def loaded_size(self) -> int:
        engine = self.resident.engine
        return min(engine.loaded_bytes, self.model_size()) if engine.is_loaded else 0

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

    # -- moving weights

    def load_weights(self, allowed_bytes: float) -> int:
        """Bytes that arrived. On any failure, cancel included, nothing stays behind."""
        engine = self.resident.engine
        if engine.is_loaded:
            return 0
        self._check_room(allowed_bytes)
        began = time.perf_counter()
        try:
            engine.load_weights(progress=host.loading_progress(), cancel=host.check_interrupt)
        except BaseException:
            # ComfyUI has taken this model off its list: a half-loaded engine would be out of every unload's reach.
            self.release()
            raise
        self.current_device = self.load_device
        seconds = time.perf_counter() - began
        log.info("Loaded %s on %s: %.2f GB in %.1f s", engine.name, self.load_device, engine.loaded_bytes / GB, seconds)
        return engine.loaded_bytes

    def _check_room(self, allowed_bytes: float) -> None:
        import comfy.model_management as management

        needed = self.model_size()
        # Under dynamic VRAM the base class also counts what core models would give up.
        free_memory = getattr(super(), "get_free_memory", management.get_free_memory)
        room = min(allowed_bytes, free_memory(self.load_device))
        if needed > room:
            raise MemoryBudgetError(
                f"{self.resident.engine.name} needs {needed / GB:.1f} GB on {self.load_device}, and ComfyUI can give it "
                f"{max(room, 0) / GB:.1f} GB (vram_gb = {self.resident.handle.vram_gb:g}, 0 = ComfyUI decides). Choose "
                "another device on Load A3B Model, close what else uses this one, or start ComfyUI without --novram"
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
        # A resident engine ignores the budget, negative ones ("shrink") too: weights go as a whole, through detach.
        return self.load_weights(extra_memory)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Kept prompts, graphs and buffers go first. Less than was asked for makes ComfyUI go on to detach(True)."""
        try:
            with LOCK:
                return self.resident.engine.release_caches(memory_to_free)
        except Exception:  # this too runs in the middle of out-of-memory handling
            log.exception("A3B: giving back the caches of %s failed", self.resident.handle.path)
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
    """ComfyUI of early 2024: a model is on the device as a whole or not at all."""

    def patch_model(self, device_to=None, patch_weights=True):
        if patch_weights and device_to is not None:
            self.load_weights(float("inf"))
        return self.model

    def patch_model_lowvram(self, device_to=None, lowvram_model_memory=0):
        # Called when weights plus ComfyUI's own reserve exceed the free memory; weights alone may still fit.
        return self.patch_model(device_to)

    def unpatch_model(self, device_to=None, unpatch_weights=True) -> None:
        if unpatch_weights:
            self.release()


@lru_cache(maxsize=None)
def _patcher_class(base: type) -> type:
    """The patcher for this host. `base` is always ModelPatcher, never CoreModelPatcher: that one is dynamic."""
    kind = CurrentHost if hasattr(base, "partially_load") else Host2024
    return type("A3BModelPatcher", (kind, base), {})
