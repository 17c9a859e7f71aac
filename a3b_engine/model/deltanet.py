"""Gated DeltaNet (arXiv 2412.06464): linear attention with a decaying, delta-rule corrected state.

Two equal forms: a step for one token and a chunked form for many (arXiv 2406.06484). Everything between the
projections runs in float32, the state included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..config import TextConfig
from .linear import Weight, gated_rms_norm, linear

CHUNK = 64


@dataclass(frozen=True)
class DeltaNetWeights:
    """qkv [conv_dim, D]; z [value_dim, D]; a, b [value_heads, D]; conv [conv_dim, kernel]; a_log, dt_bias [value_heads]; norm [value_head_dim]; out [D, value_dim]."""

    qkv: Weight
    z: Weight
    a: Weight
    b: Weight
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: Weight


@dataclass
class DeltaNetState:
    """conv: the last kernel-1 projected inputs before the convolution, [conv_dim, kernel-1], oldest first;
    recurrent: float32 [value_heads, key_head_dim, value_head_dim]."""

    conv: torch.Tensor
    recurrent: torch.Tensor


def gated_deltanet(x: torch.Tensor, weights: DeltaNetWeights, config: TextConfig, state: DeltaNetState) -> torch.Tensor:
    """x [T, D] -> [T, D]; reads and replaces the tensors of `state`."""
    tokens = x.shape[0]
    mixed = causal_conv(linear(x, weights.qkv), weights.conv, state)
    key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
    query, key, value = mixed.split((key_dim, key_dim, value_dim), dim=-1)
    repeat = config.linear_num_value_heads // config.linear_num_key_heads
    query = _unit(query.view(tokens, config.linear_num_key_heads, -1)).repeat_interleave(repeat, dim=1) * config.linear_key_head_dim**-0.5
    key = _unit(key.view(tokens, config.linear_num_key_heads, -1)).repeat_interleave(repeat, dim=1)
    value = value.view(tokens, config.linear_num_value_heads, -1).float()
    beta = torch.sigmoid(linear(x, weights.b).float())
    decay = -weights.a_log.float().exp() * F.softplus(linear(x, weights.a).float() + weights.dt_bias.float())
    rule = delta_rule_step if tokens == 1 else delta_rule_chunked
    out, state.recurrent = rule(query, key, value, decay, beta, state.recurrent)
    gate = linear(x, weights.z).view(tokens, config.linear_num_value_heads, -1)
    normed = gated_rms_norm(out, gate, weights.norm, config.rms_norm_eps)
    return linear(normed.reshape(tokens, value_dim).to(x.dtype), weights.out)


def causal_conv(u: torch.Tensor, kernel: torch.Tensor, state: DeltaNetState) -> torch.Tensor:
    """Depthwise causal convolution with SiLU: u [T, channels], kernel [channels, k] whose last tap meets the current
    token -> [T, channels]. Replaces `state.conv` by the last k-1 inputs."""
    history = torch.cat((state.conv.to(u.dtype), u.t()), dim=1)  # [channels, k-1+T]
    state.conv = history[:, history.shape[1] - (kernel.shape[1] - 1) :].clone()
    kernel = kernel.to(u.dtype)
    if u.shape[0] == 1:
        return F.silu((history * kernel).sum(dim=1))[None]
    return F.silu(F.conv1d(history[None], kernel[:, None], groups=kernel.shape[0])[0].t())


def delta_rule_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. Shapes as in `delta_rule_chunked` with T = 1; the output is read after the update."""
    q, k, v = query[0], key[0], value[0]
    state = state * decay[0].exp()[:, None, None]
    remembered = torch.einsum("hkv,hk->hv", state, k)
    correction = beta[0][:, None] * (v - remembered)
    state = state + k[:, :, None] * correction[:, None, :]
    return torch.einsum("hkv,hk->hv", state, q)[None], state


def delta_rule_chunked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many tokens in chunks of 64.

    query, key [T, H, dk] (unit length, query scaled), value [T, H, dv], decay (log of the forget gate, <= 0) and beta
    [T, H], state [H, dk, dv]; all float32. Returns out [T, H, dv] and the new state.
    Inside a chunk the rank-one updates are resolved by one unit-triangular solve (the WY form).
    """
    tokens = query.shape[0]
    size = min(CHUNK, tokens)
    count = -(-tokens // size)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [H, count, size, ...]; padding of zeros leaves the state alone."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, count * size - tokens))
        return x.view(count, size, *x.shape[1:]).movedim(2, 0)

    q, k, v, g, b = chunks(query), chunks(key), chunks(value), chunks(decay), chunks(beta)
    total = g.cumsum(-1)  # log decay from the start of the chunk, [H, count, size]
    # Above the diagonal the difference is positive and could overflow: it is cut before the exponential.
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weighted = k * b[..., None]
    unit_lower = (weighted @ k.transpose(-1, -2) * between).tril(-1)
    grown = total.exp()[..., None]
    right = torch.cat((v * b[..., None], weighted * grown), dim=-1)
    solved = torch.linalg.solve_triangular(unit_lower, right, upper=False, unitriangular=True)
    fresh, erased = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside = q @ k.transpose(-1, -2) * between
    from_state = q * grown
    into_state = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    outputs = []
    for i in range(count):
        values = fresh[:, i] - erased[:, i] @ state
        outputs.append(from_state[:, i] @ state + inside[:, i] @ values)
        state = state * kept[:, i] + into_state[:, i] @ values
    out = torch.stack(outputs, dim=1).flatten(1, 2)[:, :tokens]  # [H, T, dv]
    return out.transpose(0, 1), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension in float32, with the epsilon inside the root."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
