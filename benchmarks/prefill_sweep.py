"""Candidates for the tile sizes of the prefill kernels at the 35B sizes, and the time of each; `prefill.py --sweep` runs it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Callable, Iterator

import torch

from a3b_engine.bench.shape import ModelShape, model_config
from a3b_engine.kernels import support
from a3b_engine.kernels.attention_prefill import AttentionPrefillPlan, AttentionTiles
from a3b_engine.kernels.deltanet_prefill import DeltaRulePlan, ScanTiles
from a3b_engine.kernels.expert_parts import ExpertTiles
from a3b_engine.kernels.expert_table import random_experts
from a3b_engine.kernels.fp8_gemm import GemmTiles, ProjectionPlan
from a3b_engine.kernels.fp8_gemv import random_fp8
from a3b_engine.kernels.launcher import Launchers
from a3b_engine.kernels.moe_prefill import ExpertsPrefillPlan
from a3b_engine.kernels.packed_prefill import PackedForm, random_packed
from a3b_engine.kernels.route_prefill import RoutePlan, RouteTiles
from a3b_engine.model.moe import ExpertWeights

BF16 = torch.bfloat16


def per_launch(call: Callable[[int], object], count: int) -> float:
    """Microseconds a call, of `count` calls one behind the other."""
    for number in range(3):
        call(number)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        began.record()
        for number in range(count):
            call(number)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / count)
    return min(times)


def candidates(device: torch.device, where: support.Target, form: PackedForm | None = None) -> Iterator[tuple[str, str, Callable[[], Callable[[int], object]]]]:
    """(what, tiles, function that prepares the call to time)."""
    config, launchers = model_config(ModelShape(layers=4)).text, Launchers(where)
    copies = [
        ([random_fp8((rows, 2048), (128, 128), device, seed=n) for rows in (8192, 4096)], random_fp8((2048, 4096), (128, 128), device, seed=n))
        for n in range(4)
    ]
    tail = torch.randn(64, 2048, device=device).to(BF16)

    def projection(tokens: int, tiles: GemmTiles | None, splits: int = 0) -> Callable[[int], object]:
        start = 1 << 30 if tiles else 1
        if splits:
            plans = [ProjectionPlan([out], launchers, BF16, tiles=tiles, from_tokens=start) for _, out in copies]
        else:
            plans = [ProjectionPlan(inward, launchers, BF16, tail=tail, tiles=tiles, from_tokens=start) for inward, _ in copies]
        x = torch.randn(tokens, plans[0].columns, device=device).to(plans[0].input_type(tokens))
        room = torch.empty(plans[0].rows, plans[0].columns, device=device, dtype=BF16)
        out = torch.empty(max(1, splits), tokens, plans[0].rows, device=device, dtype=torch.float32 if splits > 1 else BF16)
        return lambda number: plans[number % 4](x, out if splits > 1 else out[0], room, max(1, splits))

    for tokens in (16, 64, 256, 512, 2048):
        widths = {16: (16,), 64: (32, 64), 256: (64, 128), 512: (128,)}.get(tokens, ())
        for width, (rows, warps, stages, pairs) in itertools.product(widths, ((64, 4, 4, False), (64, 4, 4, True), (64, 4, 6, True), (128, 8, 3, True))):
            tiles = GemmTiles(rows, width, warps, stages, pairs)
            yield f"in, {tokens}", str(tiles), lambda tokens=tokens, tiles=tiles: projection(tokens, tiles)
            if rows == 64 and stages == 4:
                for splits in (2, 4):
                    yield f"out, {tokens}", f"{tiles} splits {splits}", lambda tokens=tokens, tiles=tiles, splits=splits: projection(tokens, tiles, splits)
        if tokens >= 256:
            yield f"in, {tokens}", "library", lambda tokens=tokens: projection(tokens, None)
            yield f"out, {tokens}", "library", lambda tokens=tokens: projection(tokens, None, 1)

    weights = random_experts(256, 2048, 512, 512, device)
    if form is not None:
        stacks = (random_packed(form, shape, device, at) for at, shape in enumerate(((256, 512, 2048), (256, 512, 2048), (256, 2048, 512))))
        weights = dataclasses.replace(weights, experts=ExpertWeights(*stacks))

    def experts(tokens: int, tiles: ExpertTiles, up: bool) -> Callable[[int], object]:
        plan = ExpertsPrefillPlan(weights, 8, launchers, BF16, tiles=tiles)
        ids = torch.rand(tokens, 256, device=device).topk(8).indices.flatten()
        order = ids.argsort(stable=True).to(torch.int32)
        counts = torch.bincount(ids, minlength=256).tolist()
        table, before = [], 0
        for expert, count in enumerate(counts):
            table += [[expert, before + at, min(tiles.tokens, count - at)] for at in range(0, count, tiles.tokens)]
            before += count
        table += [[-1, 0, 0]] * (tokens * 8 // tiles.tokens + 256 - len(table))
        tile_table = torch.tensor(table, dtype=torch.int32, device=device)
        x, hidden = (torch.randn(shape, device=device).to(plan.product) for shape in ((tokens, 2048), (tokens * 9, 512)))
        shares, out = torch.rand(tokens, 9, device=device), torch.empty(tokens, 9, 2048, device=device, dtype=BF16)
        if up:
            return lambda _: plan.up(x, order, tile_table, hidden)
        return lambda _: plan.down(hidden, shares, order, tile_table, out)

    shapes = [(*rest, 1, pairs) for rest in ((64, 4, 3), (64, 4, 4), (128, 8, 3)) for pairs in (False, True)]
    shapes += [(*rest, run_of, False) for rest in ((64, 4, 3), (64, 4, 4), (128, 8, 3)) for run_of in (4, 8)]  # only `down` runs
    for tokens, widths in ((64, (16,)), (256, (16,)), (512, (16, 32)), (2048, (16, 32, 64))):
        if form is not None:
            for width, rows, stages, scaled in itertools.product(widths, (64, 128), (3, 4, 6), (None, True)):
                tiles = ExpertTiles(width, rows, rows // 16, stages, rows, rows // 16, stages, 4, False, scaled)
                name = str((width, rows, stages, "scaled" if scaled else ""))
                yield f"up, {tokens}", name, lambda tokens=tokens, tiles=tiles: experts(tokens, tiles, True)
                yield f"down, {tokens}", name, lambda tokens=tokens, tiles=tiles: experts(tokens, tiles, False)
            continue
        for width, (rows, warps, stages, run_of, pairs) in itertools.product(widths, shapes):
            tiles = ExpertTiles(width, rows, warps, stages, rows, warps, stages, run_of, pairs)
            for up in (True, False):
                if up and run_of > 1 or not up and pairs:
                    continue
                name = f"{'up' if up else 'down'}, {tokens}"
                yield name, str((width, rows, warps, stages, run_of, pairs)), lambda tokens=tokens, tiles=tiles, up=up: experts(tokens, tiles, up)

    def routing(tokens: int, tiles: RouteTiles) -> Callable[[int], object]:
        norm, switch = torch.randn(2048, device=device) * 0.1, weights.shared_switch.to(BF16)
        plan = RoutePlan(weights.router.to(BF16), switch, norm, 8, launchers, BF16, tiles=tiles)
        residual, inverse = torch.randn(tokens, 2048, device=device), torch.ones(tokens, device=device)
        logits = torch.empty(tiles.splits, tokens, 257, device=device)
        ids, order, table = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((tokens, 8), (tokens * 8,), (plan.tiles(tokens, 16), 3)))
        shares = torch.empty(tokens, 9, device=device)
        return lambda _: plan(residual, inverse, logits, ids, shares, order, table, 16)

    for tokens, tiles in ((64, (16, 64, 64, 8, 4, 3)), (64, (16, 32, 64, 8, 4, 3)), (64, (16, 64, 128, 8, 4, 2)), (64, (16, 64, 128, 4, 4, 2))):
        yield f"routing, {tokens}", str(tiles), lambda tokens=tokens, tiles=tiles: routing(tokens, RouteTiles(*tiles))
    for tiles in ((32, 64, 64, 2, 4, 3), (64, 64, 64, 1, 4, 3), (64, 128, 64, 1, 8, 3), (128, 64, 64, 1, 8, 3)):
        yield "routing, 2048", str(tiles), lambda tiles=tiles: routing(2048, RouteTiles(*tiles))

    def attention(tokens: int, total: int, tiles: AttentionTiles) -> Callable[[int], object]:
        plan = AttentionPrefillPlan(config, launchers, tiles=tiles)
        query, qkv = torch.randn(tokens, 16, 256, device=device).to(BF16), torch.randn(tokens, 9216, device=device).to(BF16)
        cache, out = torch.randn(2, total, 2, 256, device=device).to(BF16), torch.empty(tokens, 16, 256, device=device, dtype=BF16)
        return lambda _: plan(query, cache[0], cache[1], qkv, out)

    for (tokens, total), tiles in itertools.product(((64, 64), (2048, 2048), (2048, 8192)), ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2))):
        yield f"attention, {tokens} of {total}", str(tiles), lambda tokens=tokens, total=total, tiles=tiles: attention(tokens, total, AttentionTiles(*tiles))

    def rule(tokens: int, tiles: ScanTiles, scan: bool) -> Callable[[int], object]:
        plan = DeltaRulePlan(config, launchers, tiles=tiles)
        mixed, u = torch.randn(tokens, 8192, device=device).to(BF16) * 0.08, torch.randn(tokens, 12352, device=device).to(BF16)
        buffers = [torch.zeros(shape, device=device) for shape in plan.scratch(tokens).values()]
        state, out = torch.zeros(32, 128, 128, device=device), torch.empty(tokens, 32, 128, device=device)
        vectors, history = torch.zeros(2, 32, device=device), torch.zeros(8192, 3, device=device, dtype=BF16)
        scale, chunks = 128**-0.5, -(-tokens // 64)
        prepare, walk = plan._prepare, plan._scan
        if scan:
            return lambda _: walk((128 // tiles.columns, 32, 1), mixed, *buffers, state, out, tokens, scale)
        return lambda _: prepare((chunks, 32, 1), mixed, u, *vectors, history, *buffers, tokens, 12352, 12288, scale)

    for tokens, tiles in itertools.product((64, 2048), ((32, 4, 2, 4), (16, 4, 2, 4), (16, 4, 3, 4))):
        yield f"scan, {tokens}", str(tiles[:3]), lambda tokens=tokens, tiles=tiles: rule(tokens, ScanTiles(*tiles), True)
    for tokens, warps in itertools.product((64, 2048), (4, 8)):
        yield f"prepare, {tokens}", str(warps), lambda tokens=tokens, warps=warps: rule(tokens, ScanTiles(32, 4, 2, warps), False)


def sweep(
    device: torch.device, where: support.Target, share: list[int] | None, only: tuple[str, ...], form: PackedForm | None = None
) -> dict:
    """Microseconds of every candidate; with `share` (number, of how many) only made and run once."""
    found: dict[str, list] = {}
    wanted = (entry for entry in candidates(device, where, form) if not only or entry[0].startswith(only))
    for number, (what, tiles, prepare) in enumerate(wanted):
        if share and number % share[1] != share[0]:
            continue
        try:
            call = prepare()
            call(0)
            torch.cuda.synchronize()
            if not share:
                found.setdefault(what, []).append((round(per_launch(call, 12), 1), tiles))
        except Exception as problem:  # too much shared memory, say: the candidate is out
            found.setdefault(what, []).append((1e9, f"{tiles} {str(problem)[:60]}"))
    return {what: sorted(entries)[:10] for what, entries in found.items()}
