"""Samples packed and multiplied out by GPTQModel, in both versions of the format, and one with act-order."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from common import matrix, representable, scales_and_zeros, write
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

# name: group, symmetric, version, act-order, mean of the weights (above 0: groups whose zero is 0)
SAMPLES = {
    "gptqmodel_v1_sym_g32": (32, True, 1, False, 0.0),
    "gptqmodel_v2_sym_g128": (128, True, 2, False, 0.0),
    "gptqmodel_v2_asym_g32": (32, False, 2, False, 0.3),
    "gptqmodel_v1_asym_g32": (32, False, 1, False, 3.0),
    "gptqmodel_v2_act_order": (32, True, 2, True, 0.0),
}


def sample(seed: int, group: int, symmetric: bool, version: int, act_order: bool, mean: float) -> dict[str, torch.Tensor]:
    rows, columns = 32, 128
    weight = matrix(rows, columns, seed, mean)
    scale, zero = scales_and_zeros(weight, group, symmetric)
    g_idx = torch.arange(columns, dtype=torch.int32) // group
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = representable(weight, scale, zero, group)
    if act_order:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        linear.weight.data, g_idx = linear.weight.data[:, order], g_idx[order]
    layer = TorchLinear(
        bits=4, group_size=group, sym=symmetric, desc_act=act_order, in_features=columns, out_features=rows, bias=False,
        pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    layer.pack_block(linear, scale, zero, g_idx)
    stored = SimpleNamespace(bits=4, pack_dtype=torch.int32)
    if version == 1:
        convert_gptq_v2_to_v1_format_module(layer, stored)
    tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if version == 1:
        convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.post_init()
    return {**tensors, "expected": layer.dequantize_weight().t()}


if __name__ == "__main__":
    for seed, (name, options) in enumerate(SAMPLES.items(), 20):
        write(name, "gptqmodel", sample(seed, *options))
