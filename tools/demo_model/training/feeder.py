"""The training process's side of the lessons: starts the workers and keeps a few batches ready on the device."""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .batching import Batching
from .lessons import read_slot, slot_bytes, work
from .network import batch_positions

AHEAD = 4  # batches on the device before they are needed


@dataclass
class Batch:
    """Tensors on the device, as `lessons.make_batch` describes them; positions int64 [3, B, L]. Without `ids` it is
    pictures and what is drawn on them, no words."""

    pictures: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    where: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    group: int = 0

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def tokens(self) -> int:
        """Padding included."""
        return 0 if self.ids is None else self.ids.numel()


def to_device(arrays: dict[str, np.ndarray], grid: tuple[int, int], device: torch.device, group: int = 0) -> Batch:
    """Copy the arrays of a batch; they may be overwritten afterwards."""
    batch = Batch(**{name: torch.from_numpy(array).to(device, copy=True) for name, array in arrays.items()}, group=group)
    if batch.ids is not None:
        batch.positions = batch_positions(arrays["starts"].tolist(), arrays["ids"].shape[1], grid).to(device)
    return batch


class Feeder:
    """Iterate over it for batches; `close` ends the workers. Use as a context manager."""

    def __init__(self, plan: Batching, grid: tuple[int, int], device: torch.device, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._grid, self._device = grid, device
        count = workers + AHEAD
        self._folder = Path(tempfile.mkdtemp(prefix="a3b-lessons-", dir=_scratch(count * slot_bytes(plan))))
        slots = [self._folder / f"{number}.slot" for number in range(count)]
        for path in slots:
            with open(path, "wb") as stream:
                stream.truncate(slot_bytes(plan))
        self._memory = [np.memmap(path, dtype=np.uint8, mode="r+") for path in slots]
        self._free, self._ready, self._stop = context.Queue(), context.Queue(), context.Event()
        for number in range(count):
            self._free.put(number)
        self._workers = [
            context.Process(target=work, args=(number, workers, plan, slots, self._free, self._ready, self._stop), daemon=True)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._batches: queue.Queue = queue.Queue(AHEAD)
        self._closed = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def __iter__(self) -> Feeder:
        return self

    def __next__(self) -> Batch:
        while True:
            try:
                item = self._batches.get(timeout=5)
            except queue.Empty:
                if not any(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("All worker processes have ended.") from None
                continue
            if isinstance(item, BaseException):
                raise item
            if self._device.type == "cuda":  # made on another stream
                for value in vars(item).values():
                    if isinstance(value, torch.Tensor):
                        value.record_stream(torch.cuda.current_stream())
            return item

    def _carry(self) -> None:
        """From slots to the device, on a stream of its own so that it never waits for the training step."""
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            while not self._closed:
                try:
                    slot, headers, group = self._ready.get(timeout=0.5)
                except queue.Empty:
                    continue
                if slot is None:
                    raise RuntimeError(f"worker {group} failed:\n{headers}")
                arrays = read_slot(self._memory[slot], headers)
                if stream is None:
                    batch = to_device(arrays, self._grid, self._device, group)
                else:
                    with torch.cuda.stream(stream):
                        batch = to_device(arrays, self._grid, self._device, group)
                    stream.synchronize()
                self._free.put(slot)
                self._hand_over(batch)
        except BaseException as error:  # raised again where batches are asked for
            self._hand_over(error)

    def _hand_over(self, item: Batch | BaseException) -> None:
        while not self._closed:
            try:
                return self._batches.put(item, timeout=0.5)
            except queue.Full:
                continue

    def close(self) -> None:
        self._closed = True
        self._stop.set()
        self._thread.join(timeout=10)
        deadline = time.monotonic() + 2
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.terminate()
        for channel in (self._free, self._ready):
            channel.close()
            channel.cancel_join_thread()
        self._memory.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scratch(needed: int) -> str | None:
    """Memory-backed folder if there is one with room, else the usual place for temporary files."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed else None
