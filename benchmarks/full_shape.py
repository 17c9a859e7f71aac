"""The full Qwen3.5-35B-A3B shape with random weights, for the scripts in this folder that time parts of the engine.

The whole engine is measured by `python -m a3b_engine bench`, which has the same shape and weights.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a3b_engine.bench.shape import ModelShape, model_config  # noqa: E402
from a3b_engine.bench.weights import RandomWeights  # noqa: E402
from a3b_engine.config import ModelConfig  # noqa: E402


def published_config(layers: int = ModelShape().layers) -> ModelConfig:
    """The published sizes, with fewer layers where asked."""
    return model_config(replace(ModelShape(), layers=layers))


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict:
    """Canonical name -> random weight, FP8 with block scales where the official files have it."""
    return RandomWeights(config).load(device, dtype, dequantize=False)


class Stopwatch:
    """Seconds of the work queued inside the block, the device's included."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._began
