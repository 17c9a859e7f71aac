"""One engine per checkpoint and option set, known to ComfyUI's memory manager.

Every engine has a `ModelPatcher` in ComfyUI's list of loaded models: ComfyUI makes room before weights arrive, takes
the room back when another model needs it or the user presses "unload models", and asks for the weights again on the
next use. Weights are read only inside the patcher's load call, because only there has room been made.

What ComfyUI calls on the patcher stands in `patcher.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from ..a3b_engine.engine import Engine
from ..a3b_engine.errors import A3BError, CheckpointError, ConfigError, MemoryBudgetError, NotLoadedError
from . import host, memory_advice
from .memory_advice import GB
from .patcher import LOCK, patcher_class
from .sockets import ModelHandle

log = logging.getLogger(__name__)

USUAL_TOKENS = 8192  # of a prompt with its answer; a part of the weights leaves room for that many
CPU_SHARE, CPU_BYTES = 0.6, 8 * GB  # of RAM, and at most, for a model that nobody put on the CPU on purpose


class Resident:
    """An engine and its patcher. Both stay referenced here: ComfyUI's list holds only weak references."""

    def __init__(self, handle: ModelHandle, fingerprint: str):
        import comfy.model_patcher

        self.handle = handle
        self.fingerprint = fingerprint
        self.engine = _open_engine(handle)
        self.patcher = patcher_class(comfy.model_patcher.ModelPatcher)(self, torch.device(handle.device))
        self.last_report = ""  # where things were after the latest use

    def reopen(self, fingerprint: str) -> None:
        """The files on disk changed: offsets read from the old headers no longer hold. The patcher stays."""
        engine = _open_engine(self.handle)  # a bad new checkpoint leaves the old engine in place
        self.engine.close()
        self.engine, self.fingerprint = engine, fingerprint


_residents: dict[ModelHandle, Resident] = {}


def _budget(vram_gb: float) -> int | None:
    """Bytes; None for 0. What a workflow from elsewhere says is not trusted to be a number."""
    if not isinstance(vram_gb, (int, float)) or not 0 <= vram_gb < math.inf:
        raise ConfigError(f"vram_gb: found {vram_gb!r}, expected 0 (ComfyUI decides) or a number of GB")
    return int(vram_gb * GB) or None


