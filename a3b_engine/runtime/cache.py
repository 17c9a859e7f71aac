"""What one sequence leaves behind: keys and values of the attention layers, states of the DeltaNet layers."""

from __future__ import annotations

import torch

from ..config import TextConfig
from ..errors import MemoryBudgetError
from ..model.deltanet import DeltaNetState

GROWTH = 256  # tokens; the cache grows by at least this much, and at least by half of what it holds


class KeyValueCache:
    """Keys and values of one attention layer, [length, kv_heads, head_dim] each, in buffers that grow on demand."""

    def __init__(self, config: TextConfig, limit: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = (config.num_key_value_heads, config.head_dim)
        self._limit = limit
        self._buffer = torch.empty((2, 0, *self._shape), device=device, dtype=dtype)
        self.length = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [T, kv_heads, head_dim]; returns all of them so far. Over the limit: `MemoryBudgetError`."""
        end = self.length + keys.shape[0]
        self._reserve(end)
        self._buffer[0, self.length : end] = keys
        self._buffer[1, self.length : end] = values
        self.length = end
        return self._buffer[0, :end], self._buffer[1, :end]

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def _reserve(self, tokens: int) -> None:
        capacity = self._buffer.shape[1]
        if tokens <= capacity:
            return
        if tokens > self._limit:
            raise MemoryBudgetError(f"{tokens} tokens do not fit the context of {self._limit}; raise `context` or shorten the prompt.")
        capacity = min(self._limit, max(tokens, capacity + max(GROWTH, capacity // 2)))
        grown = torch.empty((2, capacity, *self._shape), device=self._buffer.device, dtype=self._buffer.dtype)
        grown[:, : self.length] = self._buffer[:, : self.length]
        self._buffer = grown


class SequenceState:
    """The state of one sequence over all layers, empty at first.

    `length` counts tokens in the cache; `next_position` is the rotary position of the next text token, which images
    make smaller than `length`.
    """

    def __init__(self, config: TextConfig, limit: int, device: torch.device, dtype: torch.dtype) -> None:
        self.limit = limit
        self.length = 0
        self.next_position = 0
        self.layers: list[KeyValueCache | DeltaNetState] = [
            KeyValueCache(config, limit, device, dtype) if kind == "full_attention" else _empty_deltanet_state(config, device, dtype)
            for kind in config.layer_types
        ]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device now."""
        return sum(
            layer.nbytes if isinstance(layer, KeyValueCache) else layer.conv.nbytes + layer.recurrent.nbytes for layer in self.layers
        )


def sequence_bytes(config: TextConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes a sequence of `tokens` tokens needs in `SequenceState`, growth margin included."""
    attention = len(config.full_attention_layers)
    deltanet = len(config.linear_attention_layers)
    tokens = max(GROWTH, tokens + tokens // 2)
    keys_values = 2 * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
    recurrent = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    conv = config.conv_dim * (config.linear_conv_kernel_dim - 1) * dtype.itemsize
    return attention * keys_values + deltanet * (recurrent + conv)


def _empty_deltanet_state(config: TextConfig, device: torch.device, dtype: torch.dtype) -> DeltaNetState:
    shape = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return DeltaNetState(
        conv=torch.zeros((config.conv_dim, config.linear_conv_kernel_dim - 1), device=device, dtype=dtype),
        recurrent=torch.zeros(shape, device=device, dtype=torch.float32),
    )
