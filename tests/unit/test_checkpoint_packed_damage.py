"""4-bit files that are damaged, half known, or look like another format: each one clear error that names a tensor."""

import json

import pytest
import torch
from checkpoint_samples import load, official_weights, plan_of, tiny_config, write_raw
from packed_samples import AWQ, CT_INT4, CT_NVFP4, DECLARED, GPTQ_V1, GPTQ_V2, MODELOPT, Q, one_module, packed_checkpoint, sample, stored_parts

from a3b_engine.errors import CheckpointError, UnsupportedFormatError

NAME = "layers.1.self_attn.q_proj.weight"


# Damage


def changed(parts, **changes):
    parts = {**parts, **changes}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def i32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


DAMAGE = [
    ("ct_nvfp4", {"weight_global_scale": None}, "q_proj.weight_global_scale is missing beside"),
    ("ct_nvfp4", {"weight_scale": None}, "q_proj.weight_scale is missing beside"),
    ("ct_nvfp4", {"weight_scale": torch.ones(24, 4).to(torch.float8_e4m3fn)}, r"weight_scale is F8_E4M3 \[24, 4\], expected F8_E4M3 \[24, 8\]"),
    ("ct_nvfp4", {"weight_scale": torch.ones(24, 8)}, r"weight_scale is F32 \[24, 8\], expected F8_E4M3"),
    ("ct_nvfp4", {"weight_global_scale": torch.zeros(1)}, "weight_global_scale is 0.0; a tensor scale must be a positive number"),
    ("ct_nvfp4", {"weight_global_scale": torch.tensor([float("nan")])}, "weight_global_scale is nan"),
    ("ct_nvfp4", {"weight_global_scale": torch.ones(24)}, r"weight_global_scale is F32 \[24\], expected F32 \[1\]"),
    ("ct_nvfp4", {"weight": torch.ones(24, 128)}, "q_proj.weight"),
    ("modelopt_nvfp4", {"weight_scale_2": None}, "q_proj.weight_scale_2 is missing beside"),
    ("modelopt_nvfp4", {"weight": torch.zeros(24, 128, dtype=torch.uint8)}, r"q_proj.weight is U8 \[24, 128\], expected U8 \[24, 64\]"),
    ("modelopt_nvfp4", {"weight_scale_2": torch.tensor(float("inf"))}, "weight_scale_2 is inf"),
    ("modelopt_nvfp4", {"surprise": torch.ones(1)}, "q_proj.surprise"),
    ("ct_int4_asym_g32", {"weight_scale": None}, "q_proj.weight_scale is missing beside"),
    ("ct_int4_asym_g32", {"weight_zero_point": i32(24, 4)}, r"weight_zero_point is I32 \[24, 4\], expected I32 \[3, 4\]"),
    ("ct_int4_asym_g32", {"weight_zero_point": torch.zeros(24, 4, dtype=torch.int8)}, r"weight_zero_point is I8 \[24, 4\], expected I32 \[3, 4\]"),
    ("ct_int4_asym_g32", {"weight_shape": torch.tensor([24, 64])}, r"weight_shape says \[24, 64\], config.json asks for \[24, 128\]"),
    ("ct_int4_asym_g32", {"weight_scale": torch.ones(24, 3).bfloat16()}, "does not fit a weight"),
    ("ct_int4_asym_g32", {"weight_scale": torch.ones(24, 16).bfloat16()}, "does not fit a weight"),
    ("ct_int4_asym_g32", {"weight_scale": torch.ones(1).bfloat16()}, "does not fit a weight"),
    ("ct_int4_asym_g32", {"weight_g_idx": torch.arange(127, -1, -1).int() // 32}, "weight_g_idx sorts the columns"),
    ("ct_int4_asym_g32", {"weight_packed": i32(24, 32)}, "weight_packed holds codes of 8 bits"),
    ("ct_int4_asym_g32", {"weight_packed": i32(24, 12)}, "weight_packed holds codes of 3 bits"),
    ("ct_int4_asym_g32", {"weight_packed": i32(24, 17)}, r"weight_packed is I32 \[24, 17\], expected I32 \[24, 16\]"),
    ("autogptq_v1_asym_g64", {"qzeros": None}, "q_proj.qzeros is missing beside"),
    ("autogptq_v1_asym_g64", {"qweight": i32(32, 32)}, "qweight holds codes of 8 bits"),
    ("autogptq_v1_asym_g64", {"qweight": i32(16, 31)}, r"qweight is I32 \[16, 31\], expected I32 \[16, 32\]"),
    ("autogptq_v1_asym_g64", {"scales": torch.ones(4, 32)}, r"qzeros is I32 \[2, 4\], expected I32 \[4, 4\]"),
    ("autogptq_v1_asym_g64", {"qzeros": torch.full((2, 4), 0x777777F7, dtype=torch.int32)}, "qzeros holds a zero of 15"),
    ("autogptq_v1_asym_g64", {"bias": torch.ones(32)}, "q_proj.bias"),
    ("gptqmodel_v1_sym_g32", {"qzeros": torch.full((4, 4), -0x77777778, dtype=torch.int32)}, "qzeros holds zeros other than 7"),
    ("autoawq_g32", {"qzeros": None}, "q_proj.qzeros is missing beside"),
    ("autoawq_g32", {"qzeros": i32(4, 8)}, r"qzeros is I32 \[4, 8\], expected I32 \[4, 4\]"),
]


@pytest.mark.parametrize("name, changes, expected", DAMAGE)
def test_damage_is_named(tmp_path, name, changes, expected):
    tensors = sample(name)
    folder = one_module(tmp_path, changed(stored_parts(tensors), **changes), DECLARED[name], tensors["expected"].shape)
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(folder)
    assert str(caught.value).isascii() and Q in str(caught.value)


def test_a_vector_of_four_bits(tmp_path):
    tensors = official_weights(tiny_config())
    del tensors["model.language_model.norm.weight"]
    tensors["model.language_model.norm.weight_packed"] = torch.zeros(1, 32, dtype=torch.uint8)
    tensors["model.language_model.norm.weight_scale"] = torch.ones(1, 4).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="norm.weight_packed is of NVFP4"):
        plan_of(write_raw(tmp_path, tensors))


def spoil(folder, change):
    """Rewrite a checkpoint's tensors through `change`."""
    from safetensors.torch import load_file

    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}  # not of the file to be overwritten
    change(tensors)
    write_raw(folder, tensors, json.loads((folder / "config.json").read_text(encoding="utf-8")))


