"""The figures that were set as goals for a card that holds a part of the weights: what was asked for and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from .packed import STORED
from .routing import MODEL, SKEWED, UNIFORM


@dataclass(frozen=True)
class Run:
    """One load of the weights and what is measured with it.

    form: of the routed experts, see `packed.FORMATS`. budget: bytes the engine may hold, None for all it wants. decode: routings,
    each measured in turn. peak: whether an answer of 8,192 tokens with a picture is watched; prefill: whether a prompt is timed.
    """

    name: str
    form: str
    budget: int | None
    decode: tuple[str, ...]
    peak: bool = False
    prefill: bool = False


# Runs of one form follow each other: the engine stays, and the weights come back from RAM.
RUNS = (
    Run("fp8_24", STORED, 24_000_000_000, (UNIFORM, SKEWED)),
    Run("fp8_16", STORED, 16_000_000_000, (SKEWED,), prefill=True),
    Run("fp8_all", STORED, None, (MODEL, SKEWED)),
    Run("int4_all", "int4", 20_500_000_000, (MODEL,), peak=True),
    Run("int4_12", "int4", 12_000_000_000, (UNIFORM, SKEWED)),
    Run("int3_all", "int3", 17_000_000_000, (MODEL,), peak=True),
)


@dataclass(frozen=True)
class Goal:
    """A figure: its title, unit, what must and what should be reached, and where it stands in the runs.

    less: whether less is better. where: name of a run, then keys into what it measured.
    """

    title: str
    unit: str
    must: float
    aim: float
    where: tuple[str, ...]
    less: bool = False

    def reached(self, value: float | None) -> str:
        """ "aim", "must", "missed" or "not measured"."""
        if value is None:
            return "not measured"
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if value <= bound if self.less else value >= bound:
                return name
        return "missed"


# llama.cpp, Q4_0 with half of the expert layers on the CPU, on the H200 machine that the others are measured on: half of what
# its experts read lies off the card, whatever the routing. Beside it stands the hardest case with about half of them on it.
LLAMA_CPP = 82.0
GOALS = (
    Goal("4-bit experts, all on the card: peak with 8k context and a picture", "GB", 20.5, 19.0, ("int4_all", "peak", "reserved_gb"), less=True),
    Goal("3-bit experts likewise", "GB", 17.0, 15.5, ("int3_all", "peak", "reserved_gb"), less=True),
    Goal("decode, 4-bit, all on the card", "tok/s", 400, 700, ("int4_all", "decode", MODEL, "tokens_per_s")),
    Goal("decode, exact FP8, 24 GB, uniform routing", "tok/s", 80, 110, ("fp8_24", "decode", UNIFORM, "tokens_per_s")),
    Goal("decode, exact FP8, 24 GB, skewed routing", "tok/s", 120, 200, ("fp8_24", "decode", SKEWED, "tokens_per_s")),
    Goal("decode, exact FP8, 16 GB, skewed routing", "tok/s", 60, 100, ("fp8_16", "decode", SKEWED, "tokens_per_s")),
    Goal("decode, 4-bit, 12 GB, skewed routing", "tok/s", 80, 130, ("int4_12", "decode", SKEWED, "tokens_per_s")),
    Goal("decode, 4-bit, 12 GB, uniform (llama.cpp with half of the experts off the card: 82)", "tok/s", LLAMA_CPP, 2 * LLAMA_CPP,
         ("int4_12", "decode", UNIFORM, "tokens_per_s")),
    Goal("prefill of 2,048 tokens, exact FP8, 16 GB", "tok/s", 1500, 3000, ("fp8_16", "prefill", "tokens_per_s")),
    Goal("full load from files in the page cache", "s", 15, 8, ("files", "warm_s"), less=True),
    Goal("full load from parked RAM", "s", 3, 1.2, ("fp8_all", "from_parked_s"), less=True),
)  # fmt: skip


def compared(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal beside what the runs show for it; runs that failed or were left out give None."""
    rows = []
    for goal in GOALS:
        value: Any = runs
        for key in goal.where:
            value = value.get(key) if isinstance(value, Mapping) else None
        rows.append({"row": goal.title, "unit": goal.unit, "must": goal.must, "aim": goal.aim, "measured": value, "reached": goal.reached(value)})
    return rows
