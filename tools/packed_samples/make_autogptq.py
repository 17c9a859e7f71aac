"""A sample packed and multiplied out by AutoGPTQ, the first format: stored zeros are one too low."""

from __future__ import annotations

import torch
from common import matrix, module_alone, representable, scales_and_zeros, write


def sample(seed: int, group: int) -> dict[str, torch.Tensor]:
    rows, columns = 32, 128
    weight = matrix(rows, columns, seed, 0.2)
    scale, zero = scales_and_zeros(weight, group, symmetric=False)
    zero = zero.clamp(min=1)  # its packing of a zero of 0 spoils the neighbours
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = representable(weight, scale, zero, group)
    library = module_alone("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    layer = library.QuantLinear(4, group, columns, rows, bias=False, kernel_switch_threshold=0)
    layer.pack(linear, scale, zero, None)
    layer.scales = layer.scales.half()
    expected = layer(torch.eye(columns, dtype=torch.float16)).t()  # a product with the identity: the weight itself
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx, "expected": expected}


if __name__ == "__main__":
    write("autogptq_v1_asym_g64", "auto-gptq", sample(30, 64))
