"""Choosing the next token: penalties, truncation and a counter-based 64-bit generator, the same on every device.

Scores are made by single IEEE float32 operations and drawn with whole numbers (`draw`). The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) keyed by the seed
and counted by the step: it has no state, never touches torch's generators, and gives the same number on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .draw import REACH, UNIFORM_BITS, draw_ranked, log_min_p, share_of_top_p
from .errors import SamplingError

GREEDY_BELOW = 1e-4  # temperatures under this are greedy: dividing by them only overflows
MAX_SEED = 2**64 - 1
NOT_FINITE = "The model produced NaN or infinite logits: the checkpoint is damaged or the number format overflowed. Verify the files, or load with float32."
NO_CHOICE = "No token may follow here: grammar and vocabulary exclude every choice."


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is drawn. Values are checked when the object is made (`SamplingError`).

    max_new_tokens: limit of the answer, thinking included. temperature: 0 = greedy. top_p, top_k (0 = off) and min_p
    cut unlikely tokens. presence / frequency penalty act on the tokens of the answer so far, repetition_penalty on
    prompt and answer (CTRL, arXiv 1909.05858). stop: texts that end the answer (left out of it). thinking_budget:
    tokens after which thinking is closed (None = no limit of its own).
    """

    max_new_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, (list, tuple)):
            raise SamplingError(f"stop: found {self.stop!r}, expected a list of texts.")
        object.__setattr__(self, "stop", tuple(self.stop))
        _whole("max_new_tokens", self.max_new_tokens, 1, 1 << 20)
        _whole("top_k", self.top_k, 0, 1 << 24)
        _whole("seed", self.seed, 0, MAX_SEED)
        if self.thinking_budget is not None:
            _whole("thinking_budget", self.thinking_budget, 0, 1 << 20)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise SamplingError(f"stop: found {text!r}, expected non-empty texts.")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name}: found {value!r}, expected a whole number from {low} to {high}.")


def _real(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name}: found {value!r}, expected a number from {low:g} to {high:g}.")


class Sampler:
    """Draws the tokens of one answer, the same ones on every device.

    vocab_size: logits a step; real_tokens: ids from here on are padding and never drawn; prompt_ids count for the
    repetition penalty.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, real_tokens: int, prompt_ids: list[int], device: torch.device) -> None:
        self.params = params
        self.real_tokens = min(real_tokens, vocab_size)
        self._step = 0
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if params.repetition_penalty != 1.0 and prompt_ids:
            self._seen[torch.tensor(prompt_ids, device=device)] = True
        # Divisors are tensors: by a number, PyTorch on CUDA multiplies with the reciprocal, which rounds differently.
        floats = torch.tensor([params.temperature, params.repetition_penalty, log_min_p(params.min_p)], dtype=torch.float32).to(device)
        self._temperature, self._repetition, self._min_p = floats[0], floats[1], floats[2:]
        self._top_k, self._top_p = torch.tensor([[params.top_k], [share_of_top_p(params.top_p)]]).to(device)

    def record(self, token: int) -> None:
        """Count a token that became part of the answer, drawn here or forced by a grammar."""
        self._counts[token] += 1
        self._seen[token] = True
        self._step += 1

    def draw(self, logits: torch.Tensor) -> int:
        """One token from float32 logits [vocab], which are changed in place; a grammar sets what may not follow to -inf
        first. Call `record` with every token that is used. Raises `SamplingError` where an allowed logit is NaN or +inf,
        and where none is allowed."""
        params = self.params
        logits[self.real_tokens :] = -torch.inf
        self._penalise(logits)
        if params.temperature < GREEDY_BELOW:
            best, token = logits.max(dim=-1)
            self._check(best)
            return int(token)
        values, ids = self._candidates(logits / self._temperature)
        uniform = torch.tensor([int(philox_uniform(params.seed, self._step) * 2**UNIFORM_BITS)]).to(logits.device)
        return int(draw_ranked(values, ids, self._top_k, self._top_p, self._min_p, uniform))

    def _penalise(self, logits: torch.Tensor) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            scaled = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits.copy_(torch.where(self._seen, scaled, logits))
        if params.frequency_penalty:
            logits.sub_(self._counts * params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((self._counts > 0).float() * params.presence_penalty)

    def _candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the tokens that weigh anything, best first and equal scores by id, after top-k (ties with the
        last one are kept)."""
        most = scores.topk(min(self.params.top_k, len(scores)) or 1).values  # NaN comes first
        self._check(most[0])
        least = most[0] - REACH
        if self.params.top_k:
            least = torch.maximum(least, most[-1])
        ids = (scores >= least).nonzero()[:, 0]
        values, order = scores[ids].sort(descending=True, stable=True)
        return values, ids[order]

    @staticmethod
    def _check(best: torch.Tensor) -> None:
        value = float(best)
        if value != value or value == float("inf"):
            raise SamplingError(NOT_FINITE)
        if value == -float("inf"):
            raise SamplingError(NO_CHOICE)


_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox_uniform(seed: int, step: int) -> float:
    """A number in [0, 1) with 24 random bits: word 0 of Philox4x32-10 with the seed as key and the step as counter."""
    counter = [step & _LOW, step >> 32 & _LOW, 0, 0]
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        product0, product1 = counter[0] * _PHILOX_MULTIPLIERS[0], counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [(product1 >> 32) ^ counter[1] ^ key[0], product1 & _LOW, (product0 >> 32) ^ counter[3] ^ key[1], product0 & _LOW]
        key = [(key[0] + _PHILOX_WEYL[0]) & _LOW, (key[1] + _PHILOX_WEYL[1]) & _LOW]
    return (counter[0] >> 8) / (1 << 24)
