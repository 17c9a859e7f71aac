"""Reader threads and staging buffers: runs batches of byte-range reads, each read finished on the calling thread."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError

CHUNK_BYTES = 8 * 1024 * 1024  # large enough for full speed of NVMe disks and PCIe copies
_DIRECT_BYTES = 256 * 1024  # below this, reading neighbours together beats reading straight into place
_GAP_BYTES = 64 * 1024  # unneeded bytes read along rather than starting another read
_POLL_SECONDS = 0.1
# Copying out of the page cache takes a core about 5 GB/s at best; a PCIe 5 card takes 55 GB/s.
_THREADS = 8
#: Batches whose targets exist at the same time: one that is being finished, and one to read meanwhile.
AHEAD = 2


@dataclass(slots=True)
class Job:
    """Read `nbytes` at `offset` of `file`; then `finish(bytes as uint8 [nbytes])`.

    `direct`, a contiguous CPU tensor of `nbytes`, is filled without `finish` when the read is large enough.
    """

    file: Path
    offset: int
    nbytes: int
    finish: Callable[[torch.Tensor], object]
    direct: torch.Tensor | None = None


@dataclass(slots=True)
class Batch:
    """Reads whose targets are made together when their turn comes: `prepare() -> jobs`. `finished()` follows when all are done."""

    prepare: Callable[[], list[Job]]
    finished: Callable[[], object] = lambda: None


@dataclass(slots=True)
class _Open:
    """A batch on its way: reads still to be finished, and what follows."""

    left: int
    finished: Callable[[], object]


@dataclass(slots=True)
class _Read:
    """One range read: for a single direct job, or for neighbouring jobs through a staging buffer."""

    file: Path
    offset: int
    nbytes: int
    jobs: list[Job]
    direct: bool
    batch: _Open


def run_jobs(jobs: list[Job], device: torch.device, report: Callable[[int], None]) -> None:
    """Run all jobs as one batch (see `run_batches`). The list is emptied."""
    taken = list(jobs)
    jobs.clear()
    total = sum(job.nbytes for job in taken)
    run_batches([Batch(taken.copy)], device, report, total)
    taken.clear()


def run_batches(batches: Iterable[Batch], device: torch.device, report: Callable[[int], None], total: int) -> None:
    """Run batches of `total` bytes in order: one is prepared while the one before it is still being read, never two.

    `report(bytes finished since the last call)` is called from this thread and may raise, as may `prepare` and `finished`.
    Copies to `device` may still be under way on the current stream when `finished` is called, but not at the end.
    Raises CheckpointError naming the file when a read fails or comes back short. Batches and jobs are dropped as they
    finish, and all of them on an error.
    """
    work = _Work(batches, device, total)
    try:
        work.run(report)
    finally:
        work.close()


def _merge(jobs: list[Job], batch: _Open) -> list[_Read]:
    """Sort by place and join small neighbours, so that thousands of tiny tensors cost few reads."""
    reads: list[_Read] = []
    for job in sorted((job for job in jobs if job.nbytes), key=lambda job: (str(job.file), job.offset)):
        if job.direct is not None and job.nbytes >= _DIRECT_BYTES:
            reads.append(_Read(job.file, job.offset, job.nbytes, [job], True, batch))
            continue
        last = reads[-1] if reads else None
        end = job.offset + job.nbytes
        if (
            last is not None
            and not last.direct
            and last.file == job.file
            and 0 <= job.offset - (last.offset + last.nbytes) <= _GAP_BYTES
            and end - last.offset <= CHUNK_BYTES
        ):
            last.nbytes = end - last.offset
            last.jobs.append(job)
        else:
            reads.append(_Read(job.file, job.offset, job.nbytes, [job], False, batch))
    return reads


class _Work:
    def __init__(self, batches: Iterable[Batch], device: torch.device, total: int) -> None:
        self.device = device
        self.batches = deque(batches)
        self.opened: deque[_Open] = deque()
        self.todo: queue.Queue[_Read | None] = queue.Queue()  # None ends a thread
        self.finished: queue.Queue[tuple[_Read | None, torch.Tensor | None, str]] = queue.Queue()
        self.stop = threading.Event()
        self.most_threads = max(1, min(_THREADS, os.cpu_count() or 1))
        self.staging = min(CHUNK_BYTES, total)
        self.free: queue.Queue[torch.Tensor | None] = queue.Queue()
        self.buffers = 0
        self.copying: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self.threads: list[threading.Thread] = []

    def run(self, report: Callable[[int], None]) -> None:
        self._open_batches(report)
        while self.opened:
            try:
                read, buffer, error = self.finished.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                report(0)
                self._recycle()
                continue
            if read is None:
                raise CheckpointError(error)
            if buffer is not None:
                for job in read.jobs:
                    start = job.offset - read.offset
                    job.finish(buffer[start : start + job.nbytes])
                self._give_back(buffer)
            read.batch.left -= 1
            report(sum(job.nbytes for job in read.jobs))
            self._open_batches(report)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _open_batches(self, report: Callable[[int], None]) -> None:
        """Open as many batches as may be open, and close those that are done, in order."""
        while True:
            while self.batches and len(self.opened) < AHEAD:
                self._open(self.batches.popleft())
            if not self.opened or self.opened[0].left:
                return
            self.opened.popleft().finished()  # while the next one is being read
            report(0)  # it may have taken long

    def _open(self, batch: Batch) -> None:
        opened = _Open(0, batch.finished)
        reads = _merge(batch.prepare(), opened)
        opened.left = len(reads)
        self.opened.append(opened)
        self._add_threads(len(reads), staged=not all(read.direct for read in reads))
        for read in reads:
            self.todo.put(read)
        if not self.batches:
            self._end_threads()

    def _add_threads(self, reads: int, staged: bool) -> None:
        for _ in range(min(reads, self.most_threads - len(self.threads))):
            thread = threading.Thread(target=self._read_all, name=f"a3b-read-{len(self.threads)}", daemon=True)
            self.threads.append(thread)
            thread.start()
        while staged and self.buffers < len(self.threads) + 2:
            self.buffers += 1
            self.free.put(_staging_buffer(self.staging, self.device))

    def _end_threads(self) -> None:
        for _ in self.threads:
            self.todo.put(None)

    def close(self) -> None:
        """Stop the threads and drop every reference to buffers and targets."""
        self.stop.set()
        self._end_threads()
        for _ in self.threads:
            self.free.put(None)
        for thread in self.threads:
            thread.join()
        if self.copying:
            torch.cuda.current_stream(self.device).synchronize()  # copies still read from the pinned buffers
        self.copying.clear()
        self.batches.clear()
        self.opened.clear()
        self.todo = queue.Queue()
        self.free = queue.Queue()
        self.finished = queue.Queue()

    # Staging buffers

    def _give_back(self, buffer: torch.Tensor) -> None:
        if self.device.type != "cuda":
            self.free.put(buffer)
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.copying.append((event, buffer))
        self._recycle()

    def _recycle(self) -> None:
        """Return buffers whose copies to the device are done; wait for the oldest when none is free."""
        while self.copying and (self.copying[0][0].query() or self.free.empty()):
            event, buffer = self.copying.popleft()
            event.synchronize()
            self.free.put(buffer)

    # Reader threads

    def _read_all(self) -> None:
        handles: dict[Path, object] = {}
        try:
            while not self.stop.is_set():
                read = self.todo.get()
                if read is None:
                    return
                buffer = None
                if not read.direct:
                    buffer = self.free.get()
                    if buffer is None:
                        return
                    if buffer.nbytes < read.nbytes:  # rows of one scale block may be more than a chunk
                        buffer = torch.empty(read.nbytes, dtype=torch.uint8)
                if read.file not in handles:
                    handles[read.file] = open(read.file, "rb", buffering=0)
                target = read.jobs[0].direct.view(-1).view(torch.uint8) if read.direct else buffer[: read.nbytes]
                _read_into(handles[read.file], read, memoryview(target.numpy()))
                self.finished.put((read, buffer, ""))
        except OSError as error:
            self.finished.put((None, None, f"{read.file}: cannot be read ({error.strerror or error})."))
        except CheckpointError as error:
            self.finished.put((None, None, str(error)))
        except Exception as error:  # the calling thread must hear of anything that ends this one
            self.finished.put((None, None, f"{read.file}: cannot be read ({type(error).__name__}: {error})."))
        finally:
            for handle in handles.values():
                handle.close()


def _read_into(handle, read: _Read, target: memoryview) -> None:
    handle.seek(read.offset)
    filled = 0
    while filled < read.nbytes:
        count = handle.readinto(target[filled:])
        if not count:
            raise CheckpointError(
                f"{read.file}: ends at byte {read.offset + filled}, expected at least {read.offset + read.nbytes}. The file "
                "changed while it was read; is a download still running?"
            )
        filled += count


def _staging_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            pass  # no page-locked memory left: slower, still correct
    return torch.empty(nbytes, dtype=torch.uint8)
