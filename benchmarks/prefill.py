"""Prefill in compiled kernels: numbers, then speed, in the full Qwen3.5-35B-A3B shape with random weights.

    python benchmarks/prefill.py [--layers 40] [--sizes 64 256 512 2048 8192] [--format int4 --group 32] [--sweep] [--plain]

Prints one JSON object: self-tests; errors of a four-layer model against float32, beside the plain path's own; tokens a
second and peak memory for each prompt length; and with --profile the time each kernel takes. --sweep times the candidates for
the tile sizes; --format gives the routed experts (and, with --everything, all that FP8 files scale) few bits; `--compile I N` makes the I-th of N processes only compile its share of them, to run many at once.

Predicted for one H200 before any measurement (ms for all 40 layers; a layer of 64 tokens reads about 220 of 256 experts):

| tokens | experts | projections | DeltaNet, attention | rows, routing | together | tokens/s |
|---|---|---|---|---|---|---|
| 64 | 8.0 | 0.9 | 0.6 | 1.0 | 10.5 | 6,100 |
| 256 | 10 | 1.6 | 0.9 | 1.5 | 14 | 18,000 |
| 512 | 11 | 2.8 | 1.5 | 1.7 | 17 | 30,000 |
| 2048 | 22 | 10 | 7 | 5 | 44 | 46,000 |
| 8192 (four pieces) | 88 | 40 | 32 | 20 | 180 | 45,000 |

Measured there, torch 2.11, 2026-11-30, with random routing (64 tokens go to 211 of 256 experts in the last layer); the plain
path beside it, on the same machine:

| tokens | 1 | 16 | 64 | 128 | 256 | 512 | 2048 | 8192 |
|---|---|---|---|---|---|---|---|---|
| ms | 7.9 to 10.4 | 7.8 | 11.9 | 14.1 | 15.4 | 19.4 | 47.0 | 196 |
| tokens/s | 97 to 127 | 2,044 | 5,398 | 9,101 | 16,625 | 26,335 | 43,543 | 41,770 |
| plain | 12 | 85 | 199 | 339 | 651 | 1,283 | 4,098 | |

With `--format int4 --group 64`, all on the card, the same day (experts twice as large as now, so that 64 tokens went to only 106
experts of the last layer, and 512 to 224): 64 tokens 11.9 ms, 512 in 24.9 ms, 2048 in 53.8 ms (38,100 tokens/s). Tile sizes are those
of FP8, not tuned for packed weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Callable

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prefill_sweep import sweep  # noqa: E402

from a3b_engine.bench.shape import ModelShape, model_config  # noqa: E402
from a3b_engine.bench.weights import RandomWeights  # noqa: E402
from a3b_engine.checkpoint.packed import PackedWeight  # noqa: E402
from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.config import ModelConfig  # noqa: E402
from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.packed_prefill import PackedForm, random_packed  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.forward import forward_chunks  # noqa: E402
from a3b_engine.runtime.prefill import KERNELS, PACKED_KERNELS, FastText  # noqa: E402

BF16 = torch.bfloat16
GROUPS = {"int4": 32, "int3": 32, "nvfp4": 16}


def form_of(options: argparse.Namespace) -> PackedForm | None:
    """The layout that --format and --group ask for; a group of 0 is a whole row."""
    if options.format is None:
        return None
    group = GROUPS[options.format] if options.group is None else options.group
    if options.format == "nvfp4":
        return PackedForm("e2m1", 4, group, torch.float8_e4m3fn, False, "times")
    return PackedForm("int", int(options.format[-1]), group, torch.float16, options.zero, "")


def packed(weights: dict, form: PackedForm | None, everything: bool = False) -> dict:
    """The routed experts in `form`; with `everything` all weights in FP8."""
    for number, (name, weight) in enumerate(weights.items()):
        if form is not None and isinstance(weight, ScaledWeight) and (everything or ".experts." in name):
            fitting = dataclasses.replace(form, group=form.group or weight.shape[-1])
            weights[name] = found = random_packed(fitting, tuple(weight.shape), weight.data.device, number)
            # As large as those in FP8, so that the tokens' own part stays the larger one and routing as spread.
            (found.scale if found.factor is None else found.factor).mul_(0.5)
    return weights


class Stopwatch:
    """Seconds of the work queued inside the block, the device's included."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._began


