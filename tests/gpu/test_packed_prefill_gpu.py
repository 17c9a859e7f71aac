"""Kernels of many tokens over packed experts on a CUDA GPU, at the sizes of Qwen3.5-35B-A3B: four layers of random weights, against
float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEVICE = "cuda:0"


def test_self_tests_pass():
    from a3b_engine.kernels import support
    from a3b_engine.runtime.prefill import PACKED_KERNELS

    if support.target(DEVICE) is None:
        pytest.skip("the kernels are not written for this GPU")
    assert {name: support.usable(name, DEVICE) for name in PACKED_KERNELS} == dict.fromkeys(PACKED_KERNELS, True)


@pytest.mark.parametrize(
    "arguments", [["--format", "int4"], ["--format", "int3", "--group", "64"], ["--format", "nvfp4"], ["--format", "int4", "--group", "128", "--zero", "--everything"]], ids=" ".join
)  # fmt: skip
def test_as_close_to_float32_as_the_plain_path(arguments, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "prefill", raising=False)
    import prefill as benchmark

    from a3b_engine.kernels import support

    where = support.target(DEVICE)
    if where is None:
        pytest.skip("the kernels are not written for this GPU")
    options = benchmark.arguments(arguments)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.inference_mode():
            found = benchmark.errors(where.device, where, benchmark.form_of(options), options.everything)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for case, entry in found.items():
        # Both err mostly where a router's close choice falls the other way: which of them has more such tokens is chance.
        assert entry["kernels"] <= 2 * entry["plain"] and entry["same bits"], (case, entry)
