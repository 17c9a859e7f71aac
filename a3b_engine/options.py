"""How an engine shall run: checked in one place, before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .errors import ConfigError, PromptError

# Formats that experts are rounded to while they are loaded, and their bits.
EXPERT_BITS = {"int4": 4, "int3": 3}
EXPERT_FORMATS = ("stored", *EXPERT_BITS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineOptions:
    """device, compute dtype, storage of the experts, cap in bytes (None: no cap), most tokens of prompt plus answer, whether
    experts stay in RAM when the weights leave the device, and whether experts that are rounded while they are loaded may be kept in
    a folder beside the checkpoint's files."""

    device: torch.device
    dtype: torch.dtype
    expert_format: str
    vram_budget: int | None
    context: int
    park: bool = False
    cache_experts: bool = False

    @classmethod
    def checked(
        cls,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str | None = None,
        expert_format: str = "stored",
        vram_budget: int | None = None,
        context: int = 8192,
        park: bool = False,
        cache_experts: bool = False,
    ) -> EngineOptions:
        """Options as `Engine.open` takes them. Raises `ConfigError` and `PromptError` naming the option."""
        if expert_format not in EXPERT_FORMATS:
            raise ConfigError(f"expert_format: found {expert_format!r}, expected one of {', '.join(EXPERT_FORMATS)}.")
        found = _device(device)
        dtype = _compute_dtype(dtype, found)
        if not isinstance(context, int) or isinstance(context, bool) or context < 1:
            raise PromptError(f"context: found {context!r}, expected a positive number of tokens.")
        if vram_budget is not None and (isinstance(vram_budget, bool) or not isinstance(vram_budget, (int, float)) or not 0 < vram_budget < math.inf):
            raise ConfigError(f"vram_budget: found {vram_budget!r}, expected a number of bytes above 0, or None for no cap.")
        return cls(found, dtype, expert_format, vram_budget, context, park, cache_experts)


def _device(device: str | torch.device) -> torch.device:
    """The device by name; one that this machine does not have is refused before anything is read."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: found {device!r}, expected 'cpu' or 'cuda:0', 'cuda:1', ...") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(f"device: found {device!r}, but torch sees {count} CUDA devices here. Choose another one, or 'cpu'.")
    elif found.type != "cpu":
        try:
            torch.zeros(1, device=found).cpu()
        except Exception as error:  # each backend has its own way to be absent
            raise ConfigError(f"device: found {device!r}, which does not work here. Choose 'cpu' or 'cuda:0', 'cuda:1', ...") from error
    return found


def _compute_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}.")
    return dtype
