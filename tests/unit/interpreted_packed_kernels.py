"""The kernels for packed weights and for mixed kinds of weights, run by Triton's interpreter on the CPU against float64.

Not collected by itself: test_kernels_packed.py runs it in a process of its own with TRITON_INTERPRET=1.
"""

from dataclasses import replace

import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()
from a3b_engine.checkpoint.packed import PackedWeight  # noqa: E402
from a3b_engine.kernels import packed_experts, packed_gemv, support  # noqa: E402
from a3b_engine.kernels.configs import TileConfig  # noqa: E402
from a3b_engine.kernels.dense_gemv import DenseGemv  # noqa: E402
from a3b_engine.kernels.expert_table import random_experts  # noqa: E402
from a3b_engine.kernels.fp8_gemv import Fp8Gemv, random_fp8  # noqa: E402
from a3b_engine.kernels.moe_decode import ExpertsPlan  # noqa: E402
from a3b_engine.kernels.packed_experts import random_packed_experts  # noqa: E402
from a3b_engine.kernels.packed_gemv import PackedGemv, SeveralProducts, product  # noqa: E402
from a3b_engine.kernels.packed_samples import random_packed  # noqa: E402
from a3b_engine.kernels.support import UnsupportedByKernel, relative_error  # noqa: E402

torch.set_num_threads(1)
CPU = torch.device("cpu")
NATIVE = support.target(CPU)
BYTES = replace(NATIVE, fp8_native=False)  # as on a card below sm_89
LIMIT = 1e-6
TILE = TileConfig(16, 256, 4)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(plan, x, residual=None):
    """Of one call into an output full of NaN."""
    out = torch.full((plan.rows,), torch.nan)
    plan(x, out, residual)
    return relative_error(out, plan.reference(x, residual, torch.float64))


@pytest.mark.parametrize("module", [packed_gemv, packed_experts])
@pytest.mark.parametrize("form", ["int4", "int3", "e2m1"])
@pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
def test_self_test_passes(module, form, where):
    assert module.check(where, form) < LIMIT


def test_self_test_of_mixed_kinds_passes():
    assert packed_experts.check_mixed(NATIVE) < LIMIT


class TestCodes:
    @pytest.mark.parametrize("form", ["int4", "int3", "e2m1"])
    def test_every_code_in_every_place_is_exact(self, form):
        """Row r has code r everywhere; x picks one column after another."""
        bits = 3 if form == "int3" else 4
        codes = torch.arange(1 << bits, dtype=torch.uint8)[:, None].expand(-1, 32).contiguous()
        codes[1] = torch.arange(32) % (1 << bits)
        from a3b_engine.checkpoint.packed import pack_codes

        weight = PackedWeight(pack_codes(codes, bits), torch.ones(1 << bits, 1), None, None, "e2m1" if form == "e2m1" else "int", 32, bits)
        plan = PackedGemv([weight], NATIVE, config=TileConfig(16, 32, 4))
        expected = weight.dequantize(torch.float32)
        out = torch.empty(1 << bits)
        for column in range(32):
            x = torch.zeros(32)
            x[column] = 1.0
            plan(x, out)
            assert torch.equal(out, expected[:, column])


class TestPackedGemv:
    @pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
    @pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
    def test_types_of_scales(self, scale, where):
        for form in ("int4", "e2m1"):
            plan = PackedGemv([random_packed((24, 128), form, 32, CPU, scale=scale, factor=scale == torch.float8_e4m3fn)], where, config=TILE)
            assert error(plan, normal(128)) < LIMIT

    @pytest.mark.parametrize("form, zero", [("int4", False), ("int4", True), ("int3", False), ("int3", True), ("e2m1", False)])
    @pytest.mark.parametrize("group, columns", [(16, 96), (32, 64), (64, 192), (128, 384), (160, 160), (320, 640)])
    def test_groups(self, form, zero, group, columns):
        plan = PackedGemv([random_packed((21, columns), form, group, CPU, zero=zero)], NATIVE, config=TILE)
        assert error(plan, normal(columns), normal(21, seed=1)) < LIMIT

    def test_table_norm_and_residual_in_place(self):
        matrices = [random_packed((rows, 256), "int4", 64, CPU, factor=True, divides=True, seed=rows) for rows in (20, 3, 9, 1)]
        for count in (1, 2, 3, 4):
            plan = PackedGemv(matrices[:count], NATIVE, norm=normal(256, seed=3) * 0.2, eps=1e-3)
            assert error(plan, normal(256) * 30) < LIMIT
        x, stream = normal(256), normal(plan.rows, seed=5)
        expected = plan.reference(x, stream, torch.float64)
        plan(x, stream, stream)
        assert relative_error(stream, expected) < LIMIT

    def test_types_of_x(self):
        plan = PackedGemv([random_packed((20, 128), "int4", 32, CPU)], NATIVE, config=TILE)
        for dtype in (torch.bfloat16, torch.float16):
            assert error(plan, normal(128, dtype=dtype)) < LIMIT

    def test_what_it_does_not_take(self):
        with pytest.raises(UnsupportedByKernel, match="scales over 8 columns"):
            PackedGemv([random_packed((8, 64), "int4", 8, CPU)], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="different layouts"):
            PackedGemv([random_packed((8, 64), "int4", 32, CPU), random_packed((8, 64), "int4", 64, CPU)], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="norm"):
            PackedGemv([random_packed((8, 64), "int4", 32, CPU)], NATIVE, norm=normal(8))


