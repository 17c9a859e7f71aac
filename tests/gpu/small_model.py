"""What tests of an engine's memory share: a model of made-up weights, a picture for it, and what a card holds."""

from __future__ import annotations

import numpy as np
import torch

from a3b_engine.bench.made_up import made_up_parts
from a3b_engine.bench.shape import ModelShape
from a3b_engine.parts import EngineParts


def small_parts() -> EngineParts:
    """Four layers at the published width: 5.5 GB, half of it experts."""
    return made_up_parts(ModelShape(layers=4, vision_depth=2))


def picture() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (384, 384, 3), dtype=np.uint8)


def held(device: torch.device) -> int:
    """Bytes that tensors asked for. `memory_allocated` counts blocks, which may be up to 1 MiB larger than what was asked for."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]
