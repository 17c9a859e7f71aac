"""The sizes of Qwen3.5-35B-A3B as numbers, and a configuration made of them without any file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig

# Control tokens in the order of the published tokenizer: (literal, special). Their ids follow the text tokens.
CONTROL_TOKENS = (
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True),
    ("<|object_ref_start|>", True), ("<|object_ref_end|>", True), ("<|box_start|>", True), ("<|box_end|>", True),
    ("<|quad_start|>", True), ("<|quad_end|>", True), ("<|vision_start|>", True), ("<|vision_end|>", True),
    ("<|vision_pad|>", True), ("<|image_pad|>", True), ("<|video_pad|>", True),
    ("<tool_call>", False), ("</tool_call>", False), ("<|fim_prefix|>", False), ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False), ("<|fim_pad|>", False), ("<|repo_name|>", False), ("<|file_sep|>", False),
    ("<tool_response>", False), ("</tool_response>", False), ("<think>", False), ("</think>", False),
    ("<|audio_start|>", True), ("<|audio_end|>", True), ("<tts_pad>", True), ("<tts_text_bos>", True),
    ("<tts_text_eod>", True), ("<tts_text_bos_single>", True), ("<|audio_pad|>", True),
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; the defaults are the published ones. text_tokens: ids before the control tokens; vocab: rows of
    the head, padding included."""

    layers: int = 40
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_head_dim: int = 128
    experts: int = 256
    experts_per_token: int = 8
    expert_inner: int = 512
    text_tokens: int = 248_044
    vocab: int = 248_320
    max_tokens: int = 262_144
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_inner: int = 4304
    vision_heads: int = 16
    vision_positions: int = 2304

    def control_id(self, literal: str) -> int:
        """Id of a control token."""
        return self.text_tokens + [content for content, _ in CONTROL_TOKENS].index(literal)


def config_dict(shape: ModelShape) -> dict[str, Any]:
    """What `config.json` of that shape would hold."""
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
        "max_position_embeddings": shape.max_tokens, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": shape.delta_head_dim, "linear_value_head_dim": shape.delta_head_dim,
        "linear_num_key_heads": shape.delta_key_heads, "linear_num_value_heads": shape.delta_value_heads,
        "moe_intermediate_size": shape.expert_inner, "shared_expert_intermediate_size": shape.expert_inner,
        "num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token, "eos_token_id": shape.control_id("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": list(shape.mrope_section),
        },
    }  # fmt: skip
    vision = {
        "depth": shape.vision_depth, "hidden_size": shape.vision_hidden, "intermediate_size": shape.vision_inner,
        "num_heads": shape.vision_heads, "hidden_act": "gelu_pytorch_tanh", "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": shape.hidden, "num_position_embeddings": shape.vision_positions,
    }  # fmt: skip
    ids = {
        "image_token_id": shape.control_id("<|image_pad|>"), "video_token_id": shape.control_id("<|video_pad|>"),
        "vision_start_token_id": shape.control_id("<|vision_start|>"), "vision_end_token_id": shape.control_id("<|vision_end|>"),
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": vision, "tie_word_embeddings": False, **ids}


def model_config(shape: ModelShape) -> ModelConfig:
    """The configuration of that shape, as the published files would give it. Raises `ConfigError` for sizes that do not fit together."""
    end, stop = shape.control_id("<|im_end|>"), shape.control_id("<|endoftext|>")
    return ModelConfig.from_dict(config_dict(shape), {"eos_token_id": [end, stop], "pad_token_id": stop}, source="the shape of the benchmark")
