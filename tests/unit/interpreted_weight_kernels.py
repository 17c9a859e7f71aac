"""The kernels that read weights, run by Triton's interpreter on the CPU against float64.

Not collected by itself: test_kernels_weights.py runs it, with interpreted_matrix_units.py, in a process of its own with TRITON_INTERPRET=1, because the
variable must be set before Triton is imported and would change every other kernel of the process.
Limits are relative errors |y - reference| / |reference|; float32 sums of a few hundred terms stay below 1e-6.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.kernels import fp8_gemv, moe_decode
from a3b_engine.kernels.configs import TileConfig
from a3b_engine.kernels.dense_gemv import DenseGemv
from a3b_engine.kernels.expert_table import random_experts
from a3b_engine.kernels.fp8_gemv import Fp8Gemv, random_fp8
from a3b_engine.kernels.moe_decode import ExpertsPlan
from a3b_engine.kernels.router import RouterPlan
from a3b_engine.kernels.support import UnsupportedByKernel, relative_error, target, usable
from a3b_engine.model.moe import ExpertWeights, MoEWeights, mixture_of_experts, route

torch.set_num_threads(1)
CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NATIVE = target(CPU)
BYTES = replace(NATIVE, fp8_native=False)  # as on a card below sm_89
LIMIT = 1e-6
TILE = TileConfig(16, 256, 4)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(plan, x, residual=None, dtype=torch.float32):
    """One call into an output full of NaN."""
    out = torch.full((plan.rows,), torch.nan, dtype=dtype)
    plan(x, out, residual)
    return out


def error(plan, x, residual=None):
    return relative_error(run(plan, x, residual), plan.reference(x, residual, torch.float64))


@pytest.mark.parametrize("kernel", ["fp8_gemv", "dense_gemv", "router", "moe_decode"])
def test_self_test_passes(kernel):
    assert usable(kernel, CPU)


@pytest.mark.parametrize("module", [fp8_gemv, moe_decode])
def test_self_test_passes_with_codes_as_bytes(module):
    assert module.check(BYTES) < LIMIT


class TestCodes:
    @staticmethod
    def decoded(dtype, where):
        """Every one of the 256 codes, multiplied by 1."""
        codes = torch.zeros(256, 16, dtype=torch.uint8)
        codes[:, 0] = torch.arange(256)
        weight = ScaledWeight(codes.view(dtype), torch.ones(1, 1), (256, 16))
        x = torch.zeros(16)
        x[0] = 1.0
        return run(Fp8Gemv([weight], where, config=TileConfig(64, 16, 4)), x), codes[:, 0].view(dtype).float()

    @pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
    def test_all_finite_e4m3_codes_are_exact(self, where):
        found, expected = self.decoded(E4M3, where)
        finite = expected.isfinite()
        assert finite.sum() == 254
        assert torch.equal(found[finite], expected[finite])

    def test_nan_codes_as_bytes_become_480(self):
        found, _ = self.decoded(E4M3, BYTES)
        assert found[[0x7F, 0xFF]].tolist() == [480.0, -480.0]

    def test_all_e5m2_codes_are_exact(self):
        found, expected = self.decoded(E5M2, NATIVE)
        assert torch.equal(found.nan_to_num(1e9), expected.nan_to_num(1e9))


class TestFp8Gemv:
    @pytest.mark.parametrize(
        "rows, columns, block",
        [
            (1, 16, (128, 128)),
            (48, 256, (128, 128)),  # nothing ragged
            (130, 130, (128, 128)),  # odd row stride, a scale block of two rows and one of two columns
            (37, 328, (128, 128)),
            (40, 200, (40, 200)),  # per tensor
            (40, 200, (1, 200)),  # per channel
            (40, 200, (64, 64)),
            (40, 200, (32, 96)),  # summed in groups of 32
        ],
    )
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_shapes_and_scales(self, rows, columns, block, dtype):
        plan = Fp8Gemv([random_fp8((rows, columns), block, CPU, dtype)], NATIVE, config=TILE)
        assert error(plan, normal(columns)) < LIMIT

    @pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_types_of_x_and_residual(self, dtype, where):
        plan = Fp8Gemv([random_fp8((40, 200), (128, 128), CPU)], where, config=TILE)
        assert error(plan, normal(200, dtype=dtype), normal(40, seed=1, dtype=dtype)) < LIMIT

    def test_several_matrices_and_a_dense_tail_in_one_launch(self):
        """Like q | k | v with b | a behind: ragged in rows, each with scales of its own."""
        matrices = [random_fp8((rows, 200), (128, 128), CPU, seed=rows) for rows in (150, 33, 16, 1)]
        tail = [normal(rows, 200, seed=rows, dtype=torch.bfloat16) for rows in (5, 18)]
        for count, behind in ((1, tail[:1]), (2, tail), (3, tail[:0]), (4, tail)):
            plan = Fp8Gemv(matrices[:count], NATIVE, tail=behind, config=TILE)
            assert plan.rows == sum(matrix.shape[0] for matrix in (*matrices[:count], *behind))
            assert error(plan, normal(200)) < LIMIT

    def test_norm_on_the_way(self):
        plan = Fp8Gemv([random_fp8((40, 200), (128, 128), CPU)], NATIVE, norm=normal(200, seed=3) * 0.2, eps=1e-3, config=TILE)
        assert error(plan, normal(200) * 30) < LIMIT
        assert error(plan, normal(200) * 0.01) < LIMIT

    def test_split_columns_add_up_in_one_order(self):
        weight, x, residual = random_fp8((40, 600), (128, 128), CPU), normal(600), normal(40, seed=1)
        for splits in (2, 3):
            plan = Fp8Gemv([weight], NATIVE, config=TileConfig(16, 128, 4, splits))
            assert error(plan, x, residual) < LIMIT
            assert torch.equal(run(plan, x, residual), run(plan, x, residual))

    @pytest.mark.parametrize("rows, programs", [(16, 1), (2, 2), (1, 4)])
    def test_programs_with_several_tiles(self, rows, programs):
        """On four multiprocessors; the last program has a tile too few, and no tile spans two matrices."""
        matrices = [random_fp8((size, 200), (128, 128), CPU, seed=size) for size in (150, 33, 16)]
        config = TileConfig(rows, 256, 4, programs=programs)
        steps, count = config.shared_out(sum(-(-size // rows) for size in (150, 33, 16)), NATIVE)
        assert steps > 1 and count <= 4 * programs
        plan = Fp8Gemv(matrices, NATIVE, tail=[normal(5, 200, dtype=torch.bfloat16)], norm=normal(200, seed=3) * 0.2, config=config)
        assert error(plan, normal(200)) < LIMIT
        wide = Fp8Gemv([random_fp8((40, 600), (128, 128), CPU)], NATIVE, config=replace(config, columns=128, rows=1))
        assert error(wide, normal(600), normal(40, seed=1)) < LIMIT

    def test_residual_in_place(self):
        for config in (TILE, TileConfig(16, 128, 4, splits=2), TileConfig(4, 256, 4, programs=1)):
            plan = Fp8Gemv([random_fp8((40, 200), (128, 128), CPU)], NATIVE, config=config)
            x, stream = normal(200), normal(40, seed=1)
            expected = plan.reference(x, stream, torch.float64)
            plan(x, stream, stream)
            assert relative_error(stream, expected) < LIMIT

    def test_zero_rows_and_large_scales(self):
        weight = random_fp8((40, 200), (128, 128), CPU)
        weight.data.view(torch.uint8)[7] = 0
        weight.scale *= 1e30
        plan = Fp8Gemv([weight], NATIVE, config=TILE)
        found = run(plan, normal(200))
        assert found[7] == 0.0 and found.isfinite().all()
        assert error(plan, normal(200)) < LIMIT
        weight.scale.zero_()
        assert torch.equal(run(plan, normal(200)), torch.zeros(40))

    def test_bfloat16_output(self):
        """Small whole numbers, which bfloat16 holds exactly."""
        codes = torch.tensor([0.0, 1.0, -2.0])[torch.arange(40 * 32).view(40, 32) % 3].to(E4M3)
        plan = Fp8Gemv([ScaledWeight(codes, torch.ones(1, 1), (40, 32))], NATIVE, config=TILE)
        x = torch.arange(32.0) % 4
        assert torch.equal(run(plan, x, dtype=torch.bfloat16).float(), codes.float() @ x)

    def test_nan_in_x_shows(self):
        x = normal(200)
        x[150] = torch.nan
        plan = Fp8Gemv([random_fp8((40, 200), (128, 128), CPU)], NATIVE, config=TILE)
        assert run(plan, x).isnan().all()

    def test_configuration_from_the_table(self):
        plan = Fp8Gemv([random_fp8((40, 200), (128, 128), CPU)], NATIVE)
        assert error(plan, normal(200)) < LIMIT

    def test_what_it_does_not_take(self):
        one, other = random_fp8((40, 200), (128, 128), CPU), random_fp8((140, 200), (64, 64), CPU)
        with pytest.raises(UnsupportedByKernel, match="different layouts"):
            Fp8Gemv([one, other], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="different layouts"):
            Fp8Gemv([one, random_fp8((40, 72), (128, 128), CPU)], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="scales over 8 columns"):
            Fp8Gemv([random_fp8((40, 200), (8, 8), CPU)], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="gaps"):
            wide = random_fp8((40, 400), (40, 400), CPU)
            Fp8Gemv([ScaledWeight(wide.data[:, :200], wide.scale, (40, 200))], NATIVE)
        with pytest.raises(UnsupportedByKernel, match="norm"):
            Fp8Gemv([one], NATIVE, norm=normal(100))
        with pytest.raises(ValueError, match="split"):
            Fp8Gemv([one], NATIVE, norm=normal(200), config=TileConfig(16, 128, 4, splits=2))


class TestDenseGemv:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("sizes", [[1], [33, 7], [16, 16, 16]])
    def test_shapes_and_types(self, sizes, dtype):
        for columns in (24, 200, 512):
            matrices = [normal(rows, columns, seed=rows, dtype=dtype) for rows in sizes]
            assert error(DenseGemv(matrices, NATIVE, config=TILE), normal(columns)) < LIMIT

    def test_norm_residual_and_table(self):
        plan = DenseGemv([normal(33, 200, dtype=torch.bfloat16)], NATIVE, norm=normal(200, seed=3) * 0.2)
        assert error(plan, normal(200, dtype=torch.bfloat16), normal(33, seed=1)) < LIMIT

    def test_integers_are_refused(self):
        with pytest.raises(UnsupportedByKernel, match="int8"):
            DenseGemv([torch.ones(8, 16, dtype=torch.int8)], NATIVE)


class TestRouter:
    CONFIG = TileConfig(8, 128, 1)

    def plan(self, matrix, top_k, **options):
        return RouterPlan(matrix, normal(1, matrix.shape[1], seed=9), top_k, NATIVE, config=self.CONFIG, **options)

    @pytest.mark.parametrize("experts, top_k", [(1, 1), (8, 8), (37, 5), (64, 8)])
    def test_ids_and_shares(self, experts, top_k):
        plan = self.plan(normal(experts, 136, seed=2) * 0.1, top_k, norm=normal(136, seed=3) * 0.2)
        for seed in (4, 5):
            x = normal(136, seed=seed)
            plan(x)
            ids, shares = plan.reference(x, torch.float64)
            assert plan.ids.tolist() == ids.tolist()
            assert relative_error(plan.shares, shares) < LIMIT

    def test_agrees_with_the_model(self):
        matrix, x = normal(24, 136, seed=2) * 0.1, normal(136, seed=4)
        plan = self.plan(matrix, 6)
        plan(x)
        share, chosen = route(x[None], matrix, 6)
        assert plan.ids.tolist() == chosen[0].tolist()
        assert relative_error(plan.shares[:6], share[0]) < LIMIT
        assert abs(plan.shares[6] - torch.sigmoid(x @ plan.switch[0])) < 1e-6

    def test_ties_go_to_the_lower_id(self):
        matrix = torch.zeros(24, 16)
        matrix[[3, 9, 20], 0] = 2.0
        matrix[15, 0] = 5.0
        plan = self.plan(matrix, 6)
        plan(torch.eye(16)[0])
        assert plan.ids.tolist() == [15, 3, 9, 20, 0, 1]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_broken_logits_still_give_experts(self, bad):
        """An id out of range would make the next kernel read a wild address."""
        for broken in (range(24), (0, 5), (23,)):
            matrix = normal(24, 16, seed=2).abs() + 0.1
            matrix[list(broken), 0] = bad
            plan = self.plan(matrix, 6)
            plan(torch.ones(16))
            ids = set(plan.ids.tolist())
            assert len(ids) == 6 and min(ids) >= 0 and max(ids) < 24
            if len(broken) < 24 and bad != torch.inf:
                assert not ids & set(broken)
            if bad is torch.nan:
                assert plan.shares[:6].isnan().all()

    def test_large_logits(self):
        plan = self.plan(normal(24, 16, seed=2) * 1e4, 6)
        plan(torch.ones(16))
        assert plan.shares.isfinite().all() and abs(plan.shares[:6].sum() - 1) < 1e-6


class TestExperts:
    UP, DOWN = TileConfig(16, 256, 4), TileConfig(32, 256, 4)

    def plan(self, weights, top_k=3, where=NATIVE, **options):
        return ExpertsPlan(weights, top_k, where, up_config=self.UP, down_config=self.DOWN, **options)

    @staticmethod
    def run(plan, ids=(4, 0, 3), residual=None, out=None, seed=1):
        """Output and float64 reference for some x, with NaN wherever the kernels must write first."""
        size = plan.weights.experts.gate.shape[2]
        x, ids = normal(size, seed=seed), torch.tensor(ids[: plan.top_k], dtype=torch.int32)
        shares = torch.rand(plan.top_k + 1, generator=torch.Generator().manual_seed(2))
        expected = plan.reference(x, ids, shares, residual, torch.float64)
        out = torch.full((size,), torch.nan) if out is None else out
        plan.hidden.fill_(torch.nan)
        plan(x, ids, shares, out, residual)
        return out, expected

    @pytest.mark.parametrize("where", [NATIVE, BYTES], ids=["native", "bytes"])
    @pytest.mark.parametrize("sizes", [(64, 32, 32), (130, 200, 136), (144, 40, 168)])
    def test_fp8(self, sizes, where):
        """hidden, inner, shared inner: whole, scale blocks of two rows and columns over, shared wider than routed."""
        assert relative_error(*self.run(self.plan(random_experts(5, *sizes, CPU), where=where))) < LIMIT

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dense(self, dtype):
        assert relative_error(*self.run(self.plan(random_experts(5, 136, 40, 24, CPU, dtype)))) < LIMIT

    @pytest.mark.parametrize("block", [(1, 0), (0, 0), (64, 32)], ids=["per channel", "per tensor", "64x32"])
    def test_other_scales(self, block):
        def matrix(seed, *shape):
            return random_fp8(shape, (block[0] or shape[-2], block[1] or shape[-1]), CPU, seed=seed)

        stacks = ExpertWeights(matrix(1, 5, 48, 144), matrix(2, 5, 48, 144), matrix(3, 5, 144, 48))
        weights = MoEWeights(normal(5, 144), stacks, matrix(4, 48, 144), matrix(5, 48, 144), matrix(6, 144, 48), normal(1, 144))
        assert relative_error(*self.run(self.plan(weights))) < LIMIT

    @pytest.mark.parametrize("top_k", [1, 2, 4])
    def test_numbers_of_choices(self, top_k):
        plan = self.plan(random_experts(5, 64, 32, 32, CPU), top_k)
        assert relative_error(*self.run(plan, ids=(2, 4, 0, 1))) < LIMIT

    @pytest.mark.parametrize("columns", [64, 256])
    def test_early_x(self, columns):
        options = dict(norm=normal(144, seed=3) * 0.2, up_config=replace(self.UP, columns=columns), down_config=self.DOWN)
        plans = [ExpertsPlan(random_experts(5, 144, 48, 48, CPU), 3, NATIVE, early_x=early, **options) for early in (True, False)]
        found, expected = self.run(plans[0])
        assert relative_error(found, expected) < LIMIT
        assert torch.equal(found, self.run(plans[1])[0])

    def test_norm_residual_in_place_and_table(self):
        weights, stream = random_experts(5, 144, 48, 48, CPU), normal(144, seed=7)
        plan = ExpertsPlan(weights, 3, NATIVE, norm=normal(144, seed=3) * 0.2)
        out, expected = self.run(plan, residual=stream, out=stream)
        assert out is stream and relative_error(out, expected) < LIMIT

    def test_same_bits_every_time(self):
        plan = self.plan(random_experts(5, 144, 48, 48, CPU))
        assert torch.equal(self.run(plan)[0], self.run(plan)[0])

    def test_columns_in_several_pieces(self):
        weights = random_experts(5, 144, 200, 136, CPU)
        plan = ExpertsPlan(weights, 3, NATIVE, up_config=TileConfig(64, 128, 4), down_config=TileConfig(32, 128, 4))
        assert relative_error(*self.run(plan)) < LIMIT

    def test_an_expert_moves(self):
        """Its table row is rewritten and its old place poisoned: the kernels must find the new one."""
        weights = random_experts(5, 144, 48, 48, CPU)
        plan = self.plan(weights)
        before, _ = self.run(plan)
        moved = []
        for column, stack in enumerate((weights.experts.gate, weights.experts.up, weights.experts.down)):
            codes, scale = stack.data[0].clone(), stack.scale[0].clone()
            plan.table.pointers[0, column], plan.table.pointers[0, column + 3] = codes.data_ptr(), scale.data_ptr()
            stack.scale[0] = torch.nan
            moved += [codes, scale]
        x, ids = normal(144, seed=1), torch.tensor((4, 0, 3), dtype=torch.int32)
        after = torch.full((144,), torch.nan)
        plan(x, ids, torch.rand(4, generator=torch.Generator().manual_seed(2)), after)
        assert torch.equal(before, after)

    def test_permuted_experts_give_the_same_bits(self):
        weights, order = random_experts(5, 144, 48, 48, CPU), [3, 0, 4, 1, 2]
        experts = weights.experts
        shuffled = replace(weights, experts=ExpertWeights(*(stack[order] for stack in (experts.gate, experts.up, experts.down))))
        plan, other = self.plan(weights), self.plan(shuffled)
        other.table.pointers[order] = other.table.pointers[:5].clone()  # expert order[i] lies at place i
        assert torch.equal(self.run(plan)[0], self.run(other)[0])

    def test_router_and_experts_are_the_model(self):
        """The three launches after one another against model.moe in float32."""
        weights = random_experts(16, 144, 48, 48, CPU)
        choose, experts = RouterPlan(weights.router, weights.shared_switch, 4, NATIVE, config=TestRouter.CONFIG), self.plan(weights, 4)
        x, out = normal(144, seed=11) * 5, torch.full((144,), torch.nan)
        choose(x)
        experts(x, choose.ids, choose.shares, out)
        assert relative_error(out, mixture_of_experts(x[None], weights, SimpleNamespace(num_experts_per_tok=4))[0]) < LIMIT

    def test_what_it_does_not_take(self):
        weights, dense = random_experts(5, 64, 32, 32, CPU), random_experts(5, 64, 32, 32, CPU, torch.bfloat16)
        with pytest.raises(UnsupportedByKernel, match="different layouts"):
            self.plan(replace(weights, shared_up=dense.shared_up))
        with pytest.raises(UnsupportedByKernel, match="multiple of 16"):
            self.plan(random_experts(5, 33, 33, 33, CPU))
