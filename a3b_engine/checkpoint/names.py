"""Canonical tensor names and shapes of the architecture, and the official names they have in files.

Canonical = the official name without its prefix (`layers.N.self_attn.q_proj.weight`, `visual....`, `lm_head.weight`);
the routed experts of a layer are three stacks: `layers.N.mlp.experts.{gate,up}.weight` [E, I, H] and `.down.weight`
[E, H, I].
"""

from __future__ import annotations

import re

from ..config import ModelConfig, TextConfig, VisionConfig

# (prefix in the file, prefix of the canonical name, what must follow). Order matters: "model." is a prefix of others.
_PREFIXES = (
    ("model.language_model.", "", ("embed_tokens.", "norm.", "layers.")),
    ("language_model.model.", "", ("embed_tokens.", "norm.", "layers.")),
    ("language_model.", "", ("lm_head.",)),
    ("model.visual.", "visual.", ("",)),
    ("visual.", "visual.", ("",)),
    ("model.mtp.", "mtp.", ("",)),
    ("mtp.", "mtp.", ("",)),
    ("model.", "", ("embed_tokens.", "norm.", "layers.")),
    ("lm_head.", "lm_head.", ("",)),
)
#: Routed experts; embedding rows (looked up, never multiplied); the vision tower; what every token needs.
TIERS = ("experts", "embedding", "vision", "rest")
DEFAULT_PREFIX = "model.language_model."

_EXPERT_STACK = re.compile(r"layers\.\d+\.mlp\.experts\.(gate|up|down)\.weight")
_FLOAT32 = re.compile(r".*(norm\.(weight|bias)|layernorm\.weight|norm[12]\.(weight|bias)|\.A_log|\.dt_bias)")
_SCALED = re.compile(
    r"lm_head\.weight|layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.shared_expert\.(gate|up|down)_proj|mlp\.experts\.(gate|up|down))\.weight"
)


def strip_prefix(name: str) -> tuple[str, str] | None:
    """(canonical-style name, file prefix) of a name in a file, or None for a name with no known prefix."""
    for prefix, canonical, followers in _PREFIXES:
        rest = name[len(prefix) :]
        if name.startswith(prefix) and rest.startswith(followers):
            return canonical + rest, prefix
    return None


def is_expert_stack(canonical: str) -> bool:
    return _EXPERT_STACK.fullmatch(canonical) is not None


def layer_of(canonical: str) -> int:
    """The number of the layer that "layers.N...." belongs to."""
    return int(canonical.split(".", 2)[1])


def stack_names(layer: int) -> tuple[str, str, str]:
    """Canonical names of a layer's stacks: gate, up, down."""
    gate, up, down = (f"layers.{layer}.mlp.experts.{which}.weight" for which in ("gate", "up", "down"))
    return gate, up, down


def tier_of(canonical: str, tied: bool) -> str:
    """The part of the model that a weight belongs to where memory is planned: one of TIERS.

    tied: the head reads the embedding table too, so that it cannot be kept apart.
    """
    if is_expert_stack(canonical):
        return "experts"
    if canonical == "embed_tokens.weight" and not tied:
        return "embedding"
    return "vision" if canonical.startswith("visual.") else "rest"


def kept_in_float32(canonical: str) -> bool:
    """Norms, A_log and dt_bias are small and sensitive: float32 whatever the compute dtype."""
    return _FLOAT32.fullmatch(canonical) is not None


def may_stay_scaled(canonical: str) -> bool:
    """Whether the engine can use this weight as FP8; any other weight stored in FP8 is multiplied out when loaded."""
    return _SCALED.fullmatch(canonical) is not None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the engine needs, `lm_head.weight` included even when tied.

    Shapes as in the published checkpoints, except `conv1d.weight` [C, kernel] and `visual.patch_embed.proj.weight`
    [hidden, C*T*P*P], which lose their unit and unrolled dimensions.
    """
    text = config.text
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (text.vocab_size, text.hidden_size)}
    for layer, kind in enumerate(text.layer_types):
        base = f"layers.{layer}."
        shapes[f"{base}input_layernorm.weight"] = (text.hidden_size,)
        mixer = _attention(text) if kind == "full_attention" else _deltanet(text)
        shapes.update((f"{base}{name}", shape) for name, shape in mixer.items())
        shapes[f"{base}post_attention_layernorm.weight"] = (text.hidden_size,)
        shapes.update((f"{base}mlp.{name}", shape) for name, shape in _experts(text).items())
    shapes["norm.weight"] = (text.hidden_size,)
    shapes["lm_head.weight"] = (text.vocab_size, text.hidden_size)
    if config.vision is not None:
        shapes.update((f"visual.{name}", shape) for name, shape in _vision(config.vision).items())
    return shapes


def _attention(text: TextConfig) -> dict[str, tuple[int, ...]]:
    hidden, size = text.hidden_size, text.head_dim
    queries, keys = text.num_attention_heads * size, text.num_key_value_heads * size
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),  # per head: query rows, then output-gate rows
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }


def _deltanet(text: TextConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = text.hidden_size, text.linear_num_value_heads
    keys, values = text.linear_num_key_heads * text.linear_key_head_dim, heads * text.linear_value_head_dim
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, text.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (text.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _experts(text: TextConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, shared = text.hidden_size, text.moe_intermediate_size, text.shared_expert_intermediate_size
    return {
        "gate.weight": (text.num_experts, hidden),
        "experts.gate.weight": (text.num_experts, inner, hidden),
        "experts.up.weight": (text.num_experts, inner, hidden),
        "experts.down.weight": (text.num_experts, hidden, inner),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
        "shared_expert_gate.weight": (1, hidden),
    }


def _vision(vision: VisionConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    merged = hidden * vision.spatial_merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.num_position_embeddings, hidden),
    }

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)

    for block in range(vision.depth):
        base = f"blocks.{block}."
        norm(f"{base}norm1")
        norm(f"{base}norm2")
        linear(f"{base}attn.qkv", 3 * hidden, hidden)
        linear(f"{base}attn.proj", hidden, hidden)
        linear(f"{base}mlp.linear_fc1", inner, hidden)
        linear(f"{base}mlp.linear_fc2", hidden, inner)
    norm("merger.norm")
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", vision.out_hidden_size, merged)
    return shapes


def shapes_in_files(canonical: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The shapes a plain (not expert) tensor may have in a file; the first is the official one."""
    if canonical.endswith("linear_attn.conv1d.weight"):
        return (shape[0], 1, shape[1]), shape
    if canonical == "visual.patch_embed.proj.weight" and config.vision is not None:
        vision = config.vision
        side = vision.patch_size
        return (shape[0], vision.in_channels, vision.temporal_patch_size, side, side), shape
    return (shape,)
