"""Load A3B Model: choose a checkpoint and how it runs."""

from __future__ import annotations

import logging
import os
from typing import Annotated

from ..a3b_engine.engine import EXPERT_FORMATS
from ..a3b_engine.errors import A3BError
from . import host, residency
from .annotations import Choice, Float, Int, Output, node
from .sockets import A3B_MODEL, ModelHandle

log = logging.getLogger(__name__)


def check(checkpoint) -> bool | str:
    """Takes over core's list check, so that a name saved with backslashes is understood.

    Names one input only: core reports what is returned once for every input named here, after that input's name.
    """
    if not isinstance(checkpoint, str):
        return True  # linked from another node, known only when it runs
    try:
        host.checkpoint_folder(checkpoint)
    except A3BError as problem:
        return str(problem).removeprefix("checkpoint: ")
    return True


def fingerprint(checkpoint) -> str:
    """Changes when the files of the checkpoint do, so that a cached handle never outlives them."""
    if not isinstance(checkpoint, str):
        return "linked"  # ComfyUI shows links as None here; the value upstream is part of its own cache key
    try:
        return residency.checkpoint_fingerprint(host.checkpoint_folder(checkpoint))
    except A3BError:
        return "not found"  # the node itself says why


@node(
    "A3BLoadModel",
    "Load A3B Model",
    category="A3B",
    validate=check,
    fingerprint=fingerprint,
    search=("qwen3.5", "qwen", "35b", "llm", "vlm", "comic"),
)
def A3BLoadModel(
    checkpoint: Annotated[
        str,
        Choice(
            host.checkpoint_names,
            tooltip="Folder with config.json and *.safetensors of Qwen3.5-35B-A3B (FP8 or BF16), found under every LLM "
            "and text_encoders model folder of ComfyUI. Nothing is ever downloaded. a3b-drawn-scenes-demo comes with the "
            "pack: a demonstration model for its own drawn scenes, not a small Qwen.",
        ),
    ],
    expert_format: Annotated[
        str,
        Choice(
            EXPERT_FORMATS,
            tooltip="How the weights of the experts are kept in memory. stored: exactly as in the file.",
        ),
    ] = "stored",
    vram_gb: Annotated[
        float,
        Float(
            0.0,
            1024.0,
            0.5,
            tooltip="Hard limit in GB for weights and working memory on the device. 0: ComfyUI decides, and frees other models "
            "as needed.",
        ),
    ] = 0.0,
    context: Annotated[
        int,
        Int(
            512,
            262144,
            256,
            tooltip="Longest conversation in tokens: prompt, pictures (144 each at 384 px) and answer together. "
            "Memory for it is taken only as it is used (20 KB a token).",
        ),
    ] = 8192,
    device: Annotated[
        str,
        Choice(
            host.device_names,
            also=host.is_device_name,
            tooltip="auto: the device ComfyUI uses. A card that is not present falls back to auto with a warning in the log.",
        ),
    ] = "auto",
) -> tuple[Annotated[ModelHandle, Output(A3B_MODEL, "model", "The opened model. Weights are read when it is first used.")]]:
    """Opens a Qwen3.5-35B-A3B checkpoint. Its files are checked here; the weights are read on first use, stay on the
    device between runs, and leave when another model needs the room or you press "unload models"."""
    handle = ModelHandle(
        path=os.path.realpath(host.checkpoint_folder(checkpoint)),
        device=str(host.resolve_device(device)),
        expert_format=expert_format,
        vram_gb=vram_gb,
        context=context,
    )
    engine = residency.open_engine(handle)
    log.info("A3B: %s opened on %s, %.2f GB of weights", engine.name, handle.device, engine.weight_bytes / residency.GB)
    return (handle,)
