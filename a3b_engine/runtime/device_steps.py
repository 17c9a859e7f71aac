"""Decoding by kernels: a captured graph for a token, another for the draw, and one small copy back to the host a step.

The host is never in the way: while a token is on its way back, the step on that token already runs, and what the host
does with the token (grammar, text, progress) happens beside it.
"""

from __future__ import annotations

import logging
import time
from typing import Callable, Sequence

import torch

from ..config import ModelConfig
from ..errors import SamplingError
from ..kernels.sampler import NOTHING_ALLOWED, OK, DeviceSampler
from ..kernels.support import Target
from ..model.text import TextModel
from ..sampling import NO_CHOICE, NOT_FINITE, SamplingParams
from .cache import SequenceState
from .capture import captured
from .decode import DecodeStep, Reroute
from .forward import ForwardModel, forward_chunks

log = logging.getLogger(__name__)

# Known tokens up to this many go one by one: a prefill of a few tokens reads nearly as much and launches more.
ONE_BY_ONE = 16
STAGING = 4096  # tokens that may wait in pinned memory to be copied


class DeviceBuffers:
    """What stays on the device from answer to answer: the buffers of one sequence of up to `capacity` tokens, the sampler
    and both graphs. Nothing in it moves while it lives; more tokens need a new one."""

    def __init__(
        self, model: TextModel, config: ModelConfig, real_tokens: int, capacity: int, where: Target, reroute: Reroute | None = None
    ) -> None:
        began = time.perf_counter()
        text, device = config.text, where.device
        self.capacity, self.device = capacity, device
        self.state = SequenceState(text, capacity, device, model.embedding.dtype, capacity=capacity)
        self.sampler = DeviceSampler(text.vocab_size, real_tokens, config.eos_token_ids, device)
        self.step = DecodeStep(model, self.state, self.sampler.token, where, reroute)
        pinned = dict(pin_memory=device.type == "cuda")
        self.result = torch.zeros(2, dtype=torch.int64, **pinned)  # token and status of the last draw, on the host
        self.bitmask = torch.zeros(self.sampler.bitmask.shape, dtype=torch.int32, **pinned)
        self._staged = torch.zeros(STAGING, dtype=torch.int64, **pinned)
        self._next_staged = 0
        self._pdl = where.pdl
        self._draw_graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.sampler.start(SamplingParams(), [])
            self.step.capture()
            self._draw_graph = captured(lambda: self._draw(False), device)
        log.debug("decode step for %d tokens made in %.2f s", capacity, time.perf_counter() - began)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the sequence's included."""
        return self.state.nbytes + self.step.nbytes + self.sampler.nbytes

    def close(self) -> None:
        """Give everything back; the buffers are not to be used again."""
        self.step.close()
        self._draw_graph = None

    def draw(self) -> None:
        """Queue the draw from the step's logits, and the copy of its `result` to the host."""
        if self._draw_graph is None or self.sampler.needs_sort:
            self._draw(self.sampler.needs_sort)
        else:
            self._draw_graph.replay()

    def _draw(self, needs_sort: bool) -> None:
        self.sampler.sample(self.step.logits, needs_sort=needs_sort, pdl=self._pdl and not needs_sort)
        self.result.copy_(self.sampler.result, non_blocking=True)

    def to_device(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids as int64 on the device without waiting for it, unless they are more than wait on the host."""
        if len(tokens) > STAGING:
            return torch.tensor(tokens, dtype=torch.int64, device=self.device)
        if self._next_staged + len(tokens) > STAGING:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # everything staged so far has been read
            self._next_staged = 0
        place = self._staged[self._next_staged : self._next_staged + len(tokens)]
        self._next_staged += len(tokens)
        place.copy_(torch.tensor(tokens, dtype=torch.int64))
        return place.to(self.device, non_blocking=True)


class DeviceSteps:
    """`steps.Steps` over `DeviceBuffers`, for one answer whose prompt stands in the buffers' sequence.

    forward: what runs groups of tokens (fast or plain); hidden [1, D]: the last row of the prompt.
    """

    def __init__(
        self, buffers: DeviceBuffers, forward: ForwardModel, config: ModelConfig, sampling: SamplingParams,
        prompt_ids: Sequence[int], hidden: torch.Tensor, poll: Callable[[], None],
    ) -> None:  # fmt: skip
        self._buffers, self._forward, self._config, self._poll = buffers, forward, config, poll
        self._sampler, self._step = buffers.sampler, buffers.step
        self._sampler.start(sampling, list(prompt_ids))
        self._masked = True  # whatever the last answer left
        self._ahead = False
        self._drawn: int | None = None
        self._read = torch.cuda.Event() if buffers.device.type == "cuda" else None
        self._take_over(hidden)

    def draw(self, bitmask: torch.Tensor | None, *, sure: bool) -> int:
        """See `steps.Steps`. Raises `SamplingError` where there is nothing to draw."""
        buffers = self._buffers
        if bitmask is not None:
            buffers.bitmask.copy_(bitmask)
            self._sampler.bitmask.copy_(buffers.bitmask, non_blocking=True)
        elif self._masked:
            self._sampler.bitmask.fill_(-1)
        self._masked = bitmask is not None
        buffers.draw()
        if self._read is not None:
            self._read.record()
        self._ahead = sure and buffers.state.length < buffers.capacity  # a full context ends the answer
        if self._ahead:
            self._step.launch()
        if self._read is not None:
            self._read.synchronize()
        self._drawn, status = buffers.result.tolist()
        if status != OK:
            raise SamplingError(NO_CHOICE if status == NOTHING_ALLOWED else NOT_FINITE)
        return self._drawn

    def feed(self, tokens: Sequence[int]) -> None:
        """See `steps.Steps`."""
        if list(tokens) == [self._drawn]:
            if not self._ahead:
                self._step.launch()
        elif self._ahead:
            raise AssertionError("another token than the drawn one was fed, although the drawn one was sure")
        else:
            self._force(tokens)
        self._ahead, self._drawn = False, None

    def _force(self, tokens: Sequence[int]) -> None:
        ids = self._buffers.to_device(tokens)
        self._sampler.record(ids)
        if len(tokens) > ONE_BY_ONE:
            self._step.leave()
            for hidden in forward_chunks(self._forward, self._config, self._buffers.state, tokens, before_chunk=self._poll):
                last = hidden[-1:]
            self._take_over(last)
            return
        for number in range(len(tokens)):
            self._sampler.token.copy_(ids[number : number + 1])
            self._step.launch()

    def _take_over(self, hidden: torch.Tensor) -> None:
        """From prefill to single steps."""
        self._buffers.state.settle()
        self._step.begin_behind(hidden)
