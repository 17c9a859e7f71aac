"""What decoding with part of the experts on the device shows: where they are, which were found there, how fast the rest came."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from ..checkpoint.names import is_expert_stack
from ..config import TextConfig
from ..engine import Engine
from .routing import MODEL, expected_hit_rate, make_trace

TRACE_STEPS = 2048  # a prescribed routing begins again after that many tokens
Counts = tuple[int, int]


def whereabouts(engine: Engine) -> dict[str, Any]:
    """How many of the routed experts are on the device, in pinned RAM and only on disk, and the share of the first."""
    memory = engine.memory()
    on_device, experts = memory["experts_on_device"], engine.config.text.num_hidden_layers * engine.config.text.num_experts
    return {
        "on_device": on_device,
        "share": round(on_device / experts, 4),
        "in_pinned_ram": memory["experts_pinned"],
        "on_disk": memory["experts_on_disk"],
        "of": experts,
    }


def expert_bytes(config: TextConfig, sizes: Mapping[str, int]) -> float:
    """Bytes of one routed expert. sizes: of the weights as loaded, by canonical name."""
    return sum(nbytes for name, nbytes in sizes.items() if is_expert_stack(name)) / (config.num_hidden_layers * config.num_experts)


def fetches(
    engine: Engine, before: Counts | None, routing: str, tokens_per_s: float, nbytes: float, host_rate: float | None
) -> dict[str, Any] | None:
    """What decode steps asked for since `before` (see `Engine.expert_counts`) and what of it had to come; None where all of the
    experts are on the device. nbytes: of one expert; host_rate: bytes a second of plain copies to the device."""
    now = engine.expert_counts()
    if now is None or before is None or now[0] == before[0]:
        return None
    config = engine.config.text
    asked, fetched = (new - old for new, old in zip(now, before))
    per_token = fetched / asked * config.num_hidden_layers * config.num_experts_per_tok
    rate = per_token * nbytes * tokens_per_s
    expected = expected_hit_rate(routing, whereabouts(engine)["share"])
    return {
        "asked": asked,
        "fetched": fetched,
        "hit_rate": round(1 - fetched / asked, 4),
        "expected_hit_rate": None if expected is None else round(expected, 4),
        "fetched_per_token": round(per_token, 2),
        "fetched_mb_per_token": round(per_token * nbytes / 1e6, 2),
        "fetched_gb_per_s": round(rate / 1e9, 2),
        "share_of_host_copy": None if host_rate is None else round(rate / host_rate, 4),
    }


class Routing:
    """Puts a prescribed routing into an engine's decode steps and takes it out again.

    Prompts always go where the model's router sends them. Random weights spread them evenly, the dearest case.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._seed = engine, seed

    def use(self, name: str) -> None:
        """From the next answer on: MODEL for the model's own router, else see `routing`. Needs a device with kernels."""
        engine, text = self._engine, self._engine.config.text
        if name == MODEL:
            if engine.reroute is not None:
                engine.reroute = None
                engine.release_caches()  # steps captured with the other routing
            return
        if engine.reroute is None:
            from ..kernels.support import target
            from .trace import RoutingTrace

            engine.reroute = RoutingTrace(TRACE_STEPS, text.num_hidden_layers, text.num_experts_per_tok, target(engine.device))
            engine.release_caches()
        engine.reroute.fill(make_trace(name, TRACE_STEPS, text.num_hidden_layers, text.num_experts, text.num_experts_per_tok, self._seed))


def can_reroute(device: torch.device) -> bool:
    """Whether decode steps run by kernels there, which is where a routing can be put in."""
    from ..kernels.support import target

    return target(device) is not None
