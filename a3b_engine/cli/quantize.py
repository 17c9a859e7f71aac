"""`quantize`: a checkpoint folder with smaller experts, made from the FP8 or BF16 folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ..errors import ConfigError
from .console import note, print_json, say

_DESCRIPTION = """\
Write a checkpoint folder with fewer bits. int4 and int3: the routed experts get 4 or 3 bits and a float16 scale for each group
of columns, everything else stays as it is in the file. fp8: from a BF16 folder, as the official FP8 folder. The new
folder appears when it is whole; after an interruption the same command goes on.
"""
_SECONDS = 0.5  # between two lines of progress on a terminal


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("quantize", help="make a folder with 4-bit, 3-bit or FP8 weights", description=_DESCRIPTION)
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder (FP8 or BF16)")
    parser.add_argument("target", type=Path, metavar="DST", help="new folder")
    parser.add_argument("--to", required=True, choices=("int4", "int3", "fp8"), help="what to make")
    parser.add_argument("--group", type=int, metavar="N", help="columns of an expert that share a scale: 32, 64 or 128; more is smaller and less exact (default 64)")
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ...; auto: the first CUDA card, else the CPU (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Returns 0. Bad input and what does not fit raise `A3BError` or `OSError`, which the caller prints in one line."""
    import torch

    from ..checkpoint.quantize.convert import UNFINISHED, convert
    from ..options import EngineOptions

    if options.group not in (None, 32, 64, 128):
        raise ConfigError(f"--group: found {options.group}, expected 32, 64 or 128.")
    device = options.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = EngineOptions.checked(device).device
    began, progress = time.perf_counter(), _Progress()
    try:
        result = convert(options.source, options.target, options.to, group=options.group, device=device, progress=progress)
    except KeyboardInterrupt:
        progress.end()
        unfinished = options.target.with_name(options.target.name + UNFINISHED)
        note(f"quantize: stopped. {unfinished} keeps what is finished: the same command goes on there; delete it to give up.")
        raise
    finally:
        progress.end()
    seconds = time.perf_counter() - began
    if options.json:
        print_json(
            {"folder": str(result.folder), "to": options.to, "weight_bytes": result.bytes, "files_resumed": result.resumed, "made": result.made, "seconds": round(seconds, 1)}
        )
    elif not result.made:
        say(f"{result.folder} holds this result already")
    else:
        say(f"{result.folder}: {result.bytes / 1e9:.2f} GB of weights, {seconds:.0f} s")
    return 0


class _Progress:
    """A line on standard error: rewritten on a terminal, else one for every tenth."""

    def __init__(self) -> None:
        self._shown, self._at, self._open = -1, 0.0, False

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        now = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            if now - self._at >= _SECONDS or done == total:
                self._at, self._open = now, True
                note(f"\rquantize: {done / 1e9:.1f} of {total / 1e9:.1f} GB", end="")
        elif tenths > self._shown:
            self._shown = tenths
            note(f"quantize: {10 * tenths} %")

    def end(self) -> None:
        if self._open:
            self._open = False
            note()
