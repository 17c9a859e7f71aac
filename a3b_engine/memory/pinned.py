"""Pinned RAM in large segments, cut into records that the device reads in place.

PyTorch's own pinned memory comes in powers of two and is kept for good: 3 MB records would waste a third of the RAM. Here
ordinary memory is touched by several threads, so that its pages exist, and then registered with the driver. That goes
through the driver's own entry points: a refusal by the runtime would be reported again by whatever PyTorch does next.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..errors import A3BError
from ..kernels.support import on_device
from .ram import ram, room_to_pin

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 * 1024**2
_HUGE_PAGE = 2 * 1024**2
_THREADS = 8
_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE (for all contexts), CU_MEMHOSTREGISTER_DEVICEMAP
_MADV_HUGEPAGE = 14
_GB = 1e9

_pinned = 0  # bytes registered by all arenas of the process
_lock = threading.RLock()  # a finalizer may run where it is held


class PinnedMemoryError(A3BError):
    """The system does not let this much memory be pinned."""


@dataclass(frozen=True, eq=False)
class Record:
    """A piece of an arena. host: uint8 [record_bytes] in RAM. address: where the device reads and writes it."""

    host: torch.Tensor
    address: int
    place: tuple[int, int]  # segment and piece of it
    _segment: object  # stays registered as long as one of its records is about


class PinnedArena:
    """Records of one size in pinned memory that a device reads in place; in ordinary memory for a device that is a CPU.

    Records begin at multiples of 256 bytes where `record_bytes` is one. Their memory stays pinned until `close` or `trim`;
    before either, whoever gave records back sees to it that the device has done with them. Calls from several threads at
    once are allowed.
    """

    def __init__(self, record_bytes: int, device: torch.device | str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        if record_bytes <= 0:
            raise ValueError(f"records of {record_bytes} bytes")
        self.record_bytes, self.device = record_bytes, torch.device(device)
        self._per_segment = max(1, segment_bytes // record_bytes)
        self._segments: dict[int, _Segment] = {}
        self._free: list[tuple[int, int]] = []  # a heap: the first segments fill first, so that the last ones become free
        self._out: set[tuple[int, int]] = set()
        self._made = 0
        self._changed = threading.Condition(threading.RLock())
        self._worker: threading.Thread | None = None
        self._wanted = 0  # records that the worker has still to make

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, whether in use or not."""
        return sum(segment.nbytes for segment in self._segments.values())

    def take(self) -> Record:
        """A record, with whatever its last user left in it. `PinnedMemoryError` where the system refuses a further segment."""
        with self._changed:
            while not self._free:
                self._more(self._per_segment)
            place = heapq.heappop(self._free)
            self._out.add(place)
            segment, index = self._segments[place[0]], place[1]
            start = index * self.record_bytes
            return Record(segment.memory[start : start + self.record_bytes], segment.address + start, place, segment)

    def take_many(self, count: int) -> list[Record]:
        """`count` records, or none at all and `PinnedMemoryError`."""
        with self._changed:
            made = set(self._segments)
            try:
                while len(self._free) < count:
                    self._more(min(self._per_segment, count - len(self._free)))
            except BaseException:
                for number in set(self._segments) - made - self._used():
                    self._drop(number)
                raise
            return [self.take() for _ in range(count)]

    def prepare(self, count: int) -> None:
        """Have memory for `count` records pinned in a thread of its own, so that `take` need not wait for so long. Where the system
        refuses, the `take` that has to do without it says so."""
        if self.device.type != "cuda":
            return
        with self._changed:
            self._wanted = count - len(self._free)
            if self._wanted > 0 and self._worker is None:
                worker = threading.Thread(target=self._work, name="a3b-pinned", daemon=True)
                worker.start()  # it may be refused: then nobody waits for it
                self._worker = worker

    def give_back(self, record: Record) -> None:
        """Let the next `take` have it. Its memory stays pinned."""
        with self._changed:
            self._out.remove(record.place)  # KeyError: not a record of this arena, or given back already
            heapq.heappush(self._free, record.place)

    def trim(self) -> int:
        """Give segments without a record in use back to the system. Returns their bytes."""
        with self._changed:
            before = self.nbytes
            for number in set(self._segments) - self._used():
                self._drop(number)
            return before - self.nbytes

    def close(self) -> None:
        """Give everything back to the system; records may not be used any more. The arena is as new."""
        with self._changed:
            self._wanted = 0
            self._changed.wait_for(lambda: self._worker is None)
            self._out.clear()
            for number in list(self._segments):
                self._drop(number)

    def _more(self, records: int) -> None:
        """Records for those that are short of them: from the worker while there is one."""
        if self._worker is not None:
            self._changed.wait()
        else:
            self._add(_Segment(records * self.record_bytes, self.device), records)

    def _add(self, segment: _Segment, records: int) -> None:
        number, self._made = self._made, self._made + 1
        self._segments[number] = segment
        for index in range(records):
            heapq.heappush(self._free, (number, index))

    def _work(self) -> None:
        while True:
            with self._changed:
                records = min(self._per_segment, self._wanted)
                if records <= 0:
                    self._worker = None
                    self._changed.notify_all()
                    return
            try:
                segment = _Segment(records * self.record_bytes, self.device)
            except Exception:  # the take that has to do without it asks again, and tells
                segment = None
            with self._changed:
                if segment is None:
                    self._wanted = 0
                else:
                    self._add(segment, records)
                    self._wanted -= records
                    self._changed.notify_all()

    def _used(self) -> set[int]:
        return {number for number, _ in self._out}

    def _drop(self, number: int) -> None:
        self._free = [place for place in self._free if place[0] != number]
        heapq.heapify(self._free)
        self._segments.pop(number).release()


