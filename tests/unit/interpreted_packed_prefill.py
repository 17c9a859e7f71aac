"""Kernels of many tokens over packed weights against the model, in float32. Not collected by itself:
test_kernels_packed_prefill.py runs it under Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()

from a3b_engine.checkpoint.packed import PackedWeight, pack_codes  # noqa: E402
from a3b_engine.kernels import expert_parts, fp8_gemm, moe_prefill, packed_prefill, route_prefill, support  # noqa: E402
from a3b_engine.kernels.expert_table import ExpertTable, random_experts  # noqa: E402
from a3b_engine.kernels.fp8_gemv import random_fp8  # noqa: E402
from a3b_engine.kernels.launcher import Launchers  # noqa: E402
from a3b_engine.kernels.packed_prefill import PackedForm, random_packed  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.model.moe import ExpertWeights, MoEWeights  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.prefill import PACKED_KERNELS, FastText, packed_kernels  # noqa: E402

CPU = torch.device("cpu")
WHERE = support.target("cpu")
LIMIT = 2e-5  # float32, sums in another order
INT4 = PackedForm("int", 4, 32, torch.float16, False, "")
INT4_ZERO = PackedForm("int", 4, 64, torch.float16, True, "")
INT3 = PackedForm("int", 3, 64, torch.float16, False, "")
INT3_ZERO = PackedForm("int", 3, 32, torch.bfloat16, True, "")
NVFP4 = PackedForm("e2m1", 4, 16, torch.float8_e4m3fn, False, "times")
SMALL = replace(
    PUBLISHED, vocab_size=50, hidden_size=64, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=8, mrope_section=(2, 1, 1),
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
)  # fmt: skip


def random(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator) * scale


@pytest.mark.parametrize("kernel", PACKED_KERNELS)
def test_the_self_tests_pass(kernel):
    assert support.usable(kernel, "cpu")


def model_of(config, generator, form_of):
    """Random weights; form_of(name) of what FP8 files scale: a PackedForm, "fp8", "tensor" (FP8 with one scale) or None (plain)."""
    from a3b_engine.checkpoint.names import expected_tensors, may_stay_scaled

    class Whole:
        text, vision = config, None

    weights = {}
    for number, (name, shape) in enumerate(expected_tensors(Whole).items()):
        form = form_of(name) if may_stay_scaled(name) and name != "lm_head.weight" else None
        if form is None:
            weights[name] = random(generator, *shape, scale=0.3)
        elif isinstance(form, PackedForm):
            weights[name] = random_packed(replace(form, group=math.gcd(form.group, shape[-1])), tuple(shape), CPU, number)
            weights[name].scale = (weights[name].scale.float() * 8.0).clamp(max=448).to(form.scale)
        else:
            weights[name] = random_fp8(tuple(shape), (1 << 20, 1 << 20) if form == "tensor" else (128, 128), CPU, seed=number)
            weights[name].scale.mul_(8.0)
    return TextModel(config, weights)


def experts_in(form, shared="fp8", rest="fp8"):
    return lambda name: form if ".experts." in name else shared if ".shared_expert." in name else rest


def mixed(name):
    """As in files that leave some matrices of a launch as they were."""
    if ".experts." in name:
        return NVFP4 if "down" in name else INT4
    for part, form in (("q_proj", INT4), ("k_proj", "tensor"), ("v_proj", "tensor"), ("in_proj_qkv", "fp8"), ("in_proj_z", INT4_ZERO), ("o_proj", INT3)):
        if part in name:
            return form
    return None if ".shared_expert." in name else "tensor"


@pytest.mark.parametrize(
    "form_of",
    [
        experts_in(INT4), experts_in(INT3), experts_in(NVFP4), experts_in(INT3_ZERO, None, None),
        experts_in(INT4_ZERO, INT4_ZERO, INT4), experts_in(NVFP4, INT3, NVFP4), mixed,
    ],
    ids=["int4", "int3", "nvfp4", "int3, else plain", "int4 throughout", "nvfp4 and int3", "mixed"],
)  # fmt: skip
def test_a_whole_model(form_of):
    generator = torch.Generator().manual_seed(3)
    model = model_of(SMALL, generator, form_of)
    tokens = 7
    x, positions = random(generator, tokens, SMALL.hidden_size), torch.arange(tokens).expand(3, -1)
    fast, results = FastText(model, WHERE), []
    projections, experts = isinstance(form_of("q_proj"), PackedForm), isinstance(form_of(".experts."), PackedForm)
    assert packed_kernels(model) == ("packed_prefill",) * projections + ("moe_prefill.packed",) * experts
    for runner, pieces in ((fast, (5, 2)), (model, (tokens,))):
        state, hidden, start = SequenceState(SMALL, 1 << 12, CPU, torch.float32), [], 0
        for size in pieces:
            hidden.append(runner.forward(x[start : start + size], positions[:, start : start + size], state.layers))
            start += size
        results.append(torch.cat(hidden))
    assert support.relative_error(*results) <= LIMIT
    assert torch.equal(fast.logits(results[0]), model.logits(results[0]))


def experts_of(form, generator, count=4, hidden=128, inner=64, shared=None):
    weights = random_experts(count, hidden, inner, shared or inner, CPU)
    shapes = ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner))
    stacks = ExpertWeights(*(random_packed(replace(form, group=min(form.group, shape[-1])), shape, CPU, at) for at, shape in enumerate(shapes)))
    router, switch = random(generator, count, hidden, scale=0.2), random(generator, 1, hidden, scale=0.2)
    return MoEWeights(router, stacks, weights.shared_gate, weights.shared_up, weights.shared_down, switch)


def outcome(weights, plan, generator, table=None):
    """The rows of a plan for 20 tokens, and what they should be."""
    norm, residual = random(generator, weights.router.shape[1], scale=0.1), random(generator, 20, weights.router.shape[1])
    route = route_prefill.RoutePlan(weights.router, weights.shared_switch, norm, plan.top_k, Launchers(WHERE), torch.float32)
    ids, shares, out = moe_prefill.run(route, plan, residual, norm, torch.float32, table)
    x, _, _ = moe_prefill.chosen(residual, norm, weights.router, weights.shared_switch, plan.top_k)
    whole = moe_prefill.ExpertsPrefillPlan(weights, plan.top_k, Launchers(WHERE), torch.float32)
    return out, whole.reference(x.float(), ids, shares)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("form", [replace(INT4, group=128), replace(INT4_ZERO, scale=torch.float8_e4m3fn), INT3], ids=["int4 128", "zero e4m3", "int3"])
def test_scales_before_the_product_and_behind_it(form, scaled):
    generator = torch.Generator().manual_seed(5)
    weights = experts_of(form, generator, shared=48)
    if form.scale == torch.float8_e4m3fn:
        for stack in (weights.experts.gate, weights.experts.up, weights.experts.down):
            stack.scale = torch.linspace(0.02, 0.1, stack.scale.numel()).view(stack.scale.shape).to(form.scale)
    tiles = expert_parts.expert_tiles(1, WHERE)._replace(scaled=scaled)
    plan = moe_prefill.ExpertsPrefillPlan(weights, 2, Launchers(WHERE), torch.float32, tiles=tiles)
    assert support.relative_error(*outcome(weights, plan, generator)) <= LIMIT


def test_scales_of_groups_of_a_whole_row():
    generator = torch.Generator().manual_seed(6)
    weights = experts_of(replace(INT4, group=1 << 20), generator, hidden=192, inner=64)
    plan = moe_prefill.ExpertsPrefillPlan(weights, 2, Launchers(WHERE), torch.float32)
    assert support.relative_error(*outcome(weights, plan, generator)) <= LIMIT


@pytest.mark.parametrize("form", [INT4, NVFP4, None], ids=["int4", "nvfp4", "fp8"])
def test_experts_found_by_another_table_alone(form):
    """The plan knows their layout from stacks without memory; addresses come with the call, and rows nobody needs hold nothing."""
    generator = torch.Generator().manual_seed(7)
    weights = experts_of(form or INT4, generator)
    if form is None:
        weights = replace(weights, experts=random_experts(4, 128, 64, 64, CPU).experts)
    weights.router[2] = weights.router[1]  # equal logits go to the lower id: with one choice nobody goes to expert 2
    table = ExpertTable(weights).pointers.clone()
    table[2] = 0
    stacks = (weights.experts.gate, weights.experts.up, weights.experts.down)
    layout = replace(weights, experts=ExpertWeights(*(stack.to("meta") for stack in stacks)))
    plan = moe_prefill.ExpertsPrefillPlan(layout, 1, Launchers(WHERE), torch.float32)
    assert support.relative_error(*outcome(weights, plan, generator, table)) <= LIMIT
    with pytest.raises(ValueError, match="table"):
        outcome(weights, plan, generator)


def test_every_code_is_the_number_it_stands_for():
    """A row for each code; NaN in a scale shows in its row."""
    for form in (INT4, INT3, NVFP4):
        codes = torch.arange(1 << form.bits, dtype=torch.uint8)[:, None].expand(-1, 128)
        scale = torch.ones(len(codes), 128 // form.group)
        broken = form.scale != torch.float8_e4m3fn  # of which the interpreter reads NaN as a number
        scale[3, 0] = torch.nan if broken else 1.5
        weight = PackedWeight(pack_codes(codes, form.bits), scale.to(form.scale), None, None, form.values, form.group, form.bits)
        out = torch.empty(len(codes), 128)
        packed_prefill.PackedMatrix(weight, Launchers(WHERE))(out)
        assert torch.equal(out.nan_to_num(9.0), weight.dequantize(torch.float32).nan_to_num(9.0))
        assert out[3, 0].isnan() == broken and not out[3, -1].isnan()


def test_projections_of_several_layouts():
    generator, launchers = torch.Generator().manual_seed(8), Launchers(WHERE)
    matrices = [random_packed(INT4, (40, 64), CPU), random_fp8((24, 64), (128, 128), CPU), random(generator, 8, 64)]
    tail, x = random(generator, 6, 64), random(generator, 9, 64)
    plan = fp8_gemm.ProjectionPlan(matrices, launchers, torch.float32, tail=tail)
    out, scratch = torch.full((9, 78), torch.nan), torch.full((78, 64), torch.nan)
    assert plan.many(1) and plan.splits(1) == 1
    plan(x, out, scratch)
    assert support.relative_error(out, plan.reference(x)) <= LIMIT
    assert torch.equal(scratch, torch.cat((matrices[0].dequantize(torch.float32), matrices[1].dequantize(torch.float32), matrices[2], tail)))


def test_plain_matrices_of_one_launch_are_copied_as_they_are():
    generator = torch.Generator().manual_seed(9)
    matrices, tail = [random(generator, rows, 64) for rows in (40, 24)], random(generator, 6, 64)
    plan = fp8_gemm.ProjectionPlan(matrices, Launchers(WHERE), torch.float32, tail=tail, from_tokens=1)
    assert torch.equal(plan.dequantized(torch.full((70, 64), torch.nan)), torch.cat((*matrices, tail)))


def test_what_the_kernels_cannot_take_is_refused_while_planning(monkeypatch):
    generator, launchers = torch.Generator().manual_seed(0), Launchers(WHERE)

    def plan(weights):
        return moe_prefill.ExpertsPrefillPlan(weights, 2, launchers, torch.float32)

    weights = experts_of(INT4, generator)
    with pytest.raises(support.UnsupportedByKernel, match="several|different layouts"):
        plan(replace(weights, experts=replace(weights.experts, up=experts_of(INT3, generator).experts.up)))
    with pytest.raises(support.UnsupportedByKernel, match="packed and other"):
        plan(replace(weights, experts=replace(weights.experts, up=random_experts(4, 128, 64, 64, CPU).experts.up)))
    with pytest.raises(support.UnsupportedByKernel, match="groups of 16 of 48"):
        plan(experts_of(replace(NVFP4, group=16), generator, hidden=48))
    with pytest.raises(support.UnsupportedByKernel, match="on cpu"):
        packed_prefill.PackedMatrix(random_packed(INT4, (16, 64), CPU), Launchers(replace(WHERE, device=torch.device("cuda:0"))))
    monkeypatch.setattr(packed_prefill, "usable", lambda kernel, device: False)
    for refused in (lambda: plan(weights), lambda: fp8_gemm.ProjectionPlan([random_packed(INT4, (16, 64), CPU)], launchers, torch.float32)):
        with pytest.raises(support.UnsupportedByKernel, match="self-test"):
            refused()
    fp8_gemm.ProjectionPlan([random_fp8((16, 64), (128, 128), CPU)], launchers, torch.float32)
