"""Parts of the model against their definitions, in float64 or by brute force; the whole model is checked in tests/parity."""

import pytest
import torch
import torch.nn.functional as F

from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.model import attention as attention_module
from a3b_engine.model import linear as linear_module
from a3b_engine.model import moe as moe_module
from a3b_engine.model.attention import causal_attention
from a3b_engine.model.deltanet import DeltaNetState, causal_conv, delta_rule_chunked, delta_rule_step
from a3b_engine.model.moe import ExpertWeights, _experts_grouped, _experts_of_one_token, route
from a3b_engine.model.positions import ImagePlace, mrope_positions


def generator(seed):
    return torch.Generator().manual_seed(seed)


def rule_inputs(tokens, heads=3, dk=8, dv=6, seed=0):
    g = generator(seed)
    q = F.normalize(torch.randn(tokens, heads, dk, generator=g, dtype=torch.float64), dim=-1) * dk**-0.5
    k = F.normalize(torch.randn(tokens, heads, dk, generator=g, dtype=torch.float64), dim=-1)
    v = torch.randn(tokens, heads, dv, generator=g, dtype=torch.float64)
    decay = -torch.rand(tokens, heads, generator=g, dtype=torch.float64) * 3
    beta = torch.rand(tokens, heads, generator=g, dtype=torch.float64)
    state = torch.randn(heads, dk, dv, generator=g, dtype=torch.float64)
    return q, k, v, decay, beta, state


def stepwise(q, k, v, decay, beta, state):
    outputs = []
    for t in range(q.shape[0]):
        out, state = delta_rule_step(q[t : t + 1], k[t : t + 1], v[t : t + 1], decay[t : t + 1], beta[t : t + 1], state)
        outputs.append(out)
    return torch.cat(outputs), state