def float32_twin(weights: dict) -> dict:
    """The same weights, dense ones in float32."""
    return {name: weight if isinstance(weight, (ScaledWeight, PackedWeight)) else weight.float() for name, weight in weights.items()}


def lively(weights: dict) -> dict:
    """Random convolutions and gates as large as trained ones, so that the states are no noise."""
    for name, weight in weights.items():
        if name.endswith("conv1d.weight"):
            weight.mul_(20.0)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            weight.mul_(2.0)
    return weights


def run(model: TextModel | FastText, config: ModelConfig, ids: list[int], dtype: torch.dtype, chunk: int = 2048) -> tuple[torch.Tensor, SequenceState]:
    state = SequenceState(config.text, 1 << 17, model.embedding.device, dtype)
    return torch.cat(list(forward_chunks(model, config, state, ids, chunk_size=chunk))), state


def errors(device: torch.device, where: support.Target, form: PackedForm | None = None, everything: bool = False) -> dict:
    """Relative error of the last logits against float32, four layers of the published kind: plain bfloat16 path and kernels."""
    config = model_config(ModelShape(layers=4))
    weights = packed(lively(RandomWeights(config).load(device, BF16, dequantize=False)), form, everything)
    plain, exact = TextModel(config.text, weights), TextModel(config.text, float32_twin(weights))
    fast, found = FastText(plain, where), {}
    generator = torch.Generator().manual_seed(5)
    for tokens, chunk in ((1, 2048), (3, 2048), (16, 2048), (65, 2048), (300, 2048), (300, 100), (700, 2048), (2048, 2048)):
        ids = torch.randint(0, 240000, (tokens,), generator=generator).tolist()
        rows = slice(-64, None)
        expected = exact.logits(run(exact, config, ids, torch.float32)[0][rows])
        hidden = run(fast, config, ids, BF16, chunk)[0]
        found[f"{tokens} in {chunk}"] = {
            "plain": round(support.relative_error(plain.logits(run(plain, config, ids, BF16)[0][rows]), expected), 5),
            "kernels": round(support.relative_error(fast.logits(hidden[rows]), expected), 5),
            "same bits": torch.equal(hidden, run(fast, config, ids, BF16, chunk)[0]),
        }
    return found


