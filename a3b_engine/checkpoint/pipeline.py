"""Reader threads and staging buffers: runs a list of byte-range reads, each finished on the calling thread."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError

CHUNK_BYTES = 8 * 1024 * 1024  # large enough for full speed of NVMe disks and PCIe copies
_DIRECT_BYTES = 256 * 1024  # below this, reading neighbours together beats reading straight into place
_GAP_BYTES = 64 * 1024  # unneeded bytes read along rather than starting another read
_POLL_SECONDS = 0.1


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
class _Read:
    """One range read: for a single direct job, or for neighbouring jobs through a staging buffer."""

    file: Path
    offset: int
    nbytes: int
    jobs: list[Job]
    direct: bool


def run_jobs(jobs: list[Job], device: torch.device, report: Callable[[int], None]) -> None:
    """Run all jobs. `report(bytes finished since the last call)` is called from this thread and may raise.

    Raises CheckpointError naming the file when a read fails or comes back short. The jobs are dropped as they finish,
    and all of them on an error.
    """
    work = _Work(jobs, device)
    jobs.clear()
    try:
        work.run(report)
    finally:
        work.close()


def _merge(jobs: list[Job]) -> deque[_Read]:
    """Sort by place and join small neighbours, so that thousands of tiny tensors cost few reads."""
    reads: deque[_Read] = deque()
    for job in sorted((job for job in jobs if job.nbytes), key=lambda job: (str(job.file), job.offset)):
        if job.direct is not None and job.nbytes >= _DIRECT_BYTES:
            reads.append(_Read(job.file, job.offset, job.nbytes, [job], True))
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
            reads.append(_Read(job.file, job.offset, job.nbytes, [job], False))
    return reads


class _Work:
    def __init__(self, jobs: list[Job], device: torch.device) -> None:
        self.device = device
        self.todo = _merge(jobs)
        self.left = len(self.todo)
        self.finished: queue.Queue[tuple[_Read | None, torch.Tensor | None, str]] = queue.Queue()
        self.stop = threading.Event()
        threads = max(1, min(4, self.left, os.cpu_count() or 1))
        # Staged reads never exceed a chunk, except a single row block wider than one.
        size = max((read.nbytes for read in self.todo if not read.direct), default=0)
        self.free: queue.Queue[torch.Tensor] = queue.Queue()
        for _ in range(threads + 2 if size else 0):
            self.free.put(_staging_buffer(size, device))
        self.copying: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self.threads = [threading.Thread(target=self._read_all, name=f"a3b-read-{i}", daemon=True) for i in range(threads)]

    def run(self, report: Callable[[int], None]) -> None:
        for thread in self.threads:
            thread.start()
        while self.left:
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
            self.left -= 1
            report(sum(job.nbytes for job in read.jobs))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Stop the threads and drop every reference to buffers and targets."""
        self.stop.set()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        if self.copying:
            torch.cuda.current_stream(self.device).synchronize()  # copies still read from the pinned buffers
        self.copying.clear()
        self.todo.clear()
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
                try:
                    read = self.todo.popleft()
                except IndexError:
                    return
                buffer = None if read.direct else self._take_buffer()
                if buffer is None and not read.direct:
                    return
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

    def _take_buffer(self) -> torch.Tensor | None:
        while not self.stop.is_set():
            try:
                return self.free.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
        return None


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
