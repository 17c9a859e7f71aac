"""Whether Triton kernels run on a device, what the device can do, and the self-tests that decide which kernels are used.

Nothing here touches Triton or CUDA until a function is called for a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Callable, ContextManager, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

SelfTest = Callable[["Target"], float]

_tests: dict[str, tuple[SelfTest, float]] = {}  # kernel -> (check, largest relative error allowed)
_targets: dict[torch.device, "Target | None"] = {}
_verdicts: dict[tuple[str, torch.device], bool] = {}
_running: dict[tuple[str, torch.device], threading.Lock] = {}
_lock = threading.RLock()
_COMPILERS = 8  # threads; each waits for a compiler that runs outside Python most of the time


class UnsupportedByKernel(Exception):
    """A kernel cannot take this weight or shape; the plain path can. Raised when a plan is made, never while it runs."""


@dataclass(frozen=True)
class Target:
    """A device kernels are launched on.

    capability: (major, minor) of the compute capability. multiprocessors: number of SMs. fp8_native: e4m3 is a type of
    the device (sm_89 and later); elsewhere codes are loaded as bytes. pdl: a kernel may start before the one ahead of it
    ends (programmatic dependent launch, sm_90 and later). interpreted: Triton's interpreter on a CPU, for tests.
    """

    device: torch.device
    capability: tuple[int, int]
    multiprocessors: int
    fp8_native: bool
    pdl: bool
    interpreted: bool = False


def target(device: torch.device | str) -> Target | None:
    """What kernels need to know of `device`, or None where only the plain path works. One log line a device says why."""
    device = _with_index(torch.device(device))
    with _lock:
        if device not in _targets:
            found = _inspect(device)
            if isinstance(found, str):
                if device.type == "cuda":
                    logger.warning("no compiled kernels on %s: %s; the plain path is used", device, found)
                found = None
            _targets[device] = found
        return _targets[device]


def self_test(kernel: str, limit: float) -> Callable[[SelfTest], SelfTest]:
    """Register the numeric check of a kernel: a function that runs it on small shapes on a Target and returns its largest
    relative error against the PyTorch reference, which must not exceed `limit`.

    `kernel` is the name of the module that registers, optionally with a dot and a part of it ("moe_decode.dense").
    """

    def register(check: SelfTest) -> SelfTest:
        _tests[kernel] = (check, limit)
        return check

    return register


def usable(kernel: str, device: torch.device | str) -> bool:
    """Whether `kernel` runs on `device` and passed its self-test there.

    The test runs once per device, at the first question: ask while loading, not while a graph is captured. A kernel that
    does not compile, raises or computes wrong numbers is not used; one log line says so. Where the device has no memory for the
    test, the next question asks again.
    """
    where = target(device)
    return where is not None and _answer(kernel, where, None)


def all_usable(kernels: Sequence[str], device: torch.device | str) -> bool:
    """`usable` of several, side by side: on a card that has not run them before, nearly all of the time goes into
    compiling. Each is asked, so that every one that fails gets its log line."""
    where = target(device)
    if where is None or where.interpreted:  # the interpreter changes modules while it runs: one at a time
        return all([usable(kernel, device) for kernel in kernels])
    with ThreadPoolExecutor(1, "a3b-products", _begin, (where.device,)) as products, ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1), "a3b-self-test") as pool:
        answers = list(pool.map(lambda kernel: _answer(kernel, where, products, once=True), kernels))
    # Those for which no memory was left beside the others are asked alone.
    return all([answer if answer is not None else usable(kernel, device) for kernel, answer in zip(kernels, answers)])


def _answer(kernel: str, where: Target, products: Executor | None, once: bool = False) -> bool | None:
    """What `usable` says; with `once`, None where there was no memory for the test. products: see `_run_self_test`."""
    key = (kernel, where.device)
    with _lock:
        one_at_a_time = _running.setdefault(key, threading.Lock())
    with one_at_a_time:
        if key not in _verdicts:
            try:
                problem = _run_self_test(kernel, where, products)
            except _NoMemory:
                if once:
                    return None
                logger.warning("kernel %s is not used on %s before the next load: no memory was left to check it", kernel, where.device)
                return False
            if problem:
                logger.warning("kernel %s is not used on %s: %s; the plain path is used", kernel, where.device, problem)
            _verdicts[key] = not problem
        return _verdicts[key]


def _run_self_test(kernel: str, where: Target, products: Executor | None) -> str:
    """Empty where the kernel may be used, else the reason it may not. products: does torch's matrix products for this thread (see
    `ProductsElsewhere`). Raises `_NoMemory`."""
    try:
        importlib.import_module("." + kernel.partition(".")[0], __package__)
        check, limit = _tests[kernel]
        with torch.no_grad(), on_device(where.device), nullcontext() if products is None else ProductsElsewhere(products):  # settings of a thread, and this may be any
            error = check(where)
            if where.device.type == "cuda":
                torch.cuda.synchronize(where.device)
    except Exception as problem:  # whatever a compiler or driver raises must not stop the plain path
        if _tells_of_no_memory(problem):
            raise _NoMemory from problem
        lines = str(problem).strip().splitlines()
        text = f"{type(problem).__name__}: {lines[0] if lines else ''}"
        return text.encode("ascii", "replace").decode("ascii")[:200]
    return "" if error <= limit else f"its self-test is off by {error:.2e} where {limit:.0e} is allowed"


class _NoMemory(Exception):
    """The device had no memory for a self-test, which says nothing about the kernel."""


def _tells_of_no_memory(problem: Exception) -> bool:
    """torch's allocator has an error of its own for it; the driver, Triton and cuBLAS say it in words."""
    words = str(problem).lower()
    return isinstance(problem, torch.cuda.OutOfMemoryError) or "out of memory" in words or "cublas_status_alloc_failed" in words