def profile(call: Callable[[], object]) -> dict:
    """Milliseconds on the device by kernel, largest first, of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in seen.events():
        entry = times.setdefault(event.name[:44], [0, 0.0])
        entry[0] += 1
        entry[1] += event.device_time / 1e3
    ordered = sorted(times.items(), key=lambda item: -item[1][1])[:16]
    return {name: f"{total:.3f} ms in {count}" for name, (count, total) in ordered}


def speed(options: argparse.Namespace, device: torch.device, where: support.Target) -> dict:
    config = model_config(ModelShape(layers=options.layers))
    weights = packed(RandomWeights(config).load(device, BF16, dequantize=False), form_of(options), options.everything)
    # The tokens' own part stays the larger one through all layers, so that tokens go to experts of their own: the dearest case.
    weights["embed_tokens.weight"].mul_(50.0)
    plain = TextModel(config.text, weights)
    with Stopwatch(device) as planning:
        fast = FastText(plain, where)
    report: dict = {"plan_s": round(planning.seconds, 2), "sizes": {}}
    generator = torch.Generator().manual_seed(1)
    for tokens in options.sizes:
        ids = torch.randint(0, 240000, (tokens,), generator=generator).tolist()
        with Stopwatch(device) as first:
            run(fast, config, ids, BF16)
        run(fast, config, ids, BF16)
        torch.cuda.reset_peak_memory_stats()
        before, times = torch.cuda.memory_allocated(), []
        for _ in range(7):
            with Stopwatch(device) as watch:
                run(fast, config, ids, BF16)
            times.append(watch.seconds * 1e3)
        entry = {
            "first_ms": round(first.seconds * 1e3), "ms": round(statistics.median(times), 2), "tokens_per_s": round(tokens / statistics.median(times) * 1e3),
            "least_ms": round(min(times), 2), "peak_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6),
        }  # fmt: skip
        state = SequenceState(config.text, 1 << 17, device, BF16)
        x, positions = fast.embed(torch.tensor(ids, device=device)), torch.arange(tokens, device=device).expand(3, -1)
        entry["experts_of_last_layer"] = experts_touched(fast, x, positions, config)
        hosts, forwards = [], []
        for _ in range(9 if tokens <= 2048 else 2):
            with Stopwatch(device) as watch:
                with HostWatch(device) as host:
                    fast.forward(x, positions, state.layers)
            hosts.append(host.seconds * 1e3)
            forwards.append(watch.seconds * 1e3)
        entry.update(host_ms=round(statistics.median(hosts), 2), forward_ms=round(statistics.median(forwards), 2))
        if options.profile and tokens <= 2048:
            entry["kernels"] = profile(lambda x=x, positions=positions, state=state: fast.forward(x, positions, state.layers))
        if options.plain and tokens <= 2048:
            run(plain, config, ids, BF16)
            with Stopwatch(device) as watch:
                run(plain, config, ids, BF16)
            entry["plain_tokens_per_s"] = round(tokens / watch.seconds)
        report["sizes"][tokens] = entry
        print(tokens, json.dumps(entry), flush=True)
    return report


def experts_touched(fast: FastText, x: torch.Tensor, positions: torch.Tensor, config: ModelConfig) -> int:
    """How many experts of the last layer anybody goes to."""
    plan, seen = fast._layers[-1]._route, []
    call = type(plan).__call__

    def watched(self: object, *args: torch.Tensor) -> None:
        call(self, *args)
        seen.append(args[3])

    type(plan).__call__ = watched
    try:
        fast.forward(x, positions, SequenceState(config.text, 1 << 17, x.device, BF16).layers)
    finally:
        type(plan).__call__ = call
    return len(seen[-1].unique())


class HostWatch(Stopwatch):
    """Seconds until the host has launched everything, the device not waited for."""

    def __exit__(self, *_: object) -> None:
        self._wait = lambda: None
        super().__exit__()


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 512, 2048, 8192])
    parser.add_argument("--format", choices=tuple(GROUPS), help="routed experts of few bits")
    parser.add_argument("--group", type=int, help="columns that share a scale; 0: all of a row")
    parser.add_argument("--zero", action="store_true", help="whole numbers have a zero for each group")
    parser.add_argument("--everything", action="store_true", help="with --format: projections and the shared expert too")
    parser.add_argument("--plain", action="store_true", help="measure the plain path too")
    parser.add_argument("--profile", action="store_true", help="time of each kernel")
    parser.add_argument("--no-checks", action="store_true", help="only speed")
    parser.add_argument("--sweep", action="store_true", help="time candidates for tile sizes, nothing else")
    parser.add_argument("--only", nargs="*", default=[], help="candidates whose name begins like this")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"), help="only compile a share of the candidates")
    parser.add_argument("--json", type=Path, help="write everything here too")
    return parser.parse_args(given)


@torch.inference_mode()
def main() -> None:
    options = arguments()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    where = support.target(device)
    if where is None:
        raise SystemExit("no GPU that the kernels run on")
    report: dict = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "target": {**dataclasses.asdict(where), "device": str(device)}}
    if options.compile or options.sweep:
        report["sweep"] = sweep(where.device, where, options.compile, tuple(options.only), form_of(options))
    else:
        if not options.no_checks:
            names = KERNELS + (PACKED_KERNELS if options.format else ())
            support.all_usable(names, device)
            report["self_tests"] = {name: support.usable(name, device) for name in names}
            print(json.dumps(report["self_tests"]), flush=True)
            report["errors"] = errors(where.device, where, form_of(options), options.everything)
            print(json.dumps(report["errors"], indent=1), flush=True)
        report["speed"] = speed(options, where.device, where)
    text = json.dumps(report, indent=1)
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    if options.sweep:
        for what, entries in report["sweep"].items():
            print(what, "|", "; ".join(f"{time} {tiles}" for time, tiles in entries[:5]))
    elif not options.compile:
        print(text)


if __name__ == "__main__":
    main()
