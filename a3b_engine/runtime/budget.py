"""What an answer and a picture need beside the weights, and how a budget is divided between them and the experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import ModelConfig, TextConfig, VisionConfig
from ..memory.placement import Placement, Sizes, place
from ..model.moe import dense_elements_at_once
from .cache import sequence_bytes, snapshot_bytes
from .forward import PREFILL_CHUNK

SMALLEST_CAPACITY = 2048  # tokens; buffers come in powers of two, so that longer prompts seldom make them anew
PREFIX_BYTES = 768 * 1024**2  # kept beginnings of prompts: two points of three prompts of 3,000 tokens in the 35B model
# What torch reserves beside its tensors where kernels work: cuBLAS's workspaces (two of 33 MB on an H200) and remnants of blocks; 90 to
# 280 MB were measured. TORN_BYTES of it are planned for; the rest is within what an answer's estimate has to spare.
TORN_BYTES = 192 * 1024**2
CHUNKS = (PREFILL_CHUNK, PREFILL_CHUNK // 2, PREFILL_CHUNK // 4)  # tokens of a prompt at once; shorter ones save memory
_PICTURE_PATCHES = 2304  # of a picture of 768 x 768


@dataclass(frozen=True)
class Division:
    """What is on the device, and how many tokens of a prompt are worked on at once."""

    placement: Placement
    chunk: int


class Budget:
    """Divides bytes of a device for one model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, context: int, sizes: Sizes, *, by_kernels: bool, has_vision: bool) -> None:
        """by_kernels: answers are expected to be written by kernels, whose buffers have powers of two as sizes."""
        self._config, self._dtype, self._context, self._sizes = config, dtype, context, sizes
        self._by_kernels = by_kernels
        self._has_vision = has_vision and config.vision is not None

    def answering(self, chunk: int = PREFILL_CHUNK, kept: bool = True) -> int:
        """Bytes beside the weights for the longest answer."""
        return self.working(self._context, chunk, kept)

    def working(self, tokens: int, chunk: int = PREFILL_CHUNK, kept: bool = True) -> int:
        """Bytes beside the weights for a prompt with its answer of that many tokens."""
        capacity = capacity_for(tokens, self._context) if self._by_kernels else None
        return working_bytes(self._config.text, self._dtype, tokens, capacity, chunk, kept)

    @property
    def seeing(self) -> int:
        """Bytes beside the vision tower for a picture."""
        return picture_bytes(self._config.vision, self._dtype) if self._has_vision else 0

    def divide(self, total: float) -> Division | None:
        """The best use of `total` bytes; None where not even the fewest experts fit.

        All experts on the device come before kept prompts and before long chunks. Where they cannot all be there, chunks are long:
        every chunk fetches nearly every missing expert.
        """
        for chunk, kept in [(PREFILL_CHUNK, True), *((chunk, False) for chunk in CHUNKS)]:
            placement = place(self._sizes, total, self.answering(chunk, kept), self.seeing)
            if placement is not None and placement.rows == self._sizes.experts:
                return Division(placement, chunk)
        for chunk, kept in [(PREFILL_CHUNK, True), *((chunk, False) for chunk in CHUNKS)]:
            placement = place(self._sizes, total, self.answering(chunk, kept), self.seeing)
            if placement is not None:
                return Division(placement, chunk)
        return None

    @cached_property
    def least(self) -> int:
        """Bytes without which nothing runs."""
        low, high = 0, self._sizes.all + self.answering() + self.seeing + self._sizes.vision + self._sizes.experts * self._sizes.record
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.divide(middle) is not None else (middle + 1, high)
        return low


def capacity_for(tokens: int, context: int) -> int:
    """Tokens of the buffers for a sequence of that many."""
    return min(context, max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length()))


def working_bytes(
    config: TextConfig, dtype: torch.dtype, tokens: int, capacity: int | None = None, chunk: int = PREFILL_CHUNK, kept: bool = True
) -> int:
    """Estimate of what a prompt with its answer of `tokens` tokens needs beside the weights, in buffers of `capacity` tokens where it is
    decoded by kernels, else (None) in plain PyTorch. chunk: tokens of the prompt at once. kept: with room for what is kept of it."""
    chunk = min(tokens, chunk)
    # Widest activations of a prefill chunk: about ten float32 operands of a DeltaNet layer.
    activations = chunk * (10 * 4 * config.conv_dim + 8 * dtype.itemsize * config.hidden_size)
    # A group of experts made dense: three matrices, one of them also as float32 while it is multiplied out.
    experts = dense_elements_at_once(config) * (3 * dtype.itemsize + 8) if capacity is None else 0
    sampling = (8 if capacity is None else 32) * config.vocab_size
    torn = TORN_BYTES if capacity is not None else 0
    beside = kept_bytes(config, dtype, tokens) if kept else 0
    return sequence_bytes(config, tokens, dtype, capacity) + activations + beside + experts + sampling + torn


def kept_bytes(config: TextConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the two points that are kept of a prompt."""
    return min(PREFIX_BYTES, 2 * snapshot_bytes(config, tokens, dtype))


def picture_bytes(vision: VisionConfig, dtype: torch.dtype) -> int:
    """Estimate of what a picture of 768 x 768 takes in the vision tower: its patches, and about a dozen activations of a block."""
    pixels = 4 * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    width = 8 * vision.hidden_size + 2 * vision.intermediate_size
    return _PICTURE_PATCHES * (pixels + width * max(dtype.itemsize, 4))
