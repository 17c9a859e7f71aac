"""Which experts many tokens go to, and the tokens of every expert in a row: three launches, nothing asked of the host.

Logits in float32 from the unrounded norm, and the same choice as in decode (router.choose): NaN counts as the lowest,
equal logits go to the lower id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import next_power_of_two
from .launcher import Launcher, Launchers
from .rows import let_next_start, wait_for_inputs
from .support import Target, UnsupportedByKernel
from .weight_tiles import dot, split


@triton.jit(do_not_specialize=["count"])
def logits_kernel(
    residual, norm, router, switch, logits, count,
    K: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits float32 [SPLITS, count, EXPERTS + 1] = (residual * (1 + norm)) times the rows of router [EXPERTS, K] and, last, switch [1, K].

    residual float32 [count, K], not yet divided by its rms. Grid (tiles of BT tokens, tiles of BN experts, splits of the columns).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    D: tl.constexpr = router.dtype.element_ty
    EACH: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    tokens = residual + tl.minimum(token, count - 1).to(tl.int64) * K
    index, column = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    rows = tl.where(index < EXPERTS, router + index * K, switch + index * 0)
    part = tl.program_id(2)
    total = tl.zeros((BT, BN), tl.float32)
    for start in range(part * EACH, tl.minimum(part * EACH + EACH, K), BK):
        at = start + column
        inside = at < K
        x = tl.load(tokens[:, None] + at[None, :], mask=inside[None, :], other=0.0)
        high, low = split(x * (1.0 + tl.load(norm + at, mask=inside, other=0.0))[None, :], D)
        weights = tl.trans(tl.load(rows[:, None] + at[None, :], mask=inside[None, :], other=0.0))
        total = dot(high, weights, total)
        if D != tl.float32:
            total = dot(low, weights, total)
    place = logits + (part * count + token).to(tl.int64)[:, None] * (EXPERTS + 1) + index[None, :]
    tl.store(place, total, mask=(token < count)[:, None] & (index <= EXPERTS)[None, :])


@triton.jit(do_not_specialize=["count"])
def choose_tokens_kernel(
    logits, inverse, ids, shares, count,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids int32 [count, TOP_K] and shares float32 [count, TOP_K + 1], the shared expert's last. inverse [count] = 1 / rms."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token, index = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, WIDTH)
    valid = tl.minimum(token, count - 1)
    known = (index < EXPERTS)[None, :]
    value = tl.zeros((BT, WIDTH), tl.float32)
    switch = tl.zeros((BT,), tl.float32)
    for part in tl.static_range(SPLITS):
        at = logits + (part * count + valid).to(tl.int64) * (EXPERTS + 1)
        value += tl.load(at[:, None] + index[None, :], mask=known, other=0.0)
        switch += tl.load(at + EXPERTS)
    root = tl.load(inverse + valid)
    value = value * root[:, None]
    broken = tl.max((value != value).to(tl.int32), 1)
    value = tl.where(value == value, tl.maximum(value, -3.0e38), -3.0e38) + 0.0
    # As integers in the same order, so that the largest can be found and taken out.
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(known, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    slot = tl.arange(0, TOP_WIDTH)
    chosen = tl.zeros((BT, TOP_WIDTH), tl.int32)
    best = tl.full((BT, TOP_WIDTH), -float("inf"), tl.float32)
    for choice in tl.static_range(TOP_K):
        highest = tl.max(key, 1)
        place = tl.min(tl.where(key == highest[:, None], index[None, :], WIDTH), 1)
        found = (highest ^ ((highest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where((slot == choice)[None, :], place[:, None], chosen)
        best = tl.where((slot == choice)[None, :], found[:, None], best)
        key = tl.where(index[None, :] == place[:, None], -2147483648, key)
    weight = tl.exp(best - tl.max(best, 1)[:, None])
    share = tl.where((broken > 0)[:, None], float("nan"), weight / tl.sum(weight, 1)[:, None])
    live = (token < count)[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids + token[:, None] * TOP_K + slot[None, :], chosen, mask=live)
    tl.store(shares + token[:, None] * (TOP_K + 1) + slot[None, :], share, mask=live)
    tl.store(shares + token * (TOP_K + 1) + TOP_K, 1.0 / (1.0 + tl.exp(-switch * root)), mask=token < count)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(ids, order, tiles, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):
    """One program an expert: its (token, choice) pairs, in their order, behind those of the experts before it.

    ids int32 [pairs] -> order int32 [pairs] (pair numbers), tiles int32 [pairs // BM + EXPERTS, 3]: expert or -1, first
    place in `order`, number of pairs (at most BM). An expert with `before` pairs ahead of it owns the tiles from
    before // BM + expert on: never fewer than it needs, so that nobody has to add up the tiles of the others.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    lower, own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        found = tl.load(ids + start + index, mask=start + index < pairs, other=EXPERTS)
        lower += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    before, total = tl.sum(lower, 0), tl.sum(own, 0)
    at = before
    for start in range(0, pairs, BLOCK):
        found = tl.load(ids + start + index, mask=start + index < pairs, other=EXPERTS)
        mine = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, start + index, mask=mine > 0)
        at += tl.sum(mine, 0)
    first = before // BM + expert
    last = (before + total) // BM + expert + 1
    number = tl.arange(0, 64)
    for start in range(first, last, 64):
        tile = start + number
        done = (tile - first) * BM
        tl.store(tiles + tile * 3, tl.where(done < total, expert, -1), mask=tile < last)
        tl.store(tiles + tile * 3 + 1, before + done, mask=tile < last)
        tl.store(tiles + tile * 3 + 2, tl.minimum(total - done, BM), mask=tile < last)


