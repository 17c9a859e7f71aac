"""Gated full attention: grouped queries, normed q and k, partial rotary, and a sigmoid gate on every head's output.

The gate is the second half of each head's query projection (Qwen3-Next; gated attention, arXiv 2505.06708).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ..config import TextConfig
from .linear import Weight, linear, rms_norm
from .rotary import rotate

# Scores of a chunk against a long history are made in slices of rows of at most this many bytes.
_SCORE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class AttentionWeights:
    """q [2*heads*head_dim, D] (per head: query, then gate); k, v [kv_heads*head_dim, D]; o [D, heads*head_dim]; norms [head_dim]."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_norm: torch.Tensor
    k_norm: torch.Tensor


class KeyValueStore(Protocol):
    """Where an attention layer keeps its keys and values."""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [T, kv_heads, head_dim] and return everything so far, [total, kv_heads, head_dim] each."""


def gated_attention(
    x: torch.Tensor, weights: AttentionWeights, config: TextConfig, rotary: tuple[torch.Tensor, torch.Tensor], store: KeyValueStore
) -> torch.Tensor:
    """x [T, D] -> [T, D]; attends to the stored history and to itself causally."""
    tokens, head_dim = x.shape[0], config.head_dim
    query, gate = linear(x, weights.q).view(tokens, config.num_attention_heads, 2 * head_dim).chunk(2, dim=-1)
    keys = linear(x, weights.k).view(tokens, config.num_key_value_heads, head_dim)
    values = linear(x, weights.v).view(tokens, config.num_key_value_heads, head_dim)
    query = rotate(rms_norm(query, weights.q_norm, config.rms_norm_eps), *rotary)
    keys = rotate(rms_norm(keys, weights.k_norm, config.rms_norm_eps), *rotary)
    all_keys, all_values = store.append(keys, values)
    mixed = causal_attention(query, all_keys, all_values)
    return linear((mixed * torch.sigmoid(gate)).reshape(tokens, -1), weights.o)


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [T, heads, d] over keys and values [S, kv_heads, d]; query t sees the first S - T + t + 1 of them -> [T, heads, d]."""
    tokens, heads, total = query.shape[0], query.shape[1], keys.shape[0]
    if tokens == 1:
        return _attention_of_one_token(query, keys, values)
    q = query.transpose(0, 1)[None]
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    grouped = heads != keys.shape[1]
    if tokens == total:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out[0].transpose(0, 1)
    rows = max(1, min(tokens, _SCORE_BYTES // (4 * heads * total)))
    columns = torch.arange(total, device=query.device)
    pieces = []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        last_visible = torch.arange(start, stop, device=query.device) + (total - tokens)
        mask = columns[None, :] <= last_visible[:, None]
        pieces.append(F.scaled_dot_product_attention(q[:, :, start:stop], k, v, attn_mask=mask, enable_gqa=grouped))
    return torch.cat(pieces, dim=2)[0].transpose(0, 1)


def _attention_of_one_token(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [1, heads, d] over all keys and values [S, kv_heads, d] -> [1, heads, d], in float32 throughout.

    Written out, because the fused kernels prepare themselves anew for every length S: on an H200 that took 6.8 ms of
    host time a call and more than half of every decoded token.
    """
    grouped = query[0].float().view(keys.shape[1], -1, query.shape[-1])  # [kv_heads, heads / kv_heads, d]
    weights = (grouped @ keys.float().permute(1, 2, 0) * query.shape[-1] ** -0.5).softmax(-1)
    return (weights @ values.float().transpose(0, 1)).view(query.shape).to(query.dtype)
