"""What the matrix units are told to do with packed codes (kernels.packed_units), carried out by an interpreter of the PTX in it, lane by
lane. Not collected by itself: test_kernels_packed.py runs it in a process of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_units import PITCH, G, T, Warp

from a3b_engine.checkpoint.packed import PackedWeight, pack_codes
from a3b_engine.kernels import packed_units

COLUMNS = 512
def words(raw, row, first, count):
    """uint32 [32] at byte `first` [32] of rows [32], and the `count` - 1 behind each."""
    return [np.array([raw[r, f + 4 * n : f + 4 * n + 4].view(np.uint32)[0] for r, f in zip(row, first)]) for n in range(count)]


def bias(zero):
    return [np.full(32, int(np.float16(-base - zero).view(np.uint16)) * 0x10001, np.uint32) for base in (1024, 64)]


@pytest.mark.parametrize("form, zeros", [("int4", (8, 8)), ("int4", (3, 15)), ("e2m1", (8, 8)), ("int3", (4, 4)), ("int3", (0, 7))])
def test_a_lane_finds_the_sums_of_its_own_groups(form, zeros):
    """16 rows and 512 columns, as a warp takes them: zeros of rows below 8 and of the others."""
    bits, generator = 3 if form == "int3" else 4, np.random.default_rng(0)
    numbers = torch.from_numpy(generator.integers(0, 1 << bits, (16, COLUMNS)).astype(np.uint8))
    zero = torch.tensor(zeros, dtype=torch.uint8).repeat_interleave(8)[:, None].expand(16, COLUMNS // 32).contiguous()
    packed = PackedWeight(pack_codes(numbers, bits), torch.ones(16, COLUMNS // 32), None if form == "e2m1" else zero, None, "e2m1" if form == "e2m1" else "int", 32, bits)
    x = (generator.standard_normal(COLUMNS) * 2**12).astype(np.float32)
    high = x.astype(np.float16)
    place = packed_units.place_of.fn(np.arange(COLUMNS), SimpleNamespace(form=form))
    assert sorted(place) == list(range(0, 2 * COLUMNS, 2))
    shared = np.zeros(3 * PITCH, np.uint8)
    shared.view(np.float16)[place // 2] = high
    shared.view(np.float16)[(place + PITCH) // 2] = (x - high.astype(np.float32)).astype(np.float16)
    lane = np.where(G // 2 == T, G % 2 * PITCH + T * (256 if bits == 3 else 64), 2 * PITCH)
    raw, biases, below = packed.codes.numpy(), bias(zeros[0]), bias(zeros[1])
    found = np.zeros((16, COLUMNS // 32))
    for step in range(4):
        total = [np.zeros(32)] * 4
        if form == "int3":
            chunk, code = T * 4 + step, packed_units.INT3.value
            arguments = [*total, *words(raw, G, T * 48 + step * 12, 3), *words(raw, G + 8, T * 48 + step * 12, 3), lane + step * 64, biases[0], below[0]]
            total = Warp({f"${number + 4}": value for number, value in enumerate(arguments)}, shared).run(code)
        else:
            chunk, code = step * 4 + T, (packed_units.INT4 if form == "int4" else packed_units.E2M1).value
            above, beneath = (words(raw, rows, step * 64 + T * 16, 4) for rows in (G, G + 8))
            for half in (0, 2):
                arguments = [*total, *above[half : half + 2], *beneath[half : half + 2], lane + step * 256 + 16 * half, *biases, *below]
                total = Warp({f"${number + 4}": value for number, value in enumerate(arguments)}, shared).run(code)
        scale = 2.0**14 if form == "e2m1" else 1.0
        found[G, chunk], found[G + 8, chunk] = (total[0] + total[1]) * scale, (total[2] + total[3]) * scale
    expected = (packed.dequantize(torch.float32).numpy() * x.astype(np.float64)).reshape(16, -1, 32).sum(-1)
    assert np.abs(found - expected).max() < 2e-7 * np.abs(expected).max()
