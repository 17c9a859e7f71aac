"""Small random Qwen3.5 checkpoints for conformance tests.

Nothing here imports transformers or the engine's model code: the tensor table below is a second, independent
statement of the published layout, so that a slip in the engine's own table cannot hide. Every random number comes
from a local generator seeded by the model's name.
"""

from __future__ import annotations

import math
import zlib

import torch

# One row per model. Sizes differ on purpose in every respect that a formula could get wrong; see `notes`.
SHAPES: dict[str, dict] = {
    "base": {
        "notes": "the published pattern (three linear layers, one full), two value heads per key head",
        "hidden": 64, "layers": 4, "interval": 4, "heads": 4, "kv": 2, "head_dim": 32, "rotary": 0.25,
        "mrope": [2, 1, 1], "k_heads": 2, "v_heads": 4, "k_dim": 16, "v_dim": 16, "kernel": 4,
        "experts": 8, "top_k": 2, "inter": 32, "shared": 32, "vocab_padding": 90, "theta": 1000.0,
        "vision": {"depth": 2, "hidden": 32, "inter": 48, "heads": 2, "grid": 8},
    },
    "equal_heads": {
        "notes": "one value head per key head of another width, one KV head, kernel 3, every second layer full",
        "hidden": 96, "layers": 5, "interval": 2, "heads": 6, "kv": 1, "head_dim": 24, "rotary": 0.5,
        "mrope": [2, 2, 2], "k_heads": 3, "v_heads": 3, "k_dim": 8, "v_dim": 24, "kernel": 3,
        "experts": 6, "top_k": 3, "inter": 40, "shared": 24, "vocab_padding": 7, "theta": 10000.0,
        "vision": {"depth": 3, "hidden": 48, "inter": 80, "heads": 4, "grid": 6},
    },
    "tied": {
        "notes": "three value heads per key head, no grouped KV heads, rotary on the whole head, tied head",
        "hidden": 80, "layers": 6, "interval": 3, "heads": 8, "kv": 8, "head_dim": 16, "rotary": 1.0,
        "mrope": [3, 3, 2], "k_heads": 2, "v_heads": 6, "k_dim": 24, "v_dim": 16, "kernel": 4,
        "experts": 16, "top_k": 4, "inter": 48, "shared": 64, "vocab_padding": 0, "tie": True, "eps": 1e-5,
        "vision": {"depth": 1, "hidden": 64, "inter": 64, "heads": 8, "grid": 10},
    },
    "ragged": {
        "notes": "four value heads per key head, explicit layer list that starts with full attention, expert width "
                 "136 and hidden 160 (not multiples of an FP8 block), weights that BF16 cannot hold",
        "hidden": 160, "layers": 4, "types": ["full_attention", "linear_attention", "linear_attention",
                                              "full_attention"],
        "heads": 4, "kv": 1, "head_dim": 64, "rotary": 0.25,
        "mrope": [3, 3, 2], "k_heads": 1, "v_heads": 4, "k_dim": 32, "v_dim": 32, "kernel": 4,
        "experts": 12, "top_k": 8, "inter": 136, "shared": 200, "vocab_padding": 40, "bf16_values": False,
        "vision": {"depth": 2, "hidden": 72, "inter": 100, "heads": 1, "grid": 7},
    },
    "published_heads": {
        "notes": "the published head sizes: head_dim 256, 64 rotary dims in sections 11, 11, 10, linear heads of 128, "
                 "vision heads of 72",
        "hidden": 256, "layers": 2, "interval": 2, "heads": 2, "kv": 1, "head_dim": 256, "rotary": 0.25,
        "mrope": [11, 11, 10], "k_heads": 1, "v_heads": 2, "k_dim": 128, "v_dim": 128, "kernel": 4,
        "experts": 4, "top_k": 2, "inter": 128, "shared": 128, "vocab_padding": 100,
        "vision": {"depth": 2, "hidden": 144, "inter": 160, "heads": 2, "grid": 48},
    },
    "text_only": {
        "notes": "the flat configuration of Qwen3_5MoeForCausalLM, no vision tower",
        "hidden": 72, "layers": 3, "interval": 3, "heads": 3, "kv": 3, "head_dim": 32, "rotary": 0.5,
        "mrope": [3, 3, 2], "k_heads": 2, "v_heads": 4, "k_dim": 12, "v_dim": 20, "kernel": 4,
        "experts": 5, "top_k": 1, "inter": 56, "shared": 16, "vocab_padding": 30, "vision": None,
    },
}

