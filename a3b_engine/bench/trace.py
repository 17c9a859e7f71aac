"""A prescribed routing on the device: one more launch a layer of the decode step, which replaces what the router chose."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..kernels.configs import next_power_of_two
from ..kernels.rows import let_next_start, wait_for_inputs
from ..kernels.support import Target


@triton.jit(do_not_specialize=["layer"])
def reroute_kernel(trace, step, ids, layer, steps, layers, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """ids int32 [TOP_K] = trace int32 [steps, layers, TOP_K] at the step's row. One program.

    step int64 [1]: steps begun so far; the launch of layer 0 counts on. Nothing is read or written ahead of the wait, so
    the kernel behind may rely on what it could rely on behind the router.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    now = tl.load(step) - (layer > 0)
    tl.store(step, now + 1)
    at = tl.arange(0, WIDTH)
    row = trace + ((now % steps) * layers + layer) * TOP_K
    tl.store(ids + at, tl.load(row + at, mask=at < TOP_K, other=0), mask=at < TOP_K)


class RoutingTrace:
    """What `DecodeStep` calls in every layer instead of leaving the router its choice (the shares stay the router's).

    One step of the trace serves one decode step, in order and over again, whatever the answer; prompts are not rerouted.
    Its tensors never move, so that a captured step goes on with what `fill` put there last.
    """

    def __init__(self, steps: int, layers: int, top_k: int, target: Target) -> None:
        self._trace = torch.zeros((steps, layers, top_k), dtype=torch.int32, device=target.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=target.device)
        self._pdl = dict(PDL=True, launch_pdl=True) if target.pdl else dict(PDL=False)

    def fill(self, trace: np.ndarray) -> None:
        """Go on from the beginning of another trace, int32 [steps, layers, top_k] (see `routing`), ids of experts."""
        self._trace.copy_(torch.from_numpy(trace))
        self._step.zero_()

    def __call__(self, layer: int, ids: torch.Tensor) -> None:
        """Overwrite ids int32 [top_k], the router's choice in `layer`. Layers come in order from 0. One launch."""
        steps, layers, top_k = self._trace.shape
        reroute_kernel[(1,)](
            self._trace, self._step, ids, layer, steps, layers, TOP_K=top_k, WIDTH=next_power_of_two(top_k), **self._pdl, num_warps=1
        )

    @property
    def steps_done(self) -> int:
        """Decode steps since `fill`; waits for the device."""
        return int(self._step)

    @property
    def nbytes(self) -> int:
        return self._trace.nbytes + self._step.nbytes
