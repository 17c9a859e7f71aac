"""What the scripts share that compile kernels ahead of time, each in a process of its own, without a card, and how tests run them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def in_a_cache_of_its_own(main):
    """Run `main` with nothing compiled before, and leave nothing behind."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main()


ARCHITECTURES = ("80", "86", "89", "90", "120")


def report_of(script):
    """What a script of this folder prints of its kernels: architecture -> kernel -> facts."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *ARCHITECTURES]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert list(report) == list(ARCHITECTURES)
    return report
