"""How many rows, columns and warps a program of each kernel takes, by compute capability: one table, nothing tuned at run time.

Reasoning behind the values: a program should have 64 to 128 bytes of weights in flight per thread, loaded as 16-byte
pieces, because about 25 KB in flight per multiprocessor keep the memory of an H200 busy and two or more programs fit
on one; few rows a program, because a matrix of 2,048 rows must still give every multiprocessor several programs; all
columns of a row at once where registers allow, because only the first piece is loaded ahead of the wait for x.
`benchmarks/kernels.py --sweep` measures the candidates on a card and prints rows for this table. The entries of (9, 0) were
measured on an H200; there FP8 weights in 128 x 128 blocks do not come here but to matrix_gemv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .support import Target

TABLE_COLUMNS = 12  # of a row of expert_table.ExpertTable


@dataclass(frozen=True)
class TileConfig:
    """rows of the output and columns of the weight a program takes at once (powers of two), warps that share them,
    splits of the columns among programs (their sums are added by a second launch).

    programs: programs a multiprocessor, each of which takes several tiles one after another; 0: one program a tile.
    """

    rows: int
    columns: int
    warps: int
    splits: int = 1
    programs: int = 0

    def shared_out(self, tiles: int, target: Target) -> tuple[int, int]:
        """(tiles one program takes, programs), as even as can be."""
        steps = -(-tiles // (self.programs * target.multiprocessors)) if self.programs else 1
        return steps, -(-tiles // steps)


# kernel -> compute capability it was measured on -> configuration. A card takes the entry of the highest capability
# not above its own. "expert_up" counts pairs of a gate and an up row; "expert_down" counts columns of each expert.
TABLE: dict[str, dict[tuple[int, int], TileConfig]] = {
    "fp8_many_rows": {(8, 0): TileConfig(8, 1024, 4), (9, 0): TileConfig(4, 2048, 4, programs=4), (12, 0): TileConfig(8, 1024, 4)},
    "fp8_few_rows": {(8, 0): TileConfig(4, 2048, 4), (9, 0): TileConfig(4, 4096, 16), (12, 0): TileConfig(4, 2048, 4)},
    "dense_many_rows": {(8, 0): TileConfig(8, 1024, 8), (9, 0): TileConfig(8, 2048, 8)},
    "dense_few_rows": {(8, 0): TileConfig(2, 2048, 4)},
    "router": {(8, 0): TileConfig(1, 1024, 1), (9, 0): TileConfig(1, 2048, 1)},  # one warp: the choice at the end then needs no barriers
    "expert_up": {(8, 0): TileConfig(4, 1024, 4), (9, 0): TileConfig(4, 2048, 4), (12, 0): TileConfig(4, 1024, 4)},
    "expert_up_dense": {(8, 0): TileConfig(2, 1024, 4), (9, 0): TileConfig(2, 2048, 8), (12, 0): TileConfig(2, 1024, 4)},
    "expert_down": {(8, 0): TileConfig(2, 512, 4), (9, 0): TileConfig(4, 512, 4)},
    "expert_down_dense": {(8, 0): TileConfig(1, 512, 4)},
    "packed_many_rows": {(8, 0): TileConfig(8, 2048, 4)},
    "packed_few_rows": {(8, 0): TileConfig(4, 4096, 4)},
    "packed_up": {(8, 0): TileConfig(4, 2048, 4)},  # pairs, as "expert_up"
    "packed_down": {(8, 0): TileConfig(4, 512, 4)},  # columns of each expert, as "expert_down"
}

MANY_ROWS = 4096


def configuration(kernel: str, target: Target) -> TileConfig:
    """The table's entry for a kernel on a device."""
    entries = TABLE[kernel]
    return entries[max((known for known in entries if known <= target.capability), default=min(entries))]


def fitted(config: TileConfig, rows: int, columns: int, target: Target, group: int = 1) -> TileConfig:
    """`config` for a matrix of this size: no wider than it, and with fewer rows a program where two programs for every
    multiprocessor would not come together otherwise. `group` columns at least are read at once."""
    wide = max(group, min(config.columns, next_power_of_two(columns)))
    high = config.rows
    while high > 1 and -(-rows // high) < 2 * target.multiprocessors:
        high //= 2
    return replace(config, rows=high, columns=wide)


def next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
