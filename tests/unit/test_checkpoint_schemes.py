"""Storage formats: FP8 in every scale shape is read, formats that are not read are refused by their name (4 bits: test_checkpoint_packed)."""

import json

import pytest
import torch
from checkpoint_samples import load, official_weights, plan_of, tiny_config, write_raw

from a3b_engine.checkpoint.header import TensorInfo
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.checkpoint.schemes import FORMATS, ScaleLayout, declared_block_size, scale_layout
from a3b_engine.errors import CheckpointError, UnsupportedFormatError

Q = "model.language_model.layers.1.self_attn.q_proj"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def i32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape):
    return torch.ones(shape).to(E4M3)


REFUSED = {
    "MXFP4 (compressed-tensors)": {"weight_packed": u8(64, 32), "weight_scale": u8(64, 2)},
    "MXFP8": {"weight": fp8(64, 64), "weight_scale": u8(64, 2)},
    "int4 of two scales (ModelOpt W4A8)": {"weight": u8(32, 64), "weight_scale": torch.ones(64, 1), "weight_scale_2": torch.ones(())},
    "MLX": {"weight": torch.zeros(64, 8, dtype=torch.uint32), "scales": torch.ones(64, 1), "biases": torch.ones(64, 1)},
    "bitsandbytes 4-bit": {"weight": u8(2048, 1), "weight.absmax": torch.ones(64), "weight.quant_state.bitsandbytes__nf4": u8(9)},
    "bitsandbytes int8": {"weight": torch.zeros(64, 64, dtype=torch.int8), "SCB": torch.ones(64)},
    "int8": {"weight": torch.zeros(64, 64, dtype=torch.int8), "weight_scale": torch.ones(64, 1)},
    "EXL3": {"trellis": torch.zeros(4, 4, 48, dtype=torch.int16), "suh": torch.ones(64), "svh": torch.ones(64)},
    "EXL2": {"q_weight": i32(8, 64), "q_scale": i32(1, 8), "q_invperm": i32(64)},
    "HQQ": {"W_q": u8(64, 32), "meta": u8(3)},
    "torchao (flattened tensor subclasses)": {"_weight_qdata": u8(64, 32), "_weight_scale": torch.ones(64)},
    "Quanto": {"weight._data": u8(64, 64), "weight._scale": torch.ones(64)},
    "Marlin / QQQ packed int4": {"B": i32(4, 128), "s": torch.ones(1, 64)},
    "ModelOpt AWQ (activation pre-scaling)": {"weight": u8(64, 32), "weight_scale": fp8(64, 4), "pre_quant_scale": torch.ones(64)},
    "SVDQuant (Nunchaku / ModelOpt NVFP4_SVD)": {"weight": u8(64, 32), "svdquant_lora_a": torch.ones(4, 64)},
    "ComfyUI single-file quantization": {"weight": fp8(64, 64), "weight_scale": torch.ones(()), "comfy_quant": u8(20)},
    "FP8 FNUZ": None,  # torch writes no such file here; see the tests below
    "FP4 in elements of 4 bits": None,
    "MXFP4 (fused blocks)": None,
}


def with_module(parts, module=Q):
    tensors = official_weights(tiny_config())
    del tensors[f"{Q}.weight"]
    tensors.update({f"{module}.{part}" if module else part: tensor for part, tensor in parts.items()})
    return tensors


@pytest.mark.parametrize("name", [name for name, parts in REFUSED.items() if parts])
def test_other_formats_are_refused_by_name(tmp_path, name):
    config = {**tiny_config(), "quantization_config": {"quant_method": "some-tool", "format": "some-format"}}
    folder = write_raw(tmp_path, with_module(REFUSED[name]), config)
    with pytest.raises(UnsupportedFormatError) as caught:
        plan_of(folder)
    text = str(caught.value)
    assert f"stored as {name} (config.json says some-tool, some-format)" in text
    assert f"{Q}." in text and "official FP8 or BF16 repository" in text


