"""How an answer advances once its prompt has run: draw the next token, feed tokens that are known.

Two implementations with one face: `PlainSteps` here, in PyTorch on any device, and `device_steps.DeviceSteps` with
kernels and captured graphs.
"""

from __future__ import annotations

from typing import Callable, Protocol, Sequence

import torch

from ..config import ModelConfig
from ..grammar import apply_bitmask
from ..sampling import Sampler
from .cache import SequenceState
from .forward import ForwardModel, forward_chunks


class Steps(Protocol):
    """The steps of one answer: `draw`, then `feed`, over and over."""

    def draw(self, bitmask: torch.Tensor | None, *, sure: bool) -> int:
        """The next token under a grammar's mask (int32 on the CPU, see `grammar.Matcher.bitmask`; None: any), counted for
        the penalties unless it ends answers.

        sure: what is drawn will be fed next unless it ends the answer, so work on it may begin at once.
        Raises `SamplingError` where there is nothing to draw.
        """

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence: the one just drawn, or others, which are counted first. They end no answer."""


class PlainSteps:
    """`Steps` in plain PyTorch. hidden [1, D]: the last row of the prompt, which stands in `state`."""

    def __init__(
        self, model: ForwardModel, logits: Callable[[torch.Tensor], torch.Tensor], config: ModelConfig, state: SequenceState,
        sampler: Sampler, hidden: torch.Tensor, poll: Callable[[], None],
    ) -> None:  # fmt: skip
        self._model, self._logits, self._config, self._state, self._sampler = model, logits, config, state, sampler
        self._hidden, self._poll = hidden, poll
        self._drawn: int | None = None

    def draw(self, bitmask: torch.Tensor | None, *, sure: bool) -> int:
        """See `Steps`."""
        logits = self._logits(self._hidden)[0]
        if bitmask is not None:
            apply_bitmask(logits, bitmask)
        self._drawn = self._sampler.draw(logits)
        if self._drawn not in self._config.eos_token_ids:
            self._sampler.record(self._drawn)
        return self._drawn

    def feed(self, tokens: Sequence[int]) -> None:
        """See `Steps`."""
        if list(tokens) != [self._drawn]:
            for token in tokens:
                self._sampler.record(token)
        self._drawn = None
        for hidden in forward_chunks(self._model, self._config, self._state, tokens, before_chunk=self._poll):
            self._hidden = hidden[-1:]
