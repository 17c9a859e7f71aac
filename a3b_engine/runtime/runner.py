"""Runs prompts on one loaded model: by kernels where the device has them, else in plain PyTorch.

What outlives an answer stands here: kept beginnings of prompts, and on a device with kernels the buffers and graphs of
the decode step. All of it can be dropped between answers, and is made again when it is needed.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Callable, Sequence

import torch

from ..config import ModelConfig
from ..image import ImageFeatures
from ..kernels.support import Target, UnsupportedByKernel, all_usable, target
from ..memory.pool import SlotPool
from ..model.text import TextModel
from ..sampling import Sampler, SamplingParams
from .budget import PREFIX_BYTES, capacity_for, working_bytes
from .cache import SequenceState
from .forward import PREFILL_CHUNK, ForwardModel
from .prefix import PrefixStore, end_of_first_turn, prefill
from .steps import PlainSteps, Steps

if TYPE_CHECKING:
    from .device_steps import DeviceBuffers
    from .decode import Reroute

log = logging.getLogger(__name__)

SLOT_KERNELS = ("expert_slots",)  # whose self-tests speak for experts in slots

class Runner:
    """The model of one loaded engine at work; one answer at a time."""

    def __init__(
        self, model: TextModel, config: ModelConfig, real_tokens: int, context: int, *, chunk: int = PREFILL_CHUNK,
        pool: SlotPool | None = None, reroute: Callable[[], Reroute | None] = lambda: None,
    ) -> None:  # fmt: skip
        """real_tokens: ids from here on are never drawn. context: most tokens of a prompt with its answer. chunk: tokens of a prompt
        at once. pool: where the model's routed experts are, if they are in slots. reroute: asked when a decode step is made."""
        self._model, self._config, self._real_tokens, self._context = model, config, real_tokens, context
        self._chunk, self._pool, self._reroute = chunk, pool, reroute
        self._device, self._dtype = model.device, model.embedding.dtype
        self._prefixes = PrefixStore(PREFIX_BYTES)
        self._buffers: DeviceBuffers | None = None
        self._target = target(self._device)
        self._forward: ForwardModel = model
        self.decodes_by_kernels = False
        if self._target is not None:
            self._choose_kernels(self._target)
        self._running: SequenceState | None = None
        self._busy = self._leaving = False  # while an answer is written; whether its buffers go when it is over

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being written."""
        return self._busy

    @property
    def prefills_by_kernels(self) -> bool:
        return self._forward is not self._model

    def start(
        self, token_ids: Sequence[int], images: Sequence[ImageFeatures], sampling: SamplingParams, tokens: int, poll: Callable[[], None]
    ) -> tuple[Steps, int]:
        """Run a prompt (one entry of `images` an occurrence) for an answer that makes it `tokens` long at most.

        Returns the steps of the answer, and how many tokens of the prompt an earlier one had left behind. `poll` is
        called between chunks, now and later, and may raise. Call `finish` in any case.
        """
        self._busy = True
        try:
            return self._start(token_ids, images, sampling, tokens, poll)
        except Exception as problem:
            if not _is_of_triton(problem):
                raise
            self._give_kernels_up(problem)
            return self._start(token_ids, images, sampling, tokens, poll)

    def _start(
        self, token_ids: Sequence[int], images: Sequence[ImageFeatures], sampling: SamplingParams, tokens: int, poll: Callable[[], None]
    ) -> tuple[Steps, int]:
        state = self._state_for(tokens)
        hidden, kept = prefill(
            self._forward, self._config, state, self._prefixes, token_ids, images,
            system_end=end_of_first_turn(token_ids, self._config.eos_token_ids), before_chunk=poll, chunk_size=self._chunk,
        )  # fmt: skip
        if self.decodes_by_kernels:
            from .device_steps import DeviceSteps

            return DeviceSteps(self._buffers, self._forward, self._config, sampling, token_ids, hidden, poll), kept
        sampler = Sampler(sampling, self._config.text.vocab_size, self._real_tokens, list(token_ids), self._device)
        return PlainSteps(self._forward, self._model.logits, self._config, state, sampler, hidden, poll), kept

    def finish(self) -> None:
        """The answer is over, however it ended."""
        self._running, self._busy = None, False
        if self._leaving:
            self._drop_buffers()

    def drop_kept(self, wanted: float) -> int:
        """Give up kept prompts, least recently used first, until `wanted` bytes are free; returns the bytes."""
        return self._prefixes.drop(wanted)

    def release(self) -> int:
        """Give back all that can be made again, buffers and graphs too; returns the bytes. What an answer is being written in goes when
        it is over, and does not count."""
        if self._busy:
            self._leaving = True
            freed = self._prefixes.nbytes
            self._prefixes.clear()
            return freed
        held = sum(self.nbytes().values()) + (self._pool.release_places() if self._pool is not None else 0)
        self._prefixes.clear()
        self._drop_buffers()
        return held

    def nbytes(self) -> dict[str, int]:
        """Bytes on the device: `sequence` of the running answer or set aside for the next, `decode` for its steps,
        `prefixes` kept of earlier prompts."""
        buffers = self._buffers
        if buffers is None:
            return {"sequence": self._running.nbytes if self._running is not None else 0, "decode": 0, "prefixes": self._prefixes.nbytes}
        return {"sequence": buffers.state.nbytes, "decode": buffers.nbytes - buffers.state.nbytes, "prefixes": self._prefixes.nbytes}

    def limit_kept(self, tokens: int, room: int | None) -> None:
        """Bound what is kept of prompts so that it fits in `room` bytes (None: no bound of its own) beside an answer that
        makes its prompt `tokens` long; what is too much already goes now."""
        limit = PREFIX_BYTES
        if room is not None:
            tokens = max(tokens, self._buffers.capacity if self._buffers is not None else 0)  # larger buffers stay
            others = self.working_bytes(tokens, kept=False)
            limit = max(0, min(limit, room - others))
        self._prefixes.limit_bytes = limit
        self._prefixes.drop(self._prefixes.nbytes - limit)

    def working_bytes(self, tokens: int, kept: bool = True) -> int:
        """Bytes beside the weights for a prompt with its answer of `tokens` tokens, what is held already included; kept: with room
        for what is kept of the prompt."""
        capacity = capacity_for(tokens, self._context) if self.decodes_by_kernels else None
        return working_bytes(self._config.text, self._dtype, tokens, capacity, self._chunk, kept)

    # Inside

    def _state_for(self, tokens: int) -> SequenceState:
        """Where a sequence of that many tokens can stand."""
        if not self.decodes_by_kernels:
            self._running = SequenceState(self._config.text, self._context, self._device, self._dtype)
            return self._running
        if self._pool is not None:
            self._pool.make_ready()
        if self._buffers is None or self._buffers.capacity < tokens:
            self._drop_buffers()  # the old ones go first: both may not fit
            try:
                self._buffers = self._new_buffers(tokens)
            except torch.cuda.OutOfMemoryError:
                # What is kept of earlier prompts goes first when memory is short.
                self._prefixes.clear()
                torch.cuda.empty_cache()
                self._buffers = self._new_buffers(tokens)
        if self._device.type == "cuda":
            self._buffers.step.capture()  # experts may have come or gone since
        return self._buffers.state

    def _drop_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
        self._buffers, self._leaving = None, False

    def _new_buffers(self, tokens: int) -> DeviceBuffers:
        from .device_steps import DeviceBuffers

        return DeviceBuffers(self._model, self._config, self._real_tokens, capacity_for(tokens, self._context), self._target, self._reroute())

    def _choose_kernels(self, where: Target) -> None:
        """Take the kernels that work on this device and for this model. The first engine on a device runs their self-tests."""
        began = time.perf_counter()
        try:
            from . import decode
            from . import prefill as fast
        except Exception as problem:  # a Triton whose language lacks what a kernel is written in
            log.warning("%s: plain PyTorch is used, the kernels cannot be read by this Triton (%s)", where.device, type(problem).__name__)
            return
        slots = () if self._pool is None else SLOT_KERNELS
        all_usable(decode.KERNELS + decode.FASTER + fast.KERNELS + slots + decode.packed_kernels(self._model) + fast.packed_kernels(self._model), where.device)  # together, which takes least time; asked again below
        try:
            if all_usable(decode.KERNELS + slots, where.device):
                decode.trial_step(self._model, where)
                self.decodes_by_kernels = True
            if all_usable(fast.KERNELS + slots, where.device):
                self._forward = fast.FastText(self._model, where)
        except UnsupportedByKernel as reason:
            log.info("this model runs in part without kernels: they do not take %s", reason)
        if where.device.type == "cuda":
            log.info(
                "%s: decoding by %s, prompts by %s (checked in %.1f s)", torch.cuda.get_device_name(where.device),
                *("kernels" if used else "plain PyTorch" for used in (self.decodes_by_kernels, self.prefills_by_kernels)),
                time.perf_counter() - began,
            )  # fmt: skip

    def _give_kernels_up(self, problem: Exception) -> None:
        """A kernel passed its check and yet cannot be built for this model on this card: for want of registers, say."""
        reason = f"{type(problem).__name__}: {problem}".encode("ascii", "replace").decode("ascii").splitlines()[0][:200]
        log.warning("%s: plain PyTorch is used from here on, a kernel cannot be built: %s", self._device, reason)
        self._prefixes.clear()
        self._drop_buffers()
        self._forward, self.decodes_by_kernels = self._model, False


def _is_of_triton(problem: Exception) -> bool:
    """Whether Triton itself raised: its compiler, or the check of what a card has."""
    return type(problem).__module__.partition(".")[0] == "triton"

