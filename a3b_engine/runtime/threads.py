"""How many threads a model on the CPU uses."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch

# Products this narrow take microseconds: a second thread costs more in waiting than it does in work, and on a busy
# machine ten times as much (a 256 wide model wrote 9 tokens a second with two threads, and 111 with one).
NARROW = 1024


@contextmanager
def suitable_threads(device: torch.device, hidden_size: int) -> Iterator[None]:
    """One thread for a narrow model on the CPU, for as long as it runs; the host's setting comes back in any case."""
    if device.type != "cpu" or hidden_size > NARROW:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
