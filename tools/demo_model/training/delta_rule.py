"""The chunked delta rule for a batch, differentiable, in few large operations.

Same formulas as `a3b_engine.model.deltanet.delta_rule_chunked`, arranged for training: the triangular systems are solved
by an explicit inverse (a batched triangular solve is slow on a GPU, and slower still in its backward pass), and what is
left to do chunk by chunk is one matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from a3b_engine.model.deltanet import CHUNK


def unit_lower_inverse(strictly_lower: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two; differentiable."""
    return _UnitLowerInverse.apply(strictly_lower)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lower: torch.Tensor) -> torch.Tensor:
        n = lower.shape[-1]
        index = torch.arange(n, device=lower.device)
        flat = lower.reshape(-1, n, n)
        inverse = torch.eye(n, dtype=lower.dtype, device=lower.device).expand_as(flat)
        size = 1
        while size < n:
            # `inverse` holds the inverses of diagonal blocks of `size`; two neighbours and the block below them make
            # the next size: [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. As stable as substitution.
            pair, half = index // (2 * size), index // size
            below = flat * ((pair[:, None] == pair) & (half[:, None] != half)).to(lower.dtype)
            inverse = inverse - below if size == 1 else torch.baddbmm(inverse, inverse @ below, inverse, alpha=-1)
            size *= 2
        inverse = inverse.view(lower.shape)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradient @ transposed).tril(-1)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From an empty state: query, key [B, T, H, dk] (unit length, query scaled), value [B, T, H, dv], decay (log) and
    beta [B, T, H], all float32 -> out [B, T, H, dv] and the state behind the last token [B, H, dk, dv]."""
    batch, tokens, heads = decay.shape
    count = -(-tokens // CHUNK)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, ...] -> [B*H, count, CHUNK, ...]; padding of zeros leaves the state alone."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, count * CHUNK - tokens))
        return x.view(batch, count, CHUNK, *x.shape[2:]).movedim(3, 1).flatten(0, 1)

    q, k, v, g, b = chunks(query), chunks(key), chunks(value), chunks(decay), chunks(beta)
    total = g.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    grown = total.exp()[..., None]
    weighted = k * b[..., None]
    inverse = unit_lower_inverse((weighted @ k.transpose(-1, -2) * between).tril(-1))
    fresh = inverse @ (v * b[..., None])
    erased = inverse @ (weighted * grown)
    inside = q @ k.transpose(-1, -2) * between
    into_state = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    # Over one chunk the state changes by an affine map: state -> carried @ state + added.
    kept = torch.diag_embed(total[..., -1:].exp().expand(-1, -1, k.shape[-1]))
    carried = (kept - into_state @ erased).unbind(1)
    added = (into_state @ fresh).unbind(1)
    state = torch.zeros_like(added[0])
    before = []
    for matrix, addition in zip(carried, added, strict=True):
        before.append(state)
        state = torch.baddbmm(addition, matrix, state)
    out = (q * grown - inside @ erased) @ torch.stack(before, 1) + inside @ fresh
    out = out.view(batch, heads, count * CHUNK, -1)[:, :, :tokens].transpose(1, 2)
    return out, state.view(batch, heads, *state.shape[1:])


def delta_rule_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row: shapes as in `delta_rule` with T = 1, state [B, H, dk, dv]."""
    q, k, v = query[:, 0], key[:, 0], value[:, 0]
    state = state * decay[:, 0].exp()[..., None, None]
    correction = beta[:, 0, :, None] * (v - (k[:, :, None] @ state)[:, :, 0])
    state = state + k[..., None] * correction[:, :, None]
    return (q[:, :, None] @ state)[:, None, :, 0], state
