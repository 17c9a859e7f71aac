"""FP8 block-scaled files: the same logits as their weights multiplied out, whether dequantised at load or as stored."""

from __future__ import annotations

import pytest
import torch
from compare import LIMIT, encode, largest
from small_files import dequantized, write_folder
from small_models import ALL, WITH_VISION, model_config
from small_prompts import prompt


# One tensor per expert as published; fused too, where gate and up of "ragged" meet inside a block of 128 rows.
CASES = [(name, "per_expert") for name in ALL] + [("base", "fused"), ("ragged", "fused")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, models, tmp_path_factory):
    """Name, the FP8 folder, its float32 twin multiplied out by the tests, and the reference with those weights."""
    from oracle import Oracle

    name, experts = request.param
    folder = models.folder(name, f"fp8 {experts}")
    tensors = dequantized(folder, model_config(name))
    twin = write_folder(tmp_path_factory.mktemp("dequantized") / name, name, tensors, format="fp32", experts="fused")
    return name, folder, twin, Oracle(name, tensors)


def load(folder, **options):
    from a3b_engine import Engine

    return Engine.load(folder, device="cpu", dtype=torch.float32, **options)


def inputs(name: str):
    return prompt(name, "two images" if name in WITH_VISION else "text")


def test_file_really_is_fp8(case):
    from safetensors import safe_open

    name, folder, _, _ = case
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({key: file.get_slice(key).get_dtype() for key in file.keys()})
    converted = {key for key, dtype in found.items() if dtype == "F8_E4M3"}
    assert converted and all(key + "_scale_inv" in found for key in converted)
    text = model_config(name).get("text_config", model_config(name))
    linear = text["layer_types"].count("linear_attention")
    full = text["layer_types"].count("full_attention")
    fused = any(key.endswith("gate_up_proj") for key in converted)
    of_experts = 2 if fused else 3 * text["num_experts"]
    assert len(converted) == 3 * linear + 4 * full + len(text["layer_types"]) * (3 + of_experts)


def test_dequantised_at_load_equals_the_twin(case, differences):
    name, folder, twin, oracle = case
    ids, pictures = inputs(name)
    ours, plain = load(folder), load(twin)
    logits = ours.logits(ids, images=encode(ours, pictures))
    expected = plain.logits(ids, images=encode(plain, pictures))
    assert differences.note("FP8 file vs dequantised file", largest(logits, expected), name, 1e-6) <= 1e-6
    reference = largest(logits, oracle.logits(ids, pictures))
    assert differences.note("FP8 file vs dequantised reference", reference, name, LIMIT) <= LIMIT


def test_kept_as_stored_equals_the_twin(case, differences, monkeypatch):
    """The path of a model too large to multiply out: FP8 stays in memory and every product dequantises it."""
    monkeypatch.setattr("a3b_engine.resident.CPU_DEQUANTIZE_BELOW", 0)
    name, folder, twin, _ = case
    ids, pictures = inputs(name)
    ours, plain = load(folder), load(twin)
    assert ours.weight_bytes < plain.weight_bytes
    logits = ours.logits(ids, images=encode(ours, pictures))
    expected = plain.logits(ids, images=encode(plain, pictures))
    assert differences.note("FP8 as stored vs dequantised file", largest(logits, expected), name, 1e-6) <= 1e-6
    steps = ours.logits(ids, images=encode(ours, pictures), chunk_size=1)
    assert differences.note("FP8 as stored, step by step", largest(steps, expected), name, LIMIT) <= LIMIT