EXPERT = "model.language_model.layers.0.mlp.experts.2.up_proj."


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda t: [t.pop(name) for name in list(t) if name.startswith(EXPERT)], r"1 tensor\(s\) of the model are missing: .*experts.2.up_proj"),
        (lambda t: t.pop(f"{EXPERT}weight_scale"), "experts.2.up_proj.weight_scale is missing"),
        (lambda t: t.pop(f"{EXPERT}weight_zero_point"), "weight_zero_point has no like in every expert"),
        (lambda t: t.update({f"{EXPERT}weight_scale": t[f"{EXPERT}weight_scale"].bfloat16()}), "experts.2.up_proj.weight_scale has no like in every expert"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERT)] and t.update({f"{EXPERT}weight": torch.zeros(32, 64)}), "are stored in different ways"),
    ],
)  # fmt: skip
def test_one_expert_unlike_the_others(tmp_path, change, expected):
    packed_checkpoint(tmp_path, "int4_ct")
    spoil(tmp_path, change)
    with pytest.raises(CheckpointError, match=expected):
        plan_of(tmp_path)


def test_all_experts_in_one_tensor_are_refused(tmp_path):
    base = "model.language_model.layers.0.mlp.experts."
    tensors = official_weights(tiny_config())
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(base)}
    tensors[f"{base}gate_up_proj.weight_packed"] = torch.zeros(4, 64, 32, dtype=torch.uint8)
    with pytest.raises(UnsupportedFormatError, match="gate_up_proj.weight_packed holds all experts in one 4-bit tensor"):
        plan_of(write_raw(tmp_path, tensors))


# What the configuration decides, between formats that look alike


