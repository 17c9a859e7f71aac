"""The inline assembly that makes float16 of packed codes, which Triton's interpreter never runs: carried out here, line by line."""

import struct

import pytest
import torch
from interpreted import needs_triton

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-number for number in FP4]


def halves(word):
    return struct.unpack("<ee", struct.pack("<I", word))


def carried_out(text, inputs, outputs):
    """The pairs of float16 in the output registers $0 ... of PTX that knows a few instructions only."""
    registers = {f"${outputs + number}": value for number, value in enumerate(inputs)}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip("{}\n ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        first, *others = (value(name) for name in names)
        if operation == "mov.b32":
            result = first
        elif operation == "shl.b32":
            result = first << others[0] & 0xFFFFFFFF
        elif operation == "shr.u32":
            result = first >> others[0]
        elif operation == "and.b32":
            result = first & others[0]
        elif operation == "lop3.b32" and others[2] == 0xEA:
            result = first & others[0] | others[1]
        elif operation == "prmt.b32":
            source = struct.pack("<II", first, others[0])
            result = int.from_bytes(bytes(source[others[1] >> 4 * place & 7] for place in range(4)), "little")
        elif operation == "sub.f16x2":
            result = struct.unpack("<I", struct.pack("<ee", *(a - b for a, b in zip(halves(first), halves(others[0])))))[0]
        else:
            raise AssertionError(line)
        registers[target] = result
    return [halves(registers[f"${number}"]) for number in range(outputs)]


def words(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 1 << 32, (count,), generator=generator).tolist()


@needs_triton
@pytest.mark.parametrize("name, number", [("_LESS_EIGHT", lambda code: code - 8), ("_AS_STORED", float), ("_FOUR_FP4", lambda code: FP4[code] / 16384)])
def test_four_bits(name, number):
    from a3b_engine.kernels import packed_tiles

    for word in [0x76543210, 0xFEDCBA98, *words(100)]:
        expected = [tuple(number(word >> 16 * half + 4 * place & 15) for half in (0, 1)) for place in range(4)]
        assert carried_out(getattr(packed_tiles, name).value, [word], 4) == expected


@needs_triton
@pytest.mark.parametrize("name, less", [("_THREE_BITS", 4), ("_THREE_AS_STORED", 0)])
def test_three_bits(name, less):
    from a3b_engine.kernels import packed_tiles

    for low, high in zip(words(100), words(101)):
        codes = [[(low >> 8 * byte + 2 * place & 3) + 4 * (high >> 8 * byte + place & 1) - less for byte in range(4)] for place in range(4)]
        found = carried_out(getattr(packed_tiles, name).value, [low, high], 8)
        assert [[*found[2 * place], *found[2 * place + 1]] for place in range(4)] == codes
