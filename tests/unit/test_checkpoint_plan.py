"""Which tensors make up which weight: prefixes, expert forms, missing and surplus tensors, the published counts."""

import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from checkpoint_samples import (
    canonical_weights,
    load,
    official_weights,
    plan_of,
    text_only_config,
    tiny_config,
    write_raw,
    write_sample,
)

from a3b_engine.checkpoint.header import TensorInfo
from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.checkpoint.names import expected_tensors, may_stay_scaled
from a3b_engine.checkpoint.plan import build_plan
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.config import ModelConfig
from a3b_engine.errors import CheckpointError

L = "model.language_model."


def same(first, second) -> bool:
    if isinstance(first, ScaledWeight):
        bytes_equal = torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
        return first.block == second.block and bytes_equal and torch.equal(first.scale, second.scale)
    return first.dtype == second.dtype and torch.equal(first, second)


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not same(first[name], second[name])] == []


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_of(folder)
    assert str(caught.value).isascii()
    return str(caught.value)


# Prefixes

PREFIXES = {
    "official": lambda name: name,
    "visual at the top": lambda name: name.replace("model.visual.", "visual."),
    "model.": lambda name: name.replace(L, "model.").replace("model.visual.", "visual."),
    "language_model.model.": lambda name: name.replace(L, "language_model.model.").replace("lm_head.", "language_model.lm_head."),
}


@pytest.mark.parametrize("form", PREFIXES)
def test_each_prefix_form_gives_the_same_weights(tmp_path, form):
    tensors = {PREFIXES[form](name): tensor for name, tensor in official_weights(tiny_config()).items()}
    weights = load(write_raw(tmp_path, tensors))
    assert_same(weights, canonical_weights(tiny_config()))


def test_names_are_compared_whole(tmp_path):
    tensors = official_weights(tiny_config())
    tensors["wrapper." + L + "norm.weight"] = tensors.pop(L + "norm.weight")
    text = refusal(write_raw(tmp_path, tensors))
    assert "1 tensor(s) of the model are missing" in text and L + "norm.weight" in text


def test_same_module_under_two_prefixes(tmp_path):
    tensors = official_weights(tiny_config())
    tensors["model.norm.weight"] = tensors[L + "norm.weight"]
    text = refusal(write_raw(tmp_path, tensors))
    assert "model.norm" in text and L + "norm" in text and "two prefixes" in text


# Experts


@pytest.mark.parametrize("format", ["bf16", "fp32", "fp8"])
def test_f04_per_expert_and_fused_files_give_identical_stacks(tmp_path, format):
    config = tiny_config(hidden_size=256, moe_intermediate_size=128)
    config["vision_config"]["out_hidden_size"] = 256
    tensors = official_weights(config)
    separate = write_sample(tmp_path / "separate", config, tensors, format=format, experts="per_expert")
    fused = write_sample(tmp_path / "fused", config, tensors, format=format, experts="fused")
    names = CheckpointIndex.open(separate).tensors
    assert f"{L}layers.0.mlp.experts.3.up_proj.weight" in names
    assert (f"{L}layers.0.mlp.experts.3.up_proj.weight_scale_inv" in names) == (format == "fp8")
    assert f"{L}layers.0.mlp.experts.gate_up_proj" in CheckpointIndex.open(fused).tensors
    first, second = load(separate), load(fused)
    assert_same(first, second)
    gate = first["layers.0.mlp.experts.gate.weight"]
    assert tuple(gate.shape) == (4, 128, 256)
    if format != "fp8":
        assert torch.equal(gate[3], tensors[f"{L}layers.0.mlp.experts.3.gate_proj.weight"])
    else:
        assert isinstance(gate, ScaledWeight) and tuple(gate.scale.shape) == (4, 1, 2)


@pytest.mark.parametrize("form", ["fused", "per_expert"])
def test_expert_rows_end_where_they_should(tmp_path, form):
    weights = load(write_sample(tmp_path, experts=form))
    expected = canonical_weights(tiny_config())
    for which in ("gate", "up", "down"):
        name = f"layers.1.mlp.experts.{which}.weight"
        assert torch.equal(weights[name], expected[name])


