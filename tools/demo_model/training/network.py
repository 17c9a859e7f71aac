"""The model for training: the engine's formulas on whole batches, float32 weights, differentiable.

The weights are the engine's own (canonical names, `a3b_engine.checkpoint.names`), so a trained network is a checkpoint.
Sequences of a batch are padded behind their end for training (everything is causal) or before their begin for writing
answers (`keep` marks the real tokens; a padding token is a zero vector and stays one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Callable, Mapping

import torch
import torch.nn.functional as F

from a3b_engine.checkpoint.names import expected_tensors
from a3b_engine.config import ModelConfig, TextConfig
from a3b_engine.model.attention import AttentionWeights
from a3b_engine.model.deltanet import DeltaNetWeights
from a3b_engine.model.linear import linear
from a3b_engine.model.moe import MoEWeights
from a3b_engine.model.positions import ImagePlace, mrope_positions
from a3b_engine.model.rotary import mrope_cos_sin, rotate
from a3b_engine.model.text import TextModel

from .delta_rule import delta_rule, delta_rule_step
from .tower import VisionTower


@dataclass
class AttentionCache:
    """keys, values [B, kv_heads, capacity, head_dim], filled up to `DecodeState.length`."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class DeltaCache:
    """conv [B, kernel-1, channels], recurrent [B, H, dk, dv]; set by the first pass."""

    conv: torch.Tensor | None = None
    recurrent: torch.Tensor | None = None


@dataclass
class DecodeState:
    """What a batch of prompts has left behind: `keep` bool [B, capacity], False on padding before a prompt."""

    keep: torch.Tensor
    layers: list[AttentionCache | DeltaCache]
    length: int = 0


@dataclass
class Trace:
    """What the losses beside that of words need of one pass. Router statistics: the mean of E * sum(load * probability)
    over layers is 1 when experts are used evenly."""

    valid: torch.Tensor  # float [B, T], 1 on real tokens
    balance: list[torch.Tensor] = field(default_factory=list)
    features: torch.Tensor | None = None  # of the pictures, [B, rows * columns, D]


