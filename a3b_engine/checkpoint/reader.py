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
from functools import partial

import torch

from ..errors import A3BError
from ..model.linear import Weight
from ..model.moe import ExpertWeights
from .dtypes import DTYPE_BITS, torch_dtype
from .names import is_expert_stack, kept_in_float32, layer_of, may_stay_scaled, stack_names
from .pipeline import CHUNK_BYTES, Batch, Job, run_batches, run_jobs
from .scaled import ScaledWeight, dequantize_rows
from .storage import Entry, Fp8Storage, LoadPlan, Piece

log = logging.getLogger(__name__)

TakeExperts = Callable[[int, ExpertWeights], object]
_PROGRESS_SECONDS = 0.1


class LoadCancelled(A3BError):
    """`cancel` returned True while weights were being read; nothing of them is left in memory."""


def no_weight(canonical: str) -> bool:
    """Selects nothing."""
    return False


def load_weights(
    plan: LoadPlan,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    dequantize: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cancel: Callable[[], object] | None = None,
    include: Callable[[str], bool] = lambda canonical: True,
    take_experts: TakeExperts | None = None,
    on_host: Callable[[str], bool] = no_weight,
) -> dict[str, Weight]:
    """Canonical name -> weight on `device`, or on the CPU where `on_host` says so.

    Dense weights become `dtype`, norms, A_log and dt_bias float32. FP8 weights that the engine can use so stay
    `ScaledWeight` (scales float32) and 4-bit ones `PackedWeight` unless `dequantize`; others become `dtype`. `include` selects by
    canonical name. progress(done_bytes, total_bytes) and cancel() are called from this thread; cancel may raise, or
    return True for `LoadCancelled`. On any exception every buffer is released before it propagates.

    take_experts(layer, stacks) gets the routed experts of each layer, in the order of the layers and after everything else has
    been read; they are not in the result then. Their last bytes may still be under way on the current stream. At most two
    layers stand in memory at a time: the one that is given away and the one that is read meanwhile.
    """
    device = torch.device(device)
    loading = _Loading(device, dtype, dequantize, progress, cancel, on_host)
    try:
        return loading.run(plan, include, take_experts)
    except BaseException as error:
        # The traceback's frames would keep tensors alive for as long as somebody holds the exception.
        loading.release()
        traceback.clear_frames(error.__traceback__)
        raise


