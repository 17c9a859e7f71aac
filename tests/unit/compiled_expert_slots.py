"""Compile the kernels of expert slots at the 35B sizes for GPUs that are not there, as compiled_state_kernels.py does for the state.

    python compiled_expert_slots.py 80 90 ...

Prints one JSON object: architecture -> launch -> {"stack": bytes spilled per thread, "shared": bytes of shared memory,
"registers", "loads" and "stores": widths of the loads past the first cache, and of stores, "waits": whether it waits for the kernel ahead before it lets the next
start, "warmed": loads ahead of that wait}. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import sys
from pathlib import Path

import torch
from compiled_state_kernels import CPU, compiled, facts
from compiling import in_a_cache_of_its_own

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from a3b_engine.kernels import expert_slots, launcher  # noqa: E402
from a3b_engine.kernels.support import Target  # noqa: E402

RECORD = 3_146_496  # bytes of an FP8 expert


class Launch:
    """Arguments and constants of a launch that was not made."""

    def __init__(self, args, options):
        self.args, self.options = args, options


def launches(target):
    """name -> (kernel, its recorded launch)."""
    found = {}

    def record(self, grid, *args):
        found[self._kernel.__name__] = self._kernel, Launch(args, self._constants)

    def table(*shape, dtype=torch.int64):
        return torch.zeros(shape, dtype=dtype)

    half = dict(dtype=torch.int32)
    tables = expert_slots.LayerTables(
        table(256), table(256, **half), table(256, **half), table(256), table(256), table(1), table(2), table(1, **half), table(257, 12), table(12), True
    )
    call, launcher.Launcher.__call__ = launcher.Launcher.__call__, record
    try:
        take, scratch = expert_slots.TakeSlots(tables, 8, target, pdl=True), expert_slots.VisitScratch(256, CPU)
        ids = torch.zeros(64, 8, dtype=torch.int32)
        take(ids[0])
        expert_slots.Fetch(take.copies, RECORD, target, pdl=True)()
        expert_slots.Visit(tables, scratch, RECORD, target, pdl=True)(ids, torch.zeros(2, RECORD, dtype=torch.uint8))
    finally:
        launcher.Launcher.__call__ = call
    return found


def more_facts(binary):
    lines = binary.asm["ptx"].splitlines()
    wait = next((number for number, line in enumerate(lines) if "griddepcontrol.wait" in line), None)
    start = next((number for number, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line), None)
    return {
        **facts(binary),
        "loads": sorted(set(re.findall(r"ld\.global\.cg\.((?:v\d\.)?b\d+)", binary.asm["ptx"]))),
        "stores": sorted(set(re.findall(r"st\.global\.((?:v\d\.)?b\d+)", binary.asm["ptx"]))),
        "waits": wait is not None and start is not None and wait < start,
        "warmed": 0 if wait is None else sum("ld." in line and "global" in line for line in lines[:wait]),
    }


def main():
    report = {}
    for architecture in map(int, sys.argv[1:]):
        capability = divmod(architecture, 10)
        target = Target(CPU, capability, 132, fp8_native=capability >= (8, 9), pdl=capability >= (9, 0))
        report[architecture] = {name: more_facts(compiled(*found, architecture)) for name, found in launches(target).items()}
    print(json.dumps(report))


if __name__ == "__main__":
    in_a_cache_of_its_own(main)