def _open_engine(handle: ModelHandle) -> Engine:
    return Engine.open(
        Path(handle.path),
        device=handle.device,
        dtype=handle.dtype,
        expert_format=handle.expert_format,
        vram_budget=_budget(handle.vram_gb),
        context=handle.context,
        park=handle.keep_in_ram,
        cache_experts=handle.cache_experts,
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

    Cheap when everything is resident already. Call it before every use: in between ComfyUI may have unloaded. Where not all
    weights have room, a part of them is loaded; it grows and shrinks here, with the room there is.
    """
    import comfy.model_management as management

    with LOCK:
        engine = open_engine(handle)
        patcher = _residents[handle].patcher
        if management.DISABLE_SMART_MEMORY:
            _warn_no_smart_memory()
        if not engine.is_loaded:
            _retire_twins(handle)
        if engine.loaded_bytes < engine.most_bytes:
            # A picture or a short answer takes no room from the long answer after it: experts would come and go each time.
            working_bytes = max(working_bytes, engine.working_bytes(min(USUAL_TOKENS, handle.context)))
        # What earlier runs left on the device is used again: no other model has to leave for it.
        patcher.needed = max(0, working_bytes - engine.cached_bytes)
        _ask_comfyui(management, patcher)
        if not engine.is_loaded:
            # The 2024 host trusts its list; an entry whose weights left by another way has to go first.
            _strike_off(patcher)
            _ask_comfyui(management, patcher)
        if not engine.is_loaded:
            raise NotLoadedError(f"{engine.name}: ComfyUI's memory manager did not load the model; see its log for the reason")
        if not hasattr(patcher, "partially_load"):
            patcher.fit(float("inf"))  # the 2024 host never comes back to a loaded model
        return engine


def _ask_comfyui(management, patcher) -> None:
    try:
        management.load_models_gpu([patcher], memory_required=patcher.needed)
    except BaseException:
        if all(entry.model is not patcher for entry in management.current_loaded_models):
            patcher.release()  # nothing stays where no unload button reaches it
        raise


def _strike_off(patcher) -> None:
    import comfy.model_management as management

    listed = management.current_loaded_models
    listed[:] = [entry for entry in listed if entry.model is not patcher]


def _retire_twins(handle: ModelHandle) -> None:
    """An engine of the same checkpoint with other settings gives up what it keeps in RAM: that is not ComfyUI's to free, and
    two copies of 30 GB are more than most machines have."""
    for other, resident in list(_residents.items()):
        memory = resident.engine.memory()
        if other != handle and other.path == handle.path and memory["host_pinned"] + memory["host_pageable"] > 0:
            log.info("A3B: %s was loaded with other settings; that copy leaves", resident.engine.name)
            _strike_off(resident.patcher)
            resident.patcher.release()
            resident.engine.close()
            del _residents[other]


@contextlib.contextmanager
def loaded(handle: ModelHandle, working_bytes: int) -> Iterator[Engine]:
    """`with loaded(handle, n) as engine:` nothing unloads the engine inside the block.

    An allocation that fails becomes an error that says what helps; every model has left the device by then, as ComfyUI has it
    after such errors.
    """
    with LOCK:
        try:
            engine = ensure_loaded(handle, working_bytes)
            yield engine
            _residents[handle].last_report = engine.memory_report()
        except A3BError:
            raise
        except Exception as problem:
            if handle not in _residents or not host.is_out_of_memory(problem):
                raise
            raise _short_of_memory(handle, problem) from None


def _short_of_memory(handle: ModelHandle, problem: Exception) -> MemoryBudgetError:
    log.debug("A3B: out of memory", exc_info=problem)
    resident, device = _residents[handle], torch.device(handle.device)
    error = memory_advice.out_of_memory(resident.engine, handle, problem, host.free_memory(device))
    traceback.clear_frames(problem.__traceback__)  # the frames hold tensors
    host.unload_models(device)
    resident.patcher.release()  # if ComfyUI's list did not have it (any more)
    return error


def memory_text(handle: ModelHandle) -> str:
    """What is where now, or would be; see `memory_advice.state_text`."""
    engine, device = open_engine(handle), torch.device(handle.device)
    with LOCK:
        return memory_advice.state_text(engine, handle, host.free_memory(device), host.total_memory(device), _residents[handle].last_report)


def refuse_large_on_cpu(handle: ModelHandle) -> None:
    """For a CPU that nobody chose. Raises MemoryBudgetError when the weights are more than a CPU does anything sensible with."""
    engine, ram = open_engine(handle), host.total_memory(torch.device("cpu"))
    most = min(CPU_SHARE * ram, CPU_BYTES)
    if engine.weight_bytes > most:
        raise MemoryBudgetError(
            f"device: auto is the CPU here (no CUDA card, or ComfyUI runs with --cpu), and {engine.name} has {engine.weight_bytes / GB:.1f} GB of "
            f"weights. On a CPU at most {most / GB:.1f} GB are loaded unasked: {CPU_BYTES / GB:g} GB, or {100 * CPU_SHARE:g} % of the {ram / GB:.1f} GB of "
            "RAM. Choose device = cpu to load it all the same (minutes an answer, if RAM suffices), or the bundled demonstration model"
        )


@lru_cache(maxsize=1)
def _warn_no_smart_memory() -> None:
    log.warning(
        "A3B: --disable-smart-memory makes ComfyUI unload the model after every run; each run reads it again. keep_in_ram on Load A3B "
        "Model makes that quick"
    )
