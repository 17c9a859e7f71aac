"""Rotary embeddings: interleaved M-RoPE for the language model (Qwen2-VL, arXiv 2409.12191; RoPE, arXiv 2104.09864)."""

from __future__ import annotations

import torch

from ..config import TextConfig


def mrope_cos_sin(positions: torch.Tensor, config: TextConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for the rotated dimensions.

    positions: int64 [3, T] (temporal, height, width). Returns two float32 tensors [T, rotary_dim].
    Frequency i takes its position from H when i is 1, 4, 7 ..., from W when i is 2, 5, 8 ... (as far as
    `mrope_section` reaches), otherwise from T.
    """
    half = config.rotary_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=positions.device) * 2 / config.rotary_dim
    inverse = 1.0 / config.rope_theta**exponent
    angles = positions.float()[..., None] * inverse  # [3, T, half]
    mixed = angles[0].clone()
    for axis in (1, 2):
        chosen = slice(axis, config.mrope_section[axis] * 3, 3)
        mixed[:, chosen] = angles[axis][:, chosen]
    doubled = torch.cat((mixed, mixed), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `cos.shape[-1]` dimensions of x [T, heads, head_dim] (rotate-half); the rest passes through."""
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)
