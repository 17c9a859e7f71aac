"""What the scripts share: the random matrix, plain min/max quantisation, writing a sample."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "packed"


def matrix(rows: int, columns: int, seed: int, mean: float = 0.0) -> torch.Tensor:
    """float32 [rows, columns], a few large values among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) + mean
    return weight * (1 + 4 * (torch.rand(rows, columns, generator=generator) > 0.97))


def scales_and_zeros(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scale [N, groups] that float16 holds exactly, and the integer zero of codes 0..15, same shape."""
    runs = weight.unflatten(1, (-1, group))
    if symmetric:
        scale = (runs.abs().amax(-1) / 7).half().float()
        return scale, torch.full_like(scale, 8)
    low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    return scale, (-low / scale).round().clamp(0, 15)


def representable(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    """The nearest weight that codes 0..15 can stand for, so that packing rounds nothing further."""
    scale, zero = (part.repeat_interleave(group, 1) for part in (scale, zero))
    return ((weight / scale + zero).round().clamp(0, 15) - zero) * scale


def write(name: str, library: str, tensors: dict[str, torch.Tensor]) -> None:
    """One sample, with the library's version in its header."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    metadata = {"library": library, "version": importlib.metadata.version(library)}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, FOLDER / f"{name}.safetensors", metadata)
    print(name, {key: (str(tensor.dtype), list(tensor.shape)) for key, tensor in tensors.items()})


def module_alone(name: str) -> types.ModuleType:
    """Import `a.b.c` without running the `__init__` of its packages, which need more than is installed."""
    packages = name.split(".")[:-1]
    known = sys.modules.get(packages[0])
    root = Path(known.__path__[0] if known else importlib.util.find_spec(packages[0]).submodule_search_locations[0])
    for depth in range(len(packages)):
        package = types.ModuleType(".".join(packages[: depth + 1]))
        package.__path__ = [str(root.joinpath(*packages[1 : depth + 1]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)