class _Loading:
    """One call of `load_weights`: owns every buffer, so that `release` can drop them all."""

    def __init__(self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress, cancel, on_host: Callable[[str], bool]) -> None:
        self.device, self.dtype, self.dequantize = device, dtype, dequantize
        self.progress, self.cancel, self.on_host = progress, cancel, on_host
        self.weights: dict[str, Weight] = {}
        self.scales: dict[str, torch.Tensor] = {}
        self.jobs: list[Job] = []
        self.done = self.total = 0
        self.reported_at = -math.inf

    def release(self) -> None:
        self.weights.clear()
        self.scales.clear()
        self.jobs.clear()

    def run(self, plan: LoadPlan, include: Callable[[str], bool], take_experts: TakeExperts | None) -> dict[str, Weight]:
        aliases = {name: target for name, target in plan.aliases.items() if include(name)}
        wanted = {name for name in plan.entries if include(name)} | set(aliases.values())
        entries = [plan.entries[name] for name in plan.entries if name in wanted]
        self.total = sum(piece.nbytes for entry in entries for piece in (*entry.pieces, *(entry.fp8.pieces if entry.fp8 else ())))
        self._report(0)
        # Scales that multiplying out needs come before their weights; others come along with them.
        needed = [entry for entry in entries if entry.fp8 and not self._stays_scaled(entry)]
        for entry in needed:
            self.scales[entry.name] = self._prepare_scale(entry.fp8)
        self._run_jobs(torch.device("cpu"))
        for entry in needed:
            self.scales[entry.name] = self._finish_scale(entry)
        run_batches(self._batches(entries, take_experts), self.device, self._report, self.total)
        result = {name: weight for name, weight in self.weights.items() if include(name)}
        for name, target in aliases.items():
            weight = self.weights[target]
            result[name] = weight if self.on_host(name) else weight.to(self.device)
        self.weights = {}
        if self.done < self.total:  # cannot happen unless a job was lost; never hand out unread memory
            raise A3BError(f"{plan.folder}: {self.done} of {self.total} bytes were read.")
        self.reported_at = -math.inf
        self._report(0)
        return result

    def _batches(self, entries: list, take_experts: TakeExperts | None) -> list[Batch]:
        """What every token needs, then layer after layer of routed experts."""
        parts: dict[int, list] = {-1: []}
        for entry in entries:
            parts.setdefault(layer_of(entry.name) if is_expert_stack(entry.name) else -1, []).append(entry)
        batches = []
        for layer, part in sorted(parts.items()):
            take = take_experts if layer >= 0 else None
            batches.append(Batch(partial(self._prepare_all, part), partial(self._finish, part, layer, take)))
        return batches

    def _prepare_all(self, entries: list) -> list[Job]:
        for entry in entries:
            self._prepare(entry)
        jobs, self.jobs = self.jobs, []
        return jobs

    def _finish(self, entries: list, layer: int, take_experts: TakeExperts | None) -> None:
        for entry in entries:
            if isinstance(entry, Entry) and self._stays_scaled(entry):
                self.weights[entry.name] = ScaledWeight(self.weights[entry.name], self._finish_scale(entry), entry.fp8.block)
            self.scales.pop(entry.name, None)
            if not isinstance(entry, Entry) and (self.dequantize or not may_stay_scaled(entry.name)):
                # One after the other: besides the result, only the packed forms still to come are in memory.
                self.weights[entry.name] = self.weights[entry.name].dequantize(self._dense_dtype(entry.name))
        if take_experts is not None:
            take_experts(layer, ExpertWeights(*(self.weights.pop(name) for name in stack_names(layer))))

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

    def _finish_scale(self, entry: Entry) -> torch.Tensor:
        return _expanded_scale(entry.fp8, self.scales[entry.name]).to(self._place(entry.name))

    # Weights

    def _stays_scaled(self, entry: Entry) -> bool:
        return entry.stays_scaled and not self.dequantize

    def _prepare(self, entry: Entry) -> None:
        """Allocate the final tensor of `entry` and list the reads that fill it."""
        if not isinstance(entry, Entry):
            self.weights[entry.name] = entry.prepare(partial(self._allocate, entry.name), self.copy_piece)
            return
        if self._stays_scaled(entry):
            data = self._allocate(entry.name, entry.shape, torch_dtype(entry.dtype))
            self.weights[entry.name] = data  # its scale follows in `_finish`
            self.scales[entry.name] = self._prepare_scale(entry.fp8)
            self._copy_pieces(entry, data)
            return
        data = self._allocate(entry.name, entry.shape, self._dense_dtype(entry.name))
        self.weights[entry.name] = data
        if entry.fp8:
            self._dequantize_pieces(entry, data)
        else:
            self._copy_pieces(entry, data)

    def _dense_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if kept_in_float32(name) else self.dtype

    def _place(self, name: str) -> torch.device:
        return torch.device("cpu") if self.on_host(name) else self.device

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._place(name))

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
            values = _as_dtype(raw, stored)
            if stored != target.dtype and target.device.type != "cpu":
                values = values.to(target.device, non_blocking=True)  # converted there, not by this thread
            target.copy_(values, non_blocking=True)

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


def _expanded_scale(fp8: Fp8Storage, stored: torch.Tensor) -> torch.Tensor:
    """The stored scale rows as one value a block of the weight they serve; float32 of `fp8.shape`."""
    if fp8.row_repeat > 1 or fp8.row_skip:
        stored = stored.repeat_interleave(fp8.row_repeat, dim=-2)
    rows = fp8.shape[-2]
    stored = stored[..., fp8.row_skip : fp8.row_skip + rows, :]
    if fp8.copies > 1:
        stored = stored.expand(fp8.shape)
    return stored.contiguous()
