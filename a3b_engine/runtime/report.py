"""What an engine holds and where, told to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Engine


def size(nbytes: float) -> str:
    """Bytes for people: in GB (10^9), small ones in MB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def memory_report(engine: Engine) -> str:
    """What is where, why, and what would make it faster: one sentence a line."""
    memory = engine.memory()
    if not engine.is_loaded:
        return "\n".join(_plan(engine))
    here, total = memory["experts_on_device"], memory["experts"]
    lines = [f"{engine.name} on {engine.device}: {size(memory['total'])}, {size(memory['weights'])} of it weights."]
    if here == total:
        if memory["weights"] == memory["weights_when_loaded"]:
            lines.append("Everything is on the device: this is the fastest it can be with this expert_format.")
        else:
            lines.append("All experts are on the device. Embedding rows or the vision tower wait in RAM, which costs text nothing and a picture little.")
        return "\n".join(lines + _ram(memory))
    lines.append(f"{here} of {total} experts ({100 * here / total:.0f} %) are on the device; the others are fetched when a token needs them.")
    counts = engine.expert_counts()
    if counts is not None and counts[0]:
        lines.append(f"{100 * (1 - counts[1] / counts[0]):.0f} % of the experts that tokens asked for so far were there already.")
    lines += _ram(memory)
    if memory["experts_on_disk"]:
        lines.append(f"{memory['experts_on_disk']} experts found no place in RAM and are read from the files, which is slow: more RAM would help most.")
    missing = memory["weights_when_loaded"] - memory["weights"]
    capped = engine.vram_budget is not None and engine.most_bytes <= memory["weights"]
    if capped:
        lines.append(f"Why: vram_gb allows {size(engine.vram_budget)}. {size(missing)} more would hold everything.")
    else:
        lines.append(
            "Why: the device had no more room for it when it was loaded, or something else needed room since; it grows again when there is room. "
            f"{size(missing)} more would hold everything."
        )
    helps = ["a larger vram_gb" if capped else "less beside it on this card", "a smaller context"]
    if engine.experts_may_shrink:
        helps.insert(1, "expert_format int4 (about half the bytes) or int3")
    lines.append(f"Faster: {', '.join(helps[:-1])}, or {helps[-1]}.")
    return "\n".join(lines)


def _plan(engine: Engine) -> list[str]:
    whole, least = engine.weight_bytes, engine.least_bytes
    lines = [
        f"{engine.name} is not loaded; it is when a node first needs it.",
        f"Weights: {size(whole)} when all of them are on {engine.device}. It runs from {size(least)} on, all included, with a context of {engine.context}.",
    ]
    if engine.vram_budget is not None and engine.most_bytes < whole:
        lines.append(f"vram_gb = {engine.vram_budget / 1e9:g}: {size(engine.most_bytes)} of them will be; other experts wait in RAM and are fetched.")
    return lines


def _ram(memory: dict[str, int]) -> list[str]:
    held = []
    if memory["host_pinned"]:
        held.append(f"{size(memory['host_pinned'])} of pinned RAM")
    if memory["host_pageable"]:
        held.append(f"{size(memory['host_pageable'])} of ordinary RAM")
    return [f"In RAM: {' and '.join(held)}."] if held else []
