"""The kernels for packed weights on the matrix units, whole: run by Triton's interpreter with stand-ins for what is assembly. Not collected by
itself: test_kernels_packed.py runs it in a process of its own."""

import pytest
import torch
from emulated_units import Emulated
from interpreted import mend_interpreter

mend_interpreter()
from a3b_engine.kernels import packed_matrix, packed_matrix_gemv, support  # noqa: E402
from a3b_engine.kernels.moe_decode import ExpertsPlan  # noqa: E402
from a3b_engine.kernels.packed_experts import random_packed_experts  # noqa: E402
from a3b_engine.kernels.packed_gemv import PackedGemv  # noqa: E402
from a3b_engine.kernels.packed_samples import random_packed  # noqa: E402
from a3b_engine.kernels.packed_units import place_of  # noqa: E402
from a3b_engine.kernels.support import relative_error  # noqa: E402
from a3b_engine.model.linear import dense  # noqa: E402

torch.set_num_threads(1)
CPU = torch.device("cpu")
WHERE = support.target(CPU)
NVFP4 = dict(scale=torch.float8_e4m3fn, factor=True)
KINDS = [("int4", 32, {}), ("int4", 128, dict(zero=True)), ("int4", 16, {}), ("int3", 32, {}), ("int3", 64, dict(zero=True)), ("e2m1", 16, NVFP4),
         ("e2m1", 32, dict(scale=torch.float32, factor=True, divides=True))]  # fmt: skip


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    Emulated().install(monkeypatch, packed_matrix, packed_matrix_gemv)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form, group, options", KINDS)
def test_projections(form, group, options):
    matrices = [random_packed((rows, 512), form, group, CPU, seed=rows, **options) for rows in (16, 32)]
    plan = PackedGemv(matrices, WHERE, norm=normal(512, seed=1) * 0.1, matrix_units=True)
    x, residual, out = normal(512, seed=2), normal(48, seed=3), torch.full((48,), torch.nan)
    plan(x, out, residual)
    assert relative_error(out, plan.reference(x, residual, torch.float64)) < 1e-6


def test_several_warps_share_the_columns():
    plan = PackedGemv([random_packed((16, 2048), "int4", 32, CPU)], WHERE, matrix_units=True)
    x, out = normal(2048, seed=2), torch.full((16,), torch.nan)
    plan(x, out)
    assert relative_error(out, plan.reference(x, None, torch.float64)) < 1e-6


@pytest.mark.parametrize("form, group, options, shared, early_x", [
    (*KINDS[0], "fp8", True), (*KINDS[0], "same", False), (*KINDS[1], "bf16", True), (*KINDS[3], "same", True), (*KINDS[5], "fp8", True), (*KINDS[6], "same", True),
])  # fmt: skip
def test_up(form, group, options, shared, early_x):
    """With `down` in the general form, which takes any number of rows."""
    weights = random_packed_experts(3, 512, 32, 32, CPU, form, group, shared_form=form if shared == "same" else shared, **options)
    plan = ExpertsPlan(weights, 2, WHERE, norm=normal(512, seed=1) * 0.1, early_x=early_x, form="matrix_units")
    x, ids, shares, out = normal(512, seed=2), torch.tensor([2, 0], dtype=torch.int32), torch.rand(3), torch.full((512,), torch.nan)
    plan.hidden.fill_(torch.nan)
    plan(x, ids, shares, out)
    assert relative_error(out, plan.reference(x, ids, shares, None, torch.float64)) < 1e-6


@pytest.mark.parametrize("form, group, options, shared", [
    (*KINDS[0], "fp8"), (*KINDS[1], "same"), (*KINDS[2], "bf16"), (*KINDS[3], "fp8"), (*KINDS[4], "same"), (*KINDS[5], "same"), (*KINDS[6], "fp8"),
])  # fmt: skip
def test_down(form, group, options, shared):
    """Of the first 32 outputs, from a `hidden` in the order in which `up` leaves it."""
    weights = random_packed_experts(9, 512, 512, 512, CPU, form, group, shared_form=form if shared == "same" else shared, **options)
    plan = ExpertsPlan(weights, 8, WHERE, form="matrix_units")
    ids, shares, residual = torch.tensor([4, 0, 3, 8, 7, 1, 5, 6], dtype=torch.int32), torch.rand(9), normal(512, seed=5)
    hidden, out = normal(9, 512, seed=4), torch.full((512,), torch.nan)
    for row, order in enumerate([plan._packed._up["DOWN"]] * 8 + [plan._packed._up["SHARED_DOWN"]]):
        place = torch.arange(512) if order is None else place_of.fn(torch.arange(512), order) // 2
        plan.hidden[row, place] = hidden[row]
    plan._packed._down_grid = (2,)
    plan.down(ids, shares, out, residual)
    matrices = [weights.experts.down[i] for i in ids.tolist()] + [weights.shared_down]
    expected = residual.double()
    for share, vector, matrix in zip(shares.double(), hidden.double(), matrices):
        expected = expected + share * (dense(matrix, torch.float64) @ vector)
    assert relative_error(out[:32], expected[:32]) < 1e-6 and out[32:].isnan().all()


def test_both_agree_about_the_order():
    """`up` of two rows of tiles into a `hidden` that `down` reads whole."""
    weights = random_packed_experts(8, 512, 512, 512, CPU, "int4", 32)
    weights.experts.gate.codes[:, 16:] = 0x88  # zero from the third tile on
    weights.shared_gate.data.view(torch.uint8)[16:] = 0
    plan = ExpertsPlan(weights, 8, WHERE, norm=normal(512, seed=1) * 0.1, early_x=True, form="matrix_units")
    plan._packed._up_grid, plan._packed._down_grid = (2, 9), (1,)
    x, ids, shares, out = normal(512, seed=2), torch.arange(8, dtype=torch.int32).flip(0), torch.rand(9), torch.full((512,), torch.nan)
    plan(x, ids, shares, out)
    assert relative_error(out[:16], plan.reference(x, ids, shares, None, torch.float64)[:16]) < 1e-6