def test_every_refused_row_of_the_table_has_a_test():
    assert {row.name for row in FORMATS if row.scheme is None} == set(REFUSED)


def test_fused_mxfp4_experts_are_refused(tmp_path):
    base = "model.language_model.layers.0.mlp.experts."
    tensors = {**official_weights(tiny_config()), f"{base}gate_up_proj_blocks": u8(4, 64, 2, 16), f"{base}gate_up_proj_scales": u8(4, 64, 2)}
    with pytest.raises(UnsupportedFormatError, match="MXFP4 \\(fused blocks\\)"):
        plan_of(write_raw(tmp_path, tensors))


@pytest.mark.parametrize(
    "stored, old, new, expected",
    [
        (fp8(64, 64), b'"F8_E4M3"', b'"F8_E4M3FNUZ"', "FP8 FNUZ"),
        (u8(64, 32), b'"U8","shape":[64,32]', b'"F4","shape":[64,64]', "FP4 in elements of 4 bits"),
    ],
)
def test_dtypes_torch_does_not_write_are_refused(tmp_path, stored, old, new, expected):
    folder = write_raw(tmp_path, with_module({"weight": stored, "weight_scale": torch.ones(())}))
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert old in raw[8 : 8 + length]
    header = raw[8 : 8 + length].replace(old, new)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    with pytest.raises(UnsupportedFormatError, match=expected):
        plan_of(folder)


@pytest.mark.parametrize(
    "metadata, top, expected",
    [
        ({"format": "mlx"}, {}, "MLX conversion"),
        ({"_quantization_metadata": "{}"}, {}, "ComfyUI single-file"),
        (None, {"scaled_fp8": torch.ones(())}, "ComfyUI single-file"),
    ],
)
def test_marks_of_a_whole_file(tmp_path, metadata, top, expected):
    folder = write_raw(tmp_path, {**official_weights(tiny_config()), **top}, metadata=metadata)
    with pytest.raises(UnsupportedFormatError, match=expected):
        plan_of(folder)


def test_raw_integers_without_any_scale_are_not_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"q_proj.weight is stored as U8"):
        plan_of(write_raw(tmp_path, with_module({"weight": u8(64, 64)})))


# FP8


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_f01_scale_multiplies_the_stored_values(tmp_path, suffix):
    config = tiny_config(hidden_size=128, head_dim=64, num_attention_heads=1)
    config["vision_config"]["out_hidden_size"] = 128
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    tensors = official_weights(config)
    tensors[f"{Q}.weight"] = fp8(128, 128)
    tensors[f"{Q}.{suffix}"] = torch.tensor([[0.5]], dtype=torch.bfloat16)
    weight = load(write_raw(tmp_path, tensors, config))["layers.1.self_attn.q_proj.weight"]
    assert isinstance(weight, ScaledWeight)
    assert torch.equal(weight.dequantize(torch.float32), torch.full((128, 128), 0.5))


def test_f01_missing_scale_is_refused_by_tensor_name(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        plan_of(write_raw(tmp_path, with_module({"weight": fp8(64, 64)})))
    assert f"{Q}.weight is F8_E4M3 but no weight_scale_inv or weight_scale" in str(caught.value)


def test_f06_dtype_decides_not_the_skip_list(tmp_path):
    name = "model.language_model.layers.0.linear_attn.in_proj_b"
    for number, skip in enumerate(([name], [name.replace("model.language_model.", "")], ["lm_head"])):
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skip}
        tensors = with_module({"weight": fp8(64, 64), "weight_scale_inv": torch.full((1, 1), 2.0)})
        folder = write_raw(tmp_path / str(number), tensors, {**tiny_config(), "quantization_config": quantization})
        weights = load(folder, torch.bfloat16)
        assert weights["layers.0.linear_attn.in_proj_b.weight"].dtype == torch.bfloat16
        assert torch.equal(weights["layers.0.linear_attn.in_proj_b.weight"].float(), tensors[f"{name}.weight"])
        assert isinstance(weights["layers.1.self_attn.q_proj.weight"], ScaledWeight)


