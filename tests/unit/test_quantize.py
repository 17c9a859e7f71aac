"""`quantize_matrix`: what holds for every matrix, and what a calibrated one gains."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.checkpoint.packed import PackedWeight, unpack_codes
from a3b_engine.checkpoint.quantize import quantize_matrix
from a3b_engine.checkpoint.quantize.groups import ordered_sum
from a3b_engine.checkpoint.quantize.matrix import default_group
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.checkpoint.write import quantize_fp8_block
from a3b_engine.errors import CheckpointError

BITS = (4, 3)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restored(weight, bits, group=32, **options):
    return quantize_matrix(weight, bits, group, **options).dequantize(torch.float32)


def rounded_to_nearest(weight, bits, group):
    """The plain way: the largest weight of a group on the highest code, scales in float16."""
    high = 2 ** (bits - 1) - 1
    groups = weight.unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / high).half().float()
    codes = (groups / torch.where(scale > 0, scale, 1.0)).round().clamp(-high - 1, high)
    return (codes * scale).flatten(-2)


def squared_errors(found, weight, group):
    return (found - weight).square().unflatten(-1, (-1, group)).sum(-1)


matrices = st.tuples(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([32, 64, 128]), st.sampled_from([1e-5, 0.02, 1.0, 300.0]), st.booleans())


@settings(max_examples=40, deadline=None)
@given(matrices, st.sampled_from(BITS), st.sampled_from([16, 32, 64]), st.booleans())
def test_no_group_is_worse_than_plain_rounding(case, bits, group, zero):
    seed, rows, columns, size, heavy = case
    group = min(group, columns)
    weight = normal(rows, columns, seed=seed) * size
    if heavy:
        weight = (weight**3 / size**2).clamp(-60000, 60000)  # float16 scales go no further
    ours = squared_errors(restored(weight, bits, group, zero=zero), weight, group)
    plain = squared_errors(rounded_to_nearest(weight, bits, group), weight, group)
    assert (ours <= plain * (1 + 1e-4) + 1e-30).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BITS), st.booleans())
def test_what_few_bits_can_say_is_said_without_error(seed, bits, zero):
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (3, 4, 32), generator=generator).float()
    codes[..., 0] = -half  # the whole range is used, so that the scale can be found
    scale = torch.randint(1, 2000, (3, 4, 1), generator=generator).half().float() / 1024
    weight = (codes * scale).flatten(1)
    assert torch.equal(restored(weight, bits, zero=zero), weight)
    assert torch.equal(restored(-weight, bits, zero=zero), -weight)  # a scale may be negative


@pytest.mark.parametrize("bits", BITS)
def test_a_zero_point_helps_weights_that_do_not_lie_around_zero(bits):
    weight = normal(16, 128).abs() + 1.0
    error = [(restored(weight, bits, zero=zero) - weight).norm() for zero in (False, True)]
    assert error[1] < 0.75 * error[0]
    packed = quantize_matrix(weight, bits, zero=True)
    assert packed.zero.dtype == torch.uint8 and int(packed.zero.max()) < 2**bits


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_zeros_stay_zero_and_harm_nobody(bits):
    weight = normal(4, 96)
    weight[1] = 0.0
    weight[2, 32:64] = 0.0
    found = restored(weight, bits)
    assert torch.isfinite(found).all() and not found[1].any() and not found[2, 32:64].any()
    assert torch.equal(found[0], restored(weight[:1], bits)[0])
    assert not restored(torch.zeros(2, 3, 64), bits, variance=torch.ones(64), mean=torch.ones(64)).any()
    tiny = torch.full((1, 32), 1e-12)  # below what a float16 scale can say
    assert (restored(tiny, bits) - tiny).abs().max() <= 1e-12


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value, word", [(float("nan"), "not finite"), (float("inf"), "not finite"), (-float("inf"), "not finite"), (1e30, "1e+30")])
def test_damaged_weights_are_refused_by_name(bits, value, word):
    weight = normal(2, 8, 64)
    weight[1, 3, 5] = value
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp.*") as caught:
        quantize_matrix(weight, bits, name="layers.3.mlp.experts.up.weight")
    assert word in str(caught.value)


def test_as_many_columns_share_a_scale_as_divide_them():
    assert quantize_matrix(normal(2, 128), 4).group == 64
    widths = {"gate": 2048, "down": 512}
    assert default_group(widths, 4) == 64 and default_group({**widths, "down": 96}, 4) == 32 and default_group({"gate": 48}, 4) == 16
    assert default_group(widths, 3, 128) == 128
    with pytest.raises(CheckpointError, match="down: 72 columns"):
        default_group({**widths, "down": 72}, 4)
    with pytest.raises(CheckpointError, match="down: 96 columns"):
        default_group({**widths, "down": 96}, 4, 64)


@pytest.mark.parametrize("bits, group, columns", [(4, 32, 48), (3, 16, 48), (4, 64, 96), (3, 32, 40), (4, 33, 33)])
def test_columns_that_groups_do_not_divide_are_refused_by_name(bits, group, columns):
    with pytest.raises(CheckpointError, match=rf"w1: {columns} columns"):
        quantize_matrix(normal(4, columns), bits, group, name="w1")


def test_the_same_bits_whatever_the_cut_and_the_threads(monkeypatch):
    from a3b_engine.checkpoint.quantize import matrix

    weight, variance, mean = normal(3, 24, 128), normal(3, 128, seed=1).square(), normal(3, 128, seed=2)
    whole = quantize_matrix(weight, 3, variance=variance, mean=mean)
    monkeypatch.setitem(matrix._AT_ONCE, "cpu", 640)  # five rows at a time
    torch.set_num_threads(2)
    pieces = quantize_matrix(weight, 3, variance=variance, mean=mean)
    one = quantize_matrix(weight[1], 3, variance=variance[1], mean=mean[1])
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scale, pieces.scale)
    assert torch.equal(whole.codes[1], one.codes) and torch.equal(whole.scale[1], one.scale)


@given(st.integers(1, 40), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_sums_by_halves_are_sums(length, seed):
    values = normal(length, 3, seed=seed)
    assert torch.allclose(ordered_sum(values), values.sum(0), atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_the_record_is_packed_as_documented(bits):
    weight = normal(2, 5, 64)
    packed = quantize_matrix(weight, bits, 32)
    assert isinstance(packed, PackedWeight) and packed.shape == weight.shape and packed.scale.dtype == torch.float16
    assert packed.nbytes == weight.numel() * bits // 8 + 2 * weight.numel() // 32
    codes = unpack_codes(packed.codes, bits).float() - 2 ** (bits - 1)
    by_hand = (codes.unflatten(-1, (-1, 32)) * packed.scale.float()[..., None]).flatten(-2)
    assert torch.equal(packed.dequantize(torch.float32), by_hand)
    assert torch.equal(packed[1].dequantize(torch.float32), by_hand[1])


def test_fp8_is_read_as_it_is_and_stays_untouched():
    codes, scale = quantize_fp8_block(normal(3, 128, 128))
    stored = ScaledWeight(codes, scale.float(), (128, 128))
    dense = stored.dequantize(torch.float32)
    again = dense.clone()
    assert torch.equal(restored(stored, 4), restored(dense, 4))
    assert torch.equal(dense, again)


def test_columns_that_count_more_are_kept_better():
    weight = normal(64, 128)
    variance = torch.ones(128)
    variance[::4] = 100.0
    plain, weighted = ((restored(weight, 3, variance=v) - weight).square() for v in (None, variance))
    assert weighted[:, ::4].sum() < 0.8 * plain[:, ::4].sum()
    assert (weighted * variance).sum() < 0.85 * (plain * variance).sum()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(BITS), st.sampled_from([0.05, 0.5, 2.0]), st.booleans())
def test_bias_correction_never_makes_the_mean_squared_error_of_the_output_larger(seed, bits, size, zero):
    weight, mean = normal(8, 128, seed=seed), normal(128, seed=seed + 1) * size
    variance = normal(128, seed=seed + 2).square() + 0.1

    def parts(found):
        error = found - weight
        return (error.square() * variance).sum(-1), (error * mean).sum(-1).square()

    noise, bias = parts(restored(weight, bits, zero=zero, variance=variance))
    corrected_noise, corrected_bias = parts(restored(weight, bits, zero=zero, variance=variance, mean=mean))
    assert (corrected_noise + corrected_bias <= (noise + bias) * (1 + 1e-4)).all()
    assert corrected_bias.sum() <= bias.sum() + 1e-6


def test_bias_of_inputs_with_a_mean_is_taken_out_almost_free():
    weight, mean = normal(64, 512), normal(512, seed=1)
    inputs = normal(2000, 512, seed=2) + mean
    plain, corrected = (inputs @ (restored(weight, 4, variance=torch.ones(512), mean=m) - weight).T for m in (None, mean))
    assert corrected.mean(0).square().mean() < 0.05 * plain.mean(0).square().mean()
    assert corrected.square().mean() < 0.6 * plain.square().mean()
    assert corrected.var(0).mean() < 1.02 * plain.var(0).mean()


def test_how_exact_it_is():
    """Relative error of normal weights; a change of the search that loses more than a percent shows here."""
    weight = normal(128, 2048)
    found = {(bits, group): ((restored(weight, bits, group) - weight).norm() / weight.norm()).item() for bits in BITS for group in (32, 64)}
    assert found == pytest.approx({(4, 32): 0.0811, (4, 64): 0.0900, (3, 32): 0.1623, (3, 64): 0.1764}, rel=0.01)
