"""config.json: accepted spellings, and errors that name key, value and expectation."""

import copy
import json

import pytest

from a3b_engine.config import ModelConfig
from a3b_engine.errors import ConfigError

TEXT = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [3, 3, 2]},
    "eos_token_id": 500,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 144, "deepstack_visual_indexes": [],
}  # fmt: skip
FULL = {
    "model_type": "qwen3_5_moe", "image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 503, "vision_end_token_id": 504,
    "text_config": TEXT, "vision_config": VISION,
}  # fmt: skip


def changed(path, value):
    config = copy.deepcopy(FULL)
    *parents, last = path.split(".")
    target = config
    for key in parents:
        target = target[key]
    if value is None:
        target.pop(last, None)
    else:
        target[last] = value
    return config


def test_sizes_are_read():
    config = ModelConfig.from_dict(FULL, {"eos_token_id": [501, 500]})
    assert config.eos_token_ids == (501, 500)
    assert config.text.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.text.rotary_dim == 16 and config.text.mrope_section == (3, 3, 2)
    assert config.text.conv_dim == 2 * 32 + 64
    assert config.vision.patch_dim == 1536 and config.vision.position_grid == 12


def test_flat_text_only_config_and_old_rotary_keys():
    flat = {**TEXT, "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}}
    del flat["rope_parameters"]
    config = ModelConfig.from_dict(flat)
    assert config.vision is None and config.text.rope_theta == 5e5


def test_layer_types_win_over_the_interval():
    config = ModelConfig.from_dict(changed("text_config.layer_types", ["full_attention", "linear_attention"] * 2))
    assert config.text.full_attention_layers == (0, 2)


def test_a_text_only_export_with_a_vision_config_says_so():
    assert ModelConfig.from_dict({**FULL, "language_model_only": True}).vision is None


@pytest.mark.parametrize("path, value, words", [
    ("model_type", "llama", ["model_type", "'llama'", "qwen3_5_moe"]),
    ("model_type", "qwen3_5", ["dense"]),
    ("text_config", None, ["text_config", "nothing", "object"]),
    ("text_config.hidden_size", None, ["text_config.hidden_size", "nothing"]),
    ("text_config.hidden_size", "64", ["text_config.hidden_size", "'64'", "whole number"]),
    ("text_config.hidden_size", 10**12, ["text_config.hidden_size"]),
    ("text_config.num_key_value_heads", 3, ["num_key_value_heads", "3", "divisor", "4"]),
    ("text_config.linear_num_value_heads", 3, ["linear_num_value_heads", "multiple"]),
    ("text_config.num_experts", 0, ["num_experts", "dense"]),
    ("text_config.num_experts_per_tok", 9, ["num_experts_per_tok", "9", "8"]),
    ("text_config.hidden_act", "gelu", ["hidden_act", "gelu", "silu"]),
    ("text_config.layer_types", ["full_attention"], ["layer_types", "1 entries", "4"]),
    ("text_config.layer_types", ["full_attention", "mamba", "full_attention", "full_attention"], ["layer_types[1]", "mamba"]),
    ("text_config.rope_parameters.mrope_section", [11, 11, 10], ["mrope_section", "[11, 11, 10]", "8"]),
    ("text_config.rope_parameters.rope_type", "yarn", ["rope_type", "yarn"]),
    ("text_config.rms_norm_eps", -1, ["rms_norm_eps", "-1"]),
    ("vision_config.out_hidden_size", 65, ["out_hidden_size", "65", "64"]),
    ("vision_config.num_position_embeddings", 145, ["num_position_embeddings", "square"]),
    ("vision_config.deepstack_visual_indexes", [1], ["deepstack"]),
    ("image_token_id", 512, ["image_token_id", "512"]),
    ("text_config.eos_token_id", 9999, ["eos_token_id", "9999"]),
    ("text_config.eos_token_id", None, ["eos_token_id", "nothing"]),
])  # fmt: skip
def test_wrong_values_are_named(path, value, words):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, "\xff\xfe"])
def test_unreadable_files_are_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="config.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_file_says_what_to_choose(tmp_path):
    with pytest.raises(ConfigError, match="safetensors"):
        ModelConfig.from_folder(tmp_path)


def test_eos_comes_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FULL), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 499}), encoding="utf-8")
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (499, 500)


@pytest.mark.parametrize("kind", [["qwen3_5_moe"], {}, 5, None])
def test_a_model_type_that_is_no_text_is_named(kind):
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.from_dict({**FULL, "model_type": kind})


@pytest.mark.parametrize("extra", [{"image_token_id": "abc"}, {"image_token_id": [1]}, {"text_config": "abc"}, {"text_config": [1]}])
def test_keys_that_a_text_only_export_does_not_use_cannot_break_it(extra):
    assert ModelConfig.from_dict({**TEXT, **extra}).image_token_id == 248056


def test_a_null_tie_leaves_the_choice_to_the_text_config():
    assert ModelConfig.from_dict({**changed("text_config.tie_word_embeddings", True), "tie_word_embeddings": None}).text.tie_word_embeddings


def test_the_file_with_the_wrong_end_token_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FULL), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9999]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id"):
        ModelConfig.from_folder(tmp_path)