def test_two_scales_for_one_weight(tmp_path):
    parts = {"weight": fp8(64, 64), "weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)}
    with pytest.raises(CheckpointError, match="keep one"):
        plan_of(write_raw(tmp_path, with_module(parts)))


def test_integer_scale(tmp_path):
    with pytest.raises(CheckpointError, match="has dtype I32"):
        plan_of(write_raw(tmp_path, with_module({"weight": fp8(64, 64), "weight_scale": i32(1, 1)})))


def test_fp8_vector_is_refused(tmp_path):
    tensors = official_weights(tiny_config())
    tensors["model.language_model.norm.weight"] = fp8(64)
    tensors["model.language_model.norm.weight_scale"] = torch.ones(())
    with pytest.raises(CheckpointError, match="only matrices"):
        plan_of(write_raw(tmp_path, tensors))


def info(*shape, dtype="BF16"):
    return TensorInfo("x", None, dtype, shape, 0, 0)


@pytest.mark.parametrize(
    "weight, scale, declared, expected",
    [
        ((512, 2048), (4, 16), None, ScaleLayout((128, 128), (4, 16))),
        ((512, 2048), (512, 1), None, ScaleLayout((1, 2048), (512, 1))),
        ((512, 2048), (512,), (128, 128), ScaleLayout((1, 2048), (512, 1))),
        ((512, 2048), (1,), (128, 128), ScaleLayout((512, 2048), (1, 1))),
        ((512, 2048), (), None, ScaleLayout((512, 2048), (1, 1))),
        ((512, 2048), (4, 1, 16, 1), None, ScaleLayout((128, 128), (4, 16))),
        ((512, 2048), (8, 32), (64, 64), ScaleLayout((64, 64), (8, 32))),
        ((512, 2048), (4, 16), (64, 64), ScaleLayout((128, 128), (4, 16))),  # the declared size does not fit, the usual does
        ((300, 200), (3, 2), None, ScaleLayout((128, 128), (3, 2))),
        ((200, 100), (2, 1), None, ScaleLayout((128, 128), (2, 1))),
        ((8, 64, 2048), (8, 1, 16), None, ScaleLayout((128, 128), (1, 16))),
        ((8, 512, 2048), (8,), None, ScaleLayout((512, 2048), (1, 1))),
        ((8, 512, 2048), (8, 1, 1), None, ScaleLayout((512, 2048), (1, 1))),
        ((8, 512, 2048), (1,), None, ScaleLayout((512, 2048), (1, 1), broadcast=True)),
        ((8, 512, 2048), (8, 512, 1), None, ScaleLayout((1, 2048), (512, 1))),
    ],
)
def test_scale_layout_by_shape(weight, scale, declared, expected):
    assert scale_layout(info(*weight, dtype="F8_E4M3"), info(*scale), declared) == expected


@pytest.mark.parametrize("weight, scale", [((512, 2048), (16, 4)), ((512, 2048), (512, 2)), ((512, 2048), (4,)), ((8, 512, 2048), (4, 4, 16))])
def test_scale_that_fits_nothing(tmp_path, weight, scale):
    scale_info = TensorInfo("x.weight_scale", tmp_path, "F32", scale, 0, 0)
    with pytest.raises(CheckpointError, match="neither per tensor, nor per channel, nor in blocks"):
        scale_layout(info(*weight, dtype="F8_E4M3"), scale_info, None)


@pytest.mark.parametrize(
    "quantization, expected",
    [
        ({"weight_block_size": [64, 32]}, (64, 32)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": [128, 128]}}}}, (128, 128)),
        ({"weight_block_size": [0, 128]}, None),
        ({"weight_block_size": "128x128", "config_groups": [1]}, None),
        ({}, None),
    ],
)
def test_declared_block_size(quantization, expected):
    assert declared_block_size(quantization) == expected


def uniform(*shape):
    return lambda generator: torch.rand(shape, generator=generator)


# Scales of a [160, 160] weight: 2 x 2 blocks, 160 channels, one value.
STORED_SCALES = {
    "block bf16": lambda generator: uniform(2, 2)(generator).bfloat16(),
    "block f32": uniform(2, 2),
    "block 4-D": uniform(2, 1, 2, 1),
    "block e8m0": lambda generator: torch.randint(120, 134, (2, 2), dtype=torch.uint8, generator=generator),
    "channel f16": lambda generator: uniform(160, 1)(generator).half(),
    "channel 1-D": uniform(160),
    "tensor [1]": uniform(1),
    "tensor []": uniform(),
}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", STORED_SCALES)
def test_each_scale_shape_is_multiplied_out(tmp_path, kind, dtype):
    # hidden 160 and 2 x 5 x 16 = 160 rows: the last block is ragged both ways.
    config = tiny_config(hidden_size=160, num_attention_heads=5, moe_intermediate_size=160, num_experts=2)
    config["vision_config"]["out_hidden_size"] = 160
    tensors = official_weights(config)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(160, 160, generator=generator).to(dtype)
    scale = STORED_SCALES[kind](generator)
    tensors[f"{Q}.weight"], tensors[f"{Q}.weight_scale"] = codes, scale
    factors = (2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()).reshape(
        {"b": (2, 2), "c": (160, 1), "t": (1, 1)}[kind[0]]
    )
    if kind[0] == "b":
        factors = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :160]
    expected = codes.float() * factors
    folder = write_raw(tmp_path, tensors, config)
    stored = load(folder)["layers.1.self_attn.q_proj.weight"]
    assert stored.data.dtype == dtype and stored.scale.dtype == torch.float32
    assert stored.block == {"b": (128, 128), "c": (1, 160), "t": (160, 160)}[kind[0]]
    assert torch.equal(stored.dequantize(torch.float32), expected)
    assert torch.equal(load(folder, torch.bfloat16, dequantize=True)["layers.1.self_attn.q_proj.weight"], expected.bfloat16())


def test_byte_255_of_a_power_of_two_scale_is_nan(tmp_path):
    parts = {"weight": fp8(64, 64), "weight_scale": torch.full((1, 1), 255, dtype=torch.uint8)}
    weight = load(write_raw(tmp_path, with_module(parts)))["layers.1.self_attn.q_proj.weight"]
    assert weight.scale.isnan().all()


def test_fp8_where_the_engine_needs_plain_numbers_is_multiplied_out(tmp_path):
    tensors = official_weights(tiny_config())
    expected = {}
    for name in ("model.language_model.embed_tokens", "model.language_model.layers.0.mlp.gate", "model.visual.blocks.0.attn.qkv"):
        codes = tensors[f"{name}.weight"].to(E4M3)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = codes, torch.tensor(0.25)
        expected[name.replace("model.language_model.", "").replace("model.", "") + ".weight"] = (codes.float() / 4).bfloat16()
    weights = load(write_raw(tmp_path, tensors), torch.bfloat16)
    for name, value in expected.items():
        assert torch.equal(weights[name], value)


def test_head_may_stay_fp8(tmp_path):
    tensors = official_weights(tiny_config())
    tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = fp8(64, 64), torch.ones(64, 1)
    assert load(write_raw(tmp_path, tensors))["lm_head.weight"].block == (1, 64)


def test_config_alone_never_makes_a_plain_file_quantized(tmp_path):
    config = {**tiny_config(), "quantization_config": json.loads('{"quant_method": "gptq", "bits": 4}')}
    assert plan_of(write_raw(tmp_path, official_weights(tiny_config()), config)).unused == []
