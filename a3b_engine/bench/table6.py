"""All goals for a part of the weights in one go: each form of the experts is made once, each budget is a load from RAM."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import asdict, replace
from typing import Any, Callable, Sequence

import torch

from ..engine import Engine
from ..options import EngineOptions
from ..parts import EngineParts
from ..prompt import Prompt
from .bandwidth import host_copy_rate
from .bench import heard_log
from .cap import MemoryCap
from .goals import RUNS, Run, compared
from .machine import describe
from .measure import BenchSettings, Subject
from .residency import Routing, can_reroute, expert_bytes, fetches, whereabouts
from .routing import MODEL
from .weights import RecordedWeights

log = logging.getLogger(__name__)

CONTEXT = 8192  # of the engine, and of the answer whose peak is watched
DECODE_CONTEXT = 512

Say = Callable[[str], None]
PartsOf = Callable[[str], EngineParts]


class Table6:
    """Measures the runs one after the other. A run that fails is told in the report and does not keep the others from running."""

    def __init__(
        self, parts_of: PartsOf, options: EngineOptions, settings: BenchSettings, say: Say = lambda line: None, *,
        runs: Sequence[Run] = RUNS, from_files: EngineParts | None = None,
    ) -> None:  # fmt: skip
        """parts_of: form of the experts -> model. options: device and compute dtype; budgets are those of the runs. from_files: the
        same model in files, for the time of a load; None leaves that out."""
        self._parts_of, self._options, self._settings, self._say = parts_of, options, settings, say
        self._runs, self._files = runs, from_files
        self._device = options.device
        self._host_rate: float | None = None
        self._reroutes = can_reroute(options.device)

    def run(self) -> dict[str, Any]:
        """The report: plain values for JSON."""
        settings, began = self._settings, time.perf_counter()
        self._host_rate = host_copy_rate(self._device, settings.copy_bytes)
        found: dict[str, Any] = {}
        with heard_log() as heard:
            self._everything(found)
        return {
            "machine": describe(self._device),
            "settings": asdict(settings),
            "host_copy_gb_per_s": None if self._host_rate is None else round(self._host_rate / 1e9, 1),
            "seconds": round(time.perf_counter() - began, 1),
            "goals": compared(found),
            "runs": found,
            "log": heard,
        }

    # Inside

    def _everything(self, found: dict[str, Any]) -> None:
        if self._files is not None:
            try:
                found["files"] = self._load_files(self._files)
            except Exception as problem:  # as with the runs
                found["files"] = self._failure("files", problem)
        for form, runs in itertools.groupby(self._runs, key=lambda run: run.form):
            self._form(form, list(runs), found)

    def _form(self, form: str, runs: list[Run], found: dict[str, Any]) -> None:
        """The runs with one form of the experts, and one engine."""
        parts = self._parts_of(form)
        recorded = RecordedWeights(parts.weights)
        parts = replace(parts, weights=recorded)
        engine: Engine | None = None
        for run in runs:
            try:
                parked = engine is not None
                if engine is None:
                    engine = Engine(parts, replace(self._options, vram_budget=run.budget, context=CONTEXT, park=len(runs) > 1))
                else:
                    engine.unload_weights()
                    engine.vram_budget = run.budget
                found[run.name] = self._measure(run, engine, recorded, parked)
            except Exception as problem:  # minutes of other runs must not be lost with this one
                found[run.name] = self._failure(run.name, problem)
                if engine is not None:
                    engine.close()  # whatever state it is in: the next run makes everything anew
                engine = None
        if engine is not None:
            engine.close()

    def _measure(self, run: Run, engine: Engine, recorded: RecordedWeights, parked: bool) -> dict[str, Any]:
        """Everything that is asked of one run. parked: the experts wait in RAM."""
        settings = self._settings
        budget = "all it wants" if run.budget is None else f"{run.budget / 1e9:g} GB"
        self._say(f"{run.name}: load {run.form} experts into {budget}")
        with MemoryCap(self._device, run.budget) as cap:
            began = time.perf_counter()
            engine.load_weights()
            self._wait()
            seconds = round(time.perf_counter() - began, 2)
            report: dict[str, Any] = {"form": run.form, "from_parked_s" if parked else "made_s": seconds}
            subject, routing = Subject(engine, settings), Routing(engine, settings.seed)
            report |= {"experts": whereabouts(engine), "weights_gb": round(engine.loaded_bytes / 1e9, 3)}
            if run.peak:
                self._say(f"{run.name}: peak with {CONTEXT} tokens and a picture")
                report["peak"] = self._peak(subject, cap)
            if run.prefill:
                self._say(f"{run.name}: prefill of {settings.prompt} tokens")
                report["prefill"] = subject.prefill(settings.prompt)
            report["decode"] = {name: self._decode(run, name, subject, routing, recorded) for name in run.decode}
            routing.use(MODEL)
            report |= {"memory": engine.memory(), "cap": cap.figures()}
        return report

    def _decode(self, run: Run, name: str, subject: Subject, routing: Routing, recorded: RecordedWeights) -> dict[str, Any]:
        settings, engine = self._settings, subject.engine
        self._say(f"{run.name}: decode, {name} routing")
        if self._reroutes:
            routing.use(name)
        prompt = subject.prompt(DECODE_CONTEXT, 8_000_000)
        subject.run(prompt, settings.settle, settings.seed)
        before = engine.expert_counts()
        figures = subject.decode(prompt, settings.new)
        rerouted = engine.reroute is not None and engine.reroute.steps_done > 0
        nbytes = expert_bytes(engine.config.text, recorded.sizes)
        name = name if rerouted else MODEL
        return {"routing": name, **figures, "experts": fetches(engine, before, name, figures["tokens_per_s"], nbytes, self._host_rate)}

    def _peak(self, subject: Subject, cap: MemoryCap) -> dict[str, Any]:
        """An answer that fills the context, its prompt a picture and text; what torch's allocator held at most from the picture on."""
        settings, engine = self._settings, subject.engine
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        cap.since_here()
        images = engine.encode_image(subject.picture(), settings.picture_px)
        new = settings.new
        room = engine.context - new - len(engine.render(Prompt(user="7", images=images)).token_ids) + 1
        answer, _ = subject.run(Prompt(user=subject.text(room, 9_000_000), images=images), new, settings.seed)
        allocated, reserved = cap.since_here()
        tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        if self._device.type != "cuda":
            return {"tokens": tokens, "allocated_gb": None, "reserved_gb": None}
        return {"tokens": tokens, "allocated_gb": round(allocated / 1e9, 3), "reserved_gb": round(reserved / 1e9, 3)}

    def _load_files(self, parts: EngineParts) -> dict[str, Any]:
        """The whole model from files onto the device, twice: the second time they are in the page cache."""
        seconds = []
        for attempt in range(2):
            self._say(f"files: load number {attempt + 1}")
            engine = Engine(parts, replace(self._options, vram_budget=None, context=CONTEXT))
            try:
                began = time.perf_counter()
                engine.load_weights()
                self._wait()
                seconds.append(time.perf_counter() - began)
                nbytes = engine.weight_bytes
            finally:
                engine.close()
        return {"first_s": round(seconds[0], 2), "warm_s": round(seconds[1], 2), "warm_gb_per_s": round(nbytes / 1e9 / seconds[1], 2)}

    def _failure(self, name: str, problem: Exception) -> dict[str, str]:
        log.warning("%s failed", name, exc_info=problem)
        line = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:400]
        self._say(f"{name}: failed, {line}")
        return {"error": line}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
