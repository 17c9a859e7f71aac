"""Time and numbers of the kernels that hold state, and of the sampler, at the shapes of Qwen3.5-35B-A3B, on one CUDA card.

    python benchmarks/state_kernels.py             # self-tests, sampler against the CPU over the whole vocabulary, times
    python benchmarks/state_kernels.py --sweep     # candidates of attention and DeltaNet; the best belong into their plan_ functions

Each kernel runs in a CUDA graph over the state of ten layers, so that nothing is served from the L2 cache. Prints one
JSON object. Predicted for one H200, microseconds a launch, before anything was measured: see PREDICTED.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from kernels import microseconds  # noqa: E402

from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.attention_decode import AttentionPlan, AttentionScratch, attention_decode, plan_attention  # noqa: E402
from a3b_engine.kernels.deltanet_decode import DeltaNetPlan, DeltaNetScratch, deltanet_decode, plan_deltanet  # noqa: E402
from a3b_engine.kernels.norms import add_rms_norm  # noqa: E402
from a3b_engine.kernels.portable_draw import PortableSampler  # noqa: E402
from a3b_engine.kernels.sampler import DeviceSampler  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.sampling import SamplingParams  # noqa: E402

LAYERS, VOCABULARY, REAL = 10, 248320, 248077
PREDICTED = {
    "norm": 2.5, "deltanet": 4.5, "attention 512": 7.0, "attention 8192": 11.0, "attention 32768": 24.0,
    "sample top_k 20": 18.0, "sample greedy": 16.0, "sample sorted": 250.0,
}  # fmt: skip


class Layers:
    """States, inputs and outputs of ten layers of each kind."""

    def __init__(self, where: support.Target, capacity: int) -> None:
        self.where, self.device, self.config = where, where.device, PUBLISHED
        generator = torch.Generator(device=self.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device=self.device, generator=generator, dtype=dtype)

        bf16 = torch.bfloat16
        self.caches = [normal(2, capacity, 2, 256, dtype=bf16) for _ in range(LAYERS)]
        self.states = [normal(32, 128, 128) for _ in range(LAYERS)]
        self.rings = [normal(4, 8192, dtype=bf16) for _ in range(LAYERS)]
        self.taps = [normal(8192, 4, dtype=bf16) for _ in range(LAYERS)]
        self.qkv, self.z, self.out, self.residual = normal(9216), normal(4096), normal(4096), normal(2048)
        self.head_norm, self.norm, self.small = normal(256) * 0.1, normal(2048) * 0.1, normal(128)
        self.partial, self.logits = normal(4, 2048), normal(VOCABULARY)
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
                self.qkv[:8192], self.z, s[:32], s[32:64], self.taps[i], s[64:96], s[96:], s, self.rings[i], self.states[i],
                self.length, self.out, scratch, plan, self.config, pdl=pdl,
            )  # fmt: skip

        return microseconds([lambda i=i: launch(i) for i in range(LAYERS)])

    def norms(self, pdl: bool) -> float:
        return microseconds([lambda: add_rms_norm(self.partial, self.residual, self.norm, 1e-6, self.out[:2048], pdl=pdl)] * LAYERS)

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
        ours, theirs = DeviceSampler(VOCABULARY, REAL, (), device), PortableSampler(params, VOCABULARY, REAL, [7], torch.device("cpu"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    options = parser.parse_args()
    where = support.target("cuda") if torch.cuda.is_available() else None
    if where is None:
        raise SystemExit("no card that the kernels run on")
    report: dict = {"card": torch.cuda.get_device_name(), "self_tests": {}, "predicted": PREDICTED, "microseconds": {}}
    for kernel in ("norms", "attention_decode", "deltanet_decode", "sampler"):
        report["self_tests"][kernel] = support.usable(kernel, "cuda")
    report["sampler_mistakes"] = sampler_mistakes(where.device)
    layers = Layers(where, max(options.contexts) + 1)
    attention, deltanet = plan_attention(PUBLISHED, torch.bfloat16, where), plan_deltanet(PUBLISHED, where)
    for pdl in sorted({False, where.pdl}):
        times = {"norm": layers.norms(pdl), "deltanet": layers.deltanet(deltanet, pdl)}
        times |= {f"attention {tokens}": layers.attention(attention, tokens, pdl) for tokens in options.contexts}
        times |= {"sample top_k 20": layers.sample(SamplingParams(), pdl), "sample greedy": layers.sample(SamplingParams(temperature=0.0), pdl)}
        times["sample sorted"] = layers.sample(SamplingParams(top_k=0), False)
        report["microseconds"]["with early launch" if pdl else "plain"] = {name: round(value, 2) for name, value in times.items()}
    if options.sweep:
        report["deltanet"] = {
            f"columns {columns} warps {warps}": round(layers.deltanet(DeltaNetPlan(columns, warps), where.pdl), 2)
            for columns, warps in ((8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 16))
        }
        report["attention"] = {}
        for splits, block, (warps, stages), tokens in itertools.product((32, 64, 128), (16, 32, 64), ((4, 2), (4, 3), (8, 2), (8, 3)), options.contexts):
            try:
                took = layers.attention(AttentionPlan(splits, block, warps, stages, torch.bfloat16), tokens, where.pdl)
            except Exception as problem:  # more shared memory than the card has
                took = type(problem).__name__
            report["attention"][f"{tokens}: splits {splits} block {block} warps {warps} stages {stages}"] = took if isinstance(took, str) else round(took, 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
