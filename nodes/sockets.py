"""What travels on this pack's own links. Every value is immutable: ComfyUI shares outputs between all consumers."""

from __future__ import annotations

from dataclasses import dataclass

A3B_MODEL = "A3B_MODEL"  # ModelHandle
A3B_IMAGES = "A3B_IMAGES"  # tuple of a3b_engine.image.ImageFeatures, in the order [[IMG:n]] counts them
A3B_PROMPT = "A3B_PROMPT"  # a3b_engine.prompt.Prompt


@dataclass(frozen=True)
class ModelHandle:
    """Names one engine of the process-wide registry (`residency.py`) and holds no weights.

    Outputs live in ComfyUI's cache long after weights were unloaded, so a link carries only what is needed to find
    (or open again) the engine. Two loaders with equal options give equal handles, hence one engine.
    """

    path: str  # real path of the checkpoint folder
    device: str  # "cpu", "cuda:0", ...
    dtype: str | None = None  # torch dtype name; None: the engine's own choice for the device
    expert_format: str = "stored"
    vram_gb: float = 0.0  # hard cap in GB (10**9 bytes); 0: ComfyUI decides
    context: int = 8192  # tokens
    keep_in_ram: bool = False  # experts stay in RAM after the weights left the device
    cache_experts: bool = False  # locally made int4 / int3 experts are kept in a folder beside the checkpoint
