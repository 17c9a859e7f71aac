"""Time and numbers of the kernels that read weights, at the shapes of Qwen3.5-35B-A3B, on one CUDA card.

    python benchmarks/kernels.py                       # every kernel, then one whole step of 40 layers
    python benchmarks/kernels.py --sweep [--only NAME]  # candidates for kernels/configs.py, without the matrix units
    python benchmarks/kernels.py --layers 4 --experts 32   # a quick look
    python benchmarks/kernels.py --format int4 --group 32  # routed experts of few bits beside the FP8 ones

Each kernel runs in a CUDA graph over the weights of `--layers` layers, different ones each, so that nothing is served
from the L2 cache, and is checked against float64 first. `share` is its bandwidth over that of a plain copy on the same
card. Prints one JSON object, and a table on stderr.

`predicted_us` is what was expected of an H200 before the first run; `recorded_us` is what one gave when these kernels were
last changed (copy 4.26 TB/s; a whole step of weights 1.27 ms with programmatic dependent launch).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Callable, Iterator

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.configs import TileConfig  # noqa: E402
from a3b_engine.kernels.dense_gemv import DenseGemv  # noqa: E402
from a3b_engine.kernels.expert_table import random_experts  # noqa: E402
from a3b_engine.kernels.fp8_gemv import Fp8Gemv, random_fp8  # noqa: E402
from a3b_engine.kernels.moe_decode import ExpertsPlan  # noqa: E402
from a3b_engine.kernels.packed_experts import random_packed_experts  # noqa: E402
from a3b_engine.kernels.packed_gemv import PackedGemv  # noqa: E402
from a3b_engine.kernels.packed_samples import random_packed  # noqa: E402
from a3b_engine.kernels.router import RouterPlan  # noqa: E402

HIDDEN, INNER, VOCABULARY, TOP_K, LIMIT = 2048, 512, 248320, 8, 1e-5
PREDICTED = {
    "packed_up": 5.0, "packed_down": 3.3, "packed_up_general": 12.0, "packed_down_general": 8.0, "packed_q_k_v": 5.0, "packed_out": 3.5,
    "qkv_z_b_a": 8.9, "q_k_v": 6.9, "out": 4.4, "router": 5.0, "up": 7.2, "down": 4.8, "head": 225.0,
}  # fmt: skip
RECORDED = {  # packed: int4 in groups of 64
    "packed_up": 5.8, "packed_down": 4.3, "packed_up_general": 26.3, "packed_down_general": 28.0,
    "qkv_z_b_a": 8.7, "q_k_v": 6.7, "out": 4.0, "router": 3.3, "up": 7.5, "down": 4.3, "head": 222.0,
}  # fmt: skip
SELF_TESTS = ("fp8_gemv", "fp8_gemv.matrix_units", "dense_gemv", "router", "moe_decode", "moe_decode.matrix_units")
PACKED_SELF_TESTS = ("packed_gemv.{}", "packed_gemv.{}_matrix_units", "packed_experts.{}", "packed_experts.{}_matrix_units")
FORMATS = {  # --format -> form, options of random_packed
    "int4": ("int4", {}), "int3": ("int3", {}), "nvfp4": ("e2m1", dict(scale=torch.float8_e4m3fn, factor=True)),
    "int4z": ("int4", dict(zero=True)),
}  # fmt: skip
TABLE_KEYS = {
    "qkv_z_b_a": "fp8_many_rows", "q_k_v": "fp8_many_rows", "out": "fp8_few_rows", "router": "router",
    "up": "expert_up", "down": "expert_down", "head": "dense_many_rows", "packed_up_general": "packed_up",
    "packed_down_general": "packed_down", "packed_q_k_v": "packed_many_rows", "packed_out": "packed_few_rows",
}  # fmt: skip
Make = Callable[[int, "TileConfig | None"], "Case"]


class Case:
    """One kernel on one layer's weights: how to launch it, what it reads, how far from float64 it is."""

    def __init__(self, launch: Callable[[], None], nbytes: int, error: Callable[[], float]) -> None:
        self.launch, self.nbytes, self.error = launch, nbytes, error


def microseconds(launches: list[Callable[[], None]], repeats: int = 20) -> float:
    """Time of one launch: all of them in one CUDA graph, replayed."""

    def everything() -> None:
        for launch in launches:
            launch()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / len(launches) * 1e3


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a large copy by a kernel (a graph's memcpy node is slower), read and written counted."""
    source = torch.ones(1 << 29, dtype=torch.int32, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.add(source, 0, out=copy)], 10) * 1e-6)


