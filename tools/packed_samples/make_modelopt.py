"""A sample packed and multiplied out by NVIDIA's Model Optimizer."""

from __future__ import annotations

import torch
from common import matrix, write
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor


def nvfp4(seed: int) -> dict[str, torch.Tensor]:
    weight = matrix(24, 128, seed)
    weight[3, 16:48] = 0
    tensor, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
    options = dict(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return {
        "weight": tensor._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": scale_2,
        "expected": tensor.dequantize(torch.bfloat16, **options),
        "expected_f32": tensor.dequantize(torch.float32, **options),
    }


if __name__ == "__main__":
    write("modelopt_nvfp4", "nvidia-modelopt", nvfp4(11))