class RouteTiles(NamedTuple):
    """Tokens, experts and columns a program of the logits takes, parts of the columns, warps and stages."""

    tokens: int
    experts: int
    columns: int
    splits: int
    warps: int
    stages: int


def route_tiles(tokens: int, target: Target) -> RouteTiles:
    """Few tokens are cut into many parts, so that the multiprocessors are busy."""
    stages = 1 if target.interpreted else 3
    if tokens <= 128:
        return RouteTiles(16, 64, 64, 8, 4, stages)
    if tokens <= 1024:
        return RouteTiles(32, 64, 64, 4 if tokens <= 512 else 2, 4, stages)
    return RouteTiles(128, 64, 64, 1, 8, stages)


class RoutePlan:
    """router [E, D] and switch [1, D] of one layer, dense and of the activations' type; norm float32 [D] is the layer's second norm."""

    def __init__(
        self, router: torch.Tensor, switch: torch.Tensor, norm: torch.Tensor, top_k: int, launchers: Launchers, dtype: torch.dtype,
        *, tiles: RouteTiles | None = None,
    ) -> None:  # fmt: skip
        experts, columns = router.shape
        for weight in (router, switch, norm):
            if weight.device != launchers.target.device or not weight.is_contiguous() or weight.data_ptr() % 16 or weight.dtype != (torch.float32 if weight is norm else dtype):
                raise UnsupportedByKernel(f"a router of {weight.dtype} on {weight.device}")
        if switch.shape != (1, columns) or norm.shape != (columns,) or not 1 <= top_k <= experts or experts > 1024:
            raise UnsupportedByKernel(f"{top_k} of {experts} experts")
        self._weights, self.experts, self.top_k, self._launchers = (norm, router, switch), experts, top_k, launchers
        self._columns, self._tiles = columns, tiles
        self._launches: dict[tuple[RouteTiles, int], tuple[Launcher, Launcher, Launcher]] = {}

    def tiles(self, tokens: int, tile: int) -> int:
        """Rows of the table of tiles."""
        return tokens * self.top_k // tile + self.experts

    def splits(self, tokens: int) -> int:
        """Parts of the columns, each of which leaves logits of its own."""
        return self._sizes(tokens).splits

    def _sizes(self, tokens: int) -> RouteTiles:
        return self._tiles or route_tiles(tokens, self._launchers.target)

    def __call__(
        self, residual: torch.Tensor, inverse: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor,
        order: torch.Tensor, tiles: torch.Tensor, tile: int,
    ) -> None:  # fmt: skip
        """Three launches. residual float32 [T, D], inverse float32 [T]; logits float32 [splits(T), T, E + 1], ids int32 [T, top_k],
        shares float32 [T, top_k + 1], order int32 [T * top_k], tiles int32 [self.tiles(T, tile), 3] with `tile` rows each."""
        tokens = residual.shape[0]
        size = self._sizes(tokens)
        launches = self._launches.get((size, tile))
        if launches is None:
            launches = self._launches[size, tile] = self._made(size, tile)
        score, choose, sort = launches
        score((-(-tokens // size.tokens), -(-(self.experts + 1) // size.experts), size.splits), residual, *self._weights, logits, tokens)
        choose((-(-tokens // 4), 1, 1), logits, inverse, ids, shares, tokens)
        sort((self.experts, 1, 1), ids, order, tiles, tokens * self.top_k)

    def _made(self, size: RouteTiles, tile: int) -> tuple[Launcher, Launcher, Launcher]:
        get, interpreted = self._launchers.get, self._launchers.target.interpreted
        width = next_power_of_two(self.experts)
        return (
            get(
                logits_kernel, K=self._columns, EXPERTS=self.experts, SPLITS=size.splits, BT=size.tokens, BN=size.experts, BK=size.columns,
                num_warps=size.warps, num_stages=size.stages,
            ),
            get(
                choose_tokens_kernel, EXPERTS=self.experts, WIDTH=width, TOP_K=self.top_k, TOP_WIDTH=next_power_of_two(self.top_k),
                SPLITS=size.splits, BT=4, num_warps=4,
            ),
            get(sort_kernel, EXPERTS=self.experts, BLOCK=64 if interpreted else 1024, BM=tile, num_warps=4),
        )  # fmt: skip
