"""Load A3B Model: choose a checkpoint and how it runs."""

from __future__ import annotations

import logging
import os
from typing import Annotated

from ..a3b_engine.engine import EXPERT_FORMATS
from ..a3b_engine.errors import A3BError
from . import host, residency
from .annotations import Choice, Flag, Float, Int, Output, node
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
            tooltip="How the weights of the experts are kept in memory. stored: exactly as in the file. int4, int3: rounded to 4 or 3 bits "
            "while they are loaded (and the output head to FP8), from an FP8 or BF16 folder. The 35B model then takes about 21 or 17 GB instead of 37, answers "
            "change a little, and loading takes longer unless cache_experts keeps the result.",
        ),
    ] = "stored",
    vram_gb: Annotated[
        float,
        Float(
            0.0,
            1024.0,
            0.5,
            tooltip="Most GB that the model takes on the device: weights, working memory, everything. Experts beyond it wait in RAM and are "
            "fetched when a token needs them, which is slower. Set it to what your image model leaves, and both stay on the card. "
            "0: ComfyUI decides: the model takes what is free, and other models move when either needs the room.",
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
            tooltip="auto: the device ComfyUI uses. cuda:1 and so on put the model on another card than the image model. cpu: without a card; "
            "only small models are sensible there. A card that is not present falls back to auto with a warning in the log.",
        ),
    ] = "auto",
    keep_in_ram: Annotated[
        bool,
        Flag(
            optional=True,
            tooltip="Keep the experts in RAM when the model leaves the device, so that it comes back within seconds. Takes as much RAM as "
            "the checkpoint has bytes until ComfyUI ends or another setting of this node is used.",
        ),
    ] = False,
    cache_experts: Annotated[
        bool,
        Flag(
            optional=True,
            tooltip="Counts for expert_format int4 and int3 only. Write the experts, once they are made smaller, into a folder beside the "
            "checkpoint's files (int4: 17 GB) and read them from there next time, instead of making them again at every load.",
        ),
    ] = False,
) -> tuple[
    Annotated[ModelHandle, Output(A3B_MODEL, "model", "The opened model. Weights are read when it is first used.")],
    Annotated[
        str,
        Output(
            "STRING",
            "memory",
            "A forecast, made when this node ran and kept by ComfyUI: what will be where, and what would make it faster. Connect it to "
            "Preview Any. After every answer the stats of Generate say what really is where.",
        ),
    ],
]:
    """Opens a Qwen3.5-35B-A3B checkpoint. Its files are checked here; the weights are read on first use, stay on the
    device between runs, and leave, whole or in part, when another model needs the room or you press "unload models"."""
    handle = ModelHandle(
        path=os.path.realpath(host.checkpoint_folder(checkpoint)),
        device=str(host.resolve_device(device)),
        expert_format=expert_format,
        vram_gb=vram_gb,
        context=context,
        keep_in_ram=keep_in_ram,
        cache_experts=cache_experts and expert_format != "stored",
    )
    engine = residency.open_engine(handle)
    if handle.device == "cpu" and device != "cpu":
        residency.refuse_large_on_cpu(handle)
    log.info("A3B: %s opened on %s, %.2f GB of weights", engine.name, handle.device, engine.weight_bytes / residency.GB)
    return handle, residency.memory_text(handle)
