"""What happens to the rows of many tokens between matrix products: norms, the convolution of Gated DeltaNet, rotary.

The residual stream is float32; everything is computed in float32 and rounded once where a product reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..config import TextConfig
from ..model.linear import gated_rms_norm, rms_norm
from ..model.rotary import rotate
from .configs import next_power_of_two
from .launcher import TRITON_TYPES, Launcher, Launchers
from .rows import let_next_start, wait_for_inputs
from .shapes import self_test_sizes
from .support import Target, UnsupportedByKernel, relative_error, self_test
from .weight_tiles import saturated

MAX_WIDTH = 8192  # one program holds a row in registers


@triton.jit(do_not_specialize=["row_step", "slice_step"])
def add_norm_kernel(
    delta, residual, weight, out, inverse, eps, row_step, slice_step,
    DELTA: tl.constexpr, OUT: tl.constexpr, SLICES: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += the slices of delta in their order (of type DELTA; FIRST: residual = them); out = zero-centred RMS norm, of type OUT; inverse = 1 / rms.

    One program a token. Its slices begin at row token * row_step of WIDTH values, slice_step rows apart.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    at = delta + token * row_step * WIDTH + column
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    for number in tl.static_range(1, SLICES):
        x += tl.load(at + (number * slice_step).to(tl.int64) * WIDTH, mask=live, other=0.0).to(tl.float32)
    if not FIRST:
        x += tl.load(residual + token * WIDTH + column, mask=live, other=0.0)
    tl.store(residual + token * WIDTH + column, x, mask=live)
    root = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * root * (1.0 + tl.load(weight + column, mask=live, other=0.0).to(tl.float32))
    tl.store(out + token * WIDTH + column, saturated(y, OUT), mask=live)
    tl.store(inverse + token, root)


@triton.jit
def _convolved(
    u, taps, history, mixed, token, live, base,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """SiLU of the depthwise convolution of SIZE channels from `base` on; UNIT: brought to length 1 (model.deltanet._unit)."""
    channel = base + tl.arange(0, SIZE)
    total = tl.zeros((token.shape[0], SIZE), tl.float32)
    for back in tl.static_range(KERNEL):
        source = token - back
        tap = tl.load(taps + channel * KERNEL + (KERNEL - 1 - back)).to(tl.float32)
        value = tl.load(u + source.to(tl.int64)[:, None] * STRIDE + channel[None, :], mask=(live & (source >= 0))[:, None], other=0.0).to(tl.float32)
        if back > 0:
            old = history + channel[None, :] * (KERNEL - 1) + (KERNEL - 1 + source)[:, None]
            value += tl.load(old, mask=(live & (source < 0))[:, None], other=0.0).to(tl.float32)
        total += value * tap[None, :]
    total = total / (1.0 + tl.exp(-total))
    if UNIT:
        total = total * tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
    tl.store(mixed + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :], total.to(mixed.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["count"])
def conv_kernel(
    u, taps, history, mixed, count,
    STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KERNEL: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """mixed [count, CHANNELS] = query | key | value of all heads: convolved, SiLU, queries and keys of unit length.

    u [count, >= CHANNELS] with rows STRIDE apart; history [CHANNELS, KERNEL - 1]: the inputs before, oldest first.
    Grid (blocks of BT tokens, heads).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < count
    head = tl.program_id(1)
    if head < 2 * KEY_HEADS:
        _convolved(u, taps, history, mixed, token, live, head * DK, STRIDE, CHANNELS, DK, KERNEL, True)
    else:
        base = 2 * KEY_HEADS * DK + (head - 2 * KEY_HEADS) * DV
        _convolved(u, taps, history, mixed, token, live, base, STRIDE, CHANNELS, DV, KERNEL, False)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    x, gates, weight, out, eps, rows,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, OUT: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, SIZE] = weight * x / rms(x) * SiLU(gate); row r = token * HEADS + head, its gate at token * STRIDE + OFFSET + head * SIZE."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, SIZE)
    live = (row < rows)[:, None]
    wide = row.to(tl.int64)
    value = tl.load(x + wide[:, None] * SIZE + column[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gates + ((wide // HEADS) * STRIDE + OFFSET + (wide % HEADS) * SIZE)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    value = tl.load(weight + column).to(tl.float32)[None, :] * value * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + wide[:, None] * SIZE + column[None, :], saturated(value, OUT), mask=live)


@triton.jit(do_not_specialize=["count"])
def rotary_kernel(
    qkv, q_weight, k_weight, cosine, sine, query, keys, eps, count,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROTARY: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """query [count, HEADS, HEAD] and keys [count, KV_HEADS, HEAD] from qkv: zero-centred norm, then rotate-half of the first ROTARY.

    qkv [count, HEADS * 2 * HEAD + 2 * KV_HEADS * HEAD] (a head's gate behind its query); cosine, sine float32 [count, ROTARY].
    Grid (blocks of BT tokens, HEADS + KV_HEADS).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = qkv.dtype.element_ty
    STRIDE: tl.constexpr = 2 * (HEADS + KV_HEADS) * HEAD
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = (token < count)[:, None]
    wide = token.to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, HEAD)
    turned = column < ROTARY
    lower = column < ROTARY // 2
    partner = tl.where(turned, tl.where(lower, column + ROTARY // 2, column - ROTARY // 2), column)
    is_query = head < HEADS
    weight = tl.where(is_query, q_weight, k_weight)
    base = qkv + tl.where(is_query, head * 2 * HEAD, HEADS * 2 * HEAD + (head - HEADS) * HEAD)
    x = tl.load(base + wide[:, None] * STRIDE + column[None, :], mask=live, other=0.0).to(tl.float32)
    other = tl.load(base + wide[:, None] * STRIDE + partner[None, :], mask=live, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
    x = x * root * (1.0 + tl.load(weight + column).to(tl.float32))[None, :]
    other = other * root * (1.0 + tl.load(weight + partner).to(tl.float32))[None, :]
    angle = wide[:, None] * ROTARY + column[None, :]
    cos = tl.load(cosine + angle, mask=live & turned[None, :], other=1.0)
    sin = tl.load(sine + angle, mask=live & turned[None, :], other=0.0)
    x = x * cos + tl.where(lower[None, :], -other, other) * sin
    if is_query:
        tl.store(query + (wide * HEADS + head)[:, None] * HEAD + column[None, :], x.to(D), mask=live)
    else:
        tl.store(keys + (wide * KV_HEADS + head - HEADS)[:, None] * HEAD + column[None, :], x.to(D), mask=live)


class RowKernels:
    """The launches of this module for one model's sizes."""

    def __init__(self, config: TextConfig, launchers: Launchers) -> None:
        if config.hidden_size > MAX_WIDTH:
            raise UnsupportedByKernel(f"rows of {config.hidden_size} are wider than the {MAX_WIDTH} one program holds")
        for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim"):
            size = getattr(config, name)
            if size & (size - 1) or not 8 <= size <= 256:
                raise UnsupportedByKernel(f"{name} {size} is not a power of two from 8 to 256")
        self.config, self._launchers = config, launchers
        block = next_power_of_two(config.hidden_size)
        self._norm = dict(WIDTH=config.hidden_size, BLOCK=block, num_warps=max(1, min(8, block // 256)))
        self._conv = dict(
            KEY_HEADS=config.linear_num_key_heads, VALUE_HEADS=config.linear_num_value_heads, DK=config.linear_key_head_dim,
            DV=config.linear_value_head_dim, KERNEL=config.linear_conv_kernel_dim, BT=16, num_warps=4,
        )  # fmt: skip
        self._rotary = launchers.get(
            rotary_kernel, HEADS=config.num_attention_heads, KV_HEADS=config.num_key_value_heads, HEAD=config.head_dim,
            ROTARY=config.rotary_dim, BT=8, num_warps=4,
        )  # fmt: skip
        self._norms: dict[tuple, Launcher] = {}
        self._gated: dict[tuple, Launcher] = {}
        self._strided: dict[int, Launcher] = {}

    def add_norm(
        self, delta: torch.Tensor, slices: int, row_step: int, slice_step: int, residual: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor, inverse: torch.Tensor, *, first: bool = False,
    ) -> None:  # fmt: skip
        """residual float32 [T, D] += slices of delta (first: = them); out [T, D], inverse float32 [T]. Steps in rows of D."""
        key = (delta.dtype, out.dtype, slices, first)
        launch = self._norms.get(key)
        if launch is None:
            types = dict(DELTA=TRITON_TYPES[delta.dtype], OUT=TRITON_TYPES[out.dtype])
            launch = self._norms[key] = self._launchers.get(add_norm_kernel, **types, SLICES=slices, FIRST=first, **self._norm)
        launch((residual.shape[0], 1, 1), delta, residual, weight, out, inverse, self.config.rms_norm_eps, row_step, slice_step)

    def conv(self, u: torch.Tensor, stride: int, taps: torch.Tensor, history: torch.Tensor, mixed: torch.Tensor) -> None:
        """u: rows `stride` apart; taps [C, kernel], history [C, kernel - 1]; mixed [T, C]."""
        heads = 2 * self.config.linear_num_key_heads + self.config.linear_num_value_heads
        launch = self._strided.get(stride)
        if launch is None:
            launch = self._strided[stride] = self._launchers.get(conv_kernel, STRIDE=stride, **self._conv)
        launch((-(-mixed.shape[0] // 16), heads, 1), u, taps, history, mixed, mixed.shape[0])

    def gated_norm(self, x: torch.Tensor, gates: torch.Tensor, stride: int, offset: int, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x float32 [T, heads, dv], gates: row t at t * stride + offset; out [T, heads * dv]."""
        heads, size = x.shape[1:]
        rows = x.shape[0] * heads
        launch = self._gated.get((stride, offset, out.dtype))
        if launch is None:
            launch = self._gated[stride, offset, out.dtype] = self._launchers.get(
                gated_norm_kernel, STRIDE=stride, OFFSET=offset, OUT=TRITON_TYPES[out.dtype], HEADS=heads, SIZE=size, BR=16, num_warps=4
            )
        launch((-(-rows // 16), 1, 1), x, gates, weight, out, self.config.rms_norm_eps, rows)

    def rotary(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor, keys: torch.Tensor,
    ) -> None:  # fmt: skip
        """Shapes as in rotary_kernel; angles: cosines and sines of model.rotary.mrope_cos_sin."""
        heads = self.config.num_attention_heads + self.config.num_key_value_heads
        self._rotary((-(-qkv.shape[0] // 8), heads, 1), qkv, q_weight, k_weight, *angles, query, keys, self.config.rms_norm_eps, qkv.shape[0])


@self_test("prefill_rows", limit=8e-3)
def check(target: Target) -> float:
    """Each of the four kernels against model/, 37 tokens."""
    config, tokens, worst = self_test_sizes(target), 5 if target.interpreted else 37, 0.0
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    rows = RowKernels(config, Launchers(target))
    generator = torch.Generator(device=device).manual_seed(1)

    def random(*shape: int, kind: torch.dtype = dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(kind)

    eps, width = config.rms_norm_eps, config.hidden_size
    delta, residual, weight = random(3, tokens, width), random(tokens, width, kind=torch.float32), random(width, kind=torch.float32, scale=0.1)
    expected = residual + delta.float().sum(0)
    out, inverse = torch.full((tokens, width), torch.nan, device=device, dtype=dtype), torch.full((tokens,), torch.nan, device=device)
    rows.add_norm(delta, 3, 1, tokens, residual, weight, out, inverse)
    worst = max(worst, relative_error(residual, expected), relative_error(out, rms_norm(expected.double(), weight, eps)))
    worst = max(worst, relative_error(inverse, torch.rsqrt(expected.square().mean(-1) + eps)))

    kernel, channels, stride = config.linear_conv_kernel_dim, config.conv_dim, config.conv_dim + 16
    u, taps, history = random(tokens, stride), random(channels, kernel, scale=0.4), random(channels, kernel - 1)
    mixed = torch.full((tokens, channels), torch.nan, device=device, dtype=dtype)
    rows.conv(u, stride, taps, history, mixed)
    worst = max(worst, relative_error(mixed, conv_reference(u[:, :channels], taps, history, config)))

    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    x, gates, weight = random(tokens, heads, size, kind=torch.float32), random(tokens, heads * size + 16), random(size)
    out = torch.full((tokens, heads * size), torch.nan, device=device, dtype=dtype)
    rows.gated_norm(x, gates, heads * size + 16, 16, weight, out)
    worst = max(worst, relative_error(out, gated_rms_norm(x, gates[:, 16:].reshape(x.shape), weight, eps).flatten(1)))

    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv, q_weight, k_weight = random(tokens, 2 * (heads + kv_heads) * size), random(size, scale=0.1), random(size, scale=0.1)
    angle = random(tokens, config.rotary_dim // 2, kind=torch.float32).repeat(1, 2)
    query, keys = (torch.full((tokens, n, size), torch.nan, device=device, dtype=dtype) for n in (heads, kv_heads))
    rows.rotary(qkv, q_weight, k_weight, (angle.cos(), angle.sin()), query, keys)
    wanted = qkv[:, : heads * 2 * size].view(tokens, heads, 2 * size)[..., :size].double()
    worst = max(worst, relative_error(query, rotate(rms_norm(wanted, q_weight, eps).double(), angle.cos(), angle.sin())))
    wanted = qkv[:, heads * 2 * size : (2 * heads + kv_heads) * size].view(tokens, kv_heads, size).double()
    return max(worst, relative_error(keys, rotate(rms_norm(wanted, k_weight, eps).double(), angle.cos(), angle.sin())))


def conv_reference(u: torch.Tensor, taps: torch.Tensor, history: torch.Tensor, config: TextConfig) -> torch.Tensor:
    """What conv_kernel computes, in float64: [T, channels]."""
    tokens, key_dim = u.shape[0], config.linear_key_dim
    whole = torch.cat((history.double(), u.double().t()), dim=1)
    mixed = F.silu(F.conv1d(whole[None], taps.double()[:, None], groups=whole.shape[0])[0].t())
    units = mixed[:, : 2 * key_dim].reshape(tokens, 2 * config.linear_num_key_heads, -1)
    units = units * torch.rsqrt(units.square().sum(-1, keepdim=True) + 1e-6)
    return torch.cat((units.flatten(1), mixed[:, 2 * key_dim :]), dim=1)