class TestMixedProducts:
    def test_kinds_behind_each_other(self):
        """Two packed layouts, FP8 of two layouts, two dense types: as few launches as can be, in the order asked for."""
        int4 = [random_packed((rows, 128), "int4", 32, CPU, seed=rows) for rows in (20, 3)]
        nvfp4 = random_packed((9, 128), "e2m1", 16, CPU, scale=torch.float8_e4m3fn, factor=True)
        fp8, whole = random_fp8((24, 128), (128, 128), CPU), random_fp8((48, 128), (16, 128), CPU)
        bf16, fp32 = normal(7, 128, dtype=torch.bfloat16), normal(6, 128)
        norm = normal(128, seed=3) * 0.2
        for matrices, tail, plans in (
            (int4, [], [PackedGemv]), ([*int4, nvfp4], [bf16], [PackedGemv, PackedGemv, DenseGemv]),
            ([fp8, int4[0]], [bf16, bf16], [Fp8Gemv, PackedGemv, DenseGemv]), ([int4[0], fp8], [bf16], [PackedGemv, Fp8Gemv]),
            ([fp8, bf16], [bf16, bf16], [Fp8Gemv, DenseGemv]), ([bf16, fp32], [bf16], [DenseGemv, DenseGemv, DenseGemv]),
            ([whole, fp8], [], [Fp8Gemv, Fp8Gemv]),
        ):  # fmt: skip
            plan = product(matrices, NATIVE, tail=tail, norm=norm)
            found = plan.plans if isinstance(plan, SeveralProducts) else [plan]
            assert [type(part) for part in found] == plans
            assert plan.rows == sum(matrix.shape[0] for matrix in (*matrices, *tail)) and plan.columns == 128
            assert error(plan, normal(128) * 5, normal(plan.rows, seed=8)) < LIMIT

    def test_a_failing_self_test_matters_to_packed_weights_only(self, monkeypatch):
        monkeypatch.setattr(packed_gemv, "usable", lambda kernel, device: False)
        assert isinstance(product([random_fp8((24, 128), (128, 128), CPU)], NATIVE), Fp8Gemv)
        with pytest.raises(UnsupportedByKernel, match="not used"):
            product([random_packed((20, 128), "int4", 32, CPU)], NATIVE)


class TestExperts:
    SMALL = dict(up_config=TileConfig(16, 256, 4), down_config=TileConfig(32, 128, 4))

    @staticmethod
    def run(plan, ids=(4, 0, 3), residual=None):
        size = plan.weights.experts.gate.shape[2]
        x, ids = normal(size, seed=1), torch.tensor(ids[: plan.top_k], dtype=torch.int32)
        shares = torch.rand(plan.top_k + 1, generator=torch.Generator().manual_seed(2))
        expected = plan.reference(x, ids, shares, residual, torch.float64)
        out = torch.full((size,), torch.nan)
        plan.hidden.fill_(torch.nan)
        plan(x, ids, shares, out, residual)
        return relative_error(out, expected)

    @pytest.mark.parametrize("form, group, options", [
        ("int4", 32, {}), ("int4", 1 << 20, dict(zero=True)), ("int3", 32, {}), ("int3", 64, dict(zero=True)), ("e2m1", 16, dict(scale=torch.float8_e4m3fn, factor=True)),
        ("e2m1", 16, dict(scale=torch.float8_e4m3fn, factor=True, divides=True)),
    ])  # fmt: skip
    @pytest.mark.parametrize("shared", ["fp8", "bf16", "same"])
    def test_forms_beside_shared_experts(self, form, group, options, shared):
        weights = random_packed_experts(5, 192, 64, 96, CPU, form, group, shared_form=form if shared == "same" else shared, **options)
        assert self.run(ExpertsPlan(weights, 3, NATIVE, **self.SMALL)) < LIMIT

    @pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
    def test_packed_shared_expert_beside_fp8_ones(self, where):
        packed = random_packed_experts(5, 192, 64, 96, CPU, "int4", 32, shared_form="int4")
        weights = replace(random_experts(5, 192, 64, 96, CPU), **{name: getattr(packed, name) for name in ("shared_gate", "shared_up", "shared_down")})
        assert self.run(ExpertsPlan(weights, 3, where, form="general", **self.SMALL)) < LIMIT

    def test_dense_shared_expert_beside_fp8_ones(self):
        dense = random_experts(5, 192, 64, 96, CPU, torch.bfloat16)
        weights = replace(random_experts(5, 192, 64, 96, CPU), **{name: getattr(dense, name) for name in ("shared_gate", "shared_up", "shared_down")})
        assert self.run(ExpertsPlan(weights, 3, NATIVE, **self.SMALL)) < LIMIT

    @pytest.mark.parametrize("top_k", [1, 2, 4])
    def test_table_norm_and_numbers_of_choices(self, top_k):
        weights = random_packed_experts(5, 128, 64, 64, CPU, "int4", 32)
        plan = ExpertsPlan(weights, top_k, NATIVE, norm=normal(128, seed=3) * 0.2, early_x=True)
        assert self.run(plan, (2, 4, 0, 1), residual=normal(128, seed=7)) < LIMIT

    def test_what_it_does_not_take(self, monkeypatch):
        weights = random_packed_experts(5, 128, 64, 64, CPU, "int4", 32)
        other = random_packed_experts(5, 128, 64, 64, CPU, "int4", 64)
        with pytest.raises(UnsupportedByKernel, match="different layouts"):
            ExpertsPlan(replace(weights, experts=replace(weights.experts, up=other.experts.up)), 3, NATIVE)
        monkeypatch.setattr(packed_experts, "usable", lambda kernel, device: False)
        with pytest.raises(UnsupportedByKernel, match="not used"):
            ExpertsPlan(weights, 3, NATIVE)
