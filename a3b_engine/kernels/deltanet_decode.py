"""Gated DeltaNet of one token in one launch: convolution, gates, state update, output and its gated norm.

The convolution's past is kept as a ring of `kernel` rows: the token at sequence index t is written to row t % kernel and
the others are read from the remaining rows. A step therefore never writes what any program of it reads, although the
channels of one key head are read by the programs of several value heads; each channel is written by exactly one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..config import TextConfig
from ..model.deltanet import DeltaNetState, causal_conv, delta_rule_step
from ..model.linear import gated_rms_norm
from .rounding import rounded
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test


@triton.jit
def _past(ring, taps, channels, step, CHANNELS, KERNEL: tl.constexpr, D: tl.constexpr):
    """What the earlier tokens give to the depthwise convolution at `channels`, and the tap of the new one; float32."""
    mixed = tl.zeros_like(channels).to(tl.float32)
    for back in tl.static_range(KERNEL - 1, 0, -1):
        slot = (step + KERNEL - back) % KERNEL
        old = rounded(tl.load(ring + slot * CHANNELS + channels).to(tl.float32), D)
        mixed += rounded(old * rounded(tl.load(taps + channels * KERNEL + (KERNEL - 1 - back)).to(tl.float32), D), D)
    return mixed, rounded(tl.load(taps + channels * KERNEL + (KERNEL - 1)).to(tl.float32), D)


@triton.jit
def _convolved(new, past, tap, D: tl.constexpr):
    """SiLU of the convolution, float32 on the grid of D."""
    mixed = rounded(past + rounded(new * tap, D), D)
    return rounded(mixed / (1.0 + tl.exp(-mixed)), D)


@triton.jit
def _remember(ring, new, channels, step, owner, CHANNELS, KERNEL: tl.constexpr):
    """The owner of the channels keeps the new input in the ring."""
    STORED: tl.constexpr = ring.dtype.element_ty
    tl.store(ring + (step % KERNEL) * CHANNELS + channels, rounded(new, STORED).to(STORED), mask=owner & (channels >= 0))


@triton.jit
def _softplus(x):
    """log(1 + e^x); torch passes x > 20 through. Small e^x needs the series, as there is no log1p."""
    grown = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(grown < 1e-3, grown * (1.0 - grown * (0.5 - grown / 3.0)), tl.log(1.0 + grown)))


@triton.jit
def _deltanet(
    qkv, z, a, b, taps, a_log, dt_bias, norm, ring, state, length_at, out, whole, arrived, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KERNEL: tl.constexpr,
    BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    REPEAT: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = DV // BV
    head, part = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, DK), part * BV + tl.arange(0, BV)
    key_head = head // REPEAT
    query_at, key_at = key_head * DK + rows, KEY_HEADS * DK + key_head * DK + rows
    value_at = 2 * KEY_HEADS * DK + head * DV + columns
    # State and ring were last touched a token ago, so they are read before the projections of this token are waited for.
    at = state + head * (DK * DV) + rows[:, None] * DV + columns[None, :]
    old = tl.load(at)
    step = tl.load(length_at).to(tl.int32)
    query_past, query_tap = _past(ring, taps, query_at, step, CHANNELS, KERNEL, D)
    key_past, key_tap = _past(ring, taps, key_at, step, CHANNELS, KERNEL, D)
    value_past, value_tap = _past(ring, taps, value_at, step, CHANNELS, KERNEL, D)
    growth = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    wait_for_inputs(PDL)
    new_query, new_key = tl.load(qkv + query_at).to(tl.float32), tl.load(qkv + key_at).to(tl.float32)
    new_value = tl.load(qkv + value_at).to(tl.float32)
    decay_in, beta_in = tl.load(a + head).to(tl.float32), tl.load(b + head).to(tl.float32)
    query, key = _convolved(new_query, query_past, query_tap, D), _convolved(new_key, key_past, key_tap, D)
    value = _convolved(new_value, value_past, value_tap, D)
    # Query and key are brought to unit length behind the sums over the state, which need not wait for their lengths then.
    key_unit = tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query_unit = tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
    beta = 1.0 / (1.0 + tl.exp(-beta_in))
    kept = tl.exp(-growth * _softplus(decay_in + bias))
    # Both sums over the old state are taken at once: S^T q after the update is kept * S^T q + (k . q) * correction.
    remembered = kept * key_unit * tl.sum(old * key[:, None], 0)
    correction = beta * (value - remembered)
    result = query_unit * (kept * tl.sum(old * query[:, None], 0) + key_unit * tl.sum(key * query, 0) * correction)
    new_state = old * kept + (key * key_unit)[:, None] * correction[None, :]
    first = (head % REPEAT == 0) & (part == 0)
    if PARTS == 1:
        _gated_norm(result, columns, head, z, norm, out, eps, DV)
        tl.store(at, new_state)
    else:
        # The norm spans the head: whoever of its programs comes last does it, from memory and in fixed order. What only the
        # next token reads is written behind the meeting point, which would wait for it too.
        tl.store(whole + head * DV + columns, result)
        tl.debug_barrier()
        earlier = tl.atomic_add(arrived + head, 1, sem="acq_rel")
        tl.store(at, new_state)
        if earlier == PARTS - 1:
            everything = tl.arange(0, DV)
            complete = tl.load(whole + head * DV + everything, cache_modifier=".cg")
            _gated_norm(complete, everything, head, z, norm, out, eps, DV)
            tl.store(arrived + head, 0)
    _remember(ring, new_query, query_at, step, first, CHANNELS, KERNEL)
    _remember(ring, new_key, key_at, step, first, CHANNELS, KERNEL)
    _remember(ring, new_value, value_at, step, head >= 0, CHANNELS, KERNEL)


@triton.jit
def _gated_norm(result, columns, head, z, norm, out, eps, DV: tl.constexpr):
    gate = tl.load(z + head * DV + columns).to(tl.float32)
    y = result * tl.rsqrt(tl.sum(result * result, 0) / DV + eps)
    y = tl.load(norm + columns).to(tl.float32) * y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + head * DV + columns, rounded(y, out.dtype.element_ty).to(out.dtype.element_ty))


@dataclass(frozen=True)
class DeltaNetPlan:
    """Value columns a program (the grid is value_heads x dv / columns) and warps."""

    columns: int
    warps: int


# Measured on an H200: 3.6 us with 16 columns and one warp, 3.9 to 4.6 with 8 or 32 columns. One program a head needs no
# meeting point but takes 7 us: its state is read by 32 multiprocessors only.
COLUMNS = 16


def plan_deltanet(config: TextConfig, where: Target) -> DeltaNetPlan:
    """The launch of every card. `UnsupportedByKernel` for sizes it cannot take."""
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    for name, size in (("linear_key_head_dim", dk), ("linear_value_head_dim", dv)):
        if size & (size - 1) or not 8 <= size <= 256:
            raise UnsupportedByKernel(f"{name} {size} is not a power of two from 8 to 256")
    columns = min(dv, COLUMNS)
    return DeltaNetPlan(columns=columns, warps=max(1, dk * columns // 2048))


class DeltaNetScratch:
    """What programs of one head meet over, one set for all layers: outputs float32 [value_heads, dv], arrivals int32 [value_heads] (zero between launches)."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        heads = config.linear_num_value_heads
        self.whole = torch.empty((heads, config.linear_value_head_dim), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(heads, dtype=torch.int32, device=device)


def ring_from_conv(conv: torch.Tensor, length: int, ring: torch.Tensor) -> None:
    """Fill ring [..., kernel, conv_dim] from `DeltaNetState.conv` [..., conv_dim, kernel-1] (oldest first) after `length` tokens."""
    kernel = ring.shape[-2]
    for back in range(1, kernel):
        ring[..., (length - back) % kernel, :] = conv[..., kernel - 1 - back]


def conv_from_ring(ring: torch.Tensor, length: int, conv: torch.Tensor) -> None:
    """The way back: fill conv from ring."""
    kernel = ring.shape[-2]
    for back in range(1, kernel):
        conv[..., kernel - 1 - back] = ring[..., (length - back) % kernel, :]


def deltanet_decode(
    qkv: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor, conv: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    norm: torch.Tensor, ring: torch.Tensor, state: torch.Tensor, length: torch.Tensor, out: torch.Tensor,
    scratch: DeltaNetScratch, plan: DeltaNetPlan, config: TextConfig, *, pdl: bool = False,
) -> None:  # fmt: skip
    """One token: everything between the input projections and the output projection; ring and state are advanced in place.

    qkv [conv_dim], z [value_heads*dv], a, b [value_heads]: the projections. conv [conv_dim, kernel], a_log, dt_bias
    [value_heads], norm [dv]: weights. ring [kernel, conv_dim]: inputs of the convolution, see above. state float32
    [value_heads, dk, dv]. length: integer [1] on the device, tokens of the sequence before this one (it turns the ring).
    out [value_heads*dv] in the type the output projection reads. All contiguous.
    With pdl, state, ring and length are read ahead of the wait for the kernel before: a launch that is an ordinary one must
    stand between this one and whatever moves length or writes state or ring.
    """
    grid = (config.linear_num_value_heads, config.linear_value_head_dim // plan.columns)
    options = {"launch_pdl": True} if pdl else {}
    _deltanet[grid](
        qkv, z, a, b, conv, a_log, dt_bias, norm, ring, state, length, out, scratch.whole, scratch.arrived,
        config.rms_norm_eps, config.linear_key_head_dim**-0.5,
        KEY_HEADS=config.linear_num_key_heads, VALUE_HEADS=config.linear_num_value_heads, DK=config.linear_key_head_dim,
        DV=config.linear_value_head_dim, KERNEL=config.linear_conv_kernel_dim, BV=plan.columns, PDL=pdl,
        num_warps=plan.warps, **options,
    )  # fmt: skip


def deltanet_decode_reference(
    qkv: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor, conv: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    norm: torch.Tensor, state: DeltaNetState, config: TextConfig,
) -> torch.Tensor:  # fmt: skip
    """What `deltanet_decode` computes, with the functions of `model`; replaces the tensors of `state`. -> [value_heads*dv]"""
    key_dim, value_dim, heads = config.linear_key_dim, config.linear_value_dim, config.linear_num_value_heads
    mixed = causal_conv(qkv[None], conv, state).float()
    query, key, value = mixed.split((key_dim, key_dim, value_dim), dim=-1)
    repeat = heads // config.linear_num_key_heads

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.view(1, config.linear_num_key_heads, -1)
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeat, dim=1)

    decay = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    result, state.recurrent = delta_rule_step(
        unit(query) * config.linear_key_head_dim**-0.5, unit(key), value.view(1, heads, -1), decay[None], torch.sigmoid(b.float())[None], state.recurrent
    )
    return gated_rms_norm(result, z.view(1, heads, -1), norm, config.rms_norm_eps).reshape(-1).to(qkv.dtype)


@self_test("deltanet_decode", limit=1e-2)
def _check(where: Target) -> float:
    """Six tokens in a row, so that the ring turns once and a half; the state is compared too."""
    config = self_test_sizes(where)
    plan, scratch = plan_deltanet(config, where), DeltaNetScratch(config, where.device)
    generator = torch.Generator().manual_seed(3)
    heads, dv, kernel = config.linear_num_value_heads, config.linear_value_head_dim, config.linear_conv_kernel_dim

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(where.device, dtype)

    conv, norm = random(config.conv_dim, kernel) * 0.4, random(dv)
    a_log, dt_bias = random(heads, dtype=torch.float32), random(heads, dtype=torch.float32)
    recurrent = random(heads, config.linear_key_head_dim, dv, dtype=torch.float32)
    expected_state = DeltaNetState(random(config.conv_dim, kernel - 1), recurrent)
    ring, state, out = random(kernel, config.conv_dim), recurrent.clone(), random(heads * dv)
    ring_from_conv(expected_state.conv, 0, ring)
    worst = 0.0
    for step in range(6):
        inputs = random(config.conv_dim), random(heads * dv), random(heads), random(heads)
        expected = deltanet_decode_reference(*inputs, conv, a_log, dt_bias, norm, expected_state, config)
        length = torch.tensor([step], device=where.device)
        deltanet_decode(*inputs, conv, a_log, dt_bias, norm, ring, state, length, out, scratch, plan, config, pdl=where.pdl)
        worst = max(worst, relative_error(out, expected), relative_error(state, expected_state.recurrent))
    return worst
