"""What a process still holds of the card after an engine was closed: nothing but cuBLAS's own workspaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here")

MIB = 1024**2
# One for the thread that answers and one for the stream that graphs are recorded on, 32 MiB each on the largest cards, and a little beside.
WORKSPACES = 2 * 34 * MIB
SCRIPT = """
import gc
import numpy as np
import torch
from a3b_engine import Engine, Prompt, SamplingParams
from a3b_engine.bench.made_up import made_up_parts
from a3b_engine.bench.shape import ModelShape
from a3b_engine.kernels import support

def held():
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]

parts = made_up_parts(ModelShape(layers=4, vision_depth=2), experts="int4")
picture = np.zeros((384, 384, 3), dtype=np.uint8)
for part in (None, 4 * 10**9):
    engine = Engine.from_parts(parts, torch.device("cuda"), context=2048, vram_budget=part)
    before = held()
    engine.load_weights()
    print("loaded", held() - before - engine.memory()["total"])
    for number in range(3):
        engine.encode_image(picture if number else picture[:320])
        engine.generate(Prompt(user=f"Tell me a tale {number}"), SamplingParams(temperature=0.0, max_new_tokens=8))
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    print("held", held())
print("kernels", sum(support._verdicts.values()))
"""


def test_a_closed_engine_leaves_nothing_but_workspaces():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = [line.split() for line in done.stdout.splitlines()]
    print(done.stdout)
    held = [int(value) for name, value in figures if name == "held"]
    unseen = [int(value) for name, value in figures if name == "loaded"]
    assert len(held) == 2 and held[0] == held[1] <= WORKSPACES, held
    assert unseen[1] <= 4 * MIB and unseen[0] <= 4 * MIB + WORKSPACES, unseen  # the tables of the slots
    assert int(dict(figures)["kernels"]) > 8  # or none of it was tested
