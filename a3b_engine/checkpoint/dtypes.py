"""The dtype codes of safetensors headers, their sizes, and the torch dtypes they stand for."""

from __future__ import annotations

# Bits per element, for every code the format defines (sub-byte codes included, so that a file
# using them is measured correctly and can be refused by name instead of being called damaged).
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}

DENSE_CODES = ("F32", "BF16", "F16", "F64")
FP8_CODES = ("F8_E4M3", "F8_E5M2")
SCALE_CODES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}


def torch_dtype(code: str):
    """The torch dtype of a safetensors dtype `code`; KeyError for a code torch has no type for."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[code], None)
    if dtype is None:
        raise KeyError(code)
    return dtype


def dtype_code(dtype) -> str:
    """The safetensors dtype code of a torch dtype; KeyError when the format has none."""
    name = str(dtype).removeprefix("torch.")
    for code, torch_name in _TORCH_NAMES.items():
        if torch_name == name:
            return code
    raise KeyError(name)