class ProductsElsewhere(TorchDispatchMode):
    """While it is entered, this thread's matrix products of torch are computed by the one thread of an executor.

    cuBLAS keeps a workspace of 32 MB on the device for every thread that ever asked it for one, until the process ends.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **kwargs)
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        return self._executor.submit(_product, device, func, args, kwargs).result()


def _begin(device: torch.device) -> None:
    """Make the device known to this thread: cuBLAS warns where it is the first to ask for it. Never raises."""
    with suppress(Exception):  # without memory, say: then the tests find none either
        torch.zeros(1, device=device)


def _product(device: torch.device, func: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> torch.Tensor:
    with torch.no_grad(), on_device(device):
        return func(*args, **kwargs)


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linalg_solve_triangular")
)


def on_device(device: torch.device) -> ContextManager[object]:
    """A CUDA device as the current one: kernels are launched on that, whichever device their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """|result - reference| / |reference| in float64; infinite where either is not finite, since `max` would lose a NaN."""
    result, reference = result.double(), reference.double()
    size = reference.norm().clamp(min=1e-30)
    error = float((result - reference).norm() / size)
    return math.inf if math.isnan(error) else error


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _inspect(device: torch.device) -> Target | str:
    """The Target of a device, or why there is none."""
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
            return "kernels need a GPU"
        return Target(device, (9, 0), 4, fp8_native=True, pdl=False, interpreted=True)
    if device.type != "cuda":
        return f"no kernels are written for {device.type} devices"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    try:
        from triton import language as tl
    except Exception as problem:  # a broken install raises more than ImportError
        return f"Triton cannot be imported ({type(problem).__name__})"
    try:
        capability = torch.cuda.get_device_capability(device)
        count = torch.cuda.get_device_properties(device).multi_processor_count
    except Exception as problem:
        return f"the card cannot be asked what it is ({type(problem).__name__})"
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    can_overlap = capability >= (9, 0) and hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return Target(device, capability, count, fp8_native=capability >= (8, 9), pdl=can_overlap)