@pytest.mark.parametrize(
    "name, declared, expected",
    [
        ("modelopt_nvfp4", {}, "does not say so, modelopt expected"),
        ("modelopt_nvfp4", CT_NVFP4, "says compressed-tensors, modelopt expected"),
        ("ct_nvfp4", MODELOPT, "tensors of compressed-tensors, but the configuration says modelopt"),
        ("ct_nvfp4", {**CT_NVFP4, "format": "mixfp4-pack-quantized"}, "says mixfp4-pack-quantized"),
        ("ct_nvfp4", {**CT_NVFP4, "format": "mixed-precision", "config_groups": {"a": {"format": "pack-quantized"}}}, "says pack-quantized"),
        ("ct_int4_sym_g32", {**CT_INT4, "format": "marlin-24"}, "says marlin-24"),
        ("ct_int4_sym_g32", {**CT_INT4, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "a rotation of the weights"),
        ("ct_int4_sym_g32", {**CT_INT4, "config_groups": {"a": {"weights": {"actorder": "group"}}}}, "weight_g_idx does not stand beside"),
        ("gptqmodel_v2_asym_g32", {}, "the configuration says nothing"),
        ("gptqmodel_v2_asym_g32", AWQ, "GPTQ tensors, but the configuration says awq"),
        ("gptqmodel_v2_asym_g32", {**GPTQ_V2, "quant_method": "auto-round"}, "says auto-round"),
        ("gptqmodel_v2_asym_g32", {**GPTQ_V2, "checkpoint_format": "gptq_p"}, "GPTQ in the format gptq_p"),
        ("gptqmodel_v1_asym_g32", GPTQ_V1, "holds a zero of 15"),
        ("gptqmodel_v1_sym_g32", {**GPTQ_V2, "sym": True}, "qzeros holds zeros other than 8"),
        ("gptqmodel_v2_asym_g32", {**GPTQ_V2, "meta": {"rotation": "hadamard"}}, "a rotation of the weights"),
        ("autoawq_g32", {**AWQ, "version": "gemv"}, "AWQ in the version gemv"),
        ("autoawq_g32", GPTQ_V1, "AWQ tensors, but the configuration says gptq"),
    ],
)
def test_look_alikes_are_told_apart_or_refused(tmp_path, name, declared, expected):
    tensors = sample(name)
    folder = one_module(tmp_path, stored_parts(tensors), declared, tensors["expected"].shape)
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(folder)
    assert f"{Q}." in str(caught.value)


@pytest.mark.parametrize(
    "name, declared",
    [
        ("ct_nvfp4", {**CT_NVFP4, "format": "mixed-precision", "config_groups": {"a": {"format": "nvfp4-pack-quantized"}, "b": {"format": "float-quantized"}}}),
        ("ct_nvfp4", {}),
        ("ct_int4_asym_g32", {**CT_INT4, "transform_config": {}, "config_groups": {"a": {"weights": {"actorder": "static"}}}}),
        ("autoawq_g32", {**AWQ, "version": "GEMM"}),
        ("gptqmodel_v1_sym_g32", {"quant_method": "gptq", "sym": True}),
        ("modelopt_nvfp4", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
    ],
)
def test_other_ways_to_declare_the_same(tmp_path, name, declared):
    expected = sample(name)["expected"]
    folder = one_module(tmp_path, stored_parts(sample(name)), declared, expected.shape)
    assert torch.equal(load(folder)[NAME].dequantize(expected.dtype), expected)


@pytest.mark.parametrize(
    "name, file, content",
    [
        ("modelopt_nvfp4", "hf_quant_config.json", {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"quant_algo": "NVFP4"}}),
        ("gptqmodel_v2_sym_g128", "quantize_config.json", {"bits": 4, "sym": True, "checkpoint_format": "gptq_v2"}),
    ],
)
def test_declared_in_a_file_beside_config_json(tmp_path, name, file, content):
    expected = sample(name)["expected"]
    folder = one_module(tmp_path, stored_parts(sample(name)), {}, expected.shape)
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    assert torch.equal(load(folder)[NAME].dequantize(expected.dtype), expected)
    (folder / file).write_text("[1]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=file):
        plan_of(folder)


def test_int4_of_two_scales_is_not_nvfp4(tmp_path):
    parts = {"weight": torch.zeros(32, 64, dtype=torch.uint8), "weight_scale": torch.ones(64, 1), "weight_scale_2": torch.ones(())}
    with pytest.raises(UnsupportedFormatError, match="int4 of two scales"):
        plan_of(one_module(tmp_path, parts, MODELOPT))
