"""The decode step of models whose weights are packed, against the plain model. Not collected by itself: test_kernels_packed.py runs it
under Triton's interpreter."""

import pytest
import torch
from interpreted_decode import CONFIG, CPU, PROMPT, by_kernels, error, make_model, prefilled

from a3b_engine.checkpoint.names import expected_tensors, may_stay_scaled
from a3b_engine.kernels import packed_experts, packed_gemv
from a3b_engine.kernels.fp8_gemv import random_fp8
from a3b_engine.kernels.packed_samples import random_packed
from a3b_engine.model.text import TextModel
from a3b_engine.runtime import decode
from a3b_engine.runtime.forward import forward_chunks

NVFP4 = dict(scale=torch.float8_e4m3fn, factor=True)


@pytest.fixture(autouse=True)
def no_self_tests(monkeypatch):
    """They have tests of their own."""
    for module in (packed_experts, packed_gemv):
        monkeypatch.setattr(module, "usable", lambda kernel, device: True)


def packed_model(kinds):
    """kinds: of (part of a name, form), the first that fits counts: a form of random_packed, "fp8" with one scale a matrix, or "dense"."""
    weights = {}
    for seed, (name, shape) in enumerate(expected_tensors(CONFIG).items()):
        form = next((form for part, form in kinds if part in name), "dense") if may_stay_scaled(name) or name == "lm_head.weight" else "dense"
        if form == "fp8":
            weights[name] = random_fp8(shape, shape[-2:], CPU, seed=seed)
            weights[name].scale.fill_(3e-3)
        elif form == "dense":
            weights[name] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        else:
            weights[name] = random_packed(shape, form, 16, CPU, seed=seed, **(NVFP4 if form == "e2m1" else {}))
            weights[name].scale.copy_((weights[name].scale.float() * 4).to(weights[name].scale.dtype))
    return TextModel(CONFIG.text, weights)


@pytest.mark.parametrize(
    "kinds",
    [
        [("mlp.experts", "int4"), ("", "fp8")],
        [("lm_head", "int4"), ("mlp", "e2m1"), ("in_proj_z", "dense"), ("k_proj", "fp8"), ("", "int4")],
        [("mlp.experts", "fp8"), ("shared_expert", "dense"), ("", "fp8")],
    ],
    ids=["int4 experts", "everything", "dense shared expert"],
)
def test_steps_equal_the_plain_model(kinds):
    model = packed_model(kinds)
    plain, _ = prefilled(model, PROMPT[:3])
    step, state, token = by_kernels(model, PROMPT[:3])
    for number in (5, 20):
        *_, hidden = forward_chunks(model, CONFIG, plain, [number])
        token.fill_(number)
        step.launch()
        assert error(step.logits, model.logits(hidden)[0]) < 1e-5


def test_only_packed_models_ask_for_their_self_tests():
    assert decode.packed_kernels(make_model("fp8")) == ()
    assert set(decode.packed_kernels(packed_model([("mlp.experts", "int4"), ("o_proj", "e2m1"), ("", "fp8")]))) == {
        "packed_experts.int4", "packed_experts.int4_matrix_units", "packed_gemv.e2m1", "packed_gemv.e2m1_matrix_units",
    }  # fmt: skip
