"""`bench`: speed and memory of the engine, on random weights in the full published shape or on a checkpoint folder."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MemoryBudgetError
from .console import CUT, note, print_json, say

if TYPE_CHECKING:
    from ..bench.measure import BenchSettings
    from ..bench.shape import ModelShape
    from ..options import EngineOptions

PUBLISHED_LAYERS = 40
_DESCRIPTION = """\
Time the engine and print a table (--json: all details as one JSON object). Without --model it makes random weights in the full
Qwen3.5-35B-A3B shape on the device (no files needed, a card with 40 GB): they run the same operations on the same bytes as
real ones, so speed and memory hold, the words do not.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("bench", help="measure speed and memory", description=_DESCRIPTION)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder (default: random weights, no files)")
    parser.add_argument("--context", type=int, nargs="+", metavar="N", help="tokens of context for decode (default: 512 8192 32768, as far as the model goes)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of the prefill (default: 2048, as far as the model goes)")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="tokens of each decode run (default %(default)s)")
    parser.add_argument("--format", default="stored", metavar="NAME", help="routed experts: stored, int4, int3; nvfp4 for random weights too (default %(default)s)")
    parser.add_argument("--vram-gb", type=float, default=0.0, metavar="GB", help="hold no more than this on the device, enforced by torch's allocator (0: no cap)")
    parser.add_argument(
        "--routing", default="model", metavar="NAME", help="which experts decode steps ask for: model (its router's), uniform, skewed (as measured; default %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--table6", action="store_true", help="instead of all that: the goals for a part of the weights (4-bit, 3-bit, 24, 16 and 12 GB), minutes on a card with 48 GB"
    )  # fmt: skip
    parser.add_argument(
        "--files", type=Path, metavar="DIR", help="with --table6: make 37 GB of files in this new folder for the time of a load, remove them after it"
    )  # fmt: skip
    parser.add_argument("--image", action=argparse.BooleanOptionalAction, default=True, help="prompts with a picture (default on)")
    parser.add_argument("--grammar", action=argparse.BooleanOptionalAction, default=True, help="decode under the comic script's schema (default on)")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True, help="time by kernel (default on)")
    parser.add_argument("--layers", type=int, default=PUBLISHED_LAYERS, metavar="N", help="layers of the random model, for a quick look (default %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, ..., or cpu (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each figure; the median counts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, texts and answers (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all details instead of the table")


def run(options: argparse.Namespace, shape: ModelShape | None = None) -> int:
    """Returns 0. shape: of the random model, by default the published one with `--layers` layers. Bad input and what does
    not fit raise `A3BError`, which the caller prints in one line."""
    from dataclasses import replace

    from ..bench.bench import Bench
    from ..bench.made_up import made_up_parts
    from ..bench.shape import ModelShape
    from ..bench.table import table
    from ..parts import parts_of_folder

    _check(options)
    checked = _engine_options(options)
    if options.table6:
        return _table6(options, checked)
    if options.model is not None:
        parts = parts_of_folder(options.model)
    else:
        parts = made_up_parts(shape or replace(ModelShape(), layers=options.layers), options.seed, options.format)
    settings = _settings(options, parts.config.text.max_position_embeddings)
    if checked.device.type == "cpu":
        _say("on a CPU: these figures say nothing about a graphics card, and the published shape takes very long")
    report = Bench(parts, checked, settings, _say).run()
    report["model"] |= {"source": "random" if options.model is None else str(options.model), "format": options.format}
    report["model"]["whole"] = options.model is not None or (shape is None and options.layers == PUBLISHED_LAYERS)
    _print(report, table, options.json)
    return 0


def _table6(options: argparse.Namespace, checked: EngineOptions) -> int:
    """The goals for a part of the weights, in the published shape. Returns 1 where a run failed, else 0."""
    from contextlib import nullcontext

    from ..bench.files import model_in_files
    from ..bench.made_up import made_up_parts
    from ..bench.measure import BenchSettings
    from ..bench.shape import ModelShape
    from ..bench.table import goals_table
    from ..bench.table6 import Table6
    from ..parts import parts_of_folder

    if checked.device.type != "cuda":
        raise ConfigError(f"--table6: found --device {options.device}; its budgets are those of a CUDA card.")
    shape = ModelShape()
    files = nullcontext(None if options.model is None else parts_of_folder(options.model))
    if options.files is not None:
        _say(f"writing files into {options.files}")
        files = model_in_files(options.files, shape)
    with files as from_files:
        settings = BenchSettings(prompt=options.prompt or BenchSettings.prompt, new=options.new, repeat=options.repeat, seed=options.seed)
        report = Table6(lambda form: made_up_parts(shape, options.seed, form), checked, settings, _say, from_files=from_files).run()
    _print(report, goals_table, options.json)
    return CUT if any("error" in run for run in report["runs"].values()) else 0


def _print(report: dict[str, Any], as_table: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    """The report for people, or for scripts."""
    if as_json:
        print_json(report)
    else:
        say(as_table(report))


def _check(options: argparse.Namespace) -> None:
    for name, low, high in (("new", 2, 65536), ("layers", 1, 1024), ("repeat", 1, 100), ("seed", 0, 2**32 - 1)):
        value = getattr(options, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name}: found {value}, expected a whole number from {low} to {high}.")
    if options.files is not None and (options.model is not None or not options.table6):
        raise ConfigError(f"--files: found {options.files}, but it makes files for --table6, and only where no --model is given.")
    if not (math.isfinite(options.vram_gb * 1e9) and options.vram_gb >= 0):
        raise MemoryBudgetError(f"--vram-gb: found {options.vram_gb}, expected gigabytes, or 0 for no cap.")


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    import torch

    from ..bench.packed import FORMATS, STORED
    from ..bench.routing import ROUTINGS
    from ..options import EXPERT_FORMATS, EngineOptions

    formats = FORMATS if options.model is None else EXPERT_FORMATS
    if options.format not in formats:
        raise ConfigError(f"--format: found {options.format!r}, expected one of {', '.join(formats)}{'' if options.model is None else ' for a checkpoint'}.")
    if options.routing not in ROUTINGS:
        raise ConfigError(f"--routing: found {options.routing!r}, expected one of {', '.join(ROUTINGS)}.")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device: torch sees no CUDA card here. For a quick look, without meaning for a card: --model demo_model/a3b-drawn-scenes-demo --device cpu --context 512 --repeat 1 --new 32")
    budget = math.ceil(options.vram_gb * 1e9) or None
    own = STORED if options.model is None else options.format  # random weights come in their format
    return EngineOptions.checked(options.device, expert_format=own, vram_budget=budget, park=budget is not None)


def _settings(options: argparse.Namespace, max_tokens: int) -> BenchSettings:
    """What to measure; lengths that were not asked for shrink to what the model takes."""
    from ..bench.measure import SPARE_TOKENS, BenchSettings

    usual = BenchSettings()
    most = max(1, max_tokens - options.new - SPARE_TOKENS)
    return BenchSettings(
        contexts=tuple(sorted(set(options.context))) if options.context else tuple(sorted({min(length, most) for length in usual.contexts})),
        prompt=options.prompt if options.prompt is not None else min(usual.prompt, most),
        new=options.new,
        repeat=options.repeat,
        seed=options.seed,
        image=options.image,
        grammar=options.grammar,
        profile=options.profile,
        routing=options.routing,
    )


def _say(line: str) -> None:
    note(f"bench: {line}")
