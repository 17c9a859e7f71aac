"""The vision tower: patches of one picture -> features that stand where its image tokens are.

A ViT (arXiv 2010.11929) with interpolated learned positions plus 2-D rotary, full attention inside the picture, and a
merger that turns each 2x2 block of patches into one token of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Mapping

import torch
import torch.nn.functional as F

from ..config import VisionConfig
from .linear import Weight, linear

LAYER_NORM_EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class BlockWeights:
    """One block: two layer norms, attention (qkv [3C, C], proj [C, C]) and MLP, each with its bias."""

    norm1: tuple[torch.Tensor, torch.Tensor]
    qkv: tuple[Weight, torch.Tensor]
    proj: tuple[Weight, torch.Tensor]
    norm2: tuple[torch.Tensor, torch.Tensor]
    fc1: tuple[Weight, torch.Tensor]
    fc2: tuple[Weight, torch.Tensor]


class VisionModel:
    """Weights of the tower; `encode` takes one picture at a time."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, Weight], device: torch.device | None = None) -> None:
        """device: where to work; blocks that are elsewhere come one after the other for as long as they are at work. None: where the
        weights are."""
        self.config = config

        def pair(name: str) -> tuple[Weight, torch.Tensor]:
            return weights[f"visual.{name}.weight"], weights[f"visual.{name}.bias"]

        positions: torch.Tensor = weights["visual.pos_embed.weight"]
        self.positions = positions if device is None else positions.to(device, non_blocking=True)
        self.patch_embed = self._here(pair("patch_embed.proj"))
        self.blocks = [
            BlockWeights(
                norm1=pair(f"blocks.{i}.norm1"),
                qkv=pair(f"blocks.{i}.attn.qkv"),
                proj=pair(f"blocks.{i}.attn.proj"),
                norm2=pair(f"blocks.{i}.norm2"),
                fc1=pair(f"blocks.{i}.mlp.linear_fc1"),
                fc2=pair(f"blocks.{i}.mlp.linear_fc2"),
            )
            for i in range(config.depth)
        ]
        self.merger_norm, self.merger_fc1, self.merger_fc2 = (self._here(pair(f"merger.{name}")) for name in ("norm", "linear_fc1", "linear_fc2"))

    @property
    def dtype(self) -> torch.dtype:
        return self.positions.dtype

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def encode(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """patches float [rows*columns*merge^2, patch_dim] in merge-block order (`image.to_patches`), grid = merged
        (rows, columns) -> [rows*columns, out_hidden_size]."""
        config = self.config
        merge = config.spatial_merge_size
        height, width = grid[0] * merge, grid[1] * merge
        x = linear(patches.to(self.device, self.dtype), *self.patch_embed)
        x = x + self._interpolated_positions(height, width)
        cos, sin = self._rotary(height, width)
        for block in self.blocks:
            block = BlockWeights(*(self._here(getattr(block, field.name)) for field in fields(block)))
            x = x + self._attention(_layer_norm(x, block.norm1), block, cos, sin)
            hidden = F.gelu(linear(_layer_norm(x, block.norm2), *block.fc1), approximate="tanh")
            x = x + linear(hidden, *block.fc2)
        x = _layer_norm(x, self.merger_norm).reshape(-1, merge * merge * config.hidden_size)
        return linear(F.gelu(linear(x, *self.merger_fc1)), *self.merger_fc2)

    def _here(self, pair: tuple[Weight, torch.Tensor]) -> tuple[Weight, torch.Tensor]:
        return tuple(each if each.device == self.device else each.to(self.device, non_blocking=True) for each in pair)

    def _attention(self, x: torch.Tensor, block: BlockWeights, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.config.num_heads
        query, key, value = linear(x, *block.qkv).view(x.shape[0], 3, heads, -1).unbind(1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (query, key, value)))
        return linear(mixed[0].transpose(0, 1).reshape(x.shape), *block.proj)

    def _interpolated_positions(self, height: int, width: int) -> torch.Tensor:
        """Bilinear (align-corners) samples of the square position table, in merge-block order, [height*width, C]."""
        side = self.config.position_grid
        table = self.positions.view(side, side, -1)
        ys = torch.linspace(0, side - 1, height, device=self.device, dtype=torch.float32)
        xs = torch.linspace(0, side - 1, width, device=self.device, dtype=torch.float32)
        y0, x0 = ys.long(), xs.long()
        y1, x1 = (y0 + 1).clamp(max=side - 1), (x0 + 1).clamp(max=side - 1)
        dy, dx = (ys - y0)[:, None, None], (xs - x0)[None, :, None]
        corners = (
            (table[y0][:, x0], (1 - dy) * (1 - dx)),
            (table[y0][:, x1], (1 - dy) * dx),
            (table[y1][:, x0], dy * (1 - dx)),
            (table[y1][:, x1], dy * dx),
        )
        return self._block_order(sum(value.float() * weight for value, weight in corners).to(self.dtype))

    def _rotary(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 cos and sin [height*width, head_dim]: row angles, then column angles, doubled for rotate-half."""
        quarter = self.config.hidden_size // self.config.num_heads // 4
        exponent = torch.arange(quarter, dtype=torch.float32, device=self.device) / quarter
        inverse = 1.0 / ROPE_THETA**exponent
        rows = torch.arange(height, device=self.device).float()[:, None] * inverse
        columns = torch.arange(width, device=self.device).float()[:, None] * inverse
        angles = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), dim=-1)
        angles = self._block_order(angles)
        doubled = torch.cat((angles, angles), dim=-1)
        return doubled.cos(), doubled.sin()

    def _block_order(self, grid: torch.Tensor) -> torch.Tensor:
        """[height, width, C] -> [height*width, C], row-major over merge x merge blocks, then inside each block."""
        merge = self.config.spatial_merge_size
        height, width, channels = grid.shape
        blocks = grid.view(height // merge, merge, width // merge, merge, channels)
        return blocks.permute(0, 2, 1, 3, 4).reshape(height * width, channels)


def _layer_norm(x: torch.Tensor, weight_bias: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight, bias = weight_bias
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), LAYER_NORM_EPS).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half over the whole head in float32: x [T, heads, head_dim], cos and sin [T, head_dim]."""
    y = x.float()
    first, second = y.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (y * cos[:, None] + turned * sin[:, None]).to(x.dtype)
