"""Samples packed and multiplied out by compressed-tensors (the library behind llm-compressor's files)."""

from __future__ import annotations

import torch
from common import matrix, write
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

# name: group (None: a channel), symmetric, dtype of the scales, columns
INT4 = {
    "ct_int4_sym_g32": (32, True, torch.bfloat16, 128),
    "ct_int4_asym_g32": (32, False, torch.bfloat16, 128),
    "ct_int4_sym_g64": (64, True, torch.float16, 128),
    "ct_int4_asym_g128": (128, False, torch.float16, 256),
    "ct_int4_sym_channel": (None, True, torch.bfloat16, 128),
    "ct_int4_asym_channel": (None, False, torch.float32, 128),
}


def int4(seed: int, group: int | None, symmetric: bool, dtype: torch.dtype, columns: int) -> dict[str, torch.Tensor]:
    weight = matrix(24, columns, seed, 0.0 if symmetric else 0.3).to(dtype)
    args = QuantizationArgs(num_bits=4, type="int", strategy="group" if group else "channel", group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    runs = weight.unflatten(1, (-1, group or columns))
    scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    return {**packed, "expected": expected}


def nvfp4(seed: int) -> dict[str, torch.Tensor]:
    weight = matrix(24, 128, seed)
    weight[3, 16:48] = 0
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, scale_dtype=torch.float8_e4m3fn)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    global_scale = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
    runs = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(runs.amin(-1), runs.amax(-1), args, global_scale=global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    return {**packed, "expected": NVFP4PackedCompressor.decompress(packed, scheme)["weight"], **{"expected_f32": nvfp4_in_float32(packed, args)}}


def nvfp4_in_float32(packed: dict[str, torch.Tensor], args: QuantizationArgs) -> torch.Tensor:
    """`decompress` with float32 in the place of the bfloat16 that it unpacks to."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = packed["weight_packed"].shape
    codes = unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * half, dtype=torch.float32)
    return dequantize(x_q=codes, scale=packed["weight_scale"].float(), args=args, global_scale=packed["weight_global_scale"], dtype=torch.float32)


if __name__ == "__main__":
    for seed, (name, options) in enumerate(INT4.items()):
        write(name, "compressed-tensors", int4(seed, *options))
    write("ct_nvfp4", "compressed-tensors", nvfp4(10))
