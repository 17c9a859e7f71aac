"""Compile the kernels of the 35B shapes for GPUs that are not there, and say what the compiler made of them.

    python compiled_ahead.py 80 90 ...

Triton's wheel brings the assembler, so no GPU, driver or toolkit is needed. Prints one JSON object: architecture ->
launch -> {"weights": widths of the loads that read weights, "stack": bytes spilled per thread, "early": whether weights are
asked for before the wait for the kernel ahead}. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compiling import in_a_cache_of_its_own
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.kernels import fp8_gemv, gemv, moe_decode, router  # noqa: E402
from a3b_engine.kernels.dense_gemv import DenseGemv  # noqa: E402
from a3b_engine.kernels.fp8_gemv import Fp8Gemv  # noqa: E402
from a3b_engine.kernels.support import Target  # noqa: E402
from a3b_engine.model.moe import ExpertWeights, MoEWeights  # noqa: E402

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


class Recorder:
    """Stands in for a kernel and keeps the arguments of its last launch."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.args, self.options = args, options

        return launch


def compiled(kernel, launch, architecture):
    """The kernel specialised as a launch with these arguments would have it."""
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = launch.args[index] if index < len(launch.args) else launch.options[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):  # Triton compiles a 1 into the kernel
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                hints[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = {int: "i32", float: "fp32"}[type(value)]
            if isinstance(value, int) and value % 16 == 0:
                hints[(index,)] = [["tt.divisibility", 16]]
    options = {name: launch.options[name] for name in ("num_warps", "launch_pdl", "maxnreg") if name in launch.options}
    return triton.compile(ASTSource(kernel, signature, constants, hints), target=GPUTarget("cuda", architecture, 32), options=options)


def facts(binary):
    lines = binary.asm["ptx"].splitlines()
    weights = [number for number, line in enumerate(lines) if "ld.global" in line and ("evict_first" in line or "no_allocate" in line)]
    waits = [number for number, line in enumerate(lines) if "griddepcontrol.wait" in line]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {
        "weights": sorted({re.search(r"\.((?:v\d\.)?b\d+)", lines[number]).group(1) for number in weights}),
        "stack": max(map(int, re.findall(r"STACK:(\d+)", usage))),
        "early": bool(weights and waits and weights[0] < waits[0]),
    }


def fp8(*shape):
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return ScaledWeight(torch.empty(shape, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.empty(blocks), (128, 128))


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def launches(target):
    """name -> (kernel, its recorded launch) for every kernel of a step, with programmatic dependent launch where it exists."""
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
    common = dict(norm=norm, pdl=True)
    tail = [bf16(32, 2048), bf16(32, 2048)]
    plan = Fp8Gemv([fp8(8192, 2048), fp8(4096, 2048)], target, tail=tail, **common)
    record("qkv z b a", gemv, "gemv_kernel", lambda: plan(x, out))
    plan = Fp8Gemv([fp8(2048, 4096)], target, pdl=True)
    record("out", gemv, "gemv_kernel", lambda: plan(x, out, out))
    plan = DenseGemv([bf16(24832, 2048)], target, **common)
    record("head", gemv, "gemv_kernel", lambda: plan(x, out))
    matrix, switch, ids, shares = bf16(256, 2048), bf16(1, 2048), torch.zeros(8, dtype=torch.int32), torch.zeros(9)
    plan = router.RouterPlan(matrix, switch, 8, target, **common)
    record("router", gemv, "gemv_kernel", lambda: plan._product(x, plan.logits))
    plan._product = lambda *ignored: None
    record("choice", router, "choose_kernel", lambda: plan(x))
    for name, make in (("fp8", fp8), ("bf16", bf16)):
        stacks = ExpertWeights(make(4, 512, 2048), make(4, 512, 2048), make(4, 2048, 512))
        weights = MoEWeights(bf16(4, 2048), stacks, make(512, 2048), make(512, 2048), make(2048, 512), switch)
        plan = moe_decode.ExpertsPlan(weights, 8, target, **common)
        record(f"{name} up", moe_decode, "expert_up_kernel", lambda: plan.up(x, ids))
        record(f"{name} down", moe_decode, "expert_down_kernel", lambda: plan.down(ids, shares, out, out))
    if target.fp8_native:
        on_matrix_units(target, record, dict(common, matrix_units=True), tail)
    return found


def on_matrix_units(target, record, common, tail):
    """The launches of the same shapes on the matrix units."""
    x, out, ids, shares = torch.empty(4096), torch.empty(30000), torch.zeros(8, dtype=torch.int32), torch.zeros(9)
    for name, sizes, behind in (("qkv z b a", (8192, 4096), tail), ("q k v", (8192, 512, 512), ())):
        plan = Fp8Gemv([fp8(size, 2048) for size in sizes], target, tail=behind, **common)
        record("matrix units " + name, fp8_gemv, "matrix_gemv_kernel", lambda: plan(x, out))
    plan = Fp8Gemv([fp8(2048, 4096)], target, pdl=True, matrix_units=True)
    record("matrix units out", fp8_gemv, "matrix_gemv_kernel", lambda: plan(x, out, out))
    stacks = ExpertWeights(fp8(4, 512, 2048), fp8(4, 512, 2048), fp8(4, 2048, 512))
    weights = MoEWeights(bf16(4, 2048), stacks, fp8(512, 2048), fp8(512, 2048), fp8(2048, 512), bf16(1, 2048))
    plan = moe_decode.ExpertsPlan(weights, 8, target, early_x=True, **common)
    record("matrix units up", moe_decode, "matrix_up_kernel", lambda: plan.up(x, ids))
    record("matrix units down", moe_decode, "matrix_down_kernel", lambda: plan.down(ids, shares, out, out))


def main():
    report = {}
    for architecture in map(int, sys.argv[1:]):
        overlap = architecture >= 90 and hasattr(triton.language.extra.cuda, "gdc_wait")
        target = Target(torch.device("cpu"), divmod(architecture, 10), 132, architecture >= 89, overlap)
        report[architecture] = {
            name: facts(compiled(kernel, launch, architecture)) for name, (kernel, launch) in launches(target).items()
        }
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
