"""Kernels of a decode step that hold state, against the model. Not collected by itself: test_kernels_state.py runs it
under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()

from a3b_engine.kernels import attention_decode as attention  # noqa: E402
from a3b_engine.kernels import deltanet_decode as deltanet  # noqa: E402
from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.model.attention import AttentionWeights, gated_attention  # noqa: E402
from a3b_engine.model.deltanet import DeltaNetState, DeltaNetWeights, gated_deltanet  # noqa: E402
from a3b_engine.model.linear import linear  # noqa: E402
from a3b_engine.model.rotary import mrope_cos_sin  # noqa: E402

CPU = torch.device("cpu")
WHERE = support.target("cpu")
SMALL = replace(
    PUBLISHED, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rotary_dim=8, mrope_section=(2, 1, 1),
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
TINY = replace(SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_value_head_dim=8, linear_conv_kernel_dim=3)
# The kernels round where the model rounds; sums run in another order, and a sum on a border rounds the other way.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def random(generator, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("kernel", ["attention_decode", "deltanet_decode"])
def test_the_self_tests_pass_at_the_published_sizes(kernel):
    assert support.usable(kernel, "cpu")


class StaticCache:
    """A cache of fixed capacity for the model, its unused rows NaN."""

    def __init__(self, config, capacity, dtype):
        self.buffer = torch.full((2, capacity, config.num_key_value_heads, config.head_dim), torch.nan, dtype=dtype)
        self.length = 0

    def append(self, keys, values):
        self.buffer[0, self.length], self.buffer[1, self.length] = keys[0], values[0]
        self.length += 1
        return self.buffer[0, : self.length], self.buffer[1, : self.length]


def attention_weights(config, generator, dtype):
    head, width = config.head_dim, config.hidden_size
    shapes = {"q": 2 * config.num_attention_heads * head, "k": config.num_key_value_heads * head, "v": config.num_key_value_heads * head}
    projections = {name: random(generator, rows, width, dtype=dtype, scale=width**-0.5) for name, rows in shapes.items()}
    norms_of_heads = {name: random(generator, head, scale=0.3) for name in ("q_norm", "k_norm")}
    return AttentionWeights(**projections, o=torch.eye(config.num_attention_heads * head, dtype=dtype), **norms_of_heads)


@pytest.mark.parametrize("config, dtype", [(SMALL, torch.bfloat16), (TINY, torch.float32)], ids=["bf16", "tiny"])
def test_attention_follows_the_model_until_the_cache_is_full(config, dtype):
    """Lengths 0, 1, ... capacity - 1; the rotary position runs apart from the length, as behind an image."""
    generator, capacity = torch.Generator().manual_seed(1), 50
    weights = attention_weights(config, generator, dtype)
    plan = attention.plan_attention(config, dtype, WHERE)
    scratch = attention.AttentionScratch(config, plan, CPU)
    for buffer in (scratch.top, scratch.total, scratch.mixed):
        buffer.fill_(torch.nan)
    store = StaticCache(config, capacity, dtype)
    cache, qkv_weight = store.buffer.clone(), torch.cat((weights.q, weights.k, weights.v))
    for length in range(capacity):
        position = length + 1000 if length > 20 else length
        x = random(generator, 1, config.hidden_size, dtype=dtype)
        rotary = mrope_cos_sin(torch.full((3, 1), position), config)
        expected = gated_attention(x, weights, config, rotary, store)[0]
        out = torch.full_like(expected, torch.nan)
        attention.attention_decode(
            linear(x, qkv_weight)[0], weights.q_norm, weights.k_norm, cache, torch.tensor([length]), torch.tensor([position]), out, scratch, plan, config
        )
        assert support.relative_error(out, expected) <= LIMITS[dtype], length
        assert support.relative_error(cache[:, length], store.buffer[:, length]) <= LIMITS[dtype]
        assert cache[:, length + 1 :].isnan().all()
        cache[:, length] = store.buffer[:, length]  # roundings on a border do not add up


def test_a_token_too_many_is_not_written_outside_the_cache():
    generator = torch.Generator().manual_seed(4)
    plan = attention.plan_attention(TINY, torch.float32, WHERE)
    room = torch.zeros(3, 8, 1, 16)  # keys, values, and what lies behind them
    qkv, out = random(generator, 2 * 2 * 16 + 2 * 16), torch.empty(32)
    attention.attention_decode(
        qkv, torch.zeros(16), torch.zeros(16), room[:2], torch.tensor([8]), torch.tensor([8]), out, attention.AttentionScratch(TINY, plan, CPU), plan, TINY
    )
    assert out.isfinite().all() and not room.any()


@pytest.mark.parametrize("splits, block", [(1, 16), (8, 16), (16, 32)])
def test_every_number_of_splits_gives_the_same_attention(splits, block):
    generator = torch.Generator().manual_seed(5)
    plan = attention.AttentionPlan(splits=splits, block=block, warps=4, stages=1, products=torch.float32)
    scratch = attention.AttentionScratch(SMALL, plan, CPU)
    q_norm, k_norm = random(generator, 32), random(generator, 32)
    cache = random(generator, 2, 300, 2, 32)
    for length in (1, 15, 16, 17, 255, 299):
        qkv, out = random(generator, 2 * 32 * 6), torch.full((128,), torch.nan)
        expected = attention.attention_decode_reference(qkv, q_norm, k_norm, cache.clone(), length, length, SMALL)
        attention.attention_decode(qkv, q_norm, k_norm, cache.clone(), torch.tensor([length]), torch.tensor([length]), out, scratch, plan, SMALL)
        assert support.relative_error(out, expected) <= LIMITS[torch.float32], length


def test_float32_queries_meet_a_bfloat16_cache():
    """The projections hand over float32 where their sums are not rounded first."""
    generator = torch.Generator().manual_seed(6)
    plan = attention.plan_attention(SMALL, torch.bfloat16, WHERE)
    qkv, cache = random(generator, 2 * 32 * 6), random(generator, 2, 40, 2, 32, dtype=torch.bfloat16)
    out, q_norm = torch.empty(128), random(generator, 32)
    expected = attention.attention_decode_reference(qkv, q_norm, q_norm, cache.clone(), 30, 30, SMALL)
    scratch, at = attention.AttentionScratch(SMALL, plan, CPU), torch.tensor([30])
    attention.attention_decode(qkv, q_norm, q_norm, cache, at, at, out, scratch, plan, SMALL)
    assert support.relative_error(out, expected) <= 1e-5


def deltanet_weights(config, generator, dtype):
    heads, width = config.linear_num_value_heads, config.hidden_size

    def matrix(rows):
        return random(generator, rows, width, dtype=dtype, scale=width**-0.5)

    return DeltaNetWeights(
        qkv=matrix(config.conv_dim), z=matrix(config.linear_value_dim), a=matrix(heads), b=matrix(heads),
        conv=random(generator, config.conv_dim, config.linear_conv_kernel_dim, dtype=dtype, scale=0.5),
        a_log=random(generator, heads), dt_bias=random(generator, heads, scale=3.0), norm=random(generator, config.linear_value_head_dim),
        out=torch.eye(config.linear_value_dim, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize(
    "config, columns, dtype", [(SMALL, 16, torch.bfloat16), (SMALL, 8, torch.float32), (TINY, 8, torch.float32)], ids=["bf16", "parts", "tiny"]
)
def test_deltanet_follows_the_model_over_50_tokens(config, columns, dtype):
    """State and convolution are carried by each side on its own, from a prompt of three tokens on."""
    generator = torch.Generator().manual_seed(7)
    weights = deltanet_weights(config, generator, dtype)
    plan, scratch = deltanet.DeltaNetPlan(columns=columns, warps=4), deltanet.DeltaNetScratch(config, CPU)
    scratch.whole.fill_(torch.nan)
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    expected_state = DeltaNetState(torch.zeros(config.conv_dim, config.linear_conv_kernel_dim - 1, dtype=dtype), torch.zeros(heads, dk, dv))
    gated_deltanet(random(generator, 3, config.hidden_size, dtype=dtype), weights, config, expected_state)
    ring = torch.full((config.linear_conv_kernel_dim, config.conv_dim), torch.nan, dtype=dtype)
    deltanet.ring_from_conv(expected_state.conv, 3, ring)
    state = expected_state.recurrent.clone()
    for length in range(3, 53):
        x = random(generator, 1, config.hidden_size, dtype=dtype)
        expected = gated_deltanet(x, weights, config, expected_state)[0]
        inputs = [linear(x, w)[0] for w in (weights.qkv, weights.z, weights.a, weights.b)]
        out = torch.full_like(expected, torch.nan)
        deltanet.deltanet_decode(
            *inputs, weights.conv, weights.a_log, weights.dt_bias, weights.norm, ring, state, torch.tensor([length]), out, scratch, plan, config
        )
        assert support.relative_error(out, expected) <= LIMITS[dtype], length
        assert support.relative_error(state, expected_state.recurrent) <= LIMITS[dtype], length
        conv = torch.full_like(expected_state.conv, torch.nan)
        deltanet.conv_from_ring(ring, length + 1, conv)
        assert torch.equal(conv, expected_state.conv)
    assert not scratch.arrived.any()


def test_the_same_inputs_give_the_same_bits():
    generator = torch.Generator().manual_seed(8)
    plan = attention.plan_attention(SMALL, torch.bfloat16, WHERE)
    qkv, cache = random(generator, 2 * 32 * 6, dtype=torch.bfloat16), random(generator, 2, 90, 2, 32, dtype=torch.bfloat16)
    outs = []
    for _ in range(2):
        out, scratch = torch.empty(128, dtype=torch.bfloat16), attention.AttentionScratch(SMALL, plan, CPU)
        attention.attention_decode(qkv, torch.zeros(32), torch.zeros(32), cache.clone(), torch.tensor([77]), torch.tensor([77]), out, scratch, plan, SMALL)
        outs.append(out)
    assert torch.equal(*outs)


def test_sizes_the_kernels_cannot_take_are_refused_while_planning():
    with pytest.raises(support.UnsupportedByKernel, match="head_dim 48"):
        attention.plan_attention(replace(SMALL, head_dim=48), torch.bfloat16, WHERE)
    with pytest.raises(support.UnsupportedByKernel, match="32 query heads"):
        attention.plan_attention(replace(SMALL, num_attention_heads=32, num_key_value_heads=1), torch.bfloat16, WHERE)
    with pytest.raises(support.UnsupportedByKernel, match="float32"):
        attention.plan_attention(SMALL, torch.float32, replace(WHERE, interpreted=False))
    with pytest.raises(support.UnsupportedByKernel, match="linear_value_head_dim 24"):
        deltanet.plan_deltanet(replace(SMALL, linear_value_head_dim=24), WHERE)