def convolve(history: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Depthwise causal convolution with SiLU: history [B, k-1+T, C], kernel [C, k] -> [B, T, C].

    Written as shifted products: the library's gradient of a depthwise convolution is far slower.
    """
    kernel = kernel.to(history.dtype)
    tokens = history.shape[1] - kernel.shape[1] + 1
    mixed = history[:, :tokens] * kernel[:, 0]
    for tap in range(1, kernel.shape[1]):
        mixed = torch.addcmul(mixed, history[:, tap : tap + tokens], kernel[:, tap])
    return F.silu(mixed.float())


def gated(gate: torch.Tensor, up: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Hidden units of all experts, [B, T, E*I], each expert's times its share [B, T, E]."""
    hidden = (F.silu(gate) * up).unflatten(-1, (shares.shape[-1], -1))
    return (hidden * shares[..., None].to(hidden.dtype)).flatten(-2)


@dataclass
class Pointwise:
    """The two widest chains of elementwise operations; `compiled` fuses each into one kernel (needs Triton on a GPU)."""

    convolve: Callable = convolve
    gated: Callable = gated

    @classmethod
    def compiled(cls) -> Pointwise:
        return cls(*(torch.compile(function, dynamic=True) for function in (convolve, gated)))


class Network:
    """All weights as float32 leaf tensors in `weights`, by canonical name."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self.weights = {
            name: weights[name].detach().to(self.device, torch.float32, copy=True).view(shape).requires_grad_()
            for name, shape in expected_tensors(config).items()
        }
        self.text = BatchedText(config.text, self.weights)
        self.vision = VisionTower(config.vision, self.weights)

    def embed(
        self, ids: torch.Tensor, pictures: torch.Tensor, starts: torch.Tensor, keep: torch.Tensor | None = None, trace: Trace | None = None
    ) -> torch.Tensor:
        """ids int64 [B, T], pictures uint8 [B, S, S, 3] whose tokens begin at `starts` int64 [B] -> float32 [B, T, D]."""
        features = self.vision.encode_pictures(pictures)[0]
        if trace is not None:
            trace.features = features
        x = self.text.embed(ids)
        if keep is not None:
            x = x * keep[..., None]
        places = starts[:, None] + torch.arange(features.shape[1], device=ids.device)
        batch = torch.arange(len(ids), device=ids.device)[:, None]
        return x.index_put((batch, places), features.to(x.dtype))

    def grid(self, side: int) -> tuple[int, int]:
        """Merged rows and columns of a square picture."""
        cells = side // (self.config.vision.patch_size * self.config.vision.spatial_merge_size)
        return cells, cells

    def forward(self, ids: torch.Tensor, pictures: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, trace: Trace | None = None) -> torch.Tensor:
        """Hidden states [B, T, D] of sequences padded behind their end; positions int64 [3, B, T]."""
        return self.text.forward_batch(self.embed(ids, pictures, starts, trace=trace), positions, trace=trace)


def batch_positions(starts: list[int], length: int, grid: tuple[int, int]) -> torch.Tensor:
    """M-RoPE positions int64 [3, B, length] of sequences with one picture each, from token `starts[i]` on (on the CPU)."""
    return torch.stack([_positions(start, -(-length // 256) * 256, grid)[:, :length] for start in starts], dim=1)


@lru_cache(maxsize=4096)
def _positions(start: int, length: int, grid: tuple[int, int]) -> torch.Tensor:
    return mrope_positions(max(length, start + grid[0] * grid[1]), [ImagePlace(start, *grid)])[0]


class BatchedText(TextModel):
    """The language model on [B, T, D]."""

    pointwise = Pointwise()

    def forward_batch(
        self, x: torch.Tensor, positions: torch.Tensor, *, state: DecodeState | None = None, trace: Trace | None = None
    ) -> torch.Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        rotary = mrope_cos_sin(positions.flatten(1), config)
        mask = None if state is None else _mask(state, x.shape[1])
        for number, layer in enumerate(self.layers):
            cache = None if state is None else state.layers[number]
            normed = _norm(x, layer.input_norm, eps)
            if isinstance(layer.mixer, AttentionWeights):
                x = x + _attention(normed, layer.mixer, config, rotary, cache, mask, 0 if state is None else state.length)
            else:
                x = x + _deltanet(normed, layer.mixer, config, cache, self.pointwise)
            x = x + _experts(_norm(x, layer.post_norm, eps), layer.moe, config, trace, self.pointwise)
        if state is not None:
            state.length += x.shape[1]
        return _norm(x, self.norm, eps)

    def new_state(self, keep: torch.Tensor, capacity: int) -> DecodeState:
        """For prompts padded before their begin: keep bool [B, T], room for `capacity` tokens in all."""
        config, batch = self.config, len(keep)
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        # Cached in the type that attention runs in, which autocast would otherwise convert to at every step.
        dtype = torch.get_autocast_dtype(keep.device.type) if torch.is_autocast_enabled(keep.device.type) else torch.float32
        layers = [
            AttentionCache(*(torch.zeros(shape, device=keep.device, dtype=dtype) for _ in range(2))) if kind == "full_attention" else DeltaCache()
            for kind in config.layer_types
        ]
        return DecodeState(F.pad(keep, (0, capacity - keep.shape[1]), value=True), layers)


def _mask(state: DecodeState, tokens: int) -> torch.Tensor:
    """bool [B, 1, tokens, length + tokens]: what each new token may look at. A padding token looks at itself."""
    total = state.length + tokens
    rows = torch.arange(state.length, total, device=state.keep.device)[:, None]
    columns = torch.arange(total, device=state.keep.device)
    return (((columns <= rows) & state.keep[:, None, :total]) | (columns == rows))[:, None]


def _attention(
    x: torch.Tensor, weights: AttentionWeights, config: TextConfig, rotary: tuple[torch.Tensor, torch.Tensor],
    cache: AttentionCache | None, mask: torch.Tensor | None, length: int,
) -> torch.Tensor:  # fmt: skip
    batch, tokens, size = x.shape[0], x.shape[1], config.head_dim

    def heads(y: torch.Tensor, count: int) -> torch.Tensor:
        return y.reshape(batch, tokens, count, size).transpose(1, 2)

    def turned(y: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        flat = _norm(y.reshape(batch * tokens, -1, size), norm, config.rms_norm_eps)
        return rotate(flat, *rotary)

    query, gate = linear(x, weights.q).view(batch, tokens, config.num_attention_heads, 2 * size).chunk(2, dim=-1)
    query = heads(turned(query, weights.q_norm), config.num_attention_heads)
    keys = heads(turned(linear(x, weights.k), weights.k_norm), config.num_key_value_heads)
    values = heads(linear(x, weights.v), config.num_key_value_heads)
    if cache is not None:
        cache.keys[:, :, length : length + tokens] = keys
        cache.values[:, :, length : length + tokens] = values
        keys, values = cache.keys[:, :, : length + tokens], cache.values[:, :, : length + tokens]
    group = config.num_attention_heads // config.num_key_value_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if cache is not None and tokens == 1:
        # The fused kernels would prepare themselves anew for every length.
        scores = query.to(keys.dtype) @ keys.transpose(-1, -2) * size**-0.5
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    else:
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
    return linear((mixed.transpose(1, 2) * torch.sigmoid(gate)).reshape(batch, tokens, -1), weights.o)


def _deltanet(
    x: torch.Tensor, weights: DeltaNetWeights, config: TextConfig, cache: DeltaCache | None, pointwise: Pointwise
) -> torch.Tensor:
    batch, tokens = x.shape[:2]
    inputs = linear(x, weights.qkv)
    taps = weights.conv.shape[1]
    if cache is None or cache.conv is None:
        history = F.pad(inputs, (0, 0, taps - 1, 0))
    else:
        history = torch.cat((cache.conv, inputs), dim=1)
    mixed = pointwise.convolve(history, weights.conv)
    with torch.autocast(x.device.type, enabled=False):
        query, key, value = mixed.split((config.linear_key_dim, config.linear_key_dim, config.linear_value_dim), dim=-1)
        repeat = config.linear_num_value_heads // config.linear_num_key_heads

        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.reshape(batch, tokens, count, -1)

        query = _unit(heads(query, config.linear_num_key_heads)).repeat_interleave(repeat, dim=2) * config.linear_key_head_dim**-0.5
        key = _unit(heads(key, config.linear_num_key_heads)).repeat_interleave(repeat, dim=2)
        value = heads(value, config.linear_num_value_heads)
        beta = torch.sigmoid(linear(x.float(), weights.b))
        decay = -weights.a_log.exp() * F.softplus(linear(x.float(), weights.a) + weights.dt_bias)
        if cache is not None and cache.recurrent is not None and tokens == 1:
            out, cache.recurrent = delta_rule_step(query, key, value, decay, beta, cache.recurrent)
        else:
            out, state = delta_rule(query, key, value, decay, beta)
            if cache is not None:
                cache.recurrent = state
    if cache is not None:
        cache.conv = history[:, history.shape[1] - (taps - 1) :].clone()
    gate = linear(x, weights.z).view(batch, tokens, config.linear_num_value_heads, -1)
    normed = F.rms_norm(out, out.shape[-1:], weights.norm, config.rms_norm_eps) * F.silu(gate.float())
    return linear(normed.reshape(batch, tokens, -1), weights.out)


def _experts(x: torch.Tensor, weights: MoEWeights, config: TextConfig, trace: Trace | None, pointwise: Pointwise) -> torch.Tensor:
    """Every expert on every token, those not chosen with share 0: as one wide gated layer this is three large products."""
    with torch.autocast(x.device.type, enabled=False):
        probabilities = linear(x.float(), weights.router).softmax(-1)
        share, chosen = probabilities.topk(config.num_experts_per_tok, dim=-1)
        shares = torch.zeros_like(probabilities).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
    if trace is not None:
        # Load-balancing loss of the Switch transformer (arXiv 2101.03961) for several choices a token.
        count = trace.valid.sum()
        load = ((shares > 0) * trace.valid[..., None]).sum((0, 1)) / (count * config.num_experts_per_tok)
        mean = (probabilities * trace.valid[..., None]).sum((0, 1)) / count
        trace.balance.append(config.num_experts * (load * mean).sum())
    gate, up = (stack.flatten(0, 1) for stack in (weights.experts.gate, weights.experts.up))
    down = weights.experts.down.transpose(0, 1).flatten(1)  # [D, E * I]
    routed = linear(pointwise.gated(linear(x, gate), linear(x, up), shares), down)
    shared = linear(F.silu(linear(x, weights.shared_gate)) * linear(x, weights.shared_up), weights.shared_down)
    return routed + torch.sigmoid(linear(x, weights.shared_switch)) * shared


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zero-centred RMS norm in float32, by the library's fused kernel."""
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight, eps)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension, with the epsilon inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def initial_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights to start from, by canonical name. The same seed gives the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * config.text.num_hidden_layers
    return {name: _initial(name, shape, generator, depth) for name, shape in expected_tensors(config).items()}


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator, depth: int) -> torch.Tensor:
    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith("A_log"):
        return uniform(1.0, 16.0).log()
    if name.endswith("dt_bias"):
        # softplus(dt_bias) is spread evenly over the logarithms of 0.001 .. 0.1 (as in Mamba-2, arXiv 2405.21060).
        step = uniform(math.log(0.001), math.log(0.1)).exp()
        return step + (-(-step).expm1()).log()
    if name.endswith("linear_attn.norm.weight") or (name.startswith("visual.") and "norm" in name and name.endswith(".weight")):
        return torch.ones(shape)
    if name.endswith(("norm.weight", ".bias")):
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        return uniform(-(shape[1] ** -0.5), shape[1] ** -0.5)
    if name in ("embed_tokens.weight", "visual.pos_embed.weight"):
        # Near the size of what layers and vision tower add, so that neither drowns the other.
        return torch.randn(shape, generator=generator) * (0.5 if name == "embed_tokens.weight" else 0.2)
    scale = shape[-1] ** -0.5
    if name.startswith("layers.") and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down.weight")):
        scale *= depth**-0.5  # what a layer adds to the residual stream
    return torch.randn(shape, generator=generator) * (0.02 if name == "lm_head.weight" else scale)
