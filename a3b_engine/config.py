"""`config.json` -> one validated `ModelConfig`; every size the engine uses comes from here.

Accepted spellings: the nested layout of the official repositories (`text_config`, `vision_config`), the flat one of
text-only exports (`model_type` "qwen3_5_moe_text"), rotary values inside or outside `rope_parameters`, and
`layer_types` or `full_attention_interval`. A wrong or missing value is a `ConfigError` that names the key, the value
found and what was expected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from .errors import ConfigError

MULTIMODAL_TYPES = ("qwen3_5_moe",)
TEXT_ONLY_TYPES = ("qwen3_5_moe_text",)
MAX_JSON_BYTES = 64 * 1024 * 1024  # configs are kilobytes; a bigger file is not one

# Sizes above these are not models but hostile or broken files; they bound every allocation that follows.
_LARGEST = 1 << 24


@dataclass(frozen=True)
class TextConfig:
    """Sizes of the language model (names as in the published config)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    tie_word_embeddings: bool

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the depthwise convolution: queries, keys and values side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower and its merger."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int

    @property
    def patch_dim(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def position_grid(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine needs to know about a checkpoint besides its weights and tokenizer."""

    model_type: str
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Mapping[str, Any]
    mtp_layers: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read `config.json` and, where there is one, `generation_config.json` of a checkpoint folder."""
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file. Choose the folder that holds config.json and the .safetensors files.")
        generation_path = folder / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.is_file() else None
        return cls.from_dict(read_json_object(path), generation, source=str(path))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, source: str = "config.json"
    ) -> "ModelConfig":
        top = _Section(config, source, "")
        model_type = top.get("model_type")
        if model_type not in MULTIMODAL_TYPES + TEXT_ONLY_TYPES:
            raise ConfigError(_wrong_type_message(source, model_type))
        flat = model_type in TEXT_ONLY_TYPES
        section = top if flat else top.section("text_config")
        text = _text_config(section, top)
        vision = None
        if not flat and config.get("vision_config") is not None and not config.get("language_model_only"):
            vision = _vision_config(top.section("vision_config"), text)
        image_defaults = {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054}
        ids = {}
        for key, published in image_defaults.items():
            # Without a vision part these ids are never used; the published values keep the fields meaningful.
            ids[key] = top.integer(key, minimum=0, maximum=text.vocab_size - 1) if vision else _first_int(config.get(key), published)
        quantization = config.get("quantization_config")
        return cls(
            model_type=model_type,
            text=text,
            vision=vision,
            eos_token_ids=_eos_ids(config, generation_config or {}, text.vocab_size, source),
            pad_token_id=_first_int(config.get("pad_token_id"), (generation_config or {}).get("pad_token_id")),
            quantization=dict(quantization) if isinstance(quantization, Mapping) else {},
            mtp_layers=_first_int(section.get("mtp_num_hidden_layers"), 0),
            **ids,
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold one object; anything else is a `ConfigError` naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes is too large for a configuration file.")
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}). The download may be incomplete; fetch this file again.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found a JSON {type(data).__name__}, expected an object.")
    return data


