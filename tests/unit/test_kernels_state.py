"""Norm, attention, DeltaNet and sampler kernels of the decode step: numbers against the model, code for every architecture."""

import sys

import pytest
from compiling import report_of
from interpreted import needs_triton, run_cases


@needs_triton
def test_state_kernels_under_the_interpreter():
    run_cases("interpreted_state_kernels.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """At the 35B sizes nothing spills but four registers of attention where it holds most (sine and cosine of large angles
    keep 32 bytes), shared memory fits two programs of a multiprocessor, one on sm_90, and the scores, which must be
    bit-equal to the CPU's, are made without fused multiply-adds."""
    report = report_of("compiled_state_kernels.py")
    for architecture, kernels in report.items():
        assert len(kernels) == 10
        for name, facts in kernels.items():
            assert facts["stack"] <= ((48 if architecture == "90" else 32) if name == "_attend" else 0), f"{name} on sm_{architecture}"
            assert facts["shared"] <= {"80": 80, "90": 200}.get(architecture, 50) * 1024, f"{name} on sm_{architecture}"
        assert kernels["score"]["fused"] == kernels["choose"]["fused"] == 0
