"""Matrix products with weights as they are stored, and the two RMS norms of the architecture."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight

Weight = torch.Tensor | ScaledWeight | PackedWeight

_ROWS_AT_ONCE = 16384


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight as a plain tensor of `dtype`; a scaled or packed one is multiplied out in float32 first."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, in x's dtype -> [..., N]."""
    return F.linear(x, dense(weight, x.dtype), bias)


def linear_in_pieces(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As `linear`, but no more than a few rows of an FP8 matrix are multiplied out at a time: for the head, the largest there is."""
    if not isinstance(weight, ScaledWeight) or weight.shape[0] <= _ROWS_AT_ONCE:
        return linear(x, weight)
    return torch.cat([linear(x, piece) for piece in weight.row_pieces(_ROWS_AT_ONCE)], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zero-centred RMS norm over the last dimension: x / rms(x) * (1 + weight), in float32, returned in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm with a plain weight, then times SiLU(gate): the output norm of Gated DeltaNet, in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight.float() * y * F.silu(gate.float())
