"""Compile the kernels of many tokens at the 35B sizes for GPUs that are not there, as compiled_ahead.py does for decode.

    python compiled_prefill_kernels.py 80 90 ...

Prints one JSON object: architecture -> launch -> {"stack": bytes spilled per thread, "shared": bytes of shared memory,
"registers": a thread, "weights": widths of the asynchronous copies}. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import triton
from compiling import in_a_cache_of_its_own
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from a3b_engine.checkpoint.names import expected_tensors, may_stay_scaled  # noqa: E402
from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.kernels import launcher  # noqa: E402
from a3b_engine.kernels.shapes import PUBLISHED  # noqa: E402
from a3b_engine.kernels.support import Target  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.runtime import prefill  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402

CPU = torch.device("cpu")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
CONFIG = replace(PUBLISHED, vocab_size=8, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), num_experts=256)


def model(scaled):
    """One layer of either kind."""

    class Whole:
        text, vision = CONFIG, None

    weights = {}
    for name, shape in expected_tensors(Whole).items():
        if may_stay_scaled(name) and scaled and name != "lm_head.weight":
            codes = torch.empty(shape, dtype=torch.uint8)  # untouched, hence without memory behind it
            scale = torch.empty((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)))
            weights[name] = ScaledWeight(codes.view(torch.float8_e4m3fn), scale, (128, 128))
        else:
            weights[name] = torch.empty(shape, dtype=torch.bfloat16)
    return TextModel(CONFIG, weights)


def launches(target, scaled, tokens):
    """(kernel's name, constants) -> (kernel, arguments, constants) of one call with T tokens."""
    found = {}

    def record(self, grid, *args):
        name = self._kernel.__name__ + ("" if scaled else " dense") + f" {tokens}"
        found.setdefault((name, str(self._constants)), (self._kernel, args, self._constants))

    call, shape = launcher.Launcher.__call__, torch.mm
    launcher.Launcher.__call__, torch.mm = record, lambda *args, out: out
    try:
        text = model(scaled)
        fast = prefill.FastText(text, target)
        state = SequenceState(CONFIG, 1 << 16, CPU, torch.bfloat16)
        fast.forward(torch.zeros(tokens, CONFIG.hidden_size, dtype=torch.bfloat16), torch.zeros(3, tokens, dtype=torch.int64), state.layers)
    finally:
        launcher.Launcher.__call__, torch.mm = call, shape
    return found


def described(kernel, args, constants):
    """What a compiling process needs: numbers and types instead of tensors."""
    signature, hints = {}, {}
    for index, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif isinstance(args[index], torch.Tensor):
            signature[parameter.name], hints[(index,)] = "*" + TYPES[args[index].dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = {int: "i32", float: "fp32"}[type(args[index])]
    return kernel.__module__, kernel.__name__, signature, hints, {name: str(value) if isinstance(value, triton.language.dtype) else value for name, value in constants.items()}


def facts(job):
    architecture, (module, name, signature, hints, constants) = job
    kernel = getattr(sys.modules[module] if module in sys.modules else __import__(module, fromlist=["_"]), name)
    dtypes = {str(dtype): dtype for dtype in launcher.TRITON_TYPES.values()}
    values = {(kernel.arg_names.index(key),): dtypes.get(value, value) if isinstance(value, str) else value for key, value in constants.items() if key in kernel.arg_names}
    options = {key: constants[key] for key in ("num_warps", "num_stages", "launch_pdl") if key in constants}
    binary = triton.compile(ASTSource(kernel, signature, values, hints), target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", binary.asm["ptx"]))
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))), "stack": max(map(int, re.findall(r"STACK:(\d+)", usage))),
        "shared": binary.metadata.shared, "copies": sorted(int(size, 0) for size in copies), "wgmma": "wgmma.mma_async" in binary.asm["ptx"],
    }  # fmt: skip


def main():
    jobs = []
    for architecture in map(int, sys.argv[1:]):
        capability = divmod(architecture, 10)
        target = Target(CPU, capability, 132, fp8_native=capability >= (8, 9), pdl=capability >= (9, 0))
        seen = {}
        # The architectures between the extremes take the code paths of their neighbours: a short prompt and a long one do.
        cases = ((True, 16), (True, 2048)) if architecture in (86, 89) else ((True, 16), (True, 64), (True, 300), (True, 2048), (False, 64))
        for scaled, tokens in cases:
            for (name, constants), launch in launches(target, scaled, tokens).items():
                seen.setdefault((name.split()[0], constants), (name, launch))
        jobs += [(architecture, name, described(*launch)) for name, launch in seen.values()]
    report = {}
    with ProcessPoolExecutor(int(os.environ.get("COMPILE_PROCESSES", "2"))) as pool:
        results = pool.map(facts, [(architecture, job) for architecture, _, job in jobs])
        for (architecture, name, _), result in zip(jobs, results):
            entry = report.setdefault(architecture, {})
            entry[name if name not in entry else f"{name} {len(entry)}"] = result
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
