"""Recording work on a CUDA device as a graph. Imports no kernel: pictures are captured where Triton is not installed too."""

from __future__ import annotations

import threading
from typing import Callable

import torch

from ..kernels.support import on_device

Launch = Callable[[], None]

_streams: dict[int, torch.cuda.Stream] = {}  # by the number of the device
_lock = threading.Lock()


def captured(work: Launch, device: torch.device) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after a first run on a side stream that compiles what is not compiled yet.

    There is one such stream a device: cuBLAS keeps a workspace of 32 MB for every stream that it has met.
    """
    with _lock, on_device(device):
        number = torch.cuda.current_device()
        side = _streams.get(number)
        if side is None:
            side = _streams[number] = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: whatever other threads of the process do on the card meanwhile is none of this capture's business.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            work()
    return graph
