"""What the scripts share that compile kernels ahead of time, each in a process of its own, without a card."""

import os
import tempfile

import torch


def in_a_cache_of_its_own(main):
    """Run `main` with nothing compiled before, and leave nothing behind."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main()
