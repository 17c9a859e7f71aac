"""Every stage of a training once, quickly: steps with timings, save, resume, evaluation, export, comparison."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Iterator

import torch

from .evaluate import evaluate
from .export import export
from .feeder import Batch, Feeder
from .session import Options, Session
from .tokens import Encoder

STEPS, LESSONS, TOKENS = 20, 16, 1100
SMALL_STEPS, SMALL_LESSONS, SMALL_TOKENS = 4, 2, 24  # of a tiny network on a CPU


def smoke(options: Options) -> int:
    """Prints what each stage took; returns 0 when all went well."""
    compare, options = options.compile, replace(options, minutes=60.0, resume=False, compile=False)
    count, lessons, most = (SMALL_STEPS, SMALL_LESSONS, SMALL_TOKENS) if options.small else (STEPS, LESSONS, TOKENS)
    began = time.perf_counter()

    def told(what: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {what}", flush=True)

    session = Session(options)
    told(f"{sum(w.numel() for w in session.trainer.network.weights.values()) / 1e6:.2f} M parameters on {session.device}")
    with session.feeder() as feeder:
        session.train(feeder, max_steps=count)
        told(f"{count} steps of phase {session.phase.name}, loss {session.history[-1][1]}; seen {session.trainer.seen(next(feeder))}")
    session.elapsed = session.total_seconds / 2
    told(f"on to phase {session.phase.name}")
    with session.feeder() as feeder:
        next(feeder)
        told("first batch made by the workers")
        _timed_steps(session, feeder, count)
        told(f"{count} timed steps")
        session.train(feeder, max_steps=count)
        told(f"{count} steps as in training, loss {session.history[-1][1]}; state saved")
        steps = session.trainer.steps
        batches = [next(feeder) for _ in range(count)]
        told(f"{_pace(session, batches):.1f} ms a step without waiting for lessons")
        if compare:
            session.fuse()
            _pace(session, batches)
            told("compiled")
            told(f"{_pace(session, batches):.1f} ms a step without waiting for lessons, compiled")
        if session.device.type == "cuda":
            _profile(session, batches[:2])
            told(f"profiled; most memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        del batches
    session.finish(0)
    resumed = Session(replace(options, resume=True))
    with resumed.feeder() as feeder:
        resumed.train(feeder, max_steps=3)
    told(f"resumed behind step {resumed.trainer.steps - 3} of {steps}, group {resumed.next_group}; loss {resumed.history[-1][1]}")
    resumed.finish(0)
    encoder = Encoder(options.work, resumed.grid[0] * resumed.grid[1])
    result = evaluate(resumed.trainer.network, encoder, lessons, most=most)
    told(f"evaluated {lessons} + {lessons} lessons in {result['seconds']} s: valid {result['scripts']['all_form']['share']}")
    shutil.rmtree(options.work / "exported", ignore_errors=True)
    sizes = export(options.out, options.work / "exported")
    told(f"exported {sum(sizes.values()):,} bytes: {', '.join(f'{name} {size:,}' for name, size in sizes.items() if size > 1e5)}")
    return 0


def _timed_steps(session: Session, feeder: Feeder, steps: int) -> None:
    """Steps with the device waited for after each part: slower than real ones, but each part is seen."""
    parts: dict[str, float] = {}
    shapes: list[tuple[int, int]] = []

    @contextmanager
    def part(name: str, counted: bool) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if session.device.type == "cuda":
            torch.cuda.synchronize()
        if counted:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - began

    for step in range(steps):
        counted = step >= steps // 3  # the first ones choose algorithms and fill the allocator
        with part("lessons", counted):
            batch = next(feeder)
        with part("forward", counted):
            entropy, others = session.trainer.loss(batch)
        with part("backward", counted):
            (entropy + others).backward()
        with part("optimizer", counted):
            session.trainer.update(0.0)
        if counted:
            shapes.append(tuple(batch.ids.shape))
    count = len(shapes)
    print(", ".join(f"{name} {1000 * seconds / count:.1f} ms" for name, seconds in parts.items()), flush=True)
    print(f"batches {shapes}; loss {float(entropy.detach()):.3f}, other losses {float(others.detach()):.3f}", flush=True)


def _pace(session: Session, batches: list[Batch]) -> float:
    """Milliseconds of a step, one after the other as in training."""
    began = time.perf_counter()
    for batch in batches:
        entropy = session.trainer.step(batch, 0.0)
    float(entropy)
    return 1000 * (time.perf_counter() - began) / len(batches)


def _profile(session: Session, batches: list[Batch]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for batch in batches:
            session.trainer.step(batch, 0.0)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=18, max_name_column_width=60), flush=True)
