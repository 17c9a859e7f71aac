"""Compile the state and sampler kernels at the 35B sizes for GPUs that are not there, as compiled_ahead.py does for weights.

    python compiled_state_kernels.py 80 90 ...

Prints one JSON object: architecture -> launch -> {"stack": bytes spilled per thread, "shared": bytes of shared memory,
"fused": fused multiply-adds}. Run in a process of its own, without TRITON_INTERPRET.
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

from a3b_engine.kernels import attention_decode, deltanet_decode, sampler  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.kernels.support import Target  # noqa: E402
from a3b_engine.sampling import SamplingParams  # noqa: E402

CPU = torch.device("cpu")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")


class Recorder:
    """Stands in for a kernel and keeps the arguments of its last launch."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.args, self.options = args, options

        return launch


def launches(target):
    """name -> (kernel, recorded launch) of one attention layer, one DeltaNet layer and the sampler."""
    config, pdl = PUBLISHED, target.pdl
    places = [
        (attention_decode, "_attend"), (attention_decode, "_combine"), (deltanet_decode, "_deltanet"),
        (sampler, "score"), (sampler, "shortlist"), (sampler, "choose"), (sampler, "settle"), (sampler, "draw_uniform"),
        (sampler, "count_one"), (sampler, "count_all"),
    ]  # fmt: skip
    kernels = {name: getattr(module, name) for module, name in places}
    recorders = {name: Recorder() for name in kernels}
    for module, name in places:
        setattr(module, name, recorders[name])
    values, half = torch.empty(1 << 16), torch.empty(1 << 16, dtype=torch.bfloat16)
    number = torch.zeros(1, dtype=torch.int64)
    plan = attention_decode.plan_attention(config, torch.bfloat16, target)
    scratch = attention_decode.AttentionScratch(config, plan, CPU)
    cache = torch.empty(2, 4096, 2, 256, dtype=torch.bfloat16)
    attention_decode.attention_decode(half, values, values, cache, number, number, half, scratch, plan, config, pdl=pdl)
    plan = deltanet_decode.plan_deltanet(config, target)
    scratch = deltanet_decode.DeltaNetScratch(config, CPU)
    deltanet_decode.deltanet_decode(
        half, half, half, half, half, values, values, values, half, values, number, half, scratch, plan, config, pdl=pdl
    )
    device = sampler.DeviceSampler(248320, 248077, (248046, 248044), CPU)
    for top_k in (20, 0):
        device.start(SamplingParams(top_k=top_k), [])
        device.sample(torch.zeros(248320), needs_sort=device.needs_sort, pdl=pdl and top_k > 0)
    device.record([5])
    device.record(number)
    for module, name in places:
        setattr(module, name, kernels[name])
    return {name: (kernels[name], recorders[name]) for name in kernels}


def compiled(kernel, launch, architecture):
    """The kernel specialised as this launch would have it."""
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = launch.args[index] if index < len(launch.args) else launch.options[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(index,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = {int: "i32", float: "fp32"}[type(value)]
    options = {name: launch.options[name] for name in OPTIONS if name in launch.options}
    return triton.compile(ASTSource(kernel, signature, constants, hints), target=GPUTarget("cuda", architecture, 32), options=options)


def facts(binary):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    stack, fused = max(map(int, re.findall(r"STACK:(\d+)", usage))), len(re.findall(r"\bfma\.rn\.f32", binary.asm["ptx"]))
    return {"registers": max(map(int, re.findall(r"REG:(\d+)", usage))), "stack": stack, "shared": binary.metadata.shared, "fused": fused}


def main():
    report = {}
    for architecture in map(int, sys.argv[1:]):
        capability = divmod(architecture, 10)
        target = Target(CPU, capability, 132, fp8_native=capability >= (8, 9), pdl=capability >= (9, 0))
        report[architecture] = {name: facts(compiled(*found, architecture)) for name, found in launches(target).items()}
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
