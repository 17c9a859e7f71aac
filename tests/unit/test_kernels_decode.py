"""One token through all layers by kernels, and answers made of such steps: numbers against the plain model."""

from interpreted import needs_triton, run_cases


@needs_triton
def test_decode_steps_under_the_interpreter():
    run_cases("interpreted_decode.py")
