"""Checkpoint folders: finding them, checking them, and reading their weights.

    index = CheckpointIndex.open(folder)      # names, shapes, dtypes; nothing is read but headers
    plan = build_plan(index, config)          # which bytes make up which weight of the engine
    weights = load_weights(plan, device, dtype)

Names are loaded on first use: looking for folders needs no torch.
"""

from importlib import import_module

_HOMES = {
    "CheckpointIndex": ".index",
    "LoadCancelled": ".reader",
    "LoadPlan": ".storage",
    "PackedWeight": ".packed",
    "ScaledWeight": ".scaled",
    "TensorInfo": ".header",
    "build_plan": ".plan",
    "expected_tensors": ".names",
    "find_checkpoint_folders": ".discover",
    "load_weights": ".reader",
    "quantize_fp8_block": ".write",
    "write_checkpoint": ".write",
}

__all__ = (
    "CheckpointIndex", "LoadCancelled", "LoadPlan", "PackedWeight", "ScaledWeight", "TensorInfo", "build_plan", "expected_tensors",
    "find_checkpoint_folders", "load_weights", "quantize_fp8_block", "write_checkpoint",
)  # fmt: skip


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
