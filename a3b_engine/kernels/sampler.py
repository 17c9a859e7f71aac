"""The sampler of the decode graph: grammar mask, penalties, temperature, truncation, draw and book-keeping on the device.

Two launches for top_k from 1 to 64 and for greedy. `score` makes the scores and the maximum of every 128 of them;
`choose`, one program, finds the top-k-th score from the maxima and the few rows that can hold it, and draws. Nothing is
sorted: the tokens above the top-k-th score are fewer than 64 and are ranked pairwise, the tokens that share it are
counted, however many. For other top_k (0, above 64) `portable_draw.draw_sorted` sorts between the two launches
`score` and `settle`. All draw with whole numbers and so choose the same token as `portable_draw` on a CPU.
"""

from __future__ import annotations

import torch
import triton

from ..sampling import GREEDY_BELOW, SamplingParams
from .portable_draw import PortableSampler, draw_sorted, log_min_p, share_of_top_p
from .sampler_programs import FORBIDDEN, LANES, ROWS, choose, draw_uniform, score, settle
from .support import Target, self_test

SCORED = 1024  # scores a program of `score`
OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2  # what `status` says


class DeviceSampler:
    """The sampler of one sequence, in static buffers: make one, capture `sample`, call `start` for every answer.

    Read after a step (copy, then synchronise): token int64 [1], the id, which the embedding of the next step may read in
    place; status int32 [1], OK or why there is no token (the id is then 0); logprob float32 [1] where asked for: of the
    token under all allowed tokens after penalties and temperature, before truncation. Write before a step: bitmask int32
    [ceil(vocab / 32)], bit i % 32 of word i // 32 allows id i; all bits set where no grammar rules.
    """

    def __init__(self, vocab_size: int, real_tokens: int, end_ids: tuple[int, ...], device: torch.device, *, logprob: bool = False) -> None:
        self.vocab_size, self.real_tokens = vocab_size, min(real_tokens, vocab_size)
        self._blocks = triton.cdiv(vocab_size, SCORED)
        self._rows = triton.next_power_of_2(self._blocks * SCORED // LANES.value)
        self._with_logprob, self._n_ends, self.needs_sort = logprob, len(end_ids), False

        def buffer(size: int, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.token, self.status, self.logprob = buffer(1, torch.int64), buffer(1, torch.int32), buffer(1, torch.float32)
        self.bitmask = buffer(triton.cdiv(vocab_size, 32), torch.int32, -1)
        self.counts, self.prompt = buffer(vocab_size, torch.int32), buffer(vocab_size, torch.uint8)
        self._floats = buffer(5, torch.float32, 1.0)  # temperature, repetition, frequency, presence, log of min_p
        self._ints = buffer(5, torch.int64)  # seed, step, top_k, top_p, greedy
        self._ends = torch.tensor(end_ids or (-1,), dtype=torch.int64, device=device)
        self._keys = buffer(self._blocks * SCORED, torch.int32)
        self._maxima = buffer(self._rows, torch.int32, FORBIDDEN.value)
        self._sums = buffer(2 * self._blocks, torch.float32)
        self._listed, self._few = buffer(2 * self._rows, torch.int32), buffer(2 * ROWS.value, torch.int32)
        self._uniform = buffer(1, torch.int64)

    def start(self, params: SamplingParams, prompt_ids: list[int]) -> None:
        """Set the parameters and forget the last answer. Not for inside a capture; afterwards `needs_sort` says which graph to replay."""
        device = self.token.device
        greedy = params.temperature < GREEDY_BELOW
        temperature = 1.0 if greedy else params.temperature
        floats = (temperature, params.repetition_penalty, params.frequency_penalty, params.presence_penalty, log_min_p(params.min_p))
        seed = params.seed - (1 << 64) if params.seed >> 63 else params.seed
        ints = (seed, 0, 1 if greedy else params.top_k, share_of_top_p(params.top_p), int(greedy))
        self._floats.copy_(torch.tensor(floats, dtype=torch.float32))
        self._ints.copy_(torch.tensor(ints, dtype=torch.int64))
        self.counts.zero_()
        self.prompt.zero_()
        if params.repetition_penalty != 1.0 and prompt_ids:
            self.prompt[torch.tensor(prompt_ids, device=device)] = 1
        self.needs_sort = not greedy and not 1 <= params.top_k <= ROWS.value

    def record(self, tokens: list[int]) -> None:
        """Count tokens that were not drawn here but became part of the answer (forced by a grammar, a closed thinking block)."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.token.device)
        self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self._ints[1] += len(tokens)

    def sample(self, logits: torch.Tensor, *, needs_sort: bool, pdl: bool = False) -> None:
        """One draw from logits [vocab] (any float type, left as they are) into token, status and logprob.

        The token is counted and the step moves on, unless the token is one of end_ids. needs_sort False: top_k 1 to 64 and
        greedy. True: any parameters, through a sort that takes scratch memory from the graph's pool.
        """
        options = {"launch_pdl": True} if pdl else {}
        # The scores are single IEEE operations on every device: a fused multiply-add would round differently.
        score[(self._blocks,)](
            logits, self.bitmask, self.counts, self.prompt, self._floats, self._keys, self._maxima, self._sums, self.real_tokens,
            LOGPROB=self._with_logprob, BLOCK=SCORED, PDL=pdl, num_warps=4, enable_fp_fusion=False, **options,
        )  # fmt: skip
        ends = {
            "n_ends": self._n_ends, "n_sums": self._blocks, "SUBS": self._rows, "LOGPROB": self._with_logprob,
            "SUMS": triton.next_power_of_2(self._blocks), "ENDS": triton.next_power_of_2(self._ends.numel()),
        }  # fmt: skip
        published = (self._ints, self.counts, self._ends)
        if not needs_sort:
            choose[(1,)](
                self._keys, self._maxima, self._sums, self._floats, *published, self._listed, self._few,
                self.token, self.status, self.logprob, PDL=pdl, num_warps=8, enable_fp_fusion=False, **ends, **options,
            )  # fmt: skip
            return
        draw_uniform[(1,)](self._ints, self._uniform, num_warps=1)
        keys = self._keys[: self.vocab_size]
        scores = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
        chosen, _ = draw_sorted(scores, self._ints[2:3], self._ints[3:4], self._floats[4:5], self._uniform)
        settle[(1,)](chosen, self._keys, self._maxima, self._sums, *published, self.token, self.status, self.logprob, num_warps=4, **ends)


@self_test("sampler", limit=0.0)
def _check(where: Target) -> float:
    """Tokens that differ from the CPU's over a few settings, as a count: any difference is one too many."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(5000, generator=generator) * 4).to(torch.bfloat16).float()  # bfloat16 has ties
    wrong = 0
    for settings in ({}, {"temperature": 0.0}, {"top_k": 0, "top_p": 0.95}, {"top_k": 64, "min_p": 0.05, "presence_penalty": 1.5, "repetition_penalty": 1.1}):
        params = SamplingParams(seed=2**63 + 9, **settings)
        device, reference = DeviceSampler(5000, 4990, (7,), where.device), PortableSampler(params, 5000, 4990, [3], torch.device("cpu"))
        device.start(params, [3])
        for _ in range(4):
            device.sample(logits.to(where.device), needs_sort=device.needs_sort, pdl=where.pdl)
            expected = reference.draw(logits.clone())
            wrong += int(device.token) != expected or int(device.status) != OK
            if expected != 7:
                reference.record(expected)
    return float(wrong)
