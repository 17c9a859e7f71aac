"""Samples packed and multiplied out by AutoAWQ in its usual packing (version gemm)."""

from __future__ import annotations

import torch
from common import matrix, module_alone, representable, scales_and_zeros, write


def sample(seed: int, group: int) -> dict[str, torch.Tensor]:
    rows, columns = 32, 128
    weight = matrix(rows, columns, seed, 0.2)
    scale, zero = scales_and_zeros(weight, group, symmetric=False)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = representable(weight, scale, zero, group)
    layer = module_alone("awq.modules.linear.gemm").WQLinear_GEMM.from_linear(linear, 4, group, scales=scale.t().contiguous(), zeros=zero.t().contiguous())
    dequantize = module_alone("awq.utils.packing_utils").dequantize_gemm
    expected = dequantize(layer.qweight, layer.qzeros, layer.scales, 4, group).t()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "expected": expected}


if __name__ == "__main__":
    for seed, group in enumerate((32, 128), 40):
        write(f"autoawq_g{group}", "autoawq", sample(seed, group))
