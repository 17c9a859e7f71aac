"""A checkpoint's files in the official FP8 layout and their full size, for the time that a load from files takes.

What the codes are does not matter to that time, so every shard is one small run of bytes over and over. The model in them says nothing
worth hearing.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import numpy as np
import torch

from ..checkpoint.index import CheckpointIndex
from ..checkpoint.names import expected_tensors
from ..checkpoint.plan import build_plan
from ..checkpoint.write import to_official, write_json
from ..config import ModelConfig
from ..errors import CheckpointError
from ..parts import EngineParts, FolderWeights
from .made_up import made_up_parts
from .shape import ModelShape, config_dict, model_config
from .weights import BLOCK, is_scaled, scale_shape

SHARD_BYTES = 4 * 1024**3
_RUN = 1 << 26  # bytes written at once
_CODES = {1: "F8_E4M3", 2: "BF16"}


@contextmanager
def model_in_files(folder: Path, shape: ModelShape, shard_bytes: int = SHARD_BYTES) -> Iterator[EngineParts]:
    """The made-up model with its weights in files in `folder`, which is made here and removed again.

    One tensor an expert, as published. Raises `CheckpointError` where the folder exists and holds anything.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: not empty. Name a folder that does not exist yet: the files of the benchmark are removed when it is done.")
    try:
        _write(folder, shape, shard_bytes)
        parts = made_up_parts(shape)
        weights = FolderWeights(build_plan(CheckpointIndex.open(folder), parts.config))
        yield replace(parts, weights=weights, identity=str(folder.resolve()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, shape: ModelShape, shard_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape)
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    write_json(folder / "config.json", {**config_dict(shape), "quantization_config": fp8})
    # Codes from 0x20 to 0x6f: finite and ordinary numbers in both types.
    run = np.random.default_rng(0).integers(0x20, 0x70, _RUN, dtype=np.uint8)
    shards: list[dict[str, tuple[list[int], int]]] = [{}]
    size = 0
    for name, dimensions, width in _tensors(config):
        nbytes = width * math.prod(dimensions)
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dimensions, width)
        size += nbytes
    for number, shard in enumerate(shards, 1):
        _write_shard(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard, run)


def _tensors(config: ModelConfig) -> Iterator[tuple[str, list[int], int]]:
    """(name, shape, bytes an element) of every tensor in the files: an FP8 weight is followed by its block scales."""
    for canonical, dimensions in expected_tensors(config).items():
        scaled = is_scaled(canonical)
        for name, tensor in to_official({canonical: torch.empty(dimensions, device="meta")}, config).items():
            yield name, list(tensor.shape), 1 if scaled else 2
            if scaled:
                yield f"{name}_scale_inv", list(scale_shape(tuple(tensor.shape))), 2


def _write_shard(path: Path, tensors: dict[str, tuple[list[int], int]], run: np.ndarray) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name][1]):  # widest elements first: all of them aligned
        dimensions, width = tensors[name]
        begin, end = end, end + width * math.prod(dimensions)
        header[name] = {"dtype": _CODES[width], "shape": dimensions, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb", buffering=0) as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        while end > 0:
            end -= stream.write(run[: min(end, len(run))])
