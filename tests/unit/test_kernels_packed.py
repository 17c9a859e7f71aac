"""The kernels for packed weights: numbers under Triton's interpreter, code for every architecture."""

import sys

import pytest
from compiling import report_of
from interpreted import needs_triton, run_cases


@needs_triton
def test_packed_kernels_under_the_interpreter():
    run_cases("interpreted_packed_kernels.py")


@needs_triton
def test_kernels_on_the_matrix_units_whole():
    run_cases("interpreted_packed_matrix.py")


@needs_triton
def test_packed_models_decode_under_the_interpreter():
    run_cases("interpreted_packed_decode.py")


@needs_triton
def test_code_of_the_matrix_units_lane_by_lane():
    run_cases("interpreted_packed_units.py")


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """The kinds of packed weights at the 35B sizes; a thread spills four registers at most; codes of four bits are read 8 bytes (NVFP4) or more at a time; from sm_90 on
    the matrix units' are asked for before the wait wherever they do not depend on the router."""
    report = report_of("compiled_packed_kernels.py")
    for architecture, kernels in report.items():
        for name, facts in kernels.items():
            where = f"{name} on sm_{architecture}"
            assert facts["stack"] <= 16, where
            if "int3" not in name:
                assert set(facts["weights"]) <= {"v4.b32", "v2.b32"} and facts["weights"], where
                early = int(architecture) >= 90 and name.startswith("matrix units") and " up," not in name
                assert facts["early"] == early, where
