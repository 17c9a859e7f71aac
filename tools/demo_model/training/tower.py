"""The vision tower on a batch of equally large pictures; weights and formulas are the engine's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from a3b_engine.model.linear import linear
from a3b_engine.model.vision import LAYER_NORM_EPS, BlockWeights, VisionModel


class VisionTower(VisionModel):
    """`VisionModel` whose pictures are stacked in front: [B, patches, C]."""

    def encode_pictures(self, pictures: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """uint8 [B, H, W, 3] -> features [B, rows * columns, out_hidden_size] and the merged (rows, columns)."""
        config, merge = self.config, self.config.spatial_merge_size
        x, (height, width) = self._patches(pictures)
        x = linear(x, *self.patch_embed) + self._interpolated_positions(height, width)
        cos, sin = self._rotary(height, width)
        for block in self.blocks:
            x = x + self._mix(_norm(x, block.norm1), block, cos, sin)
            x = x + linear(F.gelu(linear(_norm(x, block.norm2), *block.fc1), approximate="tanh"), *block.fc2)
        x = _norm(x, self.merger_norm).reshape(len(x), -1, merge * merge * config.hidden_size)
        features = linear(F.gelu(linear(x, *self.merger_fc1)), *self.merger_fc2)
        return features, (height // merge, width // merge)

    def _patches(self, pictures: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Rows as `a3b_engine.image.to_patches` makes them, and the grid of patches."""
        patch, frames, merge = self.config.patch_size, self.config.temporal_patch_size, self.config.spatial_merge_size
        batch, height, width, _ = pictures.shape
        unit = (pictures.float() / 255 - 0.5) / 0.5
        blocks = unit.view(batch, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
        rows = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6)  # block row, block column, row and column inside, channel, y, x
        rows = rows.unsqueeze(6).expand(*rows.shape[:6], frames, patch, patch)
        grid = (height // patch, width // patch)
        return rows.reshape(batch, grid[0] * grid[1], -1), grid

    def _mix(self, x: torch.Tensor, block: BlockWeights, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, patches, _ = x.shape
        parts = linear(x, *block.qkv).view(batch, patches, 3, self.config.num_heads, -1)
        query, key = (_turn(parts[:, :, i], cos, sin) for i in (0, 1))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, parts[:, :, 2])))
        return linear(mixed.transpose(1, 2).reshape(x.shape), *block.proj)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half in float32: x [B, N, heads, head_dim], cos and sin [N, head_dim]."""
    y = x.float()
    first, second = y.chunk(2, dim=-1)
    return y * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _norm(x: torch.Tensor, weight_bias: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), *weight_bias, LAYER_NORM_EPS)
