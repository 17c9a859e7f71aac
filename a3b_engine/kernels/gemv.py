"""Plans of matrix-vector products: what is settled before a decode step runs, so that a step only launches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Sequence

import torch

from ..checkpoint.scaled import ScaledWeight
from ..model.linear import Weight, dense
from .configs import TileConfig, next_power_of_two
from .rows import gemv_kernel, sum_partials_kernel
from .support import Target, UnsupportedByKernel

DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUM_BLOCK = 256  # outputs a program of the second launch adds up


@dataclass(frozen=True)
class CodeFormat:
    """How the kernels read a weight. name: FORMAT of rows.fp8_values, or "dense". row_block: rows a scale covers, 0 for
    all; scale_columns: scales in a row; group: columns summed before a scale multiplies; per_scale: groups a scale covers."""

    name: str
    row_block: int
    scale_columns: int
    group: int
    per_scale: int


def code_format(weight: Weight, target: Target) -> CodeFormat:
    """The format of a weight [..., N, K]; UnsupportedByKernel where no kernel reads it."""
    rows, columns = weight.shape[-2:]
    if not isinstance(weight, ScaledWeight):
        if weight.dtype not in DENSE_DTYPES:
            raise UnsupportedByKernel(f"weights of {weight.dtype}")
        return CodeFormat("dense", 0, 0, min(128, next_power_of_two(columns)), 1)
    high, wide = weight.block
    if wide >= columns:
        group, per_scale = 128, next_power_of_two(columns)  # one scale a row: any number of groups
    else:
        group = math.gcd(wide, 128)
        per_scale = wide // group
    if group < 16:
        raise UnsupportedByKernel(f"scales over {wide} columns")
    if weight.data.dtype == torch.float8_e4m3fn:
        name = "e4m3" if target.fp8_native else "e4m3_bytes"
    elif weight.data.dtype == torch.float8_e5m2:
        name = "e5m2_bytes"
    else:
        raise UnsupportedByKernel(f"codes of {weight.data.dtype}")
    return CodeFormat(name, 0 if high >= rows else high, weight.scale.shape[-1], group, per_scale)


def common_format(weights: Sequence[Weight], target: Target) -> CodeFormat:
    """The one format in which a kernel can read all of these; UnsupportedByKernel where there is none."""
    forms = [code_format(weight, target) for weight in weights]
    row_block = max(form.row_block for form in forms)
    for weight, form in zip(weights, forms):
        covers_all = form.row_block == 0 and weight.shape[-2] <= row_block  # row // row_block is 0 in every row
        if replace(form, row_block=row_block) != replace(forms[0], row_block=row_block) or not (covers_all or form.row_block == row_block):
            raise UnsupportedByKernel("weights of different layouts in one launch")
    return replace(forms[0], row_block=row_block)


def readable(weight: Weight, form: CodeFormat) -> torch.Tensor:
    """The codes as the kernels take them: bytes where the device has no such type."""
    data = weight.data if isinstance(weight, ScaledWeight) else weight
    if not data.is_contiguous() or (isinstance(weight, ScaledWeight) and not weight.scale.is_contiguous()):
        raise UnsupportedByKernel("weights with gaps between their rows")
    return data.view(torch.uint8) if form.name.endswith("_bytes") else data


class Product(ABC):
    """What plans of matrix-vector products share: one to four matrices [n_i, K], then a tail of up to two dense ones, times one vector.

    norm: float32 [K], a zero-centred RMS norm of x (model.linear.rms_norm) done on the way, unrounded. A plan keeps the
    matrices' memory alive and must be made anew when they move. Calling it with x [K] and residual [rows] of any float dtype writes out
    [rows] of any float dtype, which may be `residual` itself; that only launches: nothing is allocated, checked on the host or waited for.
    """

    def __init__(self, matrices: Sequence[Weight], tail: Sequence[torch.Tensor], norm: torch.Tensor | None, eps: float) -> None:
        self.matrices, self.tail, self.norm, self.eps = list(matrices), list(tail), norm, eps
        self.rows, self.columns = sum(matrix.shape[0] for matrix in (*matrices, *tail)), matrices[0].shape[-1]

    @abstractmethod
    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """x [K] -> out [rows], see above."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales one call reads."""
        return sum(weight.nbytes for weight in self.matrices + self.tail)

    def reference(self, x: torch.Tensor, residual: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same product in plain PyTorch, in `dtype` throughout: [rows]."""
        vector = x.to(dtype)
        if self.norm is not None:
            vector = vector * torch.rsqrt(vector.square().mean() + self.eps) * (1.0 + self.norm.to(dtype))
        parts = [dense(matrix, torch.float32).to(dtype) @ vector for matrix in self.matrices + self.tail]
        out = torch.cat(parts)
        return out if residual is None else out + residual.to(dtype)


class GemvPlan(Product):
    """out [rows of all matrices] = matrices times x (+ residual) for one token, in one launch (two where columns are split).

    matrices: all FP8 of one layout or all dense of one dtype; tail: only beside FP8 ones. late: with programmatic dependent
    launch, the kernel behind this one may start only once x is complete, and read it.
    """

    def __init__(
        self, matrices: Sequence[Weight], config: TileConfig, target: Target, *,
        tail: Sequence[torch.Tensor] = (), norm: torch.Tensor | None = None, eps: float = 1e-6, pdl: bool = False, late: bool = False,
    ) -> None:  # fmt: skip
        columns = matrices[0].shape[-1]
        form = common_format(matrices, target)
        _check(matrices, tail, norm, form, columns)
        data = [readable(matrix, form) for matrix in matrices]
        extra = [readable(matrix, code_format(matrix, target)) for matrix in tail]
        scales = [matrix.scale if isinstance(matrix, ScaledWeight) else codes for matrix, codes in zip(matrices, data)]
        if config.splits > 1 and norm is not None:
            raise ValueError("columns cannot be split under a norm: no program would see all of x")
        groups = max(1, config.columns // form.group)
        pieces = -(-columns // (groups * form.group * config.splits))
        sizes, tail_sizes = [codes.shape[0] for codes in data], [codes.shape[0] for codes in extra]
        super().__init__(matrices, tail, norm, eps)
        tiles, tail_tiles = (sum(-(-size // config.rows) for size in part) for part in (sizes, tail_sizes))
        steps, programs = config.shared_out(tiles, target)
        self._grid, self._splits = (programs + tail_tiles, config.splits), config.splits
        self._norm = norm if norm is not None else data[0]
        self._pointers = [*_padded(data, 4), *_padded(scales, 4), *_padded(sizes, 4, 0)]
        self._pointers += [*_padded(extra or data[:1], 2), *_padded(tail_sizes, 2, 0)]
        self._numbers = [eps, programs, tiles, tail_tiles]
        whole = all(size % config.rows == 0 for size in sizes + tail_sizes)
        self._options = dict(
            K=columns, FORMAT=form.name, ROW_BLOCK=form.row_block, SCALE_COLUMNS=form.scale_columns, GROUP=form.group,
            PER_SCALE=form.per_scale, ROWS=config.rows, GROUPS=groups, PIECES=pieces, STEPS=steps, MATRICES=len(data),
            TAIL=len(extra), ALIGNED=all(codes.data_ptr() % 16 == 0 for codes in data + extra),
            MASKED=not (whole and groups * form.group * pieces * config.splits == columns),
            NORM=norm is not None, LATE=late, num_warps=config.warps,
        )  # fmt: skip
        self._pdl = dict(PDL=True, launch_pdl=True) if pdl and target.pdl else dict(PDL=False)
        self.partials = None
        if config.splits > 1:
            self.partials = torch.empty(config.splits, self.rows, dtype=torch.float32, device=target.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        target = out if self.partials is None else self.partials
        add = residual is not None
        gemv_kernel[self._grid](
            x, self._norm, residual if add else x, target, *self._pointers, *self._numbers,
            RESIDUAL=add and self.partials is None, **self._options, **self._pdl,
        )  # fmt: skip
        if self.partials is not None:
            sum_partials_kernel[(-(-self.rows // _SUM_BLOCK),)](
                self.partials, residual if add else x, out, self.rows,
                SPLITS=self._splits, BLOCK=_SUM_BLOCK, RESIDUAL=add, num_warps=4, **self._pdl,
            )  # fmt: skip


def _padded(items: list, count: int, filler: object = None) -> list:
    return items + [items[0] if filler is None else filler] * (count - len(items))


def _check(
    matrices: Sequence[Weight], tail: Sequence[torch.Tensor], norm: torch.Tensor | None, form: CodeFormat, columns: int
) -> None:
    if not 1 <= len(matrices) <= 4 or len(tail) > 2 or (tail and form.name == "dense"):
        raise UnsupportedByKernel(f"{len(matrices)} matrices and {len(tail)} dense ones in one launch")
    dtypes = {matrix.dtype for matrix in (matrices if form.name == "dense" else tail)}
    if len(dtypes) > 1 or any(matrix.ndim != 2 or matrix.shape[1] != columns for matrix in (*matrices, *tail)):
        raise UnsupportedByKernel("matrices of different layouts in one launch")
    if norm is not None and (norm.dtype != torch.float32 or norm.shape != (columns,)):
        raise UnsupportedByKernel(f"a norm of {norm.dtype} {list(norm.shape)}")
