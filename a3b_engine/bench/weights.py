"""Random weights under every canonical name, made on the device."""

from __future__ import annotations

import math
from typing import Callable

import torch

from ..checkpoint.names import expected_tensors, kept_in_float32, may_stay_scaled
from ..checkpoint.scaled import ScaledWeight
from ..config import ModelConfig
from ..parts import Progress, WeightSource

BLOCK = 128
_HEAD = "lm_head.weight"


class RandomWeights:
    """A weight source without files: FP8 with 128x128 block scales where the official files have it, the rest dense.

    The same seed gives the same weights on the same kind of device. Two things are not random: the head's rows of the
    end tokens are zero. Their logit is then exactly 0, far below the best of a few hundred thousand normal ones, so that
    top-k sampling never draws an end, while a grammar that leaves nothing else can still end its answer.
    """

    has_vision = True

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._config, self._seed = config, seed

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return sum(self._nbytes(name, shape, dtype, dequantize) for name, shape in expected_tensors(self._config).items())

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None
    ) -> dict[str, torch.Tensor | ScaledWeight]:
        """See `WeightSource.load`. Takes the largest tensor twice while it is made."""
        generator = torch.Generator(device=device).manual_seed(self._seed)
        weights: dict[str, torch.Tensor | ScaledWeight] = {}
        done, total = 0, self.device_bytes(dtype, dequantize)
        for name, shape in expected_tensors(self._config).items():
            if cancel is not None:
                cancel()
            weights[name] = weight = self._make(name, shape, generator, dtype, dequantize)
            done += weight.nbytes
            if progress is not None:
                progress(done, total)
        ends = torch.tensor(self._config.eos_token_ids, device=device)
        weights[_HEAD][ends] = 0.0
        return weights

    def _make(
        self, name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, dequantize: bool
    ) -> torch.Tensor | ScaledWeight:
        device = generator.device
        if _is_scaled(name):
            # Codes up to 0x6f are finite, at most 120 in size; the scale brings the weights to a usual spread.
            codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device, generator=generator)
            codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator) << 7
            scale = torch.full(_scale_shape(shape), 5e-4, dtype=torch.float32, device=device)
            weight = ScaledWeight(codes.view(torch.float8_e4m3fn), scale, (BLOCK, BLOCK))
            return weight.dequantize(dtype) if dequantize else weight
        if kept_in_float32(name):
            return torch.rand(shape, dtype=torch.float32, device=device, generator=generator) * 0.1
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)

    @staticmethod
    def _nbytes(name: str, shape: tuple[int, ...], dtype: torch.dtype, dequantize: bool) -> int:
        count = math.prod(shape)
        if _is_scaled(name) and not dequantize:
            return count + 4 * math.prod(_scale_shape(shape))
        return count * (4 if kept_in_float32(name) else dtype.itemsize)


class RecordedWeights:
    """Another source, whose tensors' sizes are kept by name each time it loads."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.has_vision = source.has_vision
        #: Canonical name -> bytes on the device; empty before the first load.
        self.sizes: dict[str, int] = {}

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return self._source.device_bytes(dtype, dequantize)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None
    ) -> dict[str, torch.Tensor | ScaledWeight]:
        """See `WeightSource.load`."""
        weights = self._source.load(device, dtype, dequantize, progress, cancel)
        self.sizes = {name: weight.nbytes for name, weight in weights.items()}
        return weights


def _is_scaled(name: str) -> bool:
    """The official FP8 files keep the head in bfloat16, though the engine could use it scaled."""
    return may_stay_scaled(name) and name != _HEAD


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
