"""How many bytes a decode step must read, and how many a second the device, and the way to it, can move."""

from __future__ import annotations

import time
from typing import Callable, Mapping

import torch

from ..checkpoint.names import is_expert_stack
from ..config import ModelConfig

COPY_REPEATS = 10


def step_bytes(config: ModelConfig, sizes: Mapping[str, int], context: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that one token must move with `context` tokens before it, by kind, and their `total`.

    sizes: bytes of each weight as loaded, by canonical name (vision is not read). experts: the chosen ones; shared
    experts, routers, projections, norms and one row of the embedding are `dense`. states: recurrent and convolution
    states of the DeltaNet layers, read and written. keys_values: what attention reads.
    """
    text = config.text
    parts = {"experts": 0, "dense": 0, "head": 0}
    for name, nbytes in sizes.items():
        if name.startswith("visual."):
            continue
        if is_expert_stack(name):
            parts["experts"] += nbytes * text.num_experts_per_tok // text.num_experts
        elif name == "lm_head.weight":
            parts["head"] += nbytes
        else:
            parts["dense"] += nbytes // text.vocab_size if name == "embed_tokens.weight" else nbytes
    recurrent = 4 * text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    conv = text.conv_dim * (text.linear_conv_kernel_dim - 1) * dtype.itemsize
    parts["states"] = 2 * len(text.linear_attention_layers) * (recurrent + conv)
    parts["keys_values"] = 2 * len(text.full_attention_layers) * context * text.num_key_value_heads * text.head_dim * dtype.itemsize
    return {**parts, "total": sum(parts.values())}


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a kernel that copies `nbytes` bytes on the device, what it reads and what it writes counted.

    An addition of zero: a plain `copy_` may become a call of the driver, which is slower than a kernel.
    """
    source = torch.empty(max(1, nbytes // 4), dtype=torch.int32, device=device).fill_(1)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes

    def once() -> None:
        torch.add(source, 0, out=target)

    return moved / _seconds(once, device)


def host_copy_rate(device: torch.device, nbytes: int) -> float | None:
    """Bytes a second of a copy of `nbytes` bytes from pinned RAM to a CUDA card by the driver; None on other devices."""
    if device.type != "cuda":
        return None
    source = torch.empty(max(1, nbytes), dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(source.shape, dtype=torch.uint8, device=device)
    return source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _seconds(once: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, on the device's own clock where it has one: the mean of some after two that are not counted."""
    for _ in range(2):
        once()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(COPY_REPEATS):
            once()
        return (time.perf_counter() - began) / COPY_REPEATS
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(COPY_REPEATS):
            once()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3 / COPY_REPEATS