@pytest.mark.parametrize("rows", [1, 100, 128, 130, 300, 1000])
@pytest.mark.parametrize("block", [(128, 128), (1, 96), (300, 96), (64, 32), (512, 96)])
def test_a_head_in_pieces_is_the_head(monkeypatch, rows, block):
    monkeypatch.setattr(linear_module, "_ROWS_AT_ONCE", rows)
    data = torch.randn(300, 96, generator=generator(0)).to(torch.float8_e4m3fn)
    weight = ScaledWeight(data, torch.rand(-(-300 // block[0]), -(-96 // block[1]), generator=generator(1)) + 0.5, block)
    pieces = list(weight.row_pieces(rows))
    assert torch.equal(torch.cat([piece.dequantize(torch.float32) for piece in pieces]), weight.dequantize(torch.float32))
    assert max(piece.shape[0] for piece in pieces) <= max(rows, block[0])
    x = torch.randn(3, 96, generator=generator(2))
    assert torch.allclose(linear_module.linear_in_pieces(x, weight), x @ weight.dequantize(torch.float32).T, atol=1e-4)
    plain = weight.dequantize(torch.float32)
    assert torch.equal(linear_module.linear_in_pieces(x, plain), linear_module.linear(x, plain))


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 63, 64, 65, 127, 128, 129, 200])
def test_chunked_rule_equals_the_step_form(tokens):
    inputs = rule_inputs(tokens, seed=tokens)
    expected, expected_state = stepwise(*inputs)
    out, state = delta_rule_chunked(*inputs)
    assert torch.allclose(out, expected, atol=1e-12) and torch.allclose(state, expected_state, atol=1e-12)


def test_strong_decay_does_not_overflow():
    q, k, v, decay, beta, state = (t.float() for t in rule_inputs(130))
    out, new_state = delta_rule_chunked(q, k, v, decay * 200, beta, state)
    assert out.isfinite().all() and new_state.isfinite().all()


def test_step_matches_its_definition():
    q, k, v, decay, beta, state = rule_inputs(1, heads=1)
    out, new = delta_rule_step(q, k, v, decay, beta, state)
    s = decay[0, 0].exp() * state[0]
    d = beta[0, 0] * (v[0, 0] - s.T @ k[0, 0])
    s = s + torch.outer(k[0, 0], d)
    assert torch.allclose(new[0], s) and torch.allclose(out[0, 0], s.T @ q[0, 0])


@pytest.mark.parametrize("splits", [[10], [1] * 10, [2, 1, 7], [3, 3, 4], [9, 1]])
def test_convolution_carries_its_state_over_any_split(splits):
    g = generator(1)
    u, kernel = torch.randn(10, 5, generator=g), torch.randn(5, 4, generator=g)
    padded = F.pad(u, (0, 0, 3, 0))
    expected = torch.stack([F.silu((padded[t : t + 4].T * kernel).sum(1)) for t in range(10)])
    state = DeltaNetState(torch.zeros(5, 3), torch.zeros(0))
    got = torch.cat([causal_conv(part, kernel, state) for part in u.split(splits)])
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(state.conv, u[-3:].T)


@pytest.mark.parametrize("tokens, total", [(1, 1), (1, 9), (9, 9), (4, 9), (8, 9)])
@pytest.mark.parametrize("budget", [1, 10**9])
def test_attention_sees_exactly_its_past(tokens, total, budget, monkeypatch):
    monkeypatch.setattr(attention_module, "_SCORE_BYTES", budget)
    g = generator(tokens * 100 + total)
    q = torch.randn(tokens, 4, 8, generator=g)
    k, v = torch.randn(total, 2, 8, generator=g), torch.randn(total, 2, 8, generator=g)
    out = causal_attention(q, k, v)
    for t in range(tokens):
        seen = total - tokens + t + 1
        for head in range(4):
            weights = (k[:seen, head // 2] @ q[t, head] * 8**-0.5).softmax(0)
            assert torch.allclose(out[t, head], weights @ v[:seen, head // 2], atol=1e-5)


@pytest.mark.parametrize("at_once", [1, 2 * 80, 10**9])
def test_both_expert_paths_agree_with_a_loop(at_once, monkeypatch):
    monkeypatch.setattr(moe_module, "_ELEMENTS_AT_ONCE", at_once)
    g = generator(3)
    experts = ExpertWeights(*(torch.randn(s, generator=g) * 0.2 for s in ((6, 10, 8), (6, 10, 8), (6, 8, 10))))
    x, router = torch.randn(7, 8, generator=g), torch.randn(6, 8, generator=g)
    share, chosen = route(x, router, 2)
    assert torch.allclose(share.sum(-1), torch.ones(7))
    expected = torch.zeros_like(x)
    for t in range(7):
        for w, e in zip(share[t], chosen[t]):
            expected[t] += w * (experts.down[e] @ (F.silu(experts.gate[e] @ x[t]) * (experts.up[e] @ x[t])))
    assert torch.allclose(_experts_grouped(x, experts, share, chosen), expected, atol=1e-5)
    for t in range(7):
        one = _experts_of_one_token(x[t : t + 1], experts, share[t : t + 1], chosen[t : t + 1])
        assert torch.allclose(one[0], expected[t], atol=1e-5)


def test_an_expert_that_every_token_chooses():
    g = generator(4)
    experts = ExpertWeights(*(torch.randn(s, generator=g) * 0.2 for s in ((5, 4, 6), (5, 4, 6), (5, 6, 4))))
    x = torch.randn(9, 6, generator=g)
    chosen = torch.tensor([[3, 0]] * 8 + [[3, 4]])
    share = torch.rand(9, 2, generator=g)
    expected = torch.stack([_experts_of_one_token(x[t : t + 1], experts, share[t : t + 1], chosen[t : t + 1])[0] for t in range(9)])
    assert torch.allclose(_experts_grouped(x, experts, share, chosen), expected, atol=1e-5)


def test_positions_of_text_and_pictures():
    positions, following = mrope_positions(2 + 6 + 1 + 4 + 2, [ImagePlace(2, 2, 3), ImagePlace(9, 4, 1)])
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert positions[:, 8].tolist() == [5, 5, 5]
    assert positions[:, 9:13].tolist() == [[6] * 4, [6, 7, 8, 9], [6] * 4]
    assert positions[:, 13:].tolist() == [[10, 11]] * 3 and following == 12


def test_positions_of_nothing():
    positions, following = mrope_positions(0, [])
    assert positions.shape == (3, 0) and following == 0
