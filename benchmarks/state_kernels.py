"""Time and numbers of the kernels that hold state, and of the sampler, at the shapes of Qwen3.5-35B-A3B, on one CUDA card.

    python benchmarks/state_kernels.py             # self-tests, sampler against the CPU over the whole vocabulary, times
    python benchmarks/state_kernels.py --sweep     # candidates of attention and DeltaNet; the best belong into their plan_ functions

Each kernel runs in a CUDA graph over the state of ten layers, so that nothing is served from the L2 cache. Prints one
JSON object. Predicted for one H200, microseconds a call, before each was measured: see PREDICTED. Measured there with
early launch, 2026-11-30 (torch 2.11, Triton 3.6):

    call                     before   now   what was changed
    deltanet                    4.5   3.6   ring and taps read ahead of the wait, state written behind the meeting of the
                                            programs of a head, 16 columns and one warp a program
    attention at 512           10.4   5.9   first rows of each slice read ahead of the wait, the new token in a program of its
    attention at 8,192         15.7  10.2   own, slices in use known from the length instead of from memory, joined by 64
    attention at 32,768        32    23.4   programs instead of 16, 64 rows a step
    sample, top_k 20           31    11.9   a short list of candidates instead of two searches by one program
    sample, greedy             32    12.5   the same, measured when `score` still had 4 warps (then 12.9 for top_k 20)
    sample, sorted            233   237     nothing

Tried and left: weights of attention rounded once instead of split in two (1 to 4 % faster, 20 times the error); ranking all
243 maxima pairwise in every program of the short list (23 us in all); short list with 2 or 4 warps (12.5 us in all); 512 or
2,048 scores a program (13.4, 21); a choice by 4 or 16 warps (13.5, 14). Not tried: joining the slices in the last program
to arrive, which would read up to 512 KiB alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from kernels import microseconds  # noqa: E402

from a3b_engine.kernels import sampler, support  # noqa: E402
from a3b_engine.kernels.attention_decode import AttentionPlan, AttentionScratch, attention_decode, plan_attention  # noqa: E402
from a3b_engine.kernels.deltanet_decode import DeltaNetPlan, DeltaNetScratch, deltanet_decode, plan_deltanet  # noqa: E402
from a3b_engine.kernels.sampler import DeviceSampler  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.sampling import Sampler, SamplingParams  # noqa: E402

LAYERS, VOCABULARY, REAL = 10, 248320, 248077
PREDICTED = {
    "deltanet": 3.6, "attention 512": 6.5, "attention 8192": 10.0, "attention 32768": 22.0,
    "sample top_k 20": 9.0, "sample greedy": 9.0, "sample sorted": 250.0,
}  # fmt: skip
ATTENTION = tuple(itertools.product((64, 128), (16, 32, 64), ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3))))
DELTANET = ((8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8), (128, 16))


class Layers:
    """States, inputs and outputs of ten layers of each kind."""

    def __init__(self, where: support.Target, capacity: int, count: int = LAYERS) -> None:
        self.where, self.device, self.config = where, where.device, PUBLISHED
        generator = torch.Generator(device=self.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device=self.device, generator=generator, dtype=dtype)

        bf16 = torch.bfloat16
        self.caches = [normal(2, capacity, 2, 256, dtype=bf16) for _ in range(count)]
        self.states = [normal(32, 128, 128) for _ in range(count)]
        self.rings = [normal(4, 8192, dtype=bf16) for _ in range(count)]
        self.taps = [normal(8192, 4, dtype=bf16) for _ in range(count)]
        self.qkv, self.z, self.out = normal(9216, dtype=bf16), normal(4096, dtype=bf16), normal(4096, dtype=bf16)
        self.head_norm, self.small = normal(256) * 0.1, normal(128)
        self.gates = normal(64, dtype=bf16)
        self.logits = normal(VOCABULARY)
        self.length = torch.zeros(1, dtype=torch.int64, device=self.device)

    def attention(self, plan: AttentionPlan, tokens: int, pdl: bool) -> float:
        self.length.fill_(tokens)
        scratch = AttentionScratch(self.config, plan, self.device)

        def launch(cache: torch.Tensor) -> None:
            attention_decode(self.qkv, self.head_norm, self.head_norm, cache, self.length, self.length, self.out, scratch, plan, self.config, pdl=pdl)

        return microseconds([lambda cache=cache: launch(cache) for cache in self.caches])

    def deltanet(self, plan: DeltaNetPlan, pdl: bool) -> float:
        scratch, s = DeltaNetScratch(self.config, self.device), self.small

        def launch(i: int) -> None:
            deltanet_decode(
                self.qkv[:8192], self.z, self.gates[:32], self.gates[32:], self.taps[i], s[64:96], s[96:], s, self.rings[i], self.states[i],
                self.length, self.out, scratch, plan, self.config, pdl=pdl,
            )  # fmt: skip

        return microseconds([lambda i=i: launch(i) for i in range(len(self.states))])

    def sample(self, params: SamplingParams, pdl: bool) -> float:
        device = DeviceSampler(VOCABULARY, REAL, (), self.device)
        device.start(params, [])
        return microseconds([lambda: device.sample(self.logits, needs_sort=device.needs_sort, pdl=pdl)] * LAYERS)


def sampler_mistakes(device: torch.device, steps: int = 20) -> dict[str, int]:
    """Tokens that a captured graph, replayed step after step, draws otherwise than the CPU; ties through bfloat16."""
    mistakes = {}
    settings = ({}, {"temperature": 0.0}, {"top_k": 0, "top_p": 0.95}, {"top_k": 64, "min_p": 0.02, "presence_penalty": 1.5, "repetition_penalty": 1.1})
    for chosen in settings:
        params = SamplingParams(seed=2**63 + 1, **{"temperature": 1.0, **chosen})
        ours, theirs = DeviceSampler(VOCABULARY, REAL, (), device), Sampler(params, VOCABULARY, REAL, [7], torch.device("cpu"))
        rows = (torch.randn(steps, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(torch.bfloat16).float()
        logits = rows[0].to(device)
        ours.start(params, [7])
        ours.sample(logits, needs_sort=ours.needs_sort)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours.sample(logits, needs_sort=ours.needs_sort)
        ours.start(params, [7])
        wrong = 0
        for row in rows:
            logits.copy_(row)
            graph.replay()
            expected = theirs.draw(row.clone())
            theirs.record(expected)
            wrong += int(ours.token) != expected
        mistakes[json.dumps(chosen)] = wrong
    return mistakes


def compile_candidate(candidate: tuple) -> None:
    """Fill Triton's cache on disk: a process of its own launches one candidate over a small state."""
    where = support.target("cuda")
    layers = Layers(where, 33, count=1)
    try:
        if len(candidate) == 3:
            splits, block, (warps, stages) = candidate
            layers.attention(AttentionPlan(splits, block, warps, stages, torch.bfloat16), 32, where.pdl)
        else:
            layers.deltanet(DeltaNetPlan(*candidate), where.pdl)
    except Exception as problem:  # the sweep meets it again and reports it
        print(candidate, type(problem).__name__, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    options = parser.parse_args()
    where = support.target("cuda") if torch.cuda.is_available() else None
    if where is None:
        raise SystemExit("no card that the kernels run on")
    if options.sweep:
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_candidate, (*ATTENTION, *DELTANET)))
    report: dict = {"card": torch.cuda.get_device_name(), "self_tests": {}, "predicted": PREDICTED, "microseconds": {}}
    for kernel in ("attention_decode", "deltanet_decode", "sampler"):
        report["self_tests"][kernel] = support.usable(kernel, "cuda")
    report["sampler_mistakes"] = sampler_mistakes(where.device)
    layers = Layers(where, max(options.contexts) + 1)
    attention, deltanet = plan_attention(PUBLISHED, torch.bfloat16, where), plan_deltanet(PUBLISHED, where)
    for pdl in sorted({False, where.pdl}):
        times = {"deltanet": layers.deltanet(deltanet, pdl)}
        times |= {f"attention {tokens}": layers.attention(attention, tokens, pdl) for tokens in options.contexts}
        times |= {"sample top_k 20": layers.sample(SamplingParams(), pdl), "sample greedy": layers.sample(SamplingParams(temperature=0.0), pdl)}
        times["sample sorted"] = layers.sample(SamplingParams(top_k=0), False)
        report["microseconds"]["with early launch" if pdl else "plain"] = {name: round(value, 2) for name, value in times.items()}
    if options.sweep:
        report["deltanet"], report["attention"], report["sampler"] = {}, {}, {}
        for columns, warps in DELTANET:
            report["deltanet"][f"columns {columns} warps {warps}"] = round(layers.deltanet(DeltaNetPlan(columns, warps), where.pdl), 2)
        for splits, block, (warps, stages) in ATTENTION:
            plan = AttentionPlan(splits, block, warps, stages, torch.bfloat16)
            try:
                took = [round(layers.attention(plan, tokens, where.pdl), 2) for tokens in options.contexts]
            except Exception as problem:  # more shared memory than the card has
                took = type(problem).__name__
            report["attention"][f"splits {splits} block {block} warps {warps} stages {stages}"] = took
        for sampler.SCORED in (512, 1024, 2048):
            report["sampler"][f"scored {sampler.SCORED}"] = round(layers.sample(SamplingParams(), where.pdl), 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
