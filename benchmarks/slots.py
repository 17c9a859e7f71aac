"""Time of expert slots and of pinned memory, at the sizes of Qwen3.5-35B-A3B, on one CUDA card.

    python benchmarks/slots.py                    # everything
    python benchmarks/slots.py --pin-gb 2         # pin less

Kernels run in CUDA graphs over as many layers as the model has, with tables of their own each, started early where the card
can; experts come from pinned memory, 64 different ones in turn. Prints one JSON object, and a table on stderr. Predicted
for one H200, before it was measured: see PREDICTED.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from kernels import microseconds  # noqa: E402

from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.expert_slots import Fetch, FetchShape, LayerTables, TakeSlots, Visit, VisitScratch  # noqa: E402
from a3b_engine.memory.pinned import PinnedArena, Record, pinnable_bytes  # noqa: E402

EXPERTS, TOP_K, LAYERS, SLOTS = 256, 8, 40, 32
RECORDS = {"fp8": 3_146_496, "int4": 1_671_168, "bf16": 12_582_912}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHAPES = (
    *(FetchShape(programs) for programs in (8, 16, 32, 48, 64, 96, 132)), *(FetchShape(32, cache=cache) for cache in ("", ".cv")),
    FetchShape(64, 1024), FetchShape(32, 1024, 2), FetchShape(16, 4096, 8), FetchShape(32, 4096), FetchShape(32, 4096, 8),
)  # fmt: skip
PREDICTED = {
    "take_slots, 0 missing": 1.9, "take_slots, 1 missing": 2.6, "take_slots, 8 missing": 3.6, "fetch, nothing to do": 1.2,
    "fetch GB/s": 50.0, "copy GB/s": 55.0, "visit of 2048 tokens": 7.0, "visit of 8192 tokens": 10.0,
}  # fmt: skip


class Layers:
    """Tables of `count` layers whose first SLOTS slots hold the experts of the same numbers. Nothing here is a real record:
    what is fetched goes to one place."""

    def __init__(self, where: support.Target, count: int) -> None:
        self.where, device = where, where.device

        def table(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((count, *shape), fill, dtype=dtype, device=device)

        numbers = torch.arange(EXPERTS, device=device)
        slots = torch.where(numbers < SLOTS, 4096 * (numbers + 1), 0).expand(count, -1).contiguous()
        occupant = torch.where(numbers < SLOTS, numbers, -1).to(torch.int32).expand(count, -1)
        self.occupant, self.slot_of = occupant.contiguous(), occupant.contiguous()
        stamp, home, pointers, self.counts = table(EXPERTS), table(EXPERTS, fill=4096), table(EXPERTS + 1, 12), table(2)
        clock, serves, offsets = table()[:1], table(dtype=torch.int32)[:1], torch.arange(12, device=device) * 16
        self.tables = [
            LayerTables(slots[i], self.occupant[i], self.slot_of[i], stamp[i], home[i], clock, self.counts[i], serves, pointers[i], offsets, advances=i == 0)
            for i in range(count)
        ]
        self.start = self.occupant.clone()

    def take(self, missing: int) -> tuple[float, float]:
        """Microseconds of a launch that misses `missing` of 8, and how many were missed on average.

        Some experts are asked for every time. The others come in a circle of more than there are slots for, so that each was
        thrown out again when its turn comes.
        """
        for table in (self.occupant, self.slot_of):
            table.copy_(self.start)
        stay, rounds = list(range(TOP_K - missing)), 1 + -(-(SLOTS + TOP_K) // missing) if missing else 4
        orders = [stay + [TOP_K + missing * number + i for i in range(missing)] for number in range(rounds)]
        ids = [torch.tensor(order, dtype=torch.int32, device=self.where.device) for order in orders]
        plans = [TakeSlots(tables, TOP_K, self.where, pdl=self.where.pdl) for tables in self.tables]
        self.counts.zero_()
        time_each = microseconds([lambda plan=plan, chosen=chosen: plan(chosen) for chosen in ids for plan in plans], repeats=5)
        asked, fetched = self.counts.sum(0).tolist()
        return time_each, fetched / asked * TOP_K

    def visit(self, tokens: int) -> float:
        scratch = VisitScratch(EXPERTS, self.where.device)
        staging = torch.zeros((EXPERTS - SLOTS, 4096), dtype=torch.uint8, device=self.where.device)
        ids = torch.rand(tokens, EXPERTS, device=self.where.device).topk(TOP_K).indices.to(torch.int32)
        plans = [Visit(tables, scratch, 4096, self.where, pdl=self.where.pdl) for tables in self.tables]
        return microseconds([lambda plan=plan: plan(ids, staging) for plan in plans])


class Bus:
    """64 records in pinned memory and 8 places for them on the device. allocated: memory that the driver made, as PyTorch's, instead
    of ordinary memory that is registered with it."""

    def __init__(self, where: support.Target, record: int, allocated: bool = False) -> None:
        self.where, self.record = where, record
        self.arena = PinnedArena(record, where.device)
        if allocated:
            memory = torch.empty((64, record), dtype=torch.uint8, pin_memory=True)
            self.homes = [Record(row, row.data_ptr(), (0, 0), None) for row in memory]
        else:
            self.homes = self.arena.take_many(64)
        for home in self.homes:
            home.host.view(torch.int64).copy_(torch.randint(1 << 60, (record // 8,)))
        self.places = torch.zeros((8, record), dtype=torch.uint8, device=where.device)

    def fetch(self, missing: int, shape: FetchShape) -> float:
        """Microseconds of a launch."""
        groups = [self.homes[first : first + missing] for first in range(0, 64 - missing + 1, max(1, missing))]
        launches = []
        for homes in groups:
            rows = [[home.address, place.data_ptr()] for home, place in zip(homes, self.places)] + [[0, 0]] * (TOP_K - missing)
            launches.append(Fetch(torch.tensor(rows, device=self.where.device), self.record, self.where, pdl=self.where.pdl, shape=shape))
        time_each = microseconds([lambda fetch=fetch: fetch() for fetch in launches], repeats=5)
        for home, place in zip(groups[-1], self.places):
            if not torch.equal(place.cpu(), home.host):
                raise AssertionError("a record that was fetched differs from its home")
        return time_each

    def copy(self) -> float:
        """Microseconds of a plain copy of one record; by events, as PyTorch captures copies of its own pinned memory only."""
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for home in self.homes:
                self.places[0].copy_(home.host, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / len(self.homes) * 1e3)
        return sorted(times)[2]


def pinning(device: torch.device, gigabytes: float) -> dict[str, float]:
    """Seconds to pin and to give back, and how fast the first copy into it is."""
    arena, record = PinnedArena(RECORDS["fp8"], device), RECORDS["fp8"]
    count = int(min(gigabytes * 1e9, pinnable_bytes()) // record)
    start = time.perf_counter()
    records = arena.take_many(count)
    pinned = time.perf_counter()
    source = torch.ones(record, dtype=torch.uint8, device=device)
    for home in records:
        home.host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    filled = time.perf_counter()
    nbytes = arena.nbytes
    arena.close()
    closed = time.perf_counter()
    return {"GB": nbytes / 1e9, "pin_s": pinned - start, "fill_GB/s": count * record / 1e9 / (filled - pinned), "close_s": closed - filled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pin-gb", type=float, default=8.0)
    options = parser.parse_args()
    where = support.target("cuda")
    if where is None:
        sys.exit("no compiled kernels on this card")
    report: dict[str, object] = {"card": torch.cuda.get_device_name(), "self_test": support.usable("expert_slots", "cuda"), "predicted": PREDICTED}
    report["huge_pages"] = HUGE_PAGES.read_text(encoding="ascii").strip() if HUGE_PAGES.exists() else ""

    def tell(name: str, value: float) -> None:
        report[name] = round(value, 2)
        print(f"{name:44} {value:9.2f}", file=sys.stderr, flush=True)

    layers = Layers(where, LAYERS)
    for missing in (0, 1, 2, 4, 8):
        each, found = layers.take(missing)
        tell(f"take_slots, {missing} missing: us ({found:.2f} missed)", each)
    for tokens in (16, 512, 2048, 8192, 16384):
        tell(f"visit of {tokens} tokens: us", layers.visit(tokens))
    for name, record, allocated in [(name, record, False) for name, record in RECORDS.items()] + [("fp8 allocated", RECORDS["fp8"], True)]:
        bus = Bus(where, record, allocated)
        for shape in SHAPES if name == "fp8" else (FetchShape(),):
            for missing in (0, 1, 3, 8):
                each = bus.fetch(missing, shape)
                what = f"{name}: fetch of {missing} by {shape.programs} x {shape.block} x {shape.warps} {shape.cache}"
                tell(f"{what}: us", each)
                if missing:
                    tell(f"{what}: GB/s", missing * record / each / 1e3)
        tell(f"{name}: copy GB/s", record / bus.copy() / 1e3)
        bus.arena.close()
        del bus
    for name, value in pinning(where.device, options.pin_gb).items():
        tell(f"pinned memory: {name}", value)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
