"""The matrix units for Triton's interpreter: an interpreter of the PTX that kernels.packed_units is made of, lane by lane, and stand-ins for the
device functions that are assembly, so that whole kernels run on a CPU."""

import ctypes
import re

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from a3b_engine.kernels import packed_units
from a3b_engine.kernels.matrix_units import PITCH as PITCH_CONSTANT

PITCH = PITCH_CONSTANT.value
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def halves(words):
    """float16 [32] in the lower and in the upper halves of uint32 [32]."""
    pairs = words.astype(np.uint32).view(np.float16).reshape(-1, 2)
    return pairs[:, 0].astype(np.float64), pairs[:, 1].astype(np.float64)


def joined(low, high):
    return np.stack((low.astype(np.float16), high.astype(np.float16)), -1).view(np.uint32).reshape(-1)


def of_operand(parts, cells, size):
    """The matrix whose cells the lanes hold: two numbers of each register behind each other."""
    matrix = np.zeros(size)
    for (low, high), (row, column, along) in zip(parts, cells):
        matrix[row, column] = low
        matrix[(row, column + 1) if along else (row + 1, column)] = high
    return matrix


class Warp:
    """Registers of 32 lanes by name, and the operations that the code uses."""

    def __init__(self, arguments, shared):
        self.registers, self.shared = dict(arguments), shared

    def value(self, text):
        if text in self.registers:
            return self.registers[text]
        return np.full(32, int(text, 0), np.uint32)

    def run(self, code):
        for line in code.splitlines():
            line = line.strip().rstrip(";")
            if line and line not in "{}" and not line.startswith(".reg"):
                self.step(*line.split(" ", 1))
        return [self.registers[f"${number}"] for number in range(4)]

    def step(self, name, rest):
        if name == "ld.shared.v4.b32":
            targets, address, offset = re.match(r"\{(.*)\}, \[(\$\d+) \+ (\d+)\]", rest).groups()
            first = self.value(address).astype(np.int64) + int(offset)
            assert not (first % 16).any()
            for number, target in enumerate(targets.split(", ")):
                self.registers[target] = self.shared.view(np.uint32)[first // 4 + number]
        elif name.startswith("mma.sync.aligned.m16n8k16.row.col"):
            self.multiply(*(group.split(", ") for group in re.findall(r"\{(.*?)\}", rest)[:3]))
        else:
            target, *sources = (part.strip() for part in rest.split(","))
            self.registers[target] = getattr(self, name.replace(".", "_"))(*map(self.value, sources))

    def multiply(self, total, first, second):
        a = of_operand([halves(self.registers[name]) for name in first], [(G, 2 * T, 1), (G + 8, 2 * T, 1), (G, 2 * T + 8, 1), (G + 8, 2 * T + 8, 1)], (16, 16))
        b = of_operand([halves(self.registers[name]) for name in second], [(2 * T, G, 0), (2 * T + 8, G, 0)], (16, 8))
        for name, (row, column) in zip(total, ((G, 2 * T), (G, 2 * T + 1), (G + 8, 2 * T), (G + 8, 2 * T + 1))):
            self.registers[name] = self.registers[name] + (a @ b)[row, column]

    mov_f32 = mov_b32 = staticmethod(np.copy)
    shr_b32 = staticmethod(np.right_shift)
    shl_b32 = staticmethod(np.left_shift)
    and_b32 = staticmethod(np.bitwise_and)

    @staticmethod
    def lop3_b32(a, b, c, table):
        assert (table == 0xEA).all()  # (a & b) | c
        return (a & b) | c

    @staticmethod
    def prmt_b32(a, b, selector):
        every = np.stack((a, b), -1).view(np.uint8).reshape(32, 8)
        chosen = [every[:, int(selector[0]) >> 4 * place & 7] for place in range(4)]
        return np.stack(chosen, -1).view(np.uint32).reshape(-1)

    @staticmethod
    def add_rn_f16x2(a, b):
        return joined(*(x + y for x, y in zip(halves(a), halves(b))))

    @staticmethod
    def fma_rn_f16x2(a, b, c):
        return joined(*(x * y + z for x, y, z in zip(halves(a), halves(b), halves(c))))


def tensor(values, dtype):
    kind = tl.block_type(dtype, list(values.shape)) if values.shape else dtype
    return tl.core.tensor(TensorHandle(values, dtype), kind)


def numbers(value):
    return value.handle.data if isinstance(value, tl.core.tensor) else np.asarray(value)


def read(addresses, count):
    """uint32 [count][T] at addresses int64 [T]."""
    raw = [ctypes.string_at(int(address), 4 * count) for address in numbers(addresses)]
    return list(np.frombuffer(b"".join(raw), np.uint32).reshape(-1, count).T.copy())


def as_codes(words):
    return tuple(tensor(word.view(np.int32), tl.int32) for word in words)


class Emulated:
    """What stands in for the assembly while one program runs after another."""

    def __init__(self):
        self.shared = np.zeros(3 * PITCH, np.uint8)

    def install(self, monkeypatch, *modules):
        for module in modules:
            for name in vars(Emulated):
                if not name.startswith("_") and name != "install" and hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))

    def shared_memory(self, any):
        self.shared[:] = 0xFF  # NaN in every number
        return tensor(np.zeros((), np.int32), tl.int32)

    def touch(self, address):
        pass

    def load_step(self, first, second):
        return as_codes(read(first, 4) + read(second, 4))

    def load_steps(self, first, second):
        return tuple(self.load_step(first + step * 64, second + step * 64) for step in range(4))

    def load_two(self, first, second):
        return as_codes(read(first, 2) + read(second, 2))

    def load_six(self, first, second):
        a, b = read(first, 12), read(second, 12)
        return tuple(as_codes(a[3 * chunk : 3 * chunk + 3] + b[3 * chunk : 3 * chunk + 3]) for chunk in range(4))

    def _store(self, values, places):
        places = places.astype(np.int64)
        assert not (places % 2).any()
        self.shared.view(np.float16)[places // 2] = values

    def store_two_pieces(self, values, address):
        values, places = numbers(values), numbers(address)
        high = values.astype(np.float16)
        self._store(high, places)
        self._store((values - high.astype(np.float32)).astype(np.float16), places + PITCH)

    store_two_pieces_in_order = store_two_pieces

    def store_zeros(self, thread, address, THREADS):
        self.shared[2 * PITCH : 2 * PITCH + 1024] = 0

    def half_chunk(self, c, first, second, below_first, below_second, address, bias, below_bias, FORM):
        code, behind = (packed_units.INT4, [*bias, *below_bias]) if FORM == "int4" else (packed_units.E2M1, [])
        return self._by_warp(code.value, [*c, first, second, below_first, below_second, address, *behind])

    def int3_chunk(self, c, w0, w1, w2, v0, v1, v2, address, bias, below_bias):
        return self._by_warp(packed_units.INT3.value, [*c, w0, w1, w2, v0, v1, v2, address, bias[0], below_bias[0]])

    def _by_warp(self, code, arguments):
        threads = max(numbers(argument).size for argument in arguments)
        every = [np.broadcast_to(numbers(argument), threads) for argument in arguments]
        every = [values.view(np.uint32) if values.dtype == np.int32 else values.astype(np.float64) for values in map(np.ascontiguousarray, every)]
        found = []
        for start in range(0, threads, 32):
            warp = Warp({f"${number + 4}": values[start : start + 32] for number, values in enumerate(every)}, self.shared)
            found.append(warp.run(code))
        return tuple(tensor(np.concatenate(parts).astype(np.float32), tl.float32) for parts in zip(*found))

    def multiply_step(self, c, codes, address):
        """FP8: 16 columns of each lane, in rows g and g + 8."""
        raw = np.stack([numbers(code) for code in codes], -1).copy().view(np.uint8).reshape(-1, 2, 16)
        weights = torch.from_numpy(raw).view(torch.float8_e4m3fn).double().numpy().reshape(-1, 8, 4, 2, 16)  # warp, g, t, row or row + 8, column
        places = numbers(address).astype(np.int64)[:, None] // 2 + np.arange(16)
        vectors = self.shared.view(np.float16)[places].astype(np.float64).reshape(-1, 8, 4, 16)  # warp, n, t, column
        sums = np.einsum("wgtrk,wntk->wgrn", weights, vectors)
        by_lane = [sums[:, :, row, piece::2].reshape(-1) for row in (0, 1) for piece in (0, 1)]
        return tuple(tensor((numbers(before) + new).astype(np.float32), tl.float32) for before, new in zip(c, by_lane))

    def multiply_steps(self, total, four, address, zero, first_scale, first_scale_below, second_scale, second_scale_below):
        c = self.multiply_step((zero,) * 4, four[0], address)
        c = self.multiply_step(c, four[1], address + 128)
        d = self.multiply_step((zero,) * 4, four[2], address + 256)
        d = self.multiply_step(d, four[3], address + 384)
        scales = [(first_scale, second_scale)] * 2 + [(first_scale_below, second_scale_below)] * 2
        return tuple(before + x * one + y * other for before, x, y, (one, other) in zip(total, c, d, scales))
