"""Kernels of many tokens against the model, in float32. Not collected by itself: test_kernels_prefill.py runs it under
Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()

from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.kernels import attention_prefill, deltanet_prefill, fp8_gemm, moe_prefill, prefill_rows, route_prefill, support  # noqa: E402
from a3b_engine.kernels.expert_table import random_experts  # noqa: E402
from a3b_engine.kernels.fp8_gemv import random_fp8  # noqa: E402
from a3b_engine.kernels.launcher import Launchers  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.model.attention import causal_attention  # noqa: E402
from a3b_engine.model.deltanet import DeltaNetState  # noqa: E402
from a3b_engine.model.moe import MoEWeights  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.prefill import KERNELS, FastText  # noqa: E402

CPU = torch.device("cpu")
WHERE = support.target("cpu")
LIMIT = 2e-5  # float32, sums in another order
SMALL = replace(
    PUBLISHED, vocab_size=50, hidden_size=48, num_hidden_layers=3, layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=8, mrope_section=(2, 1, 1),
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
)  # fmt: skip


def random(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator) * scale


def model_of(config, generator, block=(128, 128), codes=torch.float8_e4m3fn):
    """A model of random weights: FP8 where the published files have it, or dense float32 where block is None."""
    from a3b_engine.checkpoint.names import expected_tensors, may_stay_scaled

    class Whole:
        text, vision = config, None

    weights = {}
    for number, (name, shape) in enumerate(expected_tensors(Whole).items()):
        if may_stay_scaled(name) and name != "lm_head.weight":
            stored = random_fp8(shape, block or (128, 128), CPU, codes, seed=number)
            stored.scale.mul_(8.0)
            weights[name] = stored if block else stored.dequantize(torch.float32)
        else:
            weights[name] = random(generator, *shape, scale=0.3)
    return TextModel(config, weights)


def prompt(config, generator, tokens):
    """Embedded tokens and positions as of text with a picture in it."""
    positions = torch.arange(tokens).expand(3, -1).clone()
    positions[1, tokens // 2 :] += 3
    positions[2, tokens // 3 :] += 1
    return random(generator, tokens, config.hidden_size), positions


def run(model, config, x, positions, pieces):
    state = SequenceState(config, 1 << 12, CPU, torch.float32)
    hidden, start = [], 0
    for size in pieces:
        hidden.append(model.forward(x[start : start + size], positions[:, start : start + size], state.layers))
        start += size
    return torch.cat(hidden), state


def assert_same_states(ours, expected, limit):
    for mine, other in zip(ours.layers, expected.layers):
        if isinstance(mine, DeltaNetState):
            assert support.relative_error(mine.recurrent, other.recurrent) <= limit
            assert support.relative_error(mine.conv, other.conv) <= limit
        else:
            assert mine.length == other.length


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_self_tests_pass(kernel):
    assert support.usable(kernel, "cpu")


@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_a_whole_model(tokens):
    generator = torch.Generator().manual_seed(tokens)
    model = model_of(SMALL, generator)
    x, positions = prompt(SMALL, generator, tokens)
    hidden, state = run(FastText(model, WHERE), SMALL, x, positions, [tokens])
    expected, expected_state = run(model, SMALL, x, positions, [tokens])
    assert support.relative_error(hidden, expected) <= LIMIT
    assert_same_states(state, expected_state, LIMIT)


@pytest.mark.parametrize("pieces", [(1, 1, 65), (2, 63, 3)], ids=str)
def test_pieces_equal_the_whole(pieces):
    generator = torch.Generator().manual_seed(7)
    model = model_of(SMALL, generator)
    x, positions = prompt(SMALL, generator, sum(pieces))
    hidden, state = run(FastText(model, WHERE), SMALL, x, positions, pieces)
    expected, expected_state = run(model, SMALL, x, positions, [sum(pieces)])
    assert support.relative_error(hidden, expected) <= LIMIT
    assert_same_states(state, expected_state, LIMIT)


@pytest.mark.parametrize(
    "block, codes, changes",
    [
        (None, torch.float8_e4m3fn, {}),
        ((1, 1 << 20), torch.float8_e4m3fn, {"hidden_size": 80, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}),
        ((16, 32), torch.float8_e5m2, {"hidden_size": 64, "linear_conv_kernel_dim": 3, "num_key_value_heads": 1}),
        ((128, 128), torch.float8_e5m2, {"hidden_size": 144, "layer_types": ("full_attention", "linear_attention"), "linear_num_key_heads": 2}),
    ],
    ids=["dense", "a scale a channel", "small blocks", "blocks that end ragged"],
)
def test_other_weights_and_sizes(block, codes, changes):
    config = replace(SMALL, **changes)
    generator = torch.Generator().manual_seed(11)
    model = model_of(config, generator, block, codes)
    x, positions = prompt(config, generator, 9)
    fast = FastText(model, WHERE)
    hidden, _ = run(fast, config, x, positions, [7, 2])
    expected, _ = run(model, config, x, positions, [9])
    assert support.relative_error(hidden, expected) <= LIMIT
    assert torch.equal(fast.logits(hidden), model.logits(hidden))


def test_multiplied_out_first_is_the_same_product():
    generator, launchers = torch.Generator().manual_seed(3), Launchers(WHERE)
    matrices = [random_fp8((40, 144), (128, 128), CPU), random_fp8((24, 144), (128, 128), CPU, seed=1), random_fp8((200, 144), (128, 128), CPU, seed=2)]
    tail = random(generator, 6, 144)
    x, outs = random(generator, 9, 144), []
    for start in (1, 100):
        plan = fp8_gemm.ProjectionPlan(matrices, launchers, torch.float32, tail=tail, from_tokens=start)
        out, scratch = torch.full((9, 270), torch.nan), torch.full((270, 144), torch.nan)
        plan(x, out, scratch)
        assert support.relative_error(out, plan.reference(x)) <= LIMIT
        outs.append(out)
        if start == 1:
            assert torch.equal(scratch[:40], matrices[0].dequantize(torch.float32)) and torch.equal(scratch[264:], tail)
    assert support.relative_error(*outs) <= LIMIT


def experts_of(count, top_k, generator, router=None):
    weights = random_experts(count, 48, 32, 32, CPU)
    router = random(generator, count, 48, scale=0.2) if router is None else router
    weights = MoEWeights(router, weights.experts, weights.shared_gate, weights.shared_up, weights.shared_down, random(generator, 1, 48, scale=0.2))
    launchers, norm = Launchers(WHERE), random(generator, 48, scale=0.1)
    route = route_prefill.RoutePlan(router, weights.shared_switch, norm, top_k, launchers, torch.float32)
    return route, moe_prefill.ExpertsPrefillPlan(weights, top_k, launchers, torch.float32), norm, weights


def test_all_tokens_on_one_expert_and_none_on_others():
    generator = torch.Generator().manual_seed(5)
    router = torch.zeros(9, 48)
    router[[4, 7], 0] = torch.tensor([50.0, 40.0])
    route, plan, norm, weights = experts_of(9, 2, generator, router)
    residual = random(generator, 20, 48)
    residual[:, 0] = 2.0
    ids, shares, out = moe_prefill.run(route, plan, residual, norm, torch.float32)
    assert ids.tolist() == [[4, 7]] * 20
    x, _, expected_shares = moe_prefill.chosen(residual, norm, router, weights.shared_switch, 2)
    assert support.relative_error(shares, expected_shares) <= LIMIT
    assert support.relative_error(out, plan.reference(x.float(), ids, shares)) <= LIMIT


def test_equal_logits_go_to_the_lower_id_and_nan_shows_in_the_shares():
    generator = torch.Generator().manual_seed(6)
    route, plan, norm, _ = experts_of(9, 3, generator, torch.zeros(9, 48))
    residual = random(generator, 4, 48)
    residual[2, 5] = torch.nan
    ids, shares, _ = moe_prefill.run(route, plan, residual, norm, torch.float32)
    assert ids.tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(shares[[0, 1, 3], :3], torch.full((3, 3), 1 / 3)) and shares[2].isnan().all()


@pytest.mark.parametrize("tokens, top_k, tile", [(1, 1, 16), (37, 3, 16), (60, 2, 4), (90, 1, 64)])
def test_every_pair_stands_once_behind_its_expert(tokens, top_k, tile):
    generator = torch.Generator().manual_seed(tokens)
    experts = 7
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(torch.int32)
    ids[ids == 3] = 3 if top_k > 1 else 4  # with one choice, expert 3 has nobody
    order = torch.full((tokens * top_k,), -9, dtype=torch.int32)
    tiles = torch.full((tokens * top_k // tile + experts, 3), -9, dtype=torch.int32)
    launch = Launchers(WHERE).get(route_prefill.sort_kernel, EXPERTS=experts, BLOCK=64, BM=tile, num_warps=4)
    launch((experts, 1, 1), ids, order, tiles, tokens * top_k)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    seen = []
    for expert, first, size in tiles.tolist():
        assert expert >= -1
        if expert >= 0:
            assert 1 <= size <= tile
            assert (ids.flatten()[order[first : first + size].long()] == expert).all()
            seen += range(first, first + size)
    assert sorted(seen) == list(range(tokens * top_k))


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
def test_delta_rule(tokens):
    config = replace(SMALL, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=32)
    generator = torch.Generator().manual_seed(tokens)
    plan = deltanet_prefill.DeltaRulePlan(config, Launchers(WHERE), tiles=deltanet_prefill.ScanTiles(16, 4, 1, 4))
    channels, heads = config.conv_dim, 2
    units = torch.nn.functional.normalize(random(generator, tokens, 4, 16) + random(generator, 1, 4, 16), dim=-1).flatten(1)
    mixed = torch.cat((units, random(generator, tokens, 64)), dim=1)
    u, state = random(generator, tokens, channels + 4), random(generator, heads, 16, 32)
    a_log, dt_bias, history = random(generator, heads), random(generator, heads) - 3.0, random(generator, channels, 3)
    expected, expected_state = deltanet_prefill.rule_reference(mixed, u[:, channels:], a_log, dt_bias, state.double(), config)
    expected_history = torch.cat((history, u[:, :channels].t()), dim=1)[:, tokens:].clone()
    buffers = {name: torch.full(shape, torch.nan) for name, shape in plan.scratch(tokens).items()}
    out = torch.full((tokens, heads, 32), torch.nan)
    plan(mixed, u, channels + 4, channels, a_log, dt_bias, history, state, **buffers, out=out)
    assert support.relative_error(out, expected) <= LIMIT and support.relative_error(state, expected_state) <= LIMIT
    assert torch.equal(history, expected_history)


def test_delta_rule_with_equal_keys_stays_exact():
    """Keys all alike and beta near 1: the triangular matrix is full of ones, where powers of it would drown float32."""
    config, tokens = replace(SMALL, linear_num_key_heads=2), 64
    generator = torch.Generator().manual_seed(9)
    plan = deltanet_prefill.DeltaRulePlan(config, Launchers(WHERE))
    units = torch.nn.functional.normalize(random(generator, 1, 4, 16), dim=-1).flatten(1).expand(tokens, -1)
    mixed = torch.cat((units, random(generator, tokens, 32)), dim=1)
    u = torch.full((tokens, config.conv_dim + 4), 8.0)
    u[:, -2:] = -20.0  # no forgetting
    state, zeros = torch.zeros(2, 16, 16), torch.zeros(2)
    expected, expected_state = deltanet_prefill.rule_reference(mixed, u[:, config.conv_dim :], zeros, zeros, state.double(), config)
    buffers = {name: torch.full(shape, torch.nan) for name, shape in plan.scratch(tokens).items()}
    out, history = torch.full((tokens, 2, 16), torch.nan), torch.zeros(config.conv_dim, 3)
    plan(mixed, u, config.conv_dim + 4, config.conv_dim, zeros, zeros, history, state, **buffers, out=out)
    assert support.relative_error(out, expected) <= LIMIT and support.relative_error(state, expected_state) <= LIMIT


@pytest.mark.parametrize("tokens, total", [(1, 1), (1, 40), (7, 7), (33, 33), (5, 64), (40, 57)])
def test_attention_behind_a_history(tokens, total):
    generator = torch.Generator().manual_seed(total)
    plan = attention_prefill.AttentionPrefillPlan(SMALL, Launchers(WHERE))
    query, qkv = random(generator, tokens, 4, 16), random(generator, tokens, 192)
    cache = torch.full((2, total + 20, 2, 16), torch.nan)
    cache[:, :total] = random(generator, 2, total, 2, 16)
    out = torch.full((tokens, 4, 16), torch.nan)
    plan(query, cache[0, :total], cache[1, :total], qkv, out)
    gate = qkv[:, :128].view(tokens, 4, 32)[..., 16:]
    expected = causal_attention(query, cache[0, :total], cache[1, :total]) * torch.sigmoid(gate)
    assert support.relative_error(out, expected) <= LIMIT


def test_the_same_call_gives_the_same_bits():
    generator = torch.Generator().manual_seed(8)
    model = model_of(SMALL, generator)
    fast, (x, positions) = FastText(model, WHERE), prompt(SMALL, generator, 5)
    (first, state), (second, other) = (run(fast, SMALL, x, positions, [5]) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a.recurrent, b.recurrent) for a, b in zip(state.layers, other.layers) if isinstance(a, DeltaNetState))


def test_what_the_kernels_cannot_take_is_refused_while_planning():
    generator = torch.Generator().manual_seed(0)
    model = model_of(SMALL, generator)
    with pytest.raises(support.UnsupportedByKernel, match="float32"):
        FastText(model, replace(WHERE, interpreted=False))
    for changes, message in (({"head_dim": 24}, "head_dim 24"), ({"linear_value_head_dim": 12}, "linear_value_head_dim 12")):
        config = replace(SMALL, **changes)
        with pytest.raises(support.UnsupportedByKernel, match=message):
            FastText(model_of(config, generator), WHERE)
    wide = random_fp8((16, 64), (128, 128), CPU)
    gaps = ScaledWeight(wide.data.view(torch.uint8)[:, :32].view(torch.float8_e4m3fn), wide.scale, (128, 128))
    with pytest.raises(support.UnsupportedByKernel, match="on cpu"):
        fp8_gemm.ProjectionPlan([wide], Launchers(replace(WHERE, device=torch.device("meta"))), torch.float32)
    with pytest.raises(support.UnsupportedByKernel, match="gaps"):
        fp8_gemm.ProjectionPlan([gaps], Launchers(WHERE), torch.float32)
    with pytest.raises(support.UnsupportedByKernel, match="wider"):
        prefill_rows.RowKernels(replace(SMALL, hidden_size=9000), Launchers(WHERE))
