"""Tiny checkpoints for the tests of `a3b_engine.checkpoint`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.checkpoint.names import expected_tensors
from a3b_engine.checkpoint.plan import build_plan
from a3b_engine.checkpoint.reader import load_weights
from a3b_engine.checkpoint.write import to_official, write_checkpoint, write_safetensors
from a3b_engine.config import ModelConfig

_CONFIG = {
    "model_type": "qwen3_5_moe",
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "eos_token_id": 1,
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
}


def tiny_config(**text: object) -> dict:
    """A raw config.json of the smallest model with both mixers; keyword arguments change `text_config`."""
    config = copy.deepcopy(_CONFIG)
    config["text_config"].update(text)
    return config


def text_only_config(**text: object) -> dict:
    """The flat configuration of a text-only export."""
    return {**tiny_config(**text)["text_config"], "model_type": "qwen3_5_moe_text", "eos_token_id": 1}


def canonical_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical name -> random float32 tensor whose values bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(ModelConfig.from_dict(config))
    return {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes.items()}


def official_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    return to_official(canonical_weights(config, seed), ModelConfig.from_dict(config))


def write_sample(folder: Path, config: dict | None = None, tensors: dict[str, torch.Tensor] | None = None, **options) -> Path:
    """A checkpoint through the pack's own writer (bf16 unless `format` says otherwise)."""
    config = config or tiny_config()
    options.setdefault("format", "bf16")
    write_checkpoint(folder, tensors or official_weights(config), config, **options)
    return folder


def write_raw(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, metadata: dict | None = None) -> Path:
    """One model.safetensors with exactly these tensors, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, metadata)
    (folder / "config.json").write_text(json.dumps(config or tiny_config()), encoding="utf-8")
    return folder


def plan_of(folder: Path):
    return build_plan(CheckpointIndex.open(folder), ModelConfig.from_folder(folder))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options):
    return load_weights(plan_of(folder), "cpu", dtype, **options)