# The first seed for which no choice of experts in any prompt of the tests is a near tie (test_fixtures.py checks it).
WEIGHTS_SEED = 0

ALL = tuple(SHAPES)
WITH_VISION = tuple(name for name, shape in SHAPES.items() if shape["vision"])

# Added tokens of the tiny tokenizer, in id order after its ordinary tokens.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                  "<|image_pad|>", "<|video_pad|>")
PLAIN_TOKENS = ("<think>", "</think>")
BASE_TOKENS = 256
TOKENIZER_SIZE = BASE_TOKENS + len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
PATCH, MERGE, FRAMES = 16, 2, 2


def token_id(content: str) -> int:
    """Id of an added token in the tiny tokenizer."""
    return BASE_TOKENS + (SPECIAL_TOKENS + PLAIN_TOKENS).index(content)


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded from the parts, the same on every machine and in every session."""
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, parts)).encode("utf-8")))


def layer_types(shape: dict) -> list[str]:
    if "types" in shape:
        return list(shape["types"])
    return ["full_attention" if (i + 1) % shape["interval"] == 0 else "linear_attention"
            for i in range(shape["layers"])]


def model_config(name: str) -> dict:
    """The `config.json` of a small model, in the form its family is published in."""
    shape = SHAPES[name]
    text = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": TOKENIZER_SIZE + shape["vocab_padding"],
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": shape.get("eps", 1e-6),
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": layer_types(shape),
        "linear_conv_kernel_dim": shape["kernel"],
        "linear_key_head_dim": shape["k_dim"],
        "linear_value_head_dim": shape["v_dim"],
        "linear_num_key_heads": shape["k_heads"],
        "linear_num_value_heads": shape["v_heads"],
        "mamba_ssm_dtype": "float32",
        "moe_intermediate_size": shape["inter"],
        "shared_expert_intermediate_size": shape["shared"],
        "num_experts": shape["experts"],
        "num_experts_per_tok": shape["top_k"],
        "mtp_num_hidden_layers": 0,
        "eos_token_id": token_id("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.get("theta", 10000000.0),
            "partial_rotary_factor": shape["rotary"],
            "mrope_interleaved": True,
            "mrope_section": list(shape["mrope"]),
        },
    }
    if "interval" in shape:
        text["full_attention_interval"] = shape["interval"]
    if shape["vision"] is None:
        return {"architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float32",
                "tie_word_embeddings": shape.get("tie", False), **text}
    vision = shape["vision"]
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "float32",
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": shape.get("tie", False),
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5_moe",
            "depth": vision["depth"],
            "hidden_size": vision["hidden"],
            "intermediate_size": vision["inter"],
            "num_heads": vision["heads"],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "out_hidden_size": shape["hidden"],
            "num_position_embeddings": vision["grid"] ** 2,
            "deepstack_visual_indexes": [],
        },
    }


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Published tensor names (experts fused, as in the BF16 repository) and shapes for a configuration."""
    flat = "text_config" not in config
    text = config if flat else config["text_config"]
    prefix = "model." if flat else "model.language_model."
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {prefix + "embed_tokens.weight": (vocab, hidden)}
    for index, kind in enumerate(text["layer_types"]):
        layer = f"{prefix}layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        mixer = _linear_shapes(text) if kind == "linear_attention" else _attention_shapes(text)
        shapes.update({layer + name: shape for name, shape in mixer.items()})
        shapes.update({layer + "mlp." + name: shape for name, shape in _moe_shapes(text).items()})
    shapes[prefix + "norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    if not flat:
        shapes.update({"model.visual." + name: shape for name, shape in _vision_shapes(config).items()})
    return shapes


def _linear_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    value = heads * text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + value
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, value),
    }


