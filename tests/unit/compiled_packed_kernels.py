"""Compile the kernels for packed weights, at the sizes of the 35B model, for GPUs that are not there; see compiled_ahead.py, which this
is beside. Prints the same JSON."""

import json
import sys

import torch
import triton
from compiled_ahead import Recorder, bf16, compiled, facts, fp8
from compiling import in_a_cache_of_its_own

from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.kernels import packed_experts, packed_gemv
from a3b_engine.kernels.moe_decode import ExpertsPlan
from a3b_engine.kernels.packed_gemv import PackedGemv
from a3b_engine.kernels.support import Target
from a3b_engine.model.moe import ExpertWeights, MoEWeights


def packed(form, group, scale=torch.float16, zero=False, factor=False):
    """A maker of weights of that kind, of any shape."""

    def make(*shape):
        *lead, rows, columns = shape
        groups = (*lead, rows, columns // group)
        codes = torch.empty(*lead, rows, columns * (3 if form == "int3" else 4) // 8, dtype=torch.uint8)
        whole = torch.ones(*lead, 1, 1) if factor else None
        zeros = torch.zeros(groups, dtype=torch.uint8) if zero else None
        return PackedWeight(codes, torch.zeros(groups).to(scale), zeros, whole, "e2m1" if form == "e2m1" else "int", group, 3 if form == "int3" else 4)

    return make


NVFP4 = packed("e2m1", 16, torch.float8_e4m3fn, factor=True)
KINDS = {
    "int4 g32": packed("int4", 32), "int3 g32": packed("int3", 32), "int4 g128 zero": packed("int4", 128, torch.bfloat16, zero=True), "nvfp4": NVFP4,
}  # fmt: skip


def experts(make, shared):
    stacks = ExpertWeights(make(4, 512, 2048), make(4, 512, 2048), make(4, 2048, 512))
    return MoEWeights(bf16(4, 2048), stacks, shared(512, 2048), shared(512, 2048), shared(2048, 512), bf16(1, 2048))


def launches(target):
    """name -> (kernel, its recorded launch)."""
    found = {}

    def record(name, module, attribute, call):
        kernel = getattr(module, attribute)
        setattr(module, attribute, Recorder())
        try:
            call()
            found[name] = kernel, getattr(module, attribute)
        finally:
            setattr(module, attribute, kernel)

    x, out, norm = torch.empty(4096), torch.empty(30000), torch.empty(2048)
    ids, shares = torch.zeros(8, dtype=torch.int32), torch.zeros(9)
    for name, make in KINDS.items():
        everything = name in ("int4 g32", "nvfp4")
        options = dict(norm=norm, pdl=True)
        for prefix, kernel, fast in (("", "packed_gemv_kernel", False), ("matrix units ", "packed_matrix_gemv_kernel", True)):
            if everything or fast:
                plan = PackedGemv([make(8192, 2048), make(512, 2048), make(512, 2048)], target, matrix_units=fast, **options)
                record(f"{prefix}{name} q k v", packed_gemv, kernel, lambda: plan(x, out))
        if everything:
            plan = PackedGemv([make(2048, 4096)], target, pdl=True, matrix_units=True)
            record(f"matrix units {name} out", packed_gemv, "packed_matrix_gemv_kernel", lambda: plan(x, out, out))
        for prefix, form in (("", "general"), ("matrix units ", "matrix_units")):
            for beside, shared in (("fp8", fp8), ("same", make)):
                if not everything and (form, beside) != ("matrix_units", "fp8"):
                    continue
                plan = ExpertsPlan(experts(make, shared), 8, target, early_x=True, form=form, **options)
                up, down = ("packed_up_kernel", "packed_down_kernel") if form == "general" else ("packed_matrix_up_kernel", "packed_matrix_down_kernel")
                record(f"{prefix}{name} up, shared {beside}", packed_experts, up, lambda: plan.up(x, ids))
                record(f"{prefix}{name} down, shared {beside}", packed_experts, down, lambda: plan.down(ids, shares, out, out))
    return found


def main():
    report = {}
    only = next((word for word in sys.argv[1:] if not word.isdigit()), "")
    for architecture in map(int, filter(str.isdigit, sys.argv[1:])):
        overlap = architecture >= 90 and hasattr(triton.language.extra.cuda, "gdc_wait")
        target = Target(torch.device("cpu"), divmod(architecture, 10), 132, architecture >= 89, overlap)
        report[architecture] = {
            name: facts(compiled(kernel, launch, architecture)) for name, (kernel, launch) in launches(target).items()
            if only in name
        }
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
