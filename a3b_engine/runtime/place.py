"""Which device is current, and how many threads are used, while a model works."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch

from ..kernels.support import on_device

# Products this narrow take microseconds: a second thread costs more in waiting than it does in work, and on a busy
# machine ten times as much (a 256 wide model wrote 9 tokens a second with two threads, and 111 with one).
NARROW = 1024


@contextmanager
def without_autograd() -> Iterator[None]:
    """No gradients, and ordinary tensors, whatever mode the caller is in: ComfyUI runs nodes in inference mode and its unload buttons
    outside of it, where tensors of inference mode cannot be written."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def working_on(device: torch.device, hidden_size: int) -> Iterator[None]:
    """Settings of the thread and the process while a model of that width works on a device; the host's come back in any case.

    A CUDA device is made the current one, a narrow model on the CPU gets one thread.
    """
    if device.type != "cpu" or hidden_size > NARROW:
        with on_device(device):
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
