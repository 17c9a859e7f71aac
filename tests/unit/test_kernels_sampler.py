"""The sampler kernels against the sampler of the CPU path."""

from interpreted import needs_triton, run_cases


@needs_triton
def test_sampler_kernels_under_the_interpreter():
    run_cases("interpreted_sampler_kernels.py")