class _Section:
    """One object of the configuration with typed look-ups whose errors carry the full key."""

    def __init__(self, data: Mapping[str, Any], source: str, prefix: str) -> None:
        self.data, self.source, self.prefix = data, source, prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def fail(self, key: str, found: Any, expected: str) -> ConfigError:
        shown = "nothing" if found is None else repr(found)[:80]
        return ConfigError(f"{self.source}: {self.prefix}{key}: found {shown}, expected {expected}.")

    def section(self, key: str) -> "_Section":
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, value, "an object")
        return _Section(value, self.source, f"{self.prefix}{key}.")

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = _LARGEST) -> int:
        value = self.data.get(key, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.fail(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, value: Any, *, above: float = 0.0, most: float = 1e12) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value <= most:
            raise self.fail(key, value, f"a number above {above:g} and at most {most:g}")
        return float(value)

    def must_be(self, key: str, expected: Any, default: Any) -> None:
        value = self.data.get(key, default)
        if value != expected:
            raise self.fail(key, value, f"{expected!r}, the only value this architecture is published with")


def _text_config(section: _Section, top: _Section) -> TextConfig:
    section.must_be("hidden_act", "silu", "silu")
    section.must_be("attention_bias", False, False)
    section.must_be("attn_output_gate", True, True)
    integer = section.integer
    layers = integer("num_hidden_layers", maximum=1024)
    heads = integer("num_attention_heads", maximum=4096)
    kv_heads = integer("num_key_value_heads", maximum=4096)
    if heads % kv_heads:
        raise section.fail("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = integer("head_dim", maximum=4096)
    key_heads = integer("linear_num_key_heads", maximum=4096)
    value_heads = integer("linear_num_value_heads", maximum=4096)
    if value_heads % key_heads:
        raise section.fail("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    experts = section.get("num_experts")
    if not experts:
        raise section.fail("num_experts", experts, "the number of experts; dense Qwen3.5 models run in ComfyUI's own text generation")
    experts = integer("num_experts", maximum=65536)
    rope_theta, rotary_dim, mrope_section = _rotary(section, head_dim)
    # The outer value decides: transformers writes its default (false) into text_config whatever the model does.
    tied = top.get("tie_word_embeddings")
    if tied is None:
        tied = section.get("tie_word_embeddings", False)
    return TextConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=section.number("rms_norm_eps", section.get("rms_norm_eps", 1e-6), most=1.0),
        max_position_embeddings=integer("max_position_embeddings", default=262144, maximum=1 << 30),
        layer_types=_layer_types(section, layers),
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        mrope_section=mrope_section,
        linear_conv_kernel_dim=integer("linear_conv_kernel_dim", maximum=64),
        linear_key_head_dim=integer("linear_key_head_dim", maximum=4096),
        linear_value_head_dim=integer("linear_value_head_dim", maximum=4096),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        num_experts=experts,
        num_experts_per_tok=integer("num_experts_per_tok", maximum=experts),
        moe_intermediate_size=integer("moe_intermediate_size"),
        shared_expert_intermediate_size=integer("shared_expert_intermediate_size"),
        tie_word_embeddings=bool(tied),
    )


def _layer_types(section: _Section, layers: int) -> tuple[str, ...]:
    kinds = section.get("layer_types")
    if kinds is None:
        interval = section.integer("full_attention_interval", default=4, maximum=1024)
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else kinds
        raise section.fail("layer_types", found, f"a list of {layers} entries (num_hidden_layers)")
    for position, kind in enumerate(kinds):
        if kind not in ("linear_attention", "full_attention"):
            raise section.fail(f"layer_types[{position}]", kind, "'linear_attention' or 'full_attention'")
    return tuple(kinds)


def _rotary(section: _Section, head_dim: int) -> tuple[float, int, tuple[int, int, int]]:
    """theta, rotated dimensions and M-RoPE sections (T, H, W), wherever the file keeps them."""
    rope = section.get("rope_parameters") or section.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise section.fail("rope_parameters", rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise section.fail("rope_parameters.rope_type", kind, "'default' (context extension by scaling is not read)")
    theta = section.number("rope_parameters.rope_theta", rope.get("rope_theta", section.get("rope_theta", 1e7)))
    partial = rope.get("partial_rotary_factor", section.get("partial_rotary_factor", 0.25))
    partial = section.number("rope_parameters.partial_rotary_factor", partial, most=1.0)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise section.fail("rope_parameters.partial_rotary_factor", partial, f"a share of head_dim ({head_dim}) that gives an even count")
    if not rope.get("mrope_interleaved", True):
        raise section.fail("rope_parameters.mrope_interleaved", False, "true, as published for this architecture")
    sections = rope.get("mrope_section", [11, 11, 10])
    valid = isinstance(sections, (list, tuple)) and len(sections) == 3 and all(isinstance(n, int) and n >= 0 for n in sections)
    if not valid or sum(sections) != rotary_dim // 2:
        raise section.fail("rope_parameters.mrope_section", sections, f"three whole numbers that sum to {rotary_dim // 2} (half of the {rotary_dim} rotated dimensions)")
    return theta, rotary_dim, tuple(sections)


def _vision_config(section: _Section, text: TextConfig) -> VisionConfig:
    integer = section.integer
    section.must_be("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    if section.get("deepstack_visual_indexes"):
        raise section.fail("deepstack_visual_indexes", section.get("deepstack_visual_indexes"), "an empty list (Qwen3.5 has no deepstack)")
    hidden, heads = integer("hidden_size"), integer("num_heads", maximum=4096)
    if hidden % heads or (hidden // heads) % 4:
        raise section.fail("num_heads", heads, f"a divisor of hidden_size ({hidden}) that leaves a head size divisible by 4")
    positions = integer("num_position_embeddings")
    if round(positions**0.5) ** 2 != positions:
        raise section.fail("num_position_embeddings", positions, "a square number")
    out_hidden = integer("out_hidden_size")
    if out_hidden != text.hidden_size:
        raise section.fail("out_hidden_size", out_hidden, f"the language model's hidden_size ({text.hidden_size})")
    return VisionConfig(
        depth=integer("depth", maximum=1024),
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size"),
        num_heads=heads,
        in_channels=integer("in_channels", default=3, maximum=3, minimum=3),
        patch_size=integer("patch_size", maximum=256),
        temporal_patch_size=integer("temporal_patch_size", default=2, maximum=16),
        spatial_merge_size=integer("spatial_merge_size", default=2, maximum=16),
        num_position_embeddings=positions,
        out_hidden_size=out_hidden,
    )


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int, source: str) -> tuple[int, ...]:
    """End tokens of both configs: the two official files name different ones, and either ends an answer."""
    ids: list[int] = []
    for file, section in ((Path(source).with_name("generation_config.json"), generation), (source, config), (source, config.get("text_config"))):
        found = section.get("eos_token_id") if isinstance(section, Mapping) else None
        for value in found if isinstance(found, list) else [found]:
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
                raise ConfigError(f"{file}: eos_token_id: found {value!r}, expected a token id from 0 to {vocab_size - 1}.")
            if value not in ids:
                ids.append(value)
    if not ids:
        raise ConfigError(f"{source}: eos_token_id: found nothing, expected the id that ends an answer (here or in generation_config.json).")
    return tuple(ids)


def _first_int(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _wrong_type_message(source: str, model_type: Any) -> str:
    hints = {
        "qwen3_5": "that is a dense Qwen3.5 model; ComfyUI's own text generation runs those",
        "qwen3_5_text": "that is a dense Qwen3.5 model; ComfyUI's own text generation runs those",
        "qwen4_exp": "that is another architecture with n-gram embedding tables",
        "qwen3_moe": "that is Qwen3-30B-A3B, an earlier architecture without Gated DeltaNet",
    }
    hint = hints.get(str(model_type), "the engine runs Qwen3.5/3.6 mixture-of-experts checkpoints such as Qwen3.5-35B-A3B-FP8")
    expected = ", ".join(repr(t) for t in MULTIMODAL_TYPES + TEXT_ONLY_TYPES)
    return f"{source}: model_type: found {model_type!r}, expected one of {expected}; {hint}."
