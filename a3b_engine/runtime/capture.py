"""Recording work on a CUDA device as a graph. Imports no kernel: pictures are captured where Triton is not installed too."""

from __future__ import annotations

from typing import Callable

import torch

from ..kernels.support import on_device

Launch = Callable[[], None]


def captured(work: Launch, device: torch.device) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after a first run on a side stream that compiles what is not compiled yet."""
    with on_device(device):
        side = torch.cuda.Stream()
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
