"""The sizes that self-tests of the decode kernels run on: one layer of Qwen3.5-35B-A3B, so that a card that lacks the
registers or the shared memory for the real model is found out by its test."""

from dataclasses import replace

from ..config import TextConfig
from .support import Target

PUBLISHED = TextConfig(
    vocab_size=248320,
    hidden_size=2048,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
    layer_types=("linear_attention",) * 3 + ("full_attention",),
    rope_theta=1e7,
    rotary_dim=64,
    mrope_section=(11, 11, 10),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
)


def self_test_sizes(where: Target) -> TextConfig:
    """The published sizes, with few heads under the interpreter, which takes a while for each program of a launch."""
    if where.interpreted:
        return replace(PUBLISHED, num_attention_heads=4, linear_num_key_heads=1, linear_num_value_heads=2)
    return PUBLISHED
