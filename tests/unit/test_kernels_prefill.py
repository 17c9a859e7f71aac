"""Kernels of many tokens: numbers against the model, code for every architecture."""

import sys

import pytest
from compiling import report_of
from interpreted import needs_triton, run_cases


@needs_triton
def test_prefill_kernels_under_the_interpreter():
    run_cases("interpreted_prefill_kernels.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """At the 35B sizes shared memory fits every card, next to nothing spills (the delta rule's two kernels apart, which hold several
    64 x 64 matrices), and what is loaded ahead is copied in pieces of 8 bytes and more; on sm_90 products of weights are warpgroup
    instructions."""
    report = report_of("compiled_prefill_kernels.py")
    room = {"80": 163, "86": 99, "89": 99, "90": 227, "120": 99}  # KiB a program may take
    for architecture, kernels in report.items():
        names = {name.split()[0] for name in kernels}
        assert len(names) == 14, names
        for name, found in kernels.items():
            assert found["shared"] <= room[architecture] * 1024, (architecture, name, found)
            allowed = 400 if name.startswith(("prepare", "scan")) else 32
            assert found["stack"] <= allowed, (architecture, name, found)
            if name.startswith(("gemm", "experts")):
                assert found["copies"] and min(found["copies"]) >= 8, (architecture, name, found)
                assert found["wgmma"] == (architecture == "90"), (architecture, name, found)