class Bench:
    """The cases of every kernel. Weights are made once and used by all candidates."""

    def __init__(
        self, target: support.Target, layers: int, experts: int, pdl: bool, packed: tuple[str, int] | None = None, shared: str = "fp8"
    ) -> None:
        device = target.device
        self.target, self.layers, self.experts, self.options = target, layers, experts, dict(pdl=pdl)
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator, dtype=dtype)

        def small(*shape: int) -> torch.Tensor:
            return normal(*shape, dtype=torch.bfloat16) * 0.02

        blocks = (128, 128)
        self.norm, self.stream, self.mixed = normal(HIDDEN) * 0.1, normal(HIDDEN), normal(4096)
        self.scratch = torch.empty(VOCABULARY, device=device)
        self.tail = [(small(32, HIDDEN), small(32, HIDDEN)) for _ in range(layers)]
        self.wide = [random_fp8((12288, HIDDEN), blocks, device, seed=i) for i in range(layers)]
        self.out = [random_fp8((HIDDEN, 4096), blocks, device, seed=i + 1000) for i in range(layers)]
        self.moe = [random_experts(experts, HIDDEN, INNER, INNER, device) for _ in range(layers)]
        self.routers = [(small(256, HIDDEN), small(1, HIDDEN)) for _ in range(layers)]
        self.head = small(VOCABULARY, HIDDEN)
        self.ids = [torch.randperm(experts, generator=generator, device=device)[:TOP_K].int() for _ in range(layers)]
        self.packed: list = []
        if packed is not None:
            (form, options), group = FORMATS[packed[0]], packed[1]
            sizes = (experts, HIDDEN, INNER, INNER, device, form, group)
            self.packed = [random_packed_experts(*sizes, shared_form=form if shared == "same" else shared, **options) for _ in range(layers)]
            self.packed_wide = [random_packed((9216, HIDDEN), form, group, device, seed=i, **options) for i in range(layers)]
            self.packed_out = [random_packed((HIDDEN, 4096), form, group, device, seed=i, **options) for i in range(layers)]
        self.shares = torch.rand(TOP_K + 1, device=device, generator=generator) / TOP_K

    def makers(self) -> dict[str, Make]:
        return {
            "qkv_z_b_a": self.deltanet_projections, "q_k_v": self.attention_projections, "out": self.output_projection,
            "router": self.router,
            "up": self.up, "down": self.down, "head": self.logits,
            "packed_up": self.packed_up, "packed_down": self.packed_down, "packed_up_general": self.packed_up_general,
            "packed_down_general": self.packed_down_general, "packed_q_k_v": self.packed_projections, "packed_out": self.packed_output,
        }  # fmt: skip

    def _product(self, plan: object, x: torch.Tensor, residual: torch.Tensor | None = None) -> Case:
        out = self.scratch[: plan.rows]

        def error() -> float:
            plan(x, out, residual)
            return support.relative_error(out, plan.reference(x, residual, torch.float64))

        return Case(lambda: plan(x, out, residual), plan.nbytes, error)

    def _rows_of(self, layer: int, *sizes: int) -> list:
        weight, cuts, start = self.wide[layer], [], 0
        for size in sizes:
            cuts.append(ScaledWeight(weight.data[start : start + size], weight.scale[start // 128 : (start + size) // 128], weight.block))
            start += size
        return cuts

    def deltanet_projections(self, layer: int, config: TileConfig | None) -> Case:
        matrices = self._rows_of(layer, 8192, 4096)
        return self._product(Fp8Gemv(matrices, self.target, tail=self.tail[layer], norm=self.norm, config=config, **self.options), self.stream)

    def attention_projections(self, layer: int, config: TileConfig | None) -> Case:
        matrices = self._rows_of(layer, 8192, 512, 512)
        return self._product(Fp8Gemv(matrices, self.target, norm=self.norm, config=config, **self.options), self.stream)

    def output_projection(self, layer: int, config: TileConfig | None) -> Case:
        return self._product(Fp8Gemv([self.out[layer]], self.target, config=config, **self.options), self.mixed, self.stream)

    def logits(self, layer: int, config: TileConfig | None) -> Case:
        case = self._product(DenseGemv([self.head], self.target, norm=self.norm, config=config, **self.options), self.stream)
        plan = DenseGemv([self.head[:8192]], self.target, norm=self.norm, config=config, **self.options)  # float64 of it all is 4 GB
        return Case(case.launch, case.nbytes, self._product(plan, self.stream).error)

    def router(self, layer: int, config: TileConfig | None) -> Case:
        plan = RouterPlan(
            *self.routers[layer], TOP_K, self.target, norm=self.norm, config=config, **self.options
        )  # fmt: skip

        def error() -> float:
            plan(self.stream)
            ids, shares = plan.reference(self.stream, torch.float64)
            return support.relative_error(plan.shares, shares) if torch.equal(plan.ids.long(), ids) else float("inf")

        return Case(lambda: plan(self.stream), plan.nbytes, error)

    def _experts(self, layer: int, weights: list | None = None, **configurations: object) -> tuple:
        options = dict(norm=self.norm, early_x=True, **configurations, **self.options)
        plan, ids = ExpertsPlan((weights or self.moe)[layer], TOP_K, self.target, **options), self.ids[layer]

        def error() -> float:
            out = self.scratch[:HIDDEN]
            plan(self.stream, ids, self.shares, out, self.stream)
            return support.relative_error(out, plan.reference(self.stream, ids, self.shares, self.stream, torch.float64))

        return plan, ids, error

    def up(self, layer: int, config: TileConfig | None, weights: list | None = None, form: str | None = None) -> Case:
        plan, ids, error = self._experts(layer, weights, up_config=config, form=form)
        return Case(lambda: plan.up(self.stream, ids), plan.up_bytes, error)

    def packed_up(self, layer: int, config: TileConfig | None) -> Case:
        return self.up(layer, config, self.packed)

    def packed_down(self, layer: int, config: TileConfig | None) -> Case:
        return self.down(layer, config, self.packed)

    def packed_up_general(self, layer: int, config: TileConfig | None) -> Case:
        return self.up(layer, config, self.packed, "general")

    def packed_down_general(self, layer: int, config: TileConfig | None) -> Case:
        return self.down(layer, config, self.packed, "general")

    def packed_projections(self, layer: int, config: TileConfig | None) -> Case:
        return self._product(PackedGemv([self.packed_wide[layer]], self.target, norm=self.norm, config=config, **self.options), self.stream)

    def packed_output(self, layer: int, config: TileConfig | None) -> Case:
        return self._product(PackedGemv([self.packed_out[layer]], self.target, config=config, **self.options), self.mixed, self.stream)

    def down(self, layer: int, config: TileConfig | None, weights: list | None = None, form: str | None = None) -> Case:
        plan, ids, error = self._experts(layer, weights, down_config=config, form=form)
        return Case(lambda: plan.down(ids, self.shares, self.scratch[:HIDDEN], self.stream), plan.down_bytes, error)

    def step(self, chosen: dict[str, TileConfig] | None = None, packed: bool = False) -> tuple[list[Callable[[], None]], int]:
        """All launches of one token, each reading what the one ahead wrote: three layers of four with DeltaNet's projections.

        chosen: configurations in place of the table's, by the names of `makers`. packed: with the packed experts.
        """
        chosen, launches, total = chosen or {}, [], 0
        common, device = dict(norm=self.norm, **self.options), self.target.device
        stream, projected = torch.randn(HIDDEN, device=device), torch.empty(12352, device=device)
        for layer in range(self.layers):
            attention = layer % 4 == 3
            matrices = self._rows_of(layer, 8192, 512, 512) if attention else self._rows_of(layer, 8192, 4096)
            config = chosen.get("q_k_v" if attention else "qkv_z_b_a")
            first = Fp8Gemv(matrices, self.target, tail=() if attention else self.tail[layer], config=config, **common)
            out = Fp8Gemv([self.out[layer]], self.target, config=chosen.get("out"), **self.options)
            router, switch = self.routers[layer]  # ids must stay within the experts there are
            choose = RouterPlan(router[: self.experts], switch, TOP_K, self.target, config=chosen.get("router"), **common)
            experts = ExpertsPlan(
                (self.packed if packed else self.moe)[layer], TOP_K, self.target, early_x=True, up_config=chosen.get("up"), down_config=chosen.get("down"), **common
            )
            launches += [
                lambda first=first: first(stream, projected[: first.rows]),
                lambda out=out: out(projected[:4096], stream, stream),
                lambda choose=choose: choose(stream),
                lambda experts=experts, choose=choose: experts(stream, choose.ids, choose.shares, stream, stream),
            ]
            total += first.nbytes + out.nbytes + choose.nbytes + experts.up_bytes + experts.down_bytes
        head = DenseGemv([self.head], self.target, config=chosen.get("head"), **common)
        launches.append(lambda: head(stream, self.scratch))
        return launches, total + head.nbytes


def candidates(name: str) -> Iterator[TileConfig]:
    """Configurations worth trying: all columns of a row at once, 16 to 128 bytes of weights a thread; one program a tile, and
    a few programs a multiprocessor with several tiles each."""
    key, itemsize = TABLE_KEYS[name], 2 if name in ("router", "head") else 1
    columns, across = {"out": 4096, "down": INNER}.get(name, HIDDEN), {"up": 2, "down": TOP_K}.get(name, 1)
    for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        bytes_of_thread = rows * columns * across * itemsize / (32 * warps)
        if not 16 <= bytes_of_thread <= 128:
            continue
        yield TileConfig(rows, columns, warps)
        if key == "router" or bytes_of_thread > 64 or warps < 4:
            continue
        for programs in (2, 3, 4, 6, 8):
            if 16 <= programs * warps <= 48:
                yield TileConfig(rows, columns, warps, programs=programs)


def measure(bench: Bench, name: str, config: TileConfig | None, rate: float) -> dict:
    """One kernel in one configuration (None: the table's). Raises what the compiler raises."""
    cases = [bench.makers()[name](layer, config) for layer in range(1 if name == "head" else bench.layers)]
    error = cases[0].error()
    if not error <= LIMIT:
        raise ArithmeticError(f"relative error {error:.2e}")
    time = microseconds([case.launch for case in cases])
    bandwidth = cases[0].nbytes / time * 1e6
    return dict(
        us=round(time, 2), predicted_us=PREDICTED[name], recorded_us=RECORDED.get(name), tb_per_s=round(bandwidth / 1e12, 2),
        share=round(bandwidth / rate, 2), error=error,
    )  # fmt: skip


def sweep(bench: Bench, name: str, rate: float) -> dict:
    """All candidates of a kernel, fastest first."""
    found, failed = [], {}
    for config in candidates(name):
        try:
            found.append((measure(bench, name, config, rate), asdict(config)))
        except Exception as problem:  # one that does not compile or is wrong is a result too
            failed[str(tuple(asdict(config).values()))] = f"{type(problem).__name__}: {problem}"[:120]
    found.sort(key=lambda entry: entry[0]["us"])
    print(f"{name:22s} best of {len(found)}:", *(f"{e['us']} us {tuple(c.values())}" for e, c in found[:4]), file=sys.stderr, sep="  ")
    return dict(best=[dict(**result, config=config) for result, config in found[:6]], failed=failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--only", default="", help="kernels by name, with commas: " + ", ".join(PREDICTED))
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--format", choices=tuple(FORMATS), help="also packed experts and projections of this kind (int4z: with zeros)")
    parser.add_argument("--group", type=int, default=32, help="columns that share a scale in them")
    parser.add_argument("--shared", choices=("fp8", "bf16", "same"), default="fp8", help="the shared expert beside packed ones")
    options = parser.parse_args()
    target = support.target(options.device)
    if target is None:
        parser.error(f"no kernels run on {options.device}")
    torch.cuda.set_device(target.device)
    names = [name for name in PREDICTED if not options.only or name in options.only.split(",")]
    names = [name for name in names if options.format or not name.startswith("packed_")]
    self_tests = list(SELF_TESTS)
    if options.format:
        self_tests += [name.format(FORMATS[options.format][0]) for name in PACKED_SELF_TESTS]
    support.all_usable(self_tests, target.device)  # side by side
    report = {
        "device": torch.cuda.get_device_name(target.device), "capability": target.capability, "torch": torch.__version__,
        "self_tests": {name: support.usable(name, target.device) for name in self_tests},
        "layers": options.layers, "pdl": target.pdl and not options.no_pdl,
    }  # fmt: skip
    rate = copy_rate(target.device)
    report["copy_tb_per_s"] = round(rate / 1e12, 2)
    packed = (options.format, options.group) if options.format else None
    report["packed"] = packed
    bench = Bench(target, options.layers, options.experts, report["pdl"], packed, options.shared)
    if options.sweep:
        report["sweep"] = {name: sweep(bench, name, rate) for name in names if name in TABLE_KEYS}
    else:
        report["kernels"] = {}
        for name in names:
            try:
                result = report["kernels"][name] = measure(bench, name, None, rate)
            except Exception as problem:  # the others are still of interest
                report["kernels"][name] = dict(failed=f"{type(problem).__name__}: {problem}"[:200])
                print(f"{name:22s} failed:", report["kernels"][name]["failed"], file=sys.stderr)
                continue
            print(f"{name:22s} {result['us']:8.2f} us (predicted {result['predicted_us']}, H200 {result['recorded_us']})"
                  f"  {result['tb_per_s']:.2f} TB/s  {result['share']:.0%} of a copy  error {result['error']:.1e}", file=sys.stderr)  # fmt: skip
        if not options.only:
            for name in ("step", "packed_step") if packed else ("step",):
                launches, total = bench.step(packed=name == "packed_step")
                step = microseconds(launches) * len(launches) / 1e3
                report[name] = dict(ms=round(step, 3), gb=round(total / 1e9, 3), tb_per_s=round(total / step / 1e9, 2), ceiling=round(1e3 / step))
                print(f"one {name.replace('_', ' ')}, weights only:", report[name], file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
