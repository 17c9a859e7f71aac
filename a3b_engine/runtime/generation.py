"""The decode loop: run the prompt, then draw or force tokens until something ends the answer."""

from __future__ import annotations

import time
from typing import Callable, Sequence

from ..config import ModelConfig
from ..grammar import Matcher
from ..sampling import SamplingParams
from ..tokenizer import Tokenizer
from .answer import Answer, FinishReason, Timings, TokenEvent, Usage
from .steps import Steps
from .transcript import THINK_CLOSE, Transcript

Poll = Callable[[], None]
# Runs a prompt and gives the steps of its answer, and how many prompt tokens an earlier run had left behind.
RunPrompt = Callable[[Poll], tuple[Steps, int]]

BETWEEN = "\n\n"  # what the published template puts behind a closed thinking block


class Cancelled(Exception):
    """Raised inside the loop when `cancel()` answers True; never leaves this module."""


class Generation:
    """One answer being written. `run` may be called once."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        room: int,
        thinking: bool,
        matcher: Matcher | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        """room: tokens that fit behind the prompt. thinking: the answer begins inside a thinking block."""
        self._config, self._tokenizer = config, tokenizer
        self._sampling, self._matcher = sampling, matcher
        self._on_token, self._cancel = on_token, cancel
        self._limit = min(sampling.max_new_tokens, room)
        self._transcript = Transcript(thinking, sampling.stop)
        self._decoder = tokenizer.stream()
        self._count = self._thinking_count = 0
        self._started_thinking = thinking
        self._answer_opened = not thinking  # a grammar begins only after the closed block and the blank line behind it
        self._finish: FinishReason | None = None

    def run(self, prompt_tokens: int, image_tokens: int, run_prompt: RunPrompt) -> Answer:
        """Write the answer to a prompt of that many tokens."""
        began = time.perf_counter()
        first = prefilled = None
        kept = 0
        try:
            steps, kept = run_prompt(self._poll)
            prefilled = time.perf_counter()
            while self._finish is None:
                self._poll()
                tokens = self._next_tokens(steps)
                self._emit(tokens)
                first = first or time.perf_counter()
                if self._finish is None:
                    steps.feed(tokens)
        except Cancelled:
            self._finish = "cancelled"
        self._settle()
        ended = time.perf_counter()
        prefilled, first = prefilled or ended, first or ended
        decode = ended - first
        return Answer(
            text=self._transcript.text,
            thinking=self._transcript.thinking,
            finish_reason=self._finish,
            usage=Usage(prompt_tokens, image_tokens, self._count, self._thinking_count, kept),
            timings=Timings(prefilled - began, decode, first - began, (self._count - 1) / decode if decode > 0 and self._count > 1 else 0.0),
            seed=self._sampling.seed,
            ended_thinking=not self._transcript.in_thinking,
            limited_by_context=self._limit < self._sampling.max_new_tokens,
        )

    def _poll(self) -> None:
        if self._cancel is not None and self._cancel():
            raise Cancelled

    def _next_tokens(self, steps: Steps) -> list[int]:
        """The tokens that come next: one drawn, or all that are forced."""
        if self._transcript.in_thinking:
            budget = self._sampling.thinking_budget
            if budget is not None and self._thinking_count >= budget and self._started_thinking:
                return self._close_thinking()
        elif self._matcher is not None:
            if not self._answer_opened:
                self._answer_opened = True
                return self._tokenizer.encode(BETWEEN)
            forced = self._matcher.forced_tokens()
            if forced:
                for token in forced:
                    self._matcher.accept(token)
                return forced
        grammar = self._matcher if not self._transcript.in_thinking else None
        # Inside thinking an end is not fed: the block is closed instead.
        token = steps.draw(grammar.bitmask() if grammar is not None else None, sure=not self._transcript.in_thinking)
        if self._transcript.in_thinking and token in self._config.eos_token_ids:
            return self._close_thinking()  # an end there would leave no answer at all
        if grammar is not None:
            grammar.accept(token)
        return [token]

    def _close_thinking(self) -> list[int]:
        self._answer_opened = True
        self._decoder.flush()  # a character cut short here is dropped, not shown as U+FFFD
        return self._tokenizer.encode("\n" + THINK_CLOSE + BETWEEN)

    def _emit(self, tokens: Sequence[int]) -> None:
        """Count, decode and report tokens until one of them ends the answer."""
        for number, token in enumerate(tokens, start=1):
            if token in self._config.eos_token_ids:
                self._finish = "stop"
                return
            self._count += 1
            self._thinking_count += self._transcript.in_thinking
            self._report(self._transcript.push(self._decoder.push(token)))
            if self._transcript.stopped:
                self._finish = "stop_string"
                return
            if self._count >= self._limit:
                break
        # Forced tokens are accepted together: the answer is whole only if all of them came out.
        if number == len(tokens) and self._grammar_is_done():
            self._finish = "stop"
        elif self._count >= self._limit:
            self._finish = "length"

    def _grammar_is_done(self) -> bool:
        return self._matcher is not None and not self._transcript.in_thinking and self._answer_opened and self._matcher.is_stopped()

    def _settle(self) -> None:
        """Release text held back at the end. A character that never got its last bytes is dropped, not shown as U+FFFD."""
        if self._transcript.stopped:
            return
        pieces = self._transcript.finish()
        if pieces and self._finish != "cancelled":
            self._report(pieces)

    def _report(self, pieces: list[tuple[str, bool]]) -> None:
        if self._on_token is None:
            return
        for text, thinking in pieces or [("", self._transcript.in_thinking)]:
            self._on_token(TokenEvent(text, thinking, self._count, self._limit))
