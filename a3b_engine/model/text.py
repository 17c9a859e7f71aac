"""The language model: embedding, layers of mixer and experts, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
import torch.nn.functional as F

from ..config import TextConfig
from .attention import AttentionWeights, KeyValueStore, gated_attention
from .deltanet import DeltaNetState, DeltaNetWeights, gated_deltanet
from .linear import Weight, linear_in_pieces, rms_norm
from .moe import ExpertWeights, MoEWeights, mixture_of_experts
from .rotary import mrope_cos_sin


@dataclass(frozen=True)
class LayerWeights:
    """One layer: two norms, the mixer (attention or DeltaNet) and the experts."""

    input_norm: torch.Tensor
    mixer: AttentionWeights | DeltaNetWeights
    post_norm: torch.Tensor
    moe: MoEWeights


class TextModel:
    """Weights of the language model, arranged by layer. Holds no state of a sequence."""

    def __init__(self, config: TextConfig, weights: Mapping[str, Weight], experts: Sequence[ExpertWeights] | None = None) -> None:
        """weights by canonical name. experts: the routed ones of every layer, where `weights` has none. The embedding may stand in
        pinned RAM while everything else is on a device."""
        self.config = config
        self.embedding: torch.Tensor = weights["embed_tokens.weight"]
        self.head: Weight = weights["lm_head.weight"]
        self.norm: torch.Tensor = weights["norm.weight"]
        self.layers = [
            layer_weights(weights, index, kind, None if experts is None else experts[index]) for index, kind in enumerate(config.layer_types)
        ]

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.norm.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T], on any device -> [T, D]."""
        return F.embedding(token_ids.to(self.embedding.device), self.embedding).to(self.device, non_blocking=True)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, states: Sequence[KeyValueStore | DeltaNetState]) -> torch.Tensor:
        """Embedded tokens x [T, D] at positions int64 [3, T] -> hidden [T, D] after the final norm.

        `states` holds one entry a layer and is advanced by T tokens.
        """
        config, eps = self.config, self.config.rms_norm_eps
        rotary = mrope_cos_sin(positions, config)
        for layer, state in zip(self.layers, states, strict=True):
            normed = rms_norm(x, layer.input_norm, eps)
            if isinstance(layer.mixer, AttentionWeights):
                x = x + gated_attention(normed, layer.mixer, config, rotary, state)
            else:
                x = x + gated_deltanet(normed, layer.mixer, config, state)
            x = x + mixture_of_experts(rms_norm(x, layer.post_norm, eps), layer.moe, config)
        return rms_norm(x, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, D] -> float32 [T, vocab]."""
        return linear_in_pieces(hidden, self.head).float()


def layer_weights(weights: Mapping[str, Weight], index: int, kind: str, experts: ExpertWeights | None = None) -> LayerWeights:
    """Layer `index` of that kind out of weights by canonical name; its routed experts may come from elsewhere."""
    base = f"layers.{index}."

    def get(name: str) -> Weight:
        return weights[f"{base}{name}"]

    if kind == "full_attention":
        mixer: AttentionWeights | DeltaNetWeights = AttentionWeights(
            q=get("self_attn.q_proj.weight"),
            k=get("self_attn.k_proj.weight"),
            v=get("self_attn.v_proj.weight"),
            o=get("self_attn.o_proj.weight"),
            q_norm=get("self_attn.q_norm.weight"),
            k_norm=get("self_attn.k_norm.weight"),
        )
    else:
        mixer = DeltaNetWeights(
            qkv=get("linear_attn.in_proj_qkv.weight"),
            z=get("linear_attn.in_proj_z.weight"),
            a=get("linear_attn.in_proj_a.weight"),
            b=get("linear_attn.in_proj_b.weight"),
            conv=get("linear_attn.conv1d.weight"),
            a_log=get("linear_attn.A_log"),
            dt_bias=get("linear_attn.dt_bias"),
            norm=get("linear_attn.norm.weight"),
            out=get("linear_attn.out_proj.weight"),
        )
    moe = MoEWeights(
        router=get("mlp.gate.weight"),
        experts=experts or ExpertWeights(*(get(f"mlp.experts.{name}.weight") for name in ("gate", "up", "down"))),
        shared_gate=get("mlp.shared_expert.gate_proj.weight"),
        shared_up=get("mlp.shared_expert.up_proj.weight"),
        shared_down=get("mlp.shared_expert.down_proj.weight"),
        shared_switch=get("mlp.shared_expert_gate.weight"),
    )
    return LayerWeights(get("input_layernorm.weight"), mixer, get("post_attention_layernorm.weight"), moe)
