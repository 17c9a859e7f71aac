"""What would help when memory is short, with the bytes that each step saves."""

from __future__ import annotations

from typing import Any

import torch

from ..a3b_engine.errors import A3BError, MemoryBudgetError

GB = 10**9
MARGIN = GB  # left free by an advised vram_gb, so that the next run does not end the same way
STEP = 0.5  # GB; the step of the vram_gb widget
SMALLER_FORMATS = ("int4", "int3")
MOST_TEXT = 300  # characters of another program's message


class OutOfMemory(MemoryBudgetError, torch.cuda.OutOfMemoryError):
    """An allocation failed. ComfyUI sees an out-of-memory error of torch and unloads all models, the user sees what helps."""


def out_of_memory(engine: Any, handle: Any, error: BaseException, free: int) -> OutOfMemory:
    """The error for the user. engine: as it was when the allocation failed; free: bytes free on its device."""
    memory = engine.memory()
    cause = " ".join(str(error).split())[:MOST_TEXT] or type(error).__name__
    helps = "; ".join(levers(engine, handle, engine.loaded_bytes))
    return OutOfMemory(
        f"{engine.name} ran out of memory on {handle.device}. It held {memory['total'] / GB:.1f} GB there, {memory['weights'] / GB:.1f} GB of "
        f"it weights; {max(0, free) / GB:.1f} GB were free. What helps (Load A3B Model): {helps + '; ' if helps else ''}or close what else "
        f"uses the device. The cause: {cause}"
    )


def levers(engine: Any, handle: Any, weights: int) -> list[str]:
    """The widgets that make the engine smaller, and by how much, the strongest first. weights: bytes of them on the device."""
    found = [_cap(engine, handle, weights), *_formats(engine, weights), _context(engine)]
    return [text for saved, text in sorted((lever for lever in found if lever is not None), reverse=True)]


def _cap(engine: Any, handle: Any, weights: int) -> tuple[int, str] | None:
    """A vram_gb that takes experts off the device."""
    most = weights - engine.smallest_bytes
    if most < STEP * GB:
        return None
    working = engine.working_bytes(handle.context)
    held = weights + working
    lowest = _round(engine.least_bytes, up=True)
    cap = max(_round(held - MARGIN), lowest)
    saved = held - int(cap * GB)
    if saved <= 0:
        return None
    now = f"{handle.vram_gb:g}" if handle.vram_gb else "0, ComfyUI decides"
    text = f"vram_gb = {cap:g} (now {now}) takes {saved / GB:.1f} GB less"
    if cap > lowest:
        text += f", down to vram_gb = {lowest:g} with {(held - lowest * GB) / GB:.1f} GB less"
    return int(held - lowest * GB), text + " (slower: experts wait in RAM)"


def _round(nbytes: float, up: bool = False) -> float:
    """GB in steps of the widget."""
    steps = -(-nbytes // (STEP * GB)) if up else nbytes // (STEP * GB)
    return steps * STEP


def _formats(engine: Any, weights: int) -> list[tuple[int, str]]:
    """Smaller expert formats; what they save of the experts that are on the device."""
    if not engine.experts_may_shrink or engine.device.type == "cpu":
        return []
    now = engine.parts.weights.tier_bytes(engine.dtype, False)
    experts = now["experts"]
    here = min(experts, weights - now["rest"])  # before an expert leaves the device, embedding and vision tower have left
    found = []
    for name in SMALLER_FORMATS:
        try:
            then = engine.parts.with_experts(name).weights.tier_bytes(engine.dtype, False)
        except A3BError:
            continue  # sizes that cannot be kept so
        saved = now["rest"] - then["rest"]  # the head
        saved += int(max(0, here) * (1 - then["experts"] / experts)) if experts else 0
        if saved > 0:
            found.append((saved, f"expert_format = {name} takes {saved / GB:.1f} GB less"))
    return found


def _context(engine: Any) -> tuple[int, str] | None:
    half = engine.context // 2
    saved = engine.working_bytes(engine.context) - engine.working_bytes(half)
    if half < 512 or saved <= 0:
        return None
    return saved, f"context = {half} (now {engine.context}) takes {saved / GB:.2f} GB less"


def held(engine: Any) -> dict[str, Any]:
    """What is where, for the stats of an answer: numbers of experts as they are, the rest in GB, and the same in sentences."""
    figures = {name: value if name.startswith("experts") else round(value / GB, 3) for name, value in engine.memory().items()}
    return {**figures, "report": engine.memory_report().splitlines()}


def state_text(engine: Any, handle: Any, free: int, total: int, last: str) -> str:
    """What is where, for the loader's output. last: the report of the latest answer, if the weights have left since."""
    lines = [engine.memory_report()]
    limit = f"vram_gb = {handle.vram_gb:g} is the most that the model takes" if handle.vram_gb else "vram_gb = 0: ComfyUI decides how much the model takes"
    lines.append(f"{handle.device}: {free / GB:.1f} of {total / GB:.1f} GB are free; {limit}.")
    if last and not engine.is_loaded:
        lines.append(f"When it was last used: {last}")
    lines.append("(As it was when this node ran. The stats of Generate say it for every answer.)")
    return "\n".join(lines)
