"""The sampler of the decode graph: grammar mask, penalties, temperature, truncation, draw and book-keeping on the device.

Three launches for top_k from 1 to 64 and for greedy. `score` makes the scores and the maximum of every 1,024 of them;
`shortlist` lists the scores that reach the k-th largest of these maxima, which are the top k and few more; `choose`, one
program, ranks the list and draws. A list that runs over (many ties, say) makes `choose` look at all scores again. For
other top_k (0, above 64) PyTorch sorts between the launches `score` and `settle`. All draw with whole numbers and so
choose the same token as `sampling.Sampler` on any device.
"""

from __future__ import annotations

from typing import Sequence

import torch
import triton

from ..draw import draw_ranked, log_min_p, share_of_top_p
from ..sampling import GREEDY_BELOW, Sampler, SamplingParams
from .sampler_programs import FORBIDDEN, LANES, LISTED, ROWS, choose, count_all, count_one, draw_uniform, score, settle, shortlist
from .support import Target, self_test

SCORED = 1024  # scores a program of `score`
OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2  # what `status` says


class DeviceSampler:
    """The sampler of one sequence, in static buffers: make one, capture `sample`, call `start` for every answer.

    Captured: `sample` with needs_sort False, one graph for all parameters that need no sort. Seed, step, parameters,
    penalty counts, mask and logits are read from the device at every replay, and nothing is allocated, tuned or waited
    for. A replay counts what it draws and moves the step on, unless the token is one of end_ids.
    Host work: `start`, once an answer, waits for the device. `record`, and `sample` with needs_sort True, only queue
    launches on the current stream (the sort takes scratch memory); they may come between replays in any order.

    Write before a step: bitmask int32 [ceil(vocab / 32)], bit i % 32 of word i // 32 allows id i; all bits set where no
    grammar rules. Read after a step (copy, then synchronise): token int64 [1], the id, which the embedding of the next
    step may read in place, and which may be overwritten with a forced one; status int32 [1], OK or why there is no token
    (the id is then 0 and nothing is counted); result int64 [2], both in one piece for one copy: the id, then the status;
    logprob float32 [1] where asked for: of the token under all allowed tokens after penalties and temperature, before
    truncation. Besides: counts int32 [vocab], how often each id is part of the answer; prompt int8 [vocab], not 0 for ids
    of the prompt.
    """

    def __init__(self, vocab_size: int, real_tokens: int, end_ids: tuple[int, ...], device: torch.device, *, logprob: bool = False) -> None:
        self.vocab_size, self.real_tokens = vocab_size, min(real_tokens, vocab_size)
        self._blocks = triton.cdiv(vocab_size, SCORED)
        self._rows = triton.next_power_of_2(self._blocks * SCORED // LANES.value)
        self._with_logprob, self._n_ends, self.needs_sort = logprob, len(end_ids), False

        def buffer(size: int, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.bitmask = buffer(triton.cdiv(vocab_size, 32), torch.int32, -1)
        self.counts, self.prompt = buffer(vocab_size, torch.int32), buffer(vocab_size, torch.int8)
        self.result, self.logprob = buffer(2, torch.int64), buffer(1, torch.float32)
        self.token, self.status = self.result[:1], self.result.view(torch.int32)[2:3]
        self._floats = buffer(5, torch.float32, 1.0)  # temperature, repetition, frequency, presence, log min_p
        self._ints = buffer(5, torch.int64)  # seed, step, top_k, top_p, greedy
        self._ends = torch.tensor(end_ids or (-1,), dtype=torch.int64, device=device)
        self._keys = buffer(self._blocks * SCORED, torch.int32)
        self._maxima = buffer(self._rows, torch.int32, FORBIDDEN.value)
        programs = triton.next_power_of_2(self._blocks)
        self._tops, self._sums = buffer(programs, torch.int32, FORBIDDEN.value), buffer(programs, torch.float32)
        self._few, self._listed = buffer(2 * LISTED.value, torch.int32), buffer(1, torch.int32)
        self._wide, self._strict = buffer(2 * self._rows, torch.int32), buffer(2 * ROWS.value, torch.int32)
        self._uniform = buffer(1, torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(value.nbytes for name, value in vars(self).items() if isinstance(value, torch.Tensor) and name not in ("token", "status"))

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
        self._listed.zero_()  # a draw that was interrupted between its launches leaves a list behind
        if params.repetition_penalty != 1.0 and prompt_ids:
            self.prompt[torch.tensor(prompt_ids, device=device)] = 1
        self.needs_sort = not greedy and not 1 <= params.top_k <= ROWS.value

    def record(self, tokens: Sequence[int] | torch.Tensor) -> None:
        """Count tokens that were not drawn here but became part of the answer (forced by a grammar, a closed thinking block).

        Known to the host: one launch a token, its id among the arguments. A tensor int64 [N] on the device: one launch
        that reads it, which may be captured. Nothing is waited for or allocated.
        """
        if isinstance(tokens, torch.Tensor):
            count_all[(1,)](self.counts, self._ints, tokens, tokens.shape[0], BLOCK=64, num_warps=1)
            return
        for token in tokens:
            count_one[(1,)](self.counts, self._ints, token, num_warps=1)

    def sample(self, logits: torch.Tensor, *, needs_sort: bool, pdl: bool = False) -> None:
        """One draw from logits [vocab] (any float type, left as they are) into token, status and logprob.

        The token is counted and the step moves on, unless the token is one of end_ids. needs_sort False: top_k 1 to 64 and
        greedy. True: any parameters, through a sort that takes scratch memory (from the graph's pool under capture).
        """
        options = {"launch_pdl": True} if pdl else {}
        # The scores are single IEEE operations on every device: a fused multiply-add would round differently.
        score[(self._blocks,)](
            logits, self.bitmask, self.counts, self.prompt, self._floats, self._keys, self._maxima, self._tops, self._sums,
            self.real_tokens, LOGPROB=self._with_logprob, BLOCK=SCORED, PDL=pdl, num_warps=8, enable_fp_fusion=False, **options,
        )  # fmt: skip
        programs = self._tops.numel()
        published = (self._ints, self.counts, self._ends)
        ends = {"LOGPROB": self._with_logprob, "BLOCKS": programs, "ENDS": triton.next_power_of_2(self._ends.numel())}
        if not needs_sort:
            shortlist[(self._blocks,)](
                self._keys, self._tops, self._ints, self._few, self._listed, BLOCKS=programs, BLOCK=SCORED, PDL=pdl, num_warps=1, **options
            )
            choose[(1,)](
                self._keys, self._maxima, self._tops, self._sums, self._floats, *published, self._few, self._listed, self._wide,
                self._strict, self.token, self.status, self.logprob, self._n_ends,
                SUBS=self._rows, PIECE=32, PDL=pdl, num_warps=8, enable_fp_fusion=False, **ends, **options,
            )  # fmt: skip
            return
        draw_uniform[(1,)](self._ints, self._uniform, num_warps=1)
        keys = self._keys[: self.vocab_size]
        scores = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
        values, ids = scores.sort(descending=True, stable=True)
        chosen = draw_ranked(values, ids, self._ints[2:3], self._ints[3:4], self._floats[4:5], self._uniform)
        settle[(1,)](
            chosen, self._keys, self._tops, self._sums, *published, self.token, self.status, self.logprob, self._n_ends, num_warps=4, **ends
        )


@self_test("sampler", limit=0.0)
def _check(where: Target) -> float:
    """Tokens that differ from the CPU's over a few settings, as a count: any difference is one too many. Spread logits
    fit the short list; flat ones, nearly all of them ties, do not."""
    generator = torch.Generator().manual_seed(5)
    spread = (torch.randn(25000, generator=generator) * 4).to(torch.bfloat16).float()  # bfloat16 has ties
    flat = (torch.randn(25000, generator=generator) / 4).round()
    wrong = 0
    for settings in ({}, {"temperature": 0.0}, {"top_k": 0, "top_p": 0.95}, {"top_k": 64, "min_p": 0.05, "presence_penalty": 1.5, "repetition_penalty": 1.1}):
        params = SamplingParams(seed=2**63 + 9, **settings)
        device, reference = DeviceSampler(25000, 24990, (7,), where.device), Sampler(params, 25000, 24990, [3], torch.device("cpu"))
        device.start(params, [3])
        for logits in (spread, spread, flat):
            device.sample(logits.to(where.device), needs_sort=device.needs_sort, pdl=where.pdl)
            expected = reference.draw(logits.clone())
            wrong += int(device.token) != expected or int(device.status) != OK
            device.record([11])
            device.record(torch.tensor([12, 12], device=where.device))
            for token in ([] if expected == 7 else [expected]) + [11, 12, 12]:
                reference.record(token)
        wrong += not torch.equal(device.counts.cpu().float(), reference._counts)
    return float(wrong)
