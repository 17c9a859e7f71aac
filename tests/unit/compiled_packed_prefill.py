"""Compile the kernels of packed weights for many tokens at the 35B sizes for GPUs that are not there.

    python compiled_packed_prefill.py 80 90 ...

Prints one JSON object as compiled_prefill_kernels.py does. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from compiled_prefill_kernels import CPU, described, facts
from compiling import in_a_cache_of_its_own

from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.kernels import launcher
from a3b_engine.kernels.fp8_gemm import ProjectionPlan
from a3b_engine.kernels.launcher import Launchers
from a3b_engine.kernels.moe_prefill import ExpertsPrefillPlan
from a3b_engine.kernels.packed_prefill import PackedForm
from a3b_engine.kernels.support import Target
from a3b_engine.model.moe import ExpertWeights, MoEWeights

INT4 = PackedForm("int", 4, 32, torch.float16, False, "")
NVFP4 = PackedForm("e2m1", 4, 16, torch.float8_e4m3fn, False, "times")
INT3 = PackedForm("int", 3, 64, torch.float16, False, "")
# layout, numbers of tokens; the architectures between the extremes take the code paths of their neighbours
CASES = {
    "int4": (INT4, (16, 4096)), "int4 128, zero": (replace(INT4, group=128, zero=True), (2048,)), "int3": (INT3, (2048,)), "nvfp4": (NVFP4, (16, 4096)),
    "int3 32, zero": (replace(INT3, group=32, zero=True, scale=torch.bfloat16), (16,)),
}  # fmt: skip
FEW_CASES = {"int4": (INT4, (4096,)), "nvfp4": (NVFP4, (4096,))}
SHAPES = ((256, 512, 2048), (256, 512, 2048), (256, 2048, 512))


def untouched(form, *shape):
    """A weight without memory behind it."""
    scales = (*shape[:-1], shape[-1] // form.group)
    zero = torch.empty(scales, dtype=torch.uint8) if form.zero else None
    factor = torch.empty((*shape[:-2], 1, 1)) if form.factor else None
    codes = torch.empty((*shape[:-1], shape[-1] * form.bits // 8), dtype=torch.uint8)
    return PackedWeight(codes, torch.empty(scales, dtype=form.scale), zero, factor, form.values, form.group, form.bits, form.factor == "over")


def launches(target, label, form, tokens):
    """(kernel's name, constants) -> (kernel, arguments, constants) of the experts and one matrix, with T tokens."""
    found = {}

    def record(self, grid, *args):
        found.setdefault((f"{self._kernel.__name__} {label} {tokens}", str(self._constants)), (self._kernel, args, self._constants))

    call = launcher.Launcher.__call__
    launcher.Launcher.__call__ = record
    try:
        experts = ExpertWeights(*(untouched(form, *shape) for shape in SHAPES))
        shared = [torch.empty(shape[1:], dtype=torch.bfloat16) for shape in SHAPES]  # plain weights beside float16 activations
        weights = MoEWeights(torch.empty(256, 2048, dtype=torch.bfloat16), experts, *shared, torch.empty(1, 2048, dtype=torch.bfloat16))
        plan = ExpertsPrefillPlan(weights, 8, Launchers(target), torch.bfloat16, tested=False)
        x, hidden = torch.empty(tokens, 2048, dtype=plan.product), torch.empty(tokens * 9, 512, dtype=plan.product)
        order, tiles = torch.empty(tokens * 8, dtype=torch.int32), torch.empty(300, 3, dtype=torch.int32)
        plan(x, torch.empty(tokens, 9), order, tiles, hidden, torch.empty(tokens, 9, 2048, dtype=torch.bfloat16))
        matrix = ProjectionPlan([untouched(form, 4096, 2048)], Launchers(target), torch.bfloat16, tested=False)
        matrix.dequantized(torch.empty(4096, 2048, dtype=torch.bfloat16))
    finally:
        launcher.Launcher.__call__ = call
    return found


def main():
    jobs = []
    for architecture in map(int, sys.argv[1:]):
        capability = divmod(architecture, 10)
        target = Target(CPU, capability, 132, fp8_native=capability >= (8, 9), pdl=capability >= (9, 0))
        seen = {}
        for label, (form, numbers) in (FEW_CASES if architecture in (86, 89) else CASES).items():
            for tokens in numbers:
                for (name, constants), launch in launches(target, label, form, tokens).items():
                    seen.setdefault((name.split()[0], constants), (name, launch))
        jobs += [(architecture, name, described(*launch)) for name, launch in seen.values()]
    report = {}
    with ProcessPoolExecutor(int(os.environ.get("COMPILE_PROCESSES", "2"))) as pool:
        results = pool.map(facts, [(architecture, job) for architecture, _, job in jobs])
        for (architecture, name, _), result in zip(jobs, results):
            report.setdefault(architecture, {})[name] = result
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
