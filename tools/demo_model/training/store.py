"""Files of a training: the state to go on from, and the weights to keep."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.checkpoint.plan import build_plan
from a3b_engine.checkpoint.reader import load_weights
from a3b_engine.checkpoint.write import to_official, write_checkpoint
from a3b_engine.config import ModelConfig

SHARD_BYTES = 14_000_000
STATE = "state.pt"


def save_weights(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], format: str = "bf16") -> None:
    """A checkpoint in files below 15 MB (weights and config.json; no index, so that few files need to travel)."""
    official = to_official({name: weight.detach().cpu() for name, weight in weights.items()}, ModelConfig.from_dict(config))
    write_checkpoint(folder, official, config, format=format, max_shard_bytes=SHARD_BYTES, with_index=format == "fp8")


def read_weights(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Configuration and float32 weights of a checkpoint folder; FP8 is multiplied out."""
    config = ModelConfig.from_folder(folder)
    plan = build_plan(CheckpointIndex.open(folder), config)
    return config, load_weights(plan, "cpu", torch.float32, dequantize=True)


class StateFile:
    """`state.pt` in a folder, written in the background: a file that is there is always whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE
        self._writer: threading.Thread | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Copies `state` (tensors, and dicts and lists of them) now, writes it later."""
        self.wait()
        self._writer = threading.Thread(target=self._write, args=(_on_host(state),))
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def load(self) -> dict[str, Any] | None:
        return torch.load(self.path, map_location="cpu", weights_only=True) if self.path.is_file() else None

    def _write(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return value
