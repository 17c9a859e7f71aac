"""Projections of many tokens: weights as stored times activations.

Few tokens: one kernel decodes tiles of weights in registers (no rounding of weights; activations are float16 beside FP8
weights). Many tokens: the weights are
multiplied out to bfloat16 once, as the plain path does, and the library multiplies; the rows are then so many that
its faster inner loop earns back the extra 4 bytes a weight. Packed weights, and matrices of several layouts, are multiplied out
for any number of tokens.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import torch
import triton
import triton.language as tl

from ..checkpoint.packed import PackedWeight
from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight, dense
from .configs import MANY_ROWS
from .fp8_gemv import random_fp8
from .gemv import CodeFormat, code_format, common_format, readable
from .launcher import Launcher, Launchers
from .packed_prefill import PackedMatrix, require
from .rows import let_next_start, wait_for_inputs
from .support import Target, UnsupportedByKernel, relative_error, self_test
from .weight_tiles import decoded, saturated, weights_times_tokens

MATRICES = 3  # at most, beside a dense tail


@triton.jit
def _tile_of(tile, w0, w1, w2, s0, s1, s2, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BN: tl.constexpr):
    """Which matrix a tile of BN rows belongs to: weights, scales, its number of rows, the tile within it, rows ahead of it."""
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = (N1 + BN - 1) // BN
    weights = tl.where(tile < T0, w0, tl.where(tile < T0 + T1, w1, w2))
    scales = tl.where(tile < T0, s0, tl.where(tile < T0 + T1, s1, s2))
    size = tl.where(tile < T0, N0, tl.where(tile < T0 + T1, N1, N2))
    ahead = tl.where(tile < T0, 0, tl.where(tile < T0 + T1, N0, N0 + N1))
    tile = tl.where(tile < T0, tile, tl.where(tile < T0 + T1, tile - T0, tile - T0 - T1))
    return weights, scales, size, tile, ahead


@triton.jit(do_not_specialize=["count"])
def gemm_kernel(
    x, w0, w1, w2, s0, s1, s2, tail, out, count,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, TAIL: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PER_SCALE: tl.constexpr, SPLITS: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BY_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, count, N0 + N1 + N2 + TAIL] = x [count, K] times the rows of up to three matrices and a dense tail.

    Grid (tiles of BT tokens, tiles of BN rows, splits of the columns).
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    N: tl.constexpr = N0 + N1 + N2 + TAIL
    TILES: tl.constexpr = (N0 + BN - 1) // BN + (N1 + BN - 1) // BN + (N2 + BN - 1) // BN
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    tile, part = tl.program_id(1), tl.program_id(2)
    tokens = x + tl.minimum(token, count - 1).to(tl.int64) * K
    first, last = part * EACH, tl.minimum(part * EACH + EACH, STEPS)
    if tile < TILES:
        weights, scales, size, tile, ahead = _tile_of(tile, w0, w1, w2, s0, s1, s2, N0, N1, N2, BN)
        row = tile * BN + tl.arange(0, BN)
        valid = tl.minimum(row, size - 1)
        block = valid * 0
        if ROW_BLOCK > 0:
            block = valid // ROW_BLOCK
        acc = weights_times_tokens(
            weights + valid.to(tl.int64) * K, scales + block * SCALE_COLUMNS, tokens, first, last,
            K, FORMAT, PER_SCALE, BN, BT, BK, BY_PAIRS,
        )  # fmt: skip
    else:
        row = (tile - TILES) * BN + tl.arange(0, BN)
        size, ahead = TAIL, N0 + N1 + N2
        valid = tl.minimum(row, size - 1)
        acc = weights_times_tokens(tail + valid * K, tail + valid, tokens, first, last, K, "dense", 1, BN, BT, BK, False)
    at = out + (part * count + token).to(tl.int64)[None, :] * N + (ahead + row)[:, None]
    tl.store(at, saturated(acc, out.dtype.element_ty), mask=(row < size)[:, None] & (token < count)[None, :])


@triton.jit
def dequantize_kernel(
    w0, w1, w2, s0, s1, s2, tail, out,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, TAIL: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    ROW_BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr, SCALE_WIDTH: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N0 + N1 + N2 + TAIL, K]: codes times scales, rounded once. Grid (tiles of BN rows, tiles of WIDTH columns)."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    TILES: tl.constexpr = (N0 + BN - 1) // BN + (N1 + BN - 1) // BN + (N2 + BN - 1) // BN
    D: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < K
    if tile < TILES:
        weights, scales, size, tile, ahead = _tile_of(tile, w0, w1, w2, s0, s1, s2, N0, N1, N2, BN)
        row = tile * BN + tl.arange(0, BN)
        mask = (row < size)[:, None] & inside[None, :]
        codes = tl.load(weights + row.to(tl.int64)[:, None] * K + column[None, :], mask=mask, other=0.0)
        block = row * 0
        if ROW_BLOCK > 0:
            block = row // ROW_BLOCK
        values = decoded(codes, FORMAT, tl.float32)
        if FORMAT != "dense":
            factor = tl.load(scales + block[:, None] * SCALE_COLUMNS + (column // SCALE_WIDTH)[None, :], mask=mask, other=0.0)
            if FORMAT == "e4m3_bytes":
                factor = factor * 256.0
            values = values * factor
    else:
        row = (tile - TILES) * BN + tl.arange(0, BN)
        ahead = N0 + N1 + N2
        mask = (row < TAIL)[:, None] & inside[None, :]
        values = tl.load(tail + row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (ahead + row).to(tl.int64)[:, None] * K + column[None, :], values.to(D), mask=mask)


class GemmTiles(NamedTuple):
    """rows of weights and tokens a program takes, warps, stages of loads; whether e4m3 codes are read by pairs."""

    rows: int
    tokens: int
    warps: int
    stages: int
    pairs: bool = False


def gemm_tiles(tokens: int, form: CodeFormat, target: Target) -> GemmTiles:
    """By the number of tokens, and by the 100 KiB of shared memory of the smaller cards. Measured on an H200."""
    if target.interpreted:
        return GemmTiles(16, 16, 4, 1, True)
    width = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    if target.capability in ((9, 0), (10, 0)):
        return GemmTiles(64, width, 4, 4, width < 64)
    if target.capability == (8, 0):
        return GemmTiles(64, width, 4, 3)
    return GemmTiles(64, width, 4, 2 if width == 128 else 3)


class ProjectionPlan:
    """out [T, rows of all matrices and the tail] = x [T, K] times them, for any T.

    matrices: one to three [n_i, K], each FP8, packed, or dense of `dtype`; tail: dense [m, K] of `dtype`. x is of the type
    that input_type(T) names, out of `dtype`. `from_tokens`: T from which FP8 weights of one layout are multiplied out first (None:
    where an H200 gains by it). The plan keeps the matrices alive.
    """

    def __init__(
        self, matrices: Sequence[Weight], launchers: Launchers, dtype: torch.dtype, *, tail: torch.Tensor | None = None,
        from_tokens: int | None = None, tiles: GemmTiles | None = None, tested: bool = True,
    ) -> None:  # fmt: skip
        """tested: refuse packed weights where the self-test of their kernel failed."""
        target = launchers.target
        columns = matrices[0].shape[1]
        if not 1 <= len(matrices) <= MATRICES or any(matrix.ndim != 2 or matrix.shape[1] != columns for matrix in matrices):
            raise UnsupportedByKernel(f"{len(matrices)} matrices of different widths in one product")
        self.sizes = [matrix.shape[0] for matrix in matrices]
        self.columns, self.dtype, self._launchers = columns, dtype, launchers
        self.rows = sum(self.sizes) + (0 if tail is None else tail.shape[0])
        self.matrices, self.tail, self._tiles = list(matrices), tail, tiles
        self.from_tokens = from_tokens if from_tokens is not None else 384 if self.rows > MANY_ROWS else 768
        self._parts, self.whole = self._apart(tested), False
        if self._parts:
            self.from_tokens = 0
            return
        self.form = common_format(matrices, target)
        data = [stored(matrix, self.form, dtype, target) for matrix in matrices]
        scales = [matrix.scale if isinstance(matrix, ScaledWeight) else codes for matrix, codes in zip(matrices, data)]
        self._weights = [*filled(data, MATRICES), *filled(scales, MATRICES), data[0] if tail is None else tail]
        sizes = self.sizes + [0] * (MATRICES - len(self.sizes))
        self._constants = dict(
            N0=sizes[0], N1=sizes[1], N2=sizes[2], TAIL=0 if tail is None else tail.shape[0], K=columns,
            FORMAT=self.form.name, ROW_BLOCK=self.form.row_block, SCALE_COLUMNS=self.form.scale_columns,
        )  # fmt: skip
        self._dequantize: Launcher | None = None
        self.whole = len(matrices) == 1 and tail is None and self.form.name == "dense"  # the library reads it as it is
        self._block = 64 if self.form.name == "dense" and not target.interpreted else max(16, self.form.group)
        self._splits_at: dict[tuple[int, GemmTiles], int] = {}
        self._launches: dict[tuple[GemmTiles, int], Launcher] = {}

    def _apart(self, tested: bool) -> list[Callable[[torch.Tensor], object]]:
        """What fills the rows of each matrix and of the tail; nothing where one kernel reads the matrices as they are."""
        target, packed = self._launchers.target, [isinstance(matrix, PackedWeight) for matrix in self.matrices]
        if not any(packed):
            try:
                common_format(self.matrices, target)
                return []
            except UnsupportedByKernel:
                if len(self.matrices) == 1:
                    raise
        if self.columns % 8:
            raise UnsupportedByKernel(f"matrices of several layouts and {self.columns} columns")
        if any(packed) and tested:
            require("packed_prefill", target)
        parts: list[Callable[[torch.Tensor], object]] = []
        for matrix in (*self.matrices, *([] if self.tail is None else [self.tail])):
            if isinstance(matrix, PackedWeight):
                parts.append(PackedMatrix(matrix, self._launchers))
            elif isinstance(matrix, ScaledWeight):
                parts.append(ProjectionPlan([matrix], self._launchers, self.dtype).dequantized)
            else:
                stored(matrix, code_format(matrix, target), self.dtype, target)
                parts.append(lambda out, matrix=matrix: out.copy_(matrix))
        return parts

    def input_type(self, tokens: int) -> torch.dtype:
        """float16 where FP8 weights are decoded on the way."""
        return self.dtype if self.many(tokens) else product_type(self.form, self.dtype)

    def splits(self, tokens: int) -> int:
        """Into how many parts of the columns a product without a following reader of its type is cut: enough programs for
        every multiprocessor where the rows are few. The parts stand behind each other in `out`, in float32."""
        if self.many(tokens):
            return 1
        tiles = self._tiles or gemm_tiles(tokens, self.form, self._launchers.target)
        columns_of_tiles = -(-tokens // tiles.tokens)
        splits = self._splits_at.get((columns_of_tiles, tiles))
        if splits is None:
            programs, steps, splits = -(-self.rows // tiles.rows) * columns_of_tiles, -(-self.columns // self._block), 1
            while splits < 8 and steps % (2 * splits) == 0 and steps // splits > 4 and programs * splits < 1.5 * self._launchers.target.multiprocessors:
                splits *= 2
            self._splits_at[columns_of_tiles, tiles] = splits
        return splits

    def many(self, tokens: int) -> bool:
        """Whether T tokens go through the library."""
        return self.whole or tokens >= self.from_tokens

    def __call__(self, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None, splits: int = 1) -> None:
        """x [T, K] contiguous, of input_type(T); out [T, rows] of the plan's dtype, or float32 [splits, T, rows]. `scratch` [rows, K] of the
        plan's dtype is needed where `many(T)` and the weights are not dense."""
        tokens = x.shape[0]
        if self.many(tokens):
            torch.mm(x, (self.matrices[0] if self.whole else self.dequantized(scratch)).t(), out=out)
            return
        tiles = self._tiles or gemm_tiles(tokens, self.form, self._launchers.target)
        launch = self._launches.get((tiles, splits))
        if launch is None:
            launch = self._launches[tiles, splits] = self._launchers.get(
                gemm_kernel, **self._constants, PER_SCALE=self.form.per_scale, SPLITS=splits,
                BN=tiles.rows, BT=tiles.tokens, BK=self._block, BY_PAIRS=tiles.pairs, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        launch((-(-tokens // tiles.tokens), self._row_tiles(tiles.rows), splits), x, *self._weights, out, tokens)

    def dequantized(self, scratch: torch.Tensor) -> torch.Tensor:
        """All rows multiplied out into the first rows of `scratch`."""
        rows, width, out = 16, 256, scratch[: self.rows]
        if self._parts:
            for fill, part in zip(self._parts, out.split(self.sizes + [self.rows - sum(self.sizes)])):
                fill(part)
            return out
        if self._dequantize is None:
            self._dequantize = self._launchers.get(
                dequantize_kernel, **self._constants, SCALE_WIDTH=self.form.group * self.form.per_scale, BN=rows, WIDTH=width, num_warps=4
            )
        self._dequantize((self._row_tiles(rows), -(-self.columns // width), 1), *self._weights, out)
        return out

    def _row_tiles(self, rows: int) -> int:
        return sum(-(-size // rows) for size in self.sizes) + (0 if self.tail is None else -(-self.tail.shape[0] // rows))

    def reference(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same product in plain PyTorch, in `dtype` throughout."""
        parts = [dense(matrix, torch.float32).to(dtype) for matrix in self.matrices] + ([] if self.tail is None else [self.tail.to(dtype)])
        return x.to(dtype) @ torch.cat(parts).t()


def product_type(form: CodeFormat, dtype: torch.dtype) -> torch.dtype:
    """What activations are that meet weights of this format: float16 for FP8 (float32 where `dtype` is)."""
    return dtype if form.name == "dense" or dtype == torch.float32 else torch.float16


def stored(weight: Weight, form: CodeFormat, dtype: torch.dtype, target: Target) -> torch.Tensor:
    """The codes, or the dense weight, as kernels of many tokens read them; `UnsupportedByKernel` where they cannot."""
    if not isinstance(weight, ScaledWeight) and weight.dtype != dtype:
        raise UnsupportedByKernel(f"weights of {weight.dtype} beside activations of {dtype}")
    if weight.device.type != "meta" and weight.device != target.device:  # meta: a layout whose numbers lie elsewhere
        raise UnsupportedByKernel(f"weights on {weight.device} for a kernel on {target.device}")
    codes = readable(weight, form)
    parts = [codes, weight.scale] if isinstance(weight, ScaledWeight) else [codes]
    if parts[-1] is not codes and weight.scale.dtype != torch.float32:
        raise UnsupportedByKernel(f"scales of {weight.scale.dtype}")
    if codes.device.type != "meta" and any(part.data_ptr() % 16 for part in parts):
        raise UnsupportedByKernel("weights off the grid of 16 bytes")
    return codes


def filled(items: list, count: int) -> list:
    """`items` with the first repeated up to `count`."""
    return items + [items[0]] * (count - len(items))


@self_test("fp8_gemm", limit=8e-3)
def check(target: Target) -> float:
    """Block, channel and tensor scales, both codes, a dense tail, ragged tiles; through tiles, splits and the library."""
    device, dtype = target.device, torch.float32 if target.interpreted else torch.bfloat16
    launchers, worst = Launchers(target), 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    rows, columns = (40, 144) if target.interpreted else (2048, 2048)
    tail = (torch.randn(24, columns, device=device, generator=generator) * 0.02).to(dtype)
    block, second = random_fp8((rows, columns), (128, 128), device), random_fp8((2 * rows, columns), (128, 128), device, seed=2)
    channel = random_fp8((rows, columns), (1, columns), device, torch.float8_e5m2)
    for tokens in (1, 70):
        numbers = torch.randn(tokens, columns, device=device, generator=generator)
        for matrices, extra, splits, start in (
            ([block, second], tail, 1, 1 << 30), ([block], None, 2, 1 << 30), ([channel], None, 1, 1 << 30), ([block, second], tail, 1, 1)
        ):  # fmt: skip
            plan = ProjectionPlan(matrices, launchers, dtype, tail=extra, from_tokens=start)
            out = torch.full((splits, tokens, plan.rows), torch.nan, device=device, dtype=torch.float32 if splits > 1 else dtype)
            x = numbers.to(plan.input_type(tokens))
            plan(x, out if splits > 1 else out[0], torch.empty(plan.rows, columns, device=device, dtype=dtype), splits)
            worst = max(worst, relative_error(out.double().sum(0), plan.reference(x, torch.float64)))
    return worst