class _Segment:
    """memory: uint8 [nbytes]. It is unregistered before it can be freed, also where nobody closes the arena."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        if device.type != "cuda":
            self.memory = _aligned(nbytes, 256)
            self.address, self.release = self.memory.data_ptr(), lambda: None
            return
        room = pinnable_bytes()
        if room < nbytes:
            raise _refusal(nbytes, f"{max(0, room) / _GB:.1f} GB may be pinned now")
        try:
            self.memory = _touched(nbytes)
        except RuntimeError as problem:  # so PyTorch says that there is no memory
            raise _refusal(nbytes, "no memory") from problem
        self.address = _register(self.memory, device)
        self.release = weakref.finalize(self, _unregister, self.memory, device)
        self.release.atexit = False  # the end of the process does that by itself, and faster


def pinnable_bytes() -> int:
    """How many bytes may be pinned now, beside what is pinned already (ram.room_to_pin)."""
    return room_to_pin(_pinned)


def _aligned(nbytes: int, boundary: int) -> torch.Tensor:
    with torch.inference_mode(False):  # or nobody could write to it outside of that mode
        raw = torch.empty(nbytes + boundary, dtype=torch.uint8, device="cpu")
        return raw[-raw.data_ptr() % boundary :][:nbytes]


def _touched(nbytes: int) -> torch.Tensor:
    """Zeros whose pages exist, in pages of 2 MiB where the system has them."""
    memory = _aligned(nbytes, _HUGE_PAGE)
    start = memory.data_ptr()
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)  # a wish: no harm if refused
    part = -(-nbytes // _THREADS // _HUGE_PAGE) * _HUGE_PAGE or nbytes
    with ThreadPoolExecutor(_THREADS, "a3b-pin") as pool:  # ctypes lets other threads run meanwhile
        list(pool.map(lambda offset: ctypes.memset(start + offset, 0, min(part, nbytes - offset)), range(0, nbytes, part)))
    return memory


class _Driver:
    """The three entry points of the CUDA driver that PyTorch does not offer, or not without its runtime's memory of errors."""

    def __init__(self) -> None:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.register, self.unregister = library.cuMemHostRegister_v2, library.cuMemHostUnregister
        self.device_pointer, self._name = library.cuMemHostGetDevicePointer_v2, library.cuGetErrorName
        self.register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self.unregister.argtypes = [ctypes.c_void_p]
        self.device_pointer.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]
        self._name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._name(code, ctypes.byref(text))
        return (text.value or b"").decode("ascii", "replace") or f"error {code}"


def _driver(device: torch.device) -> _Driver:
    """The driver, with a context of `device` current in this thread."""
    torch.cuda.mem_get_info(device)
    return _Driver()


def _register(memory: torch.Tensor, device: torch.device) -> int:
    """Pin memory; where the device sees it."""
    global _pinned
    address = memory.data_ptr()
    try:
        with on_device(device):
            driver = _driver(device)
            code = driver.register(address, memory.nbytes, _PORTABLE | _MAPPED)
            if code:
                raise _refusal(memory.nbytes, driver.name(code))
            seen = ctypes.c_uint64()
            code = driver.device_pointer(ctypes.byref(seen), address, 0)
            if code:
                driver.unregister(address)
                raise _refusal(memory.nbytes, f"the device cannot see it: {driver.name(code)}")
    except (OSError, AttributeError) as problem:  # no driver library, or one without these entries
        raise _refusal(memory.nbytes, str(problem)) from problem
    with _lock:
        _pinned += memory.nbytes
    return seen.value


def _unregister(memory: torch.Tensor, device: torch.device) -> None:
    """Never raises: it runs where nobody could do anything about it."""
    global _pinned
    with _lock:
        _pinned -= memory.nbytes
    try:
        with on_device(device):
            driver = _driver(device)
            code = driver.unregister(memory.data_ptr())
            problem = driver.name(code) if code else ""
    except Exception as caught:  # a device that is gone, or an interpreter that is ending
        problem = str(caught)
    if problem:
        log.warning("pinned memory could not be given back: %s", problem.encode("ascii", "replace").decode("ascii"))


def _refusal(nbytes: int, reason: str) -> PinnedMemoryError:
    total, available = ram()
    return PinnedMemoryError(
        f"Memory for {nbytes / _GB:.3f} GB more of pinned RAM was asked for and refused ({reason}). Pinned so far: {_pinned / _GB:.3f} GB; "
        f"available: {available / _GB:.1f} of {total / _GB:.1f} GB. Close other programs or give the machine more RAM; choose a smaller "
        "format of the experts (int4), or more video memory for them, so that fewer wait in RAM."
    )
