"""What one sequence leaves behind: keys and values of the attention layers, states of the DeltaNet layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import TextConfig
from ..errors import MemoryBudgetError
from ..model.deltanet import DeltaNetState

GROWTH = 256  # tokens; a growing cache grows by at least this much, and at least by half of what it holds
# A growing cache holds a multiple of this many tokens: the values then begin on a 64 byte border whatever the size of a
# row, so that a product over them does not depend, in its last bits, on how the buffer came to its size.
ROUNDING = 64


class KeyValueCache:
    """Keys and values of one attention layer: `buffer` [2, capacity, kv_heads, head_dim], its first `length` rows filled.

    A growing cache replaces its buffer by a larger one when it has to; the buffer of any other never moves.
    """

    def __init__(self, buffer: torch.Tensor, limit: int) -> None:
        """buffer: where rows go, of any capacity. limit: most tokens; the cache grows where the buffer is smaller."""
        self.buffer = buffer
        self.length = 0
        self._limit = limit

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [T, kv_heads, head_dim]; returns all of them so far. Over the limit: `MemoryBudgetError`."""
        end = self.length + keys.shape[0]
        self.reserve(end)
        self.buffer[0, self.length : end] = keys
        self.buffer[1, self.length : end] = values
        self.length = end
        return self.buffer[0, :end], self.buffer[1, :end]

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` rows in all. Over the limit: `MemoryBudgetError`, and nothing has changed."""
        _require_room(tokens, self._limit)
        capacity = self.buffer.shape[1]
        if tokens <= capacity:
            return
        capacity = _rounded(min(self._limit, max(tokens, capacity + max(GROWTH, capacity // 2))))
        grown = self.buffer.new_empty((2, capacity, *self.buffer.shape[2:]))
        grown[:, : self.length] = self.buffer[:, : self.length]
        self.buffer = grown


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of everything a `SequenceState` held after `length` tokens, all layers of a kind in one tensor.

    keys_values [attention layers, 2, length, kv_heads, head_dim]; conv [DeltaNet layers, conv_dim, kernel-1];
    recurrent float32 [DeltaNet layers, value_heads, key_head_dim, value_head_dim].
    """

    keys_values: torch.Tensor
    conv: torch.Tensor
    recurrent: torch.Tensor
    length: int
    next_position: int

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes + self.conv.nbytes + self.recurrent.nbytes


class SequenceState:
    """The state of one sequence over all layers, empty at first.

    `length` counts tokens in the cache; `next_position` is the rotary position of the next text token, which images
    make smaller than `length`. `layers` is what a model's `forward` takes: one entry a layer.

    All layers of a kind share one tensor: `conv` [DeltaNet layers, conv_dim, kernel-1], `recurrent` float32 [DeltaNet
    layers, value_heads, key_head_dim, value_head_dim], current after `settle`; and with `capacity` (tokens)
    `keys_values` [attention layers, 2, capacity, kv_heads, head_dim]. These are allocated once and never move, so that
    a captured graph can hold their addresses. Without `capacity`, each attention layer has a cache that grows on demand.
    """

    def __init__(self, config: TextConfig, limit: int, device: torch.device, dtype: torch.dtype, capacity: int | None = None) -> None:
        """limit: most tokens the sequence may have; `capacity` lowers it to what is set aside."""
        self.device, self.dtype, self.capacity = device, dtype, capacity
        self.limit = limit if capacity is None else min(limit, capacity)
        self.length = 0
        self.next_position = 0
        self._config = config
        attention, deltanet = len(config.full_attention_layers), len(config.linear_attention_layers)
        # One tensor for all layers of a kind: a snapshot is copied or restored in three operations.
        self.keys_values = torch.empty((attention, 2, capacity or 0, config.num_key_value_heads, config.head_dim), device=device, dtype=dtype)
        self.conv = torch.zeros((deltanet, config.conv_dim, config.linear_conv_kernel_dim - 1), device=device, dtype=dtype)
        heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        self.recurrent = torch.zeros((deltanet, *heads), device=device, dtype=torch.float32)
        self._caches = [KeyValueCache(buffer, self.limit) for buffer in self.keys_values.unbind()]
        self._homes = list(zip(self.conv.unbind(), self.recurrent.unbind()))  # where the state of each DeltaNet layer lives
        self._states = [DeltaNetState(*home) for home in self._homes]
        caches, states = iter(self._caches), iter(self._states)
        self.layers: list[KeyValueCache | DeltaNetState] = [
            next(caches) if kind == "full_attention" else next(states) for kind in config.layer_types
        ]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device now."""
        buffers = sum(cache.nbytes for cache in self._caches) + self.conv.nbytes + self.recurrent.nbytes
        return buffers + sum(source.nbytes for _, source in self._moved())

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes that `snapshot` would take now."""
        return snapshot_bytes(self._config, self.length, self.dtype)

    def settle(self) -> None:
        """Bring states that a model replaced by new tensors back into the buffers of this object; free where none was."""
        moved = self._moved()
        if moved:
            torch._foreach_copy_([home for home, _ in moved], [source for _, source in moved])
            self._go_home()

    def reset(self) -> None:
        """Make the state empty again. Nothing is allocated and no buffer moves."""
        self.conv.zero_()
        self.recurrent.zero_()
        self._go_home()
        self._set_length(0, 0)

    def advance(self, tokens: int) -> None:
        """Count `tokens` text tokens whose rows and states were written into the buffers directly, as a captured graph does."""
        _require_room(self.length + tokens, self.limit)
        self._set_length(self.length + tokens, self.next_position + tokens)

    def snapshot(self) -> Snapshot:
        """A copy that later tokens do not change. A state that an error left between two layers is a `RuntimeError`."""
        if any(cache.length != self.length for cache in self._caches):
            raise RuntimeError("The last forward pass did not finish: this state is of no sequence. Call reset() or restore().")
        self.settle()
        kept = self.keys_values.new_empty((len(self._caches), 2, self.length, *self.keys_values.shape[3:]))
        for copy, rows in self._rows(kept):
            copy.copy_(rows)
        return Snapshot(kept, self.conv.clone(), self.recurrent.clone(), self.length, self.next_position)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from `snapshot` whatever this state held. One over the limit: `MemoryBudgetError`, and nothing has changed."""
        _require_room(snapshot.length, self.limit)
        self._set_length(0, 0)  # a cache that has to grow need not carry its old rows over
        for cache in self._caches:
            cache.reserve(snapshot.length)
        self._set_length(snapshot.length, snapshot.next_position)
        for copy, rows in self._rows(snapshot.keys_values):
            rows.copy_(copy)
        self.conv.copy_(snapshot.conv)
        self.recurrent.copy_(snapshot.recurrent)
        self._go_home()

    def _rows(self, copy: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (part of `copy`, filled rows here): one for all layers where the buffers stand together, else one a layer."""
        if self.capacity is not None:
            return [(copy, self.keys_values[:, :, : self.length])]
        return [(part, cache.buffer[:, : self.length]) for part, cache in zip(copy.unbind(), self._caches)]

    def _moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (buffer here, tensor that stands in its place since a model replaced it)."""
        moved = []
        for state, (conv, recurrent) in zip(self._states, self._homes):
            if state.conv is not conv:
                moved.append((conv, state.conv))
            if state.recurrent is not recurrent:
                moved.append((recurrent, state.recurrent))
        return moved

    def _go_home(self) -> None:
        for state, (conv, recurrent) in zip(self._states, self._homes):
            state.conv, state.recurrent = conv, recurrent

    def _set_length(self, length: int, next_position: int) -> None:
        self.length, self.next_position = length, next_position
        for cache in self._caches:
            cache.length = length


def snapshot_bytes(config: TextConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a `Snapshot` after `tokens` tokens."""
    return len(config.full_attention_layers) * _row_bytes(config, dtype) * tokens + _state_bytes(config, dtype)


def sequence_bytes(config: TextConfig, tokens: int, dtype: torch.dtype, capacity: int | None = None) -> int:
    """Bytes that a sequence of `tokens` tokens needs at most in a `SequenceState`, made with `capacity` if that is given.

    The margin of growing caches is included, and so are the new states that a model makes beside the old ones.
    """
    rows = capacity if capacity is not None else _rounded(tokens + max(GROWTH, tokens // 2))
    return len(config.full_attention_layers) * _row_bytes(config, dtype) * rows + 2 * _state_bytes(config, dtype)


def _row_bytes(config: TextConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in one layer."""
    return 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize


def _state_bytes(config: TextConfig, dtype: torch.dtype) -> int:
    """Bytes of the states of all DeltaNet layers."""
    recurrent = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    conv = config.conv_dim * (config.linear_conv_kernel_dim - 1) * dtype.itemsize
    return len(config.linear_attention_layers) * (recurrent + conv)


def _require_room(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise MemoryBudgetError(f"{tokens} tokens do not fit the context of {limit}; raise `context` or shorten the prompt.")


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUNDING) * ROUNDING