FUSED_SCALES = {
    "halves meet inside a block": ((4, 1, 1), lambda s: s.expand(4, 64, 64)),
    "one value for all experts": ((1,), lambda s: s.expand(4, 64, 64)),
    "one value an expert": ((4,), lambda s: s[:, None, None].expand(4, 64, 64)),
    "per channel": ((4, 64, 1), lambda s: s.expand(4, 64, 64)),
    "per channel without last dim": ((4, 64), lambda s: s[..., None].expand(4, 64, 64)),
    "blocks of 16": ((4, 4, 4), lambda s: s.repeat_interleave(16, 1).repeat_interleave(16, 2)),
    "blocks of 24, halves meet inside": ((4, 3, 3), lambda s: s.repeat_interleave(24, 1).repeat_interleave(24, 2)[:, :64, :64]),
}


@pytest.mark.parametrize("kind", FUSED_SCALES)
def test_fused_fp8_scales_are_split_between_gate_and_up(tmp_path, kind):
    shape, expand = FUSED_SCALES[kind]
    base = f"{L}layers.0.mlp.experts."
    tensors = official_weights(tiny_config())
    for name in [name for name in tensors if name.startswith(base)]:
        del tensors[name]
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(4, 64, 64, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator)
    down = torch.randn(4, 64, 32, generator=generator)
    tensors |= {f"{base}gate_up_proj": codes, f"{base}gate_up_proj_scale_inv": scale, f"{base}down_proj": down}
    block = 24 if "24" in kind else 16 if "16" in kind else 128
    config = {**tiny_config(), "quantization_config": {"weight_block_size": [block, block]}}
    weights = load(write_raw(tmp_path, tensors, config))
    expected = codes.float() * expand(scale)
    assert torch.equal(weights["layers.0.mlp.experts.gate.weight"].dequantize(torch.float32), expected[:, :32])
    assert torch.equal(weights["layers.0.mlp.experts.up.weight"].dequantize(torch.float32), expected[:, 32:])
    assert torch.equal(weights["layers.0.mlp.experts.down.weight"], down)


def test_half_fused_experts_name_what_is_missing(tmp_path):
    folder = write_sample(tmp_path / "whole", experts="fused")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{L}layers.0.mlp.experts.gate_up_proj"]
    text = refusal(write_raw(tmp_path / "half", tensors))
    assert f"1 tensor(s) of the model are missing: {L}layers.0.mlp.experts.gate_up_proj." in text


def test_experts_of_one_layer_must_be_stored_alike(tmp_path):
    tensors = official_weights(tiny_config())
    name = f"{L}layers.0.mlp.experts.2.up_proj.weight"
    tensors[name] = tensors[name].half()
    text = refusal(write_raw(tmp_path, tensors))
    assert f"{L}layers.0.mlp.experts" in text and "F16, F32" in text


# Missing, unexpected, unused


def test_missing_tensors_are_counted_and_the_first_named(tmp_path):
    tensors = official_weights(tiny_config())
    gone = [name for name in tensors if name.startswith(f"{L}layers.1.mlp.experts.")]
    for name in gone:
        del tensors[name]
    text = refusal(write_raw(tmp_path, tensors))
    assert f"{len(gone)} tensor(s) of the model are missing" in text
    assert f"{L}layers.1.mlp.experts.0.gate_proj.weight" in text and "Incomplete download" in text


def test_unexpected_tensors_are_counted_and_named(tmp_path):
    extra = {f"{L}layers.{n}.self_attn.q_proj.lora_A.weight": torch.ones(1) for n in range(7)} | {"alien": torch.ones(1)}
    text = refusal(write_raw(tmp_path, {**official_weights(tiny_config()), **extra}))
    assert "8 tensor(s) that this architecture does not have: alien, " in text and "lora_A" in text and text.count("lora_A") == 4


