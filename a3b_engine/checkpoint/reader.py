"""Reading weights: byte ranges of the files into their final tensors, by a few threads.

On a CPU, ranges that need no conversion are read straight into the final tensor. Everything else (other devices, other
dtypes, small tensors) goes through a small ring of staging buffers, so that no weight is ever held twice.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable

import torch

from ..errors import A3BError
from .dtypes import DTYPE_BITS, torch_dtype
from .names import kept_in_float32, may_stay_scaled
from .packed import PackedWeight
from .pipeline import CHUNK_BYTES, Job, run_jobs
from .scaled import ScaledWeight, dequantize_rows
from .storage import Entry, Fp8Storage, LoadPlan, Piece

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.1


class LoadCancelled(A3BError):
    """`cancel` returned True while weights were being read; nothing of them is left in memory."""


def load_weights(
    plan: LoadPlan,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    dequantize: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cancel: Callable[[], object] | None = None,
    include: Callable[[str], bool] = lambda canonical: True,
) -> dict[str, torch.Tensor | ScaledWeight | PackedWeight]:
    """Canonical name -> weight on `device`.

    Dense weights become `dtype`, norms, A_log and dt_bias float32. FP8 weights that the engine can use so stay
    `ScaledWeight` (scales float32) and 4-bit ones `PackedWeight` unless `dequantize`; others become `dtype`. `include` selects by
    canonical name. progress(done_bytes, total_bytes) and cancel() are called from this thread; cancel may raise, or
    return True for `LoadCancelled`. On any exception every buffer is released before it propagates.
    """
    device = torch.device(device)
    loading = _Loading(device, dtype, dequantize, progress, cancel)
    try:
        return loading.run(plan, include)
    except BaseException as error:
        # The traceback's frames would keep tensors alive for as long as somebody holds the exception.
        loading.release()
        traceback.clear_frames(error.__traceback__)
        raise


class _Loading:
    """One call of `load_weights`: owns every buffer, so that `release` can drop them all."""

    def __init__(self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress, cancel) -> None:
        self.device, self.dtype, self.dequantize = device, dtype, dequantize
        self.progress, self.cancel = progress, cancel
        self.weights: dict[str, torch.Tensor | ScaledWeight | PackedWeight] = {}
        self.scales: dict[str, torch.Tensor] = {}
        self.jobs: list[Job] = []
        self.done = self.total = 0
        self.reported_at = -math.inf

    def release(self) -> None:
        self.weights.clear()
        self.scales.clear()
        self.jobs.clear()

    def run(self, plan: LoadPlan, include: Callable[[str], bool]) -> dict[str, torch.Tensor | ScaledWeight | PackedWeight]:
        aliases = {name: target for name, target in plan.aliases.items() if include(name)}
        wanted = {name for name in plan.entries if include(name)} | set(aliases.values())
        entries = [plan.entries[name] for name in plan.entries if name in wanted]
        self.total = sum(piece.nbytes for entry in entries for piece in (*entry.pieces, *(entry.fp8.pieces if entry.fp8 else ())))
        self._report(0)
        # Scales first: they are small, and multiplying out needs them.
        buffers = {entry.name: self._prepare_scale(entry.fp8) for entry in entries if entry.fp8}
        self._run_jobs(torch.device("cpu"))
        for entry in entries:
            if entry.fp8:
                self.scales[entry.name] = _finish_scale(entry.fp8, buffers.pop(entry.name)).to(self.device)
        for entry in entries:
            self._prepare(entry)
        self._run_jobs(self.device)
        self.scales.clear()
        for entry in entries:
            if not isinstance(entry, Entry) and (self.dequantize or not may_stay_scaled(entry.name)):
                # One after the other: besides the result, only the packed forms still to come are in memory.
                self.weights[entry.name] = self.weights[entry.name].dequantize(self._dense_dtype(entry.name))
        result = {name: weight for name, weight in self.weights.items() if include(name)}
        result.update({name: self.weights[target] for name, target in aliases.items()})
        self.weights = {}
        if self.done < self.total:  # cannot happen unless a job was lost; never hand out unread memory
            raise A3BError(f"{plan.folder}: {self.done} of {self.total} bytes were read.")
        self.reported_at = -math.inf
        self._report(0)
        return result

    # Progress

    def _report(self, nbytes: int) -> None:
        self.done += nbytes
        if self.cancel is not None and self.cancel() is True:
            raise LoadCancelled("Loading the model was cancelled; nothing of it is left in memory.")
        now = time.monotonic()
        if self.progress is not None and now - self.reported_at >= _PROGRESS_SECONDS:
            self.reported_at = now
            self.progress(self.done, self.total)

    def _run_jobs(self, device: torch.device) -> None:
        jobs, self.jobs = self.jobs, []
        run_jobs(jobs, device, self._report)

    # Scales

    def _prepare_scale(self, fp8: Fp8Storage) -> torch.Tensor:
        buffer = torch.empty(fp8.stored_shape, dtype=torch.float32)
        flat, filled = buffer.view(-1), 0
        for piece in fp8.pieces:
            count = piece.nbytes * 8 // DTYPE_BITS[fp8.dtype]
            self._add_copy(piece, 0, piece.nbytes, fp8.dtype, flat[filled : filled + count])
            filled += count
        return buffer

    # Weights

    def _prepare(self, entry: Entry) -> None:
        """Allocate the final tensor of `entry` and list the reads that fill it."""
        if not isinstance(entry, Entry):
            self.weights[entry.name] = entry.prepare(self._allocate, self.copy_piece)
            return
        if entry.stays_scaled and not self.dequantize:
            data = self._allocate(entry.shape, torch_dtype(entry.dtype))
            self.weights[entry.name] = ScaledWeight(data, self.scales[entry.name], entry.fp8.block)
            self._copy_pieces(entry, data)
            return
        data = self._allocate(entry.shape, self._dense_dtype(entry.name))
        self.weights[entry.name] = data
        if entry.fp8:
            self._dequantize_pieces(entry, data)
        else:
            self._copy_pieces(entry, data)

    def _dense_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if kept_in_float32(name) else self.dtype

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def copy_piece(
        self, piece: Piece, code: str, target: torch.Tensor | None, *, place: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None,
        columns: int = 1, check: Callable[[torch.Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """List the reads of a tensor: elements of dtype `code` in rows of `columns`, into `target` (None: only checked).

        place(rows, target, first row) writes them when they are not simply copied; check(elements), on the host, raises
        when they are not what they should be.
        """
        stored = torch_dtype(code)
        row_bytes = columns * stored.itemsize
        # Whole rows, an even number of them for packings that pair rows; simply copied ones may be cut anywhere.
        step = CHUNK_BYTES if place is None else max(CHUNK_BYTES // (2 * row_bytes), 1) * 2 * row_bytes
        for start in range(0, piece.nbytes, step):
            nbytes = min(step, piece.nbytes - start)
            if place is None and check is None:
                self._add_copy(piece, start, nbytes, code, target.view(-1)[start // stored.itemsize : (start + nbytes) // stored.itemsize])
            else:
                finish = _placer(stored, columns, start // row_bytes, target, place, check)
                self.jobs.append(Job(piece.file, piece.offset + start, nbytes, finish))

    def _copy_pieces(self, entry: Entry, data: torch.Tensor) -> None:
        flat, filled = data.view(-1), 0
        size = DTYPE_BITS[entry.dtype] // 8
        for piece in entry.pieces:
            for start in range(0, piece.nbytes, CHUNK_BYTES):
                nbytes = min(CHUNK_BYTES, piece.nbytes - start)
                self._add_copy(piece, start, nbytes, entry.dtype, flat[filled : filled + nbytes // size])
                filled += nbytes // size

    def _add_copy(self, piece: Piece, start: int, nbytes: int, code: str, target: torch.Tensor) -> None:
        if code in ("U8", "F8_E8M0"):
            self.jobs.append(Job(piece.file, piece.offset + start, nbytes, lambda raw: target.copy_(_decode_e8m0(raw))))
            return
        stored = torch_dtype(code)
        direct = target if target.device.type == "cpu" and target.dtype == stored else None

        def finish(raw: torch.Tensor) -> None:
            target.copy_(_as_dtype(raw, stored), non_blocking=True)

        self.jobs.append(Job(piece.file, piece.offset + start, nbytes, finish, direct))

    def _dequantize_pieces(self, entry: Entry, data: torch.Tensor) -> None:
        """Reads of whole rows, in steps that begin at a scale block, each multiplied out into `data`."""
        rows, columns = entry.shape[-2:]
        plain = data.view(-1, rows, columns)
        scale = self.scales[entry.name].view(-1, *entry.fp8.shape[-2:])
        block, stored = entry.fp8.block, torch_dtype(entry.dtype)
        height = min(block[0], rows)
        step = max(CHUNK_BYTES // columns // height, 1) * height
        if height == rows:
            step = max(CHUNK_BYTES // columns, 1)  # one scale value down the whole matrix: cut anywhere
        matrix = 0
        for piece in entry.pieces:
            for inside in range(piece.nbytes // (rows * columns)):
                for first in range(0, rows, step):
                    last = min(rows, first + step)
                    factors = scale[matrix, first // block[0] : -(-last // block[0])]
                    finish = _dequantizer(factors, block, stored, plain[matrix, first:last])
                    offset = piece.offset + (inside * rows + first) * columns
                    self.jobs.append(Job(piece.file, offset, (last - first) * columns, finish))
                matrix += 1


def _dequantizer(scale: torch.Tensor, block: tuple[int, int], stored: torch.dtype, target: torch.Tensor):
    def finish(raw: torch.Tensor) -> None:
        data = raw.to(target.device, non_blocking=True).view(stored).view(target.shape)
        dequantize_rows(data, scale, block, target)

    return finish


def _placer(stored: torch.dtype, columns: int, first: int, target: torch.Tensor | None, place, check):
    def finish(raw: torch.Tensor) -> None:
        rows = _as_dtype(raw, stored)
        if check is not None:
            check(rows)
        if place is not None:
            place(rows.to(target.device, non_blocking=True).view(-1, columns), target, first)
        elif target is not None:
            target.view(-1)[: len(rows)].copy_(rows)

    return finish


def _as_dtype(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [n] as elements; through a copy when they do not begin at a multiple of the element size."""
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def _decode_e8m0(raw: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> float32 powers of two, 2^(byte - 127); 255 is NaN. (OCP microscaling format, section 5.4.1.)"""
    value = torch.ldexp(torch.ones(raw.shape, dtype=torch.float32), raw.to(torch.int32) - 127)
    return value.masked_fill_(raw == 255, math.nan)


def _finish_scale(fp8: Fp8Storage, stored: torch.Tensor) -> torch.Tensor:
    """The stored scale rows as one value a block of the weight they serve; float32 of `fp8.shape`."""
    if fp8.row_repeat > 1 or fp8.row_skip:
        stored = stored.repeat_interleave(fp8.row_repeat, dim=-2)
    rows = fp8.shape[-2]
    stored = stored[..., fp8.row_skip : fp8.row_skip + rows, :]
    if fp8.copies > 1:
        stored = stored.expand(fp8.shape)
    return stored.contiguous()
