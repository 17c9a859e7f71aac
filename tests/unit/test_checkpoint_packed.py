"""4-bit files: every format to not one different value against its own library, and whole checkpoints."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint_samples import canonical_weights, load, official_weights, plan_of, text_only_config, tiny_config, write_raw
from packed_samples import (
    DECLARED,
    DECLARED_BY_SCHEME,
    FOLDER,
    GPTQ_V2,
    MODELOPT,
    one_module,
    packed,
    packed_checkpoint,
    sample,
    stored_parts,
)

from a3b_engine.checkpoint.packed import PackedWeight, pack_codes, unpack_codes
from a3b_engine.checkpoint.reader import LoadCancelled
from a3b_engine.checkpoint.repack import PLACE
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.errors import UnsupportedFormatError
from a3b_engine.model.linear import dense

NAME = "layers.1.self_attn.q_proj.weight"


# Against the libraries


@pytest.mark.parametrize("name", DECLARED)
def test_a_matrix_of_the_library_is_what_the_library_says(tmp_path, pieces, name):
    tensors = sample(name)
    expected = tensors["expected"]
    folder = one_module(tmp_path, stored_parts(tensors), DECLARED[name], expected.shape)
    weight = load(folder)[NAME]
    assert isinstance(weight, PackedWeight) and weight.shape == expected.shape
    assert (weight.dequantize(expected.dtype) != expected).sum() == 0
    assert torch.equal(load(folder, expected.dtype, dequantize=True)[NAME], expected)
    if "expected_f32" in tensors:
        assert (weight.dequantize(torch.float32) != tensors["expected_f32"]).sum() == 0
    entry = plan_of(folder).entries[NAME]
    assert weight.nbytes == entry.device_bytes(torch.bfloat16, False)
    assert weight.scale.dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32)


def test_every_sample_has_a_test():
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(DECLARED) | {"gptqmodel_v2_act_order"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


def test_the_samples_hold_what_is_hard():
    assert (sample("modelopt_nvfp4")["expected_f32"][3, 16:48] == 0).all()
    words = sample("gptqmodel_v1_asym_g32")["qzeros"].view(torch.uint8)
    assert ((words & 15) == 15).any()  # a zero of 0, lowered by one: its word borrowed
    scale = sample("ct_nvfp4")["weight_global_scale"]
    assert not torch.equal(1 / scale, (1 / scale).bfloat16().float())  # dividing by it is not multiplying by its inverse


def test_act_order_is_refused_by_tensor_name(tmp_path):
    tensors = sample("gptqmodel_v2_act_order")
    folder = one_module(tmp_path, stored_parts(tensors), {**GPTQ_V2, "sym": True, "desc_act": True}, tensors["expected"].shape)
    with pytest.raises(UnsupportedFormatError, match=r"q_proj.g_idx sorts the columns by their activations"):
        load(folder)


def test_desc_act_with_columns_in_order_is_read(tmp_path):
    tensors = sample("gptqmodel_v2_asym_g32")
    folder = one_module(tmp_path, stored_parts(tensors), {**GPTQ_V2, "desc_act": True}, tensors["expected"].shape)
    assert torch.equal(load(folder)[NAME].dequantize(torch.float16), tensors["expected"])


# Whole checkpoints


@pytest.mark.parametrize("scheme", DECLARED_BY_SCHEME)
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_mixed_checkpoint(tmp_path, pieces, scheme, dequantize):
    truth = packed_checkpoint(tmp_path, scheme)
    plan = plan_of(tmp_path)
    steps = []
    weights = load(tmp_path, torch.bfloat16, dequantize=dequantize, progress=lambda done, total: steps.append((done, total)))
    for name, value in truth.items():
        kind = torch.Tensor if dequantize else ScaledWeight if ".self_attn." in name else PackedWeight
        assert type(weights[name]) is kind
        assert torch.equal(dense(weights[name], torch.bfloat16), value.bfloat16()), name
    stack = weights["layers.0.mlp.experts.down.weight"]
    if not dequantize:
        some = torch.tensor([3, 1])
        assert torch.equal(stack[some].dequantize(torch.float32), truth["layers.0.mlp.experts.down.weight"][some])
        assert torch.equal(stack[2].dequantize(torch.float32), truth["layers.0.mlp.experts.down.weight"][2])
    assert sum(weight.nbytes for weight in weights.values()) == plan.device_bytes(torch.bfloat16, dequantize)
    assert steps[-1] == (plan.stored_bytes, plan.stored_bytes)
    untouched = canonical_weights(tiny_config(shared_expert_intermediate_size=64))["layers.0.mlp.gate.weight"]
    assert torch.equal(weights["layers.0.mlp.gate.weight"], untouched.bfloat16())
    activations = {"nvfp4_modelopt": "input_scale", "nvfp4_ct": "input_global_scale"}.get(scheme)
    assert bool(plan.unused) == bool(activations) and all(name.endswith(f".{activations}") for name in plan.unused)


def test_a_text_only_export(tmp_path):
    config = text_only_config(shared_expert_intermediate_size=64)
    truth = packed_checkpoint(tmp_path, "nvfp4_modelopt", config)
    assert torch.equal(load(tmp_path)["lm_head.weight"].dequantize(torch.float32), truth["lm_head.weight"])


@pytest.mark.parametrize("scheme", ["nvfp4_modelopt", "int4_ct", "gptq_v1", "awq"])
def test_it_answers_as_the_plain_weights_do(random_checkpoint, tmp_path, monkeypatch, scheme):
    from engine_samples import GREEDY

    from a3b_engine import Engine, Prompt

    config = json.loads((random_checkpoint / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    truth = packed_checkpoint(tmp_path / "packed", scheme, config, seed=3)
    for file in random_checkpoint.iterdir():
        if file.suffix not in (".safetensors",) and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, tmp_path / "packed" / file.name)
    prompt = Prompt(user="Tell me")
    answers, logits = [], []
    for below in (1 << 40, 0):  # multiplied out while loading, and kept packed
        monkeypatch.setattr("a3b_engine.resident.CPU_DEQUANTIZE_BELOW", below)
        with_packed = Engine.load(tmp_path / "packed", context=256)
        held = with_packed._residence.weights["layers.0.mlp.experts.up.weight"]
        assert isinstance(held, PackedWeight) is (below == 0)
        assert torch.equal(dense(held, torch.float32), truth["layers.0.mlp.experts.up.weight"])
        assert with_packed.weight_bytes == with_packed.loaded_bytes
        answers.append(with_packed.generate(prompt, replace(GREEDY, max_new_tokens=12)))
        logits.append(with_packed.logits([5, 6, 7, 8]))
        with_packed.close()
    assert answers[0].text == answers[1].text and answers[0].usage.completion_tokens > 0
    assert torch.equal(logits[0], logits[1]) and logits[0].isfinite().all()


def test_cancelling_leaves_nothing(tmp_path):
    packed_checkpoint(tmp_path, "gptq_v2")
    with pytest.raises(LoadCancelled):
        load(tmp_path, cancel=lambda: True)


@pytest.mark.parametrize("name, shape", [("embed_tokens", (64, 64)), ("layers.0.mlp.gate", (4, 64)), ("layers.0.linear_attn.in_proj_a", (2, 64))])
def test_weights_the_engine_needs_plain_are_multiplied_out(tmp_path, name, shape):
    module = f"model.language_model.{name}"
    tensors = official_weights(tiny_config())
    parts, truth = packed("nvfp4_modelopt", *shape, torch.Generator().manual_seed(1))
    del tensors[f"{module}.weight"]
    tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
    write_raw(tmp_path, tensors, {**tiny_config(), "quantization_config": MODELOPT})
    assert torch.equal(load(tmp_path, torch.bfloat16)[f"{name}.weight"], truth.bfloat16())


# The record and the repacking


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_come_back(bits):
    values = torch.randint(0, 2**bits, (2, 3, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpack_codes(pack_codes(values, bits), bits), values)


def test_the_layout_of_codes_is_the_one_described():
    values = torch.arange(32, dtype=torch.uint8)
    four, three = pack_codes(values % 16, 4), pack_codes(values % 8, 3)
    assert four[0] == 0x10 and four[7] == 0xFE
    for column in range(32):
        low = (int(three[column // 4]) >> (2 * (column % 4))) & 3
        high = (int(three[8 + column // 8]) >> (column % 8)) & 1
        assert low + 4 * high == column % 8


def test_zeros_down_a_ragged_number_of_rows():
    zeros = torch.arange(20)[:, None].expand(20, 3) % 16
    words = torch.zeros(3, 3, dtype=torch.int64)
    for row in range(20):
        words[row // 8] |= zeros[row] << (4 * (row % 8))
    target = torch.full((20, 3), 99, dtype=torch.uint8)
    for first in (0, 1, 2):
        PLACE["ct_zeros"](words[first : first + 1].to(torch.uint32).view(torch.int32), target, first)
    assert torch.equal(target.long(), zeros)


@pytest.mark.parametrize(
    "change",
    [
        dict(codes=torch.zeros(2, 9, dtype=torch.uint8)),
        dict(codes=torch.zeros(2, 16, dtype=torch.int32)),
        dict(scale=torch.ones(2, 2)),
        dict(scale=torch.ones(2, 1, dtype=torch.float64)),
        dict(zero=torch.zeros(2, 1)),
        dict(factor=torch.ones(1)),
        dict(values="nf4"),
        dict(values="e2m1", zero=torch.zeros(2, 1, dtype=torch.uint8)),
        dict(group=24),
        dict(bits=5),
    ],
)
def test_parts_that_do_not_fit_make_no_record(change):
    parts = dict(codes=torch.zeros(2, 16, dtype=torch.uint8), scale=torch.ones(2, 1), zero=None, factor=None, values="int", group=32, bits=4)
    assert PackedWeight(**parts).shape == (2, 32)
    with pytest.raises(ValueError):
        PackedWeight(**{**parts, **change})


def test_only_stacks_are_indexed():
    weight = PackedWeight(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), None, None, "int", 32)
    with pytest.raises(IndexError):
        weight[0]


def test_kernels_decline_and_leave_it_to_the_plain_path():
    pytest.importorskip("triton")
    from a3b_engine.kernels.gemv import common_format
    from a3b_engine.kernels.support import Target, UnsupportedByKernel

    weight = PackedWeight(torch.zeros(32, 16, dtype=torch.uint8), torch.ones(32, 1), None, None, "int", 32)
    target = Target(torch.device("cpu"), (9, 0), 132, True, True)
    with pytest.raises(UnsupportedByKernel, match="weights of torch.uint8"):
        common_format([weight], target)


@pytest.mark.parametrize("scheme", ["nvfp4_modelopt", "int4_ct"])
def test_whole_models_are_declined_too(tmp_path, scheme):
    pytest.importorskip("triton")
    from a3b_engine.config import ModelConfig
    from a3b_engine.kernels.support import Target, UnsupportedByKernel
    from a3b_engine.model.text import TextModel
    from a3b_engine.runtime.decode import trial_step
    from a3b_engine.runtime.prefill import FastText

    packed_checkpoint(tmp_path, scheme)
    model = TextModel(ModelConfig.from_folder(tmp_path).text, load(tmp_path, torch.bfloat16))
    target = Target(torch.device("cpu"), (9, 0), 132, True, True)
    for plan in (lambda: trial_step(model, target), lambda: FastText(model, target)):
        with pytest.raises(UnsupportedByKernel):
            plan()
