"""The routed experts of a plan: how they will lie in memory, and some of them read alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import CheckpointError
from ..model.linear import Weight
from ..model.moe import ExpertWeights
from .dtypes import torch_dtype
from .names import is_expert_stack, kept_in_float32, layer_of, may_stay_scaled, stack_names
from .packed import PackedWeight
from .pipeline import AHEAD
from .reader import TakeExperts, load_weights
from .scaled import ScaledWeight
from .storage import Entry, LoadPlan

__all__ = ["TakeExperts", "expert_shapes", "load_experts", "passing_bytes"]


def load_experts(plan: LoadPlan, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
    """Some experts of a layer on the CPU, in the order of `ids`: the very bits that `load_weights` would give them."""
    names = stack_names(layer)
    entries = {name: plan.entries[name].of_experts(ids) for name in names}
    weights = load_weights(replace(plan, entries=entries, aliases={}), "cpu", dtype, dequantize=dequantize)
    return ExpertWeights(*(weights[name] for name in names))


def expert_shapes(plan: LoadPlan, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
    """Stacks like those that `load_weights` makes of every layer's experts, on the meta device.

    Raises `CheckpointError` where they are not alike in all layers.
    """
    layers = sorted({layer_of(name) for name in plan.entries if is_expert_stack(name)})
    found = [[_layout(plan.entries[name], dtype, dequantize) for name in stack_names(layer)] for layer in layers]
    first = list(map(_description, found[0]))
    for layer, stacks in zip(layers, found):
        for name, stack, expected in zip(stack_names(layer), stacks, first):
            if _description(stack) != expected:
                raise CheckpointError(
                    f"{plan.folder}: the experts {name} are stored otherwise than those of layer {layers[0]}; they must agree in all "
                    "layers. Use a repository that keeps all routed experts in one format."
                )
    return ExpertWeights(*found[0])


def passing_bytes(plan: LoadPlan, dtype: torch.dtype, dequantize: bool) -> int:
    """Bytes of the layers of routed experts that `load_weights` has in memory at a time while it gives them away."""
    sizes: dict[int, int] = {}
    for name, entry in plan.entries.items():
        if is_expert_stack(name):
            nbytes = entry.device_bytes(dtype, dequantize)
            if dequantize and not isinstance(entry, Entry):
                nbytes += entry.device_bytes(dtype, False)  # multiplied out when all of it is there
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + nbytes
    return AHEAD * max(sizes.values(), default=0)


def _layout(entry, dtype: torch.dtype, dequantize: bool) -> Weight:
    """What `load_weights` makes of a plan's entry, on the meta device."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if dequantize or not may_stay_scaled(entry.name) or isinstance(entry, Entry) and entry.fp8 is None:
        return allocate(entry.shape, torch.float32 if kept_in_float32(entry.name) else dtype)
    if isinstance(entry, Entry):
        return ScaledWeight(allocate(entry.shape, torch_dtype(entry.dtype)), allocate(entry.fp8.shape, torch.float32), entry.fp8.block)
    return entry.prepare(allocate, lambda *arguments, **options: None)


def _description(stack: Weight) -> tuple:
    """All that tells two layouts apart."""
    if isinstance(stack, torch.Tensor):
        return stack.dtype, stack.shape
    if isinstance(stack, ScaledWeight):
        return stack.data.dtype, stack.shape, stack.scale.shape, stack.block
    assert isinstance(stack, PackedWeight)
    parts = (stack.codes, stack.scale, stack.zero, stack.factor)
    return (*(part is not None and (part.dtype, part.shape) for part in parts), stack.values, stack.group, stack.bits, stack.factor_divides)
