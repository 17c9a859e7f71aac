"""What surrounds the matrix units: how a vector is brought into their range, and which weights they take. Their own numbers need a card.

Not collected by itself: see interpreted_weight_kernels.py.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from a3b_engine.kernels.fp8_gemv import fits_matrix_units, random_fp8, row_tiles
from a3b_engine.kernels.matrix_units import power_of_two_for
from a3b_engine.kernels.support import target

CPU = torch.device("cpu")
NATIVE = target(CPU)


@triton.jit
def powers_kernel(largest, up, down, N: tl.constexpr):
    index = tl.arange(0, N)
    high, low = power_of_two_for(tl.load(largest + index))
    tl.store(up + index, high)
    tl.store(down + index, low)


def test_vectors_are_scaled_into_float16():
    """The factor of the matrix units' vector: its largest value comes to 2**13 and more, below 2**14, and the pieces of it
    and of values a million times smaller add up to what they were."""
    largest = torch.tensor([1.0, 1.5, 3e-30, 0.02, 65504.0, 7e4, 1e20, 3e38])
    up, down = torch.empty(8), torch.empty(8)
    powers_kernel[(1,)](largest, up, down, 8)
    scaled = largest * up
    assert (scaled >= 2**13).all() and (scaled < 2**14).all()
    assert torch.equal(up * down, torch.ones(8))
    values = torch.cat((scaled, scaled * 1.2345e-6))
    high = values.half().float()
    middle = (values - high).half().float()
    low = (values - high - middle).half().float()
    assert ((high.double() + middle.double() + low.double() - values.double()).abs() <= 2**-24).all()


def test_zero_and_infinite_vectors_are_scaled_by_finite_factors():
    up, down = torch.empty(2), torch.empty(2)
    powers_kernel[(1,)](torch.tensor([0.0, torch.inf]), up, down, 2)
    assert up.isfinite().all() and down.isfinite().all() and (up > 0).all() and (down > 0).all()


def test_the_interpreter_has_no_matrix_units():
    weight = random_fp8((48, 2048), (128, 128), CPU)
    assert not fits_matrix_units([weight], NATIVE)
    card = replace(NATIVE, interpreted=False, multiprocessors=132)
    assert fits_matrix_units([weight], card)
    assert not fits_matrix_units([weight], replace(card, fp8_native=False))
    for other in (random_fp8((40, 2048), (128, 128), CPU), random_fp8((48, 1536), (128, 128), CPU),
                  random_fp8((48, 2048), (64, 64), CPU), random_fp8((48, 2048), (128, 128), CPU, torch.float8_e5m2)):  # fmt: skip
        assert not fits_matrix_units([weight, other], card)


@pytest.mark.parametrize(
    "sizes, warps, tiles", [((8192, 4096), 4, 2), ((8192, 512, 512), 4, 2), ((2048,), 8, 1), ((16384, 8192), 4, 1), ((9200,), 4, 1)]
)
def test_two_tiles_a_program_where_they_save_a_round(sizes, warps, tiles):
    options = row_tiles(sizes, warps, replace(NATIVE, multiprocessors=132))
    assert options["TILES"] == tiles and options["num_warps"] == options["WARPS"] == warps