def test_bias_the_architecture_lacks_is_unexpected(tmp_path):
    tensors = {**official_weights(tiny_config()), f"{L}layers.1.self_attn.q_proj.bias": torch.ones(64)}
    assert "q_proj.bias" in refusal(write_raw(tmp_path, tensors))


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
def test_f08_multi_token_prediction_is_ignored_with_one_line(tmp_path, caplog, prefix):
    extra = {f"{prefix}layers.0.mlp.experts.{n}.up_proj.weight": torch.ones(2, 2) for n in range(3)}
    # Whatever it is stored as: scale-less FP8 there is nobody's problem.
    extra |= {f"{prefix}fc.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), f"{prefix}norm.weight": torch.ones(2)}
    folder = write_raw(tmp_path, {**official_weights(tiny_config()), **extra})
    with caplog.at_level(logging.INFO, logger="a3b_engine"):
        plan = plan_of(folder)
    assert [record.levelname for record in caplog.records] == ["INFO"] and "5 multi-token-prediction tensors" in caplog.text
    assert plan.unused == sorted(extra)
    assert load(folder).keys() == expected_tensors(ModelConfig.from_folder(folder)).keys()


def test_activation_and_cache_scales_are_unused(tmp_path):
    extra = {f"{L}layers.1.self_attn.{name}": torch.ones(()) for name in ("q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale")}
    assert plan_of(write_raw(tmp_path, {**official_weights(tiny_config()), **extra})).unused == sorted(extra)


def test_wrong_shape_shows_both(tmp_path):
    tensors = official_weights(tiny_config())
    tensors["lm_head.weight"] = torch.ones(64, 32)
    text = refusal(write_raw(tmp_path, tensors))
    assert "lm_head.weight has shape [64, 32], config.json asks for [64, 64]" in text


def test_transposed_fused_experts_are_refused(tmp_path):
    from safetensors.torch import load_file

    tensors = load_file(write_sample(tmp_path / "a", experts="fused") / "model.safetensors")
    name = f"{L}layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    assert "[4, 32, 64], config.json asks for [4, 64, 32]" in refusal(write_raw(tmp_path / "b", tensors))


# Heads and vision


def test_tied_head_shares_the_embedding(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = official_weights(config)
    both = write_raw(tmp_path / "both", tensors, config)
    del tensors["lm_head.weight"]
    plan = plan_of(write_raw(tmp_path / "tied", tensors, config))
    assert plan.aliases == {"lm_head.weight": "embed_tokens.weight"} and plan.unused == []
    for folder in (tmp_path / "tied", both):
        weights = load(folder)
        assert weights["lm_head.weight"] is weights["embed_tokens.weight"]
    assert plan_of(both).unused == ["lm_head.weight"]
    assert list(load(both, include=lambda name: name == "lm_head.weight")) == ["lm_head.weight"]


def test_untied_head_must_be_there(tmp_path):
    tensors = official_weights(tiny_config())
    del tensors["lm_head.weight"]
    assert "missing: lm_head.weight." in refusal(write_raw(tmp_path, tensors))


def test_text_only_export(tmp_path):
    config = text_only_config()
    tensors = {name.replace(L, "model."): tensor for name, tensor in official_weights(config).items()}
    folder = write_raw(tmp_path, tensors, config)
    assert plan_of(folder).has_vision is False
    assert_same(load(folder), canonical_weights(config))


def test_vision_config_without_vision_tensors_is_text_only(tmp_path):
    tensors = {name: tensor for name, tensor in official_weights(tiny_config()).items() if ".visual." not in name}
    plan = plan_of(write_raw(tmp_path, tensors))
    assert plan.has_vision is False and not any(name.startswith("visual.") for name in plan.entries)


def test_vision_tensors_of_a_model_declared_language_only_are_unused(tmp_path):
    plan = plan_of(write_raw(tmp_path, official_weights(tiny_config()), {**tiny_config(), "language_model_only": True}))
    assert plan.has_vision is False and len(plan.unused) == 21


def test_half_a_vision_tower_is_missing_not_text_only(tmp_path):
    tensors = official_weights(tiny_config())
    del tensors["model.visual.pos_embed.weight"]
    assert "missing: model.visual.pos_embed.weight." in refusal(write_raw(tmp_path, tensors))


def test_device_bytes_is_what_loading_takes(tmp_path):
    folder = write_sample(tmp_path, format="fp8")
    plan = plan_of(folder)
    for dtype, dequantize in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        loaded = load(folder, dtype, dequantize=dequantize)
        assert plan.device_bytes(dtype, dequantize) == sum(weight.nbytes for weight in loaded.values())
    assert plan.stored_bytes == CheckpointIndex.open(folder).total_bytes


# The published model


@pytest.fixture(scope="module")
def published() -> dict:
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("A3B_REFERENCE") or root.parent / "shared" / "reference" / "qwen3.5")
    if not (folder / "config.fp8.json").is_file():
        pytest.skip("no reference configuration: set A3B_REFERENCE to a folder that holds config.fp8.json")
    return json.loads((folder / "config.fp8.json").read_text(encoding="utf-8"))


def generation() -> dict:
    return {"eos_token_id": [248046, 248044]}


def test_published_shapes_and_counts(published):
    config = ModelConfig.from_dict(published, generation())
    shapes = expected_tensors(config)
    visual = {name: shape for name, shape in shapes.items() if name.startswith("visual.")}
    fused = {name.replace(".experts.up.", ".experts.gate.") for name in shapes if name not in visual}
    assert (len(fused), len(visual)) == (693, 333)
    assert sum(math.prod(shape) for shape in shapes.values()) == 35_107_181_936
    assert sum(math.prod(shape) for shape in visual.values()) == pytest.approx(446.6e6, rel=1e-3)
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert shapes["layers.0.linear_attn.conv1d.weight"] == (8192, 4)
    assert shapes["layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes["layers.39.mlp.experts.down.weight"] == (256, 2048, 512)
    assert shapes["visual.patch_embed.proj.weight"] == (1152, 1536)
    assert shapes["visual.merger.linear_fc2.weight"] == (2048, 4608)


def published_index(config: ModelConfig) -> CheckpointIndex:
    """The tensor table of the official FP8 repository (names, dtypes, shapes), with made-up places."""
    tensors: dict[str, TensorInfo] = {}

    def add(name, dtype, shape):
        width = 1 if dtype == "F8_E4M3" else 2
        tensors[name] = TensorInfo(name, Path("model.safetensors"), dtype, shape, 0, width * math.prod(shape))

    def add_fp8(module, shape):
        add(f"{module}.weight", "F8_E4M3", shape)
        add(f"{module}.weight_scale_inv", "BF16", (-(-shape[0] // 128), -(-shape[1] // 128)))

    for name, shape in expected_tensors(config).items():
        prefix = "" if name.startswith("lm_head") else "model." if name.startswith("visual") else L
        if ".experts." in name:
            base, which, _ = name.rsplit(".", 2)
            for expert in range(shape[0]):
                add_fp8(f"{L}{base}.{expert}.{which}_proj", shape[1:])
        elif may_stay_scaled(name) and not name.startswith("lm_head"):
            add_fp8(prefix + name.removesuffix(".weight"), shape)
        elif name.endswith("conv1d.weight"):
            add(prefix + name, "BF16", (shape[0], 1, shape[1]))
        elif name == "visual.patch_embed.proj.weight":
            add(prefix + name, "BF16", (shape[0], 3, 2, 16, 16))
        else:
            add(prefix + name, "BF16", shape)
    for number in range(785):
        add(f"mtp.layers.0.part{number}.weight", "BF16", (1,))
    return CheckpointIndex(Path("published"), tensors, [], 0, {})


def test_published_fp8_repository_plans_whole(published):
    config = ModelConfig.from_dict(published, generation())
    index = published_index(config)
    plan = build_plan(index, config)
    scales = [name for name in index.tensors if name.endswith(".weight_scale_inv")]
    assert len([name for name in scales if ".experts." in name]) == 30_720
    assert len([name for name in scales if ".experts." not in name]) == 250
    stacks = [entry for entry in plan.entries.values() if ".experts." in entry.name]
    assert len(stacks) == 120 and sum(len(entry.pieces) for entry in stacks) == 30_720
    assert len([entry for entry in plan.entries.values() if entry.fp8 and ".experts." not in entry.name]) == 250
    assert len(plan.unused) == 785 and plan.has_vision
    assert plan.entries["layers.0.mlp.experts.gate.weight"].fp8.shape == (256, 4, 16)
    # 37.45 GB of files less 0.853 GB of unused multi-token prediction.
    assert plan.stored_bytes == pytest.approx(36.6e9, rel=0.005)
    assert plan.device_bytes(torch.bfloat16, False) == pytest.approx(36.6e9, rel=0.005)


def test_published_bf16_repository_plans_whole(published):
    published = {key: value for key, value in published.items() if key != "quantization_config"}
    config = ModelConfig.from_dict(published, generation())
    tensors = {}
    for name, info in published_index(config).tensors.items():
        if ".experts." not in name and "_scale_inv" not in name and not name.startswith("mtp."):
            tensors[name] = TensorInfo(name, info.file, "BF16", info.shape, 0, 2 * math.prod(info.shape))
    for layer in range(40):
        base = f"{L}layers.{layer}.mlp.experts."
        for name, shape in ((f"{base}gate_up_proj", (256, 1024, 2048)), (f"{base}down_proj", (256, 2048, 512))):
            tensors[name] = TensorInfo(name, Path("model.safetensors"), "BF16", shape, 0, 2 * math.prod(shape))
    assert len(tensors) == 693 + 333
    plan = build_plan(CheckpointIndex(Path("published"), tensors, [], 0, {}), config)
    assert plan.unused == [] and plan.stored_bytes == 2 * 35_107_181_936