def _attention_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    hidden, dim = text["hidden_size"], text["head_dim"]
    query, key = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (2 * query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _moe_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    hidden, experts = text["hidden_size"], text["num_experts"]
    inter, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    return {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * inter, hidden),
        "experts.down_proj": (experts, hidden, inter),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
        "shared_expert_gate.weight": (1, hidden),
    }


def _vision_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    vision = config["vision_config"]
    hidden, inter = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, vision["in_channels"], vision["temporal_patch_size"],
                                    vision["patch_size"], vision["patch_size"]),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision["num_position_embeddings"], hidden),
    }
    linears = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden),
               "mlp.linear_fc1": (inter, hidden), "mlp.linear_fc2": (hidden, inter)}
    for index in range(vision["depth"]):
        for norm in ("norm1", "norm2"):
            shapes[f"blocks.{index}.{norm}.weight"] = (hidden,)
            shapes[f"blocks.{index}.{norm}.bias"] = (hidden,)
        for linear, shape in linears.items():
            shapes[f"blocks.{index}.{linear}.weight"] = shape
            shapes[f"blocks.{index}.{linear}.bias"] = shape[:1]
    shapes["merger.norm.weight"] = shapes["merger.norm.bias"] = (hidden,)
    for linear, shape in {"linear_fc1": (merged, merged), "linear_fc2": (vision["out_hidden_size"], merged)}.items():
        shapes[f"merger.{linear}.weight"] = shape
        shapes[f"merger.{linear}.bias"] = shape[:1]
    return shapes


def random_tensors(name: str) -> dict[str, torch.Tensor]:
    """float32 weights under published names: random, but such that every part of the model matters.

    Activations stay near 1 through all layers, norm weights are far from their neutral value, decays run from almost
    none to most of the state a token, and router logits spread widely enough that the choice of experts is decided
    by far more than rounding.
    """
    rng = generator("weights", name, WEIGHTS_SEED)
    tied = SHAPES[name].get("tie", False)
    tensors = {key: _random(key, shape, rng, tied) for key, shape in tensor_shapes(model_config(name)).items()}
    if SHAPES[name].get("bf16_values", True):
        # The same numbers then stand in a BF16 and in an FP32 file.
        tensors = {key: value.bfloat16().float() for key, value in tensors.items()}
    return tensors


def _random(key: str, shape: tuple[int, ...], rng: torch.Generator, tied: bool) -> torch.Tensor:
    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * std + mean

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=rng) * (high - low) + low

    if key.endswith("A_log"):
        return uniform(math.log(0.02), math.log(2.0))
    if key.endswith("dt_bias"):
        return uniform(-4.0, 1.0)
    if key.endswith("conv1d.weight"):
        return normal(0.45)
    if key.endswith("bias"):
        return normal(0.2)
    if key.endswith("linear_attn.norm.weight") or (".visual." in key and "norm" in key):
        return normal(0.3, mean=1.0)
    if "norm" in key:
        return normal(0.3)
    if key.endswith("embed_tokens.weight"):
        # A tied embedding is the head as well: at full size every logit would point back at its own token.
        return normal(0.25 if tied else 1.0)
    if key.endswith("pos_embed.weight"):
        return normal(0.5)
    if key.endswith("mlp.gate.weight"):
        return normal(1.5 / math.sqrt(shape[1]))
    if key == "lm_head.weight":
        return normal(1.5 / math.sqrt(shape[1]))
    fan_in = math.prod(shape[1:]) if "patch_embed" in key else shape[-1]
    # What a block adds stays below what it was given: otherwise float32 rounding in one layer is blown up by the next
    # ones until two correct implementations differ by more than the tolerance.
    adds = key.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return normal((0.35 if adds else 1.0) / math.sqrt(fan_in))
