"""Kernels of many tokens over packed weights: numbers against the model, code for every architecture."""

import sys

import pytest
from compiling import report_of
from interpreted import needs_triton, run_cases


@needs_triton
def test_packed_prefill_kernels_under_the_interpreter():
    run_cases("interpreted_packed_prefill.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """At the 35B sizes shared memory fits every card, nothing spills, codes and activations are copied ahead; on sm_90 products of
    weights are warpgroup instructions."""
    report = report_of("compiled_packed_prefill.py")
    room = {"80": 163, "86": 99, "89": 99, "90": 227, "120": 99}  # KiB a program may take
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
