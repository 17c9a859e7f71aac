"""Kernels of many tokens over packed weights: numbers against the model, code for every architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import needs_triton, run_cases


@needs_triton
def test_packed_prefill_kernels_under_the_interpreter():
    run_cases("interpreted_packed_prefill.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """At the 35B sizes shared memory fits every card, nothing spills, codes and activations are copied ahead; on sm_90 products of
    weights are warpgroup instructions."""
    script = Path(__file__).with_name("compiled_packed_prefill.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, "80", "86", "89", "90", "120"], env=environment, capture_output=True, text=True, encoding="utf-8", timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    room = {"80": 163, "86": 99, "89": 99, "90": 227, "120": 99}  # KiB a program may take
    report = json.loads(done.stdout)
    assert list(report) == list(room)
    for architecture, kernels in report.items():
        names = {name.split()[0] for name in kernels}
        assert {"packed_up_kernel", "packed_down_kernel", "packed_dequantize_kernel"} <= names
        for name, found in kernels.items():
            assert found["shared"] <= room[architecture] * 1024, (architecture, name, found)
            assert found["stack"] <= 32, (architecture, name, found)
            if "dequantize" not in name:
                assert found["copies"] and max(found["copies"]) == 16, (architecture, name, found)
                assert found["wgmma"] == (architecture == "90"), (architecture, name, found)
