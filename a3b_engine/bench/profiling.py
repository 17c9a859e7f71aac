"""Where the time of a decode step and of a prefill goes, kernel by kernel, as torch's profiler sees it."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from torch.profiler import ProfilerActivity, profile

from ..engine import Engine
from ..prompt import Prompt
from ..sampling import SamplingParams

TOP = 15
SKIPPED_STEPS = 4  # the first steps of an answer may still prepare something


class _Window:
    """A profile that is opened and closed in the middle of a run, from its own callbacks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])
        self.is_open = False

    def open(self) -> None:
        self._wait()
        self._profile.start()
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self._wait()
            self._profile.stop()
            self.is_open = False

    def table(self, times: int) -> dict[str, Any]:
        """Microseconds of `times` equal pieces of work, for one of them: all kernels together, and the longest ones.

        On a GPU a kernel's time is its own; on a CPU it is an operator's without those it calls.
        """
        rows = []
        for event in self._profile.key_averages():
            microseconds = _device_time(event) if self._cuda else event.self_cpu_time_total
            if microseconds > 0 and not event.key.startswith("ProfilerStep"):
                rows.append({"name": event.key, "us": microseconds / times, "count": event.count / times})
        rows.sort(key=lambda row: row["us"], reverse=True)
        total = sum(row["us"] for row in rows)
        own = own_kernel_names()
        return {
            "us": round(total, 1),
            "launches": round(sum(row["count"] for row in rows), 1),
            "share_of_own_kernels": round(sum(row["us"] for row in rows if row["name"] in own) / total, 3) if total else None,
            "top": [{**row, "us": round(row["us"], 2), "count": round(row["count"], 2)} for row in rows[:TOP]],
        }

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def profile_decode(engine: Engine, prompt: Prompt, steps: int, seed: int) -> dict[str, Any] | None:
    """One decode step, averaged over `steps`; None where the answer ended before that."""
    window = _Window(engine.device)
    first = SKIPPED_STEPS
    done = False

    def on_token(event: Any) -> None:
        nonlocal done
        if event.count == first:
            window.open()
        elif event.count == first + steps:
            window.close()
            done = True

    _generate(engine, prompt, first + steps + 1, seed, window, on_token, lambda: done)
    return window.table(steps) if done else None


def profile_prefill(engine: Engine, prompt: Prompt, seed: int) -> dict[str, Any]:
    """A whole prompt up to its first token."""
    window = _Window(engine.device)
    window.open()
    _generate(engine, prompt, 1, seed, window, None, None)
    return window.table(1)


def _generate(
    engine: Engine, prompt: Prompt, new: int, seed: int, window: _Window, on_token: Callable[[Any], None] | None, cancel: Callable[[], bool] | None
) -> None:
    try:
        engine.generate(prompt, SamplingParams(max_new_tokens=new, seed=seed), on_token=on_token, cancel=cancel)
    finally:
        window.close()


def own_kernel_names() -> frozenset[str]:
    """Names of the Triton kernels of this package that are in use: those of its modules that were imported so far."""
    package = __package__.rpartition(".")[0]
    names = set()
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(f"{package}.kernels."):
            continue
        for value in vars(module).values():
            # A jitted function of Triton; told by its parts, since Triton may not be installed.
            function = getattr(value, "fn", None)
            if callable(function) and hasattr(value, "run") and hasattr(function, "__name__"):
                names.add(function.__name__)
    return frozenset(names)


def _device_time(event: Any) -> float:
    """Microseconds on the device; torch before 2.5 has it under another name."""
    return event.self_device_time_total if hasattr(event, "self_device_time_total") else event.self_cuda_time_total
