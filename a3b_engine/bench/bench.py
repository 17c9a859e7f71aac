"""One benchmark from end to end: engines, figures, report."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Callable, Iterator

import torch

from ..engine import Engine
from ..errors import ConfigError, MemoryBudgetError, PromptError
from ..kernels import support
from ..options import EngineOptions
from ..parts import EngineParts
from .bandwidth import copy_rate, host_copy_rate, step_bytes
from .cap import MemoryCap
from .machine import describe, free_bytes
from .measure import SPARE_TOKENS, BenchSettings, Subject
from .profiling import profile_decode, profile_prefill
from .residency import Routing, can_reroute, expert_bytes, fetches, whereabouts
from .routing import MODEL
from .weights import RecordedWeights

SHORT_PROMPTS = (64, 512)

Say = Callable[[str], None]


class Bench:
    """Measures one model on one device. `run` may be called once; nothing is left on the device after it."""

    def __init__(self, parts: EngineParts, options: EngineOptions, settings: BenchSettings, say: Say = lambda line: None) -> None:
        """say: told in one line what is measured now. Raises `PromptError` for lengths that the model cannot take, `ConfigError`
        for a prescribed routing where no kernels run."""
        if settings.routing != MODEL and not can_reroute(options.device):
            raise ConfigError(f"--routing: found {settings.routing}, but no compiled kernels run on {options.device}, and only they take a prescribed routing. Choose {MODEL}.")
        self._recorded = RecordedWeights(parts.weights)
        self._parts = replace(parts, weights=self._recorded)
        self._options, self._settings, self._say = options, settings, say
        self._device = options.device
        most = parts.config.text.max_position_embeddings - settings.new - SPARE_TOKENS
        for name, length in [("--context", length) for length in settings.contexts] + [("--prompt", settings.prompt)]:
            if not 0 < length <= most:
                raise PromptError(f"{name}: found {length}, expected 1 to {most} tokens for this model with --new {settings.new}.")
        self._peak_context = min(settings.peak_context, most)
        self._copy_rate = 0.0
        self._host_rate: float | None = None
        self._settles = options.vram_budget is not None or settings.routing != MODEL

    def run(self) -> dict[str, Any]:
        """The report: plain values for JSON. Raises `MemoryBudgetError` before anything large is made, if it will not fit."""
        settings = self._settings
        short = [length for length in settings.contexts if length <= self._peak_context]
        long = [length for length in settings.contexts if length > self._peak_context]
        answer = max(settings.new, settings.grammar_tokens if settings.grammar else 0, settings.settle if self._settles else 0) + SPARE_TOKENS
        limit = max(self._peak_context, settings.prompt, *short) + answer
        engines = [replace(self._options, context=limit)] + ([replace(self._options, context=max(long) + answer)] if long else [])
        for options in engines:
            self._require_memory(Engine(self._parts, options))
        self._say("copy rates")
        self._copy_rate, self._host_rate = copy_rate(self._device, settings.copy_bytes), host_copy_rate(self._device, settings.copy_bytes)
        report: dict[str, Any] = {
            "machine": describe(self._device),
            "settings": asdict(settings),
            "copy_gb_per_s": round(self._copy_rate / 1e9, 1),
            "host_copy_gb_per_s": None if self._host_rate is None else round(self._host_rate / 1e9, 1),
        }
        with heard_log() as heard:
            report |= self._standard(engines[0], short)
            if long:
                report["decode"] += self._long(engines[1], long)
        report["decode"].sort(key=lambda row: row["prompt_tokens"])
        report["kernels"] = self._kernels(heard)
        return report

    def _standard(self, options: EngineOptions, contexts: list[int]) -> dict[str, Any]:
        """Everything but the contexts that need a larger engine."""
        settings = self._settings
        with self._loaded(options) as (subject, load, cap):
            engine = subject.engine
            self._say("first answer")
            began = time.perf_counter()
            subject.run(subject.prompt(settings.text_tokens, 0), 16, settings.seed)
            load["first_answer_s"] = round(time.perf_counter() - began, 2)
            report = {"model": self._model(engine), "load": load, "experts": whereabouts(engine)}
            report["decode"] = [self._decode(subject, length) for length in contexts]
            report["memory"] = self._memory(subject, cap)
            report["prefill"] = []
            for length in sorted({*(n for n in SHORT_PROMPTS if n < settings.prompt), settings.prompt}):
                self._say(f"prefill of {length} tokens")
                report["prefill"].append(subject.prefill(length))
            self._say("first tokens")
            report["first_token"] = {"picture": subject.first_picture() if settings.image and engine.has_vision else None, **subject.first_again()}
            report["grammar"] = None
            if settings.grammar:
                self._say("grammar")
                report["grammar"] = subject.grammar(min(settings.contexts))
            report["profile"] = self._profile(subject) if settings.profile else None
            if options.park:
                load |= self._parked(engine)
            report["cap"] = cap.figures()
        return report

    def _long(self, options: EngineOptions, contexts: list[int]) -> list[dict[str, Any]]:
        with self._loaded(options) as (subject, *_):
            return [self._decode(subject, length) for length in contexts]

    @contextmanager
    def _loaded(self, options: EngineOptions) -> Iterator[tuple[Subject, dict[str, Any], MemoryCap]]:
        engine = Engine(self._parts, options)
        self._say(f"load for {engine.context} tokens of context")
        with MemoryCap(self._device, engine.vram_budget) as cap:
            try:
                seconds = self._load(engine)
                load = {"weights_s": round(seconds, 2), "gb_per_s": round(engine.weight_bytes / 1e9 / seconds, 2)}
                Routing(engine, self._settings.seed).use(self._settings.routing)
                yield Subject(engine, self._settings), load, cap
            finally:
                engine.close()

    def _load(self, engine: Engine) -> float:
        """Seconds until the weights are there."""
        began = time.perf_counter()
        engine.load_weights()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _parked(self, engine: Engine) -> dict[str, float]:
        """Off the device and back from RAM."""
        self._say("load from parked RAM")
        began = time.perf_counter()
        engine.unload_weights()
        away = time.perf_counter() - began
        return {"unload_s": round(away, 2), "from_parked_s": round(self._load(engine), 2)}

    def _decode(self, subject: Subject, context: int) -> dict[str, Any]:
        self._say(f"decode at {context} tokens of context")
        engine, prompt, settings = subject.engine, subject.prompt(context, 5_000_000 + context), self._settings
        if self._settles:  # until what is on the device is what the routing asks for
            subject.run(prompt, settings.settle, settings.seed)
        before = engine.expert_counts()
        figures = subject.decode(prompt, settings.new)
        nbytes = expert_bytes(engine.config.text, self._recorded.sizes)
        routing = MODEL if engine.reroute is None or not engine.reroute.steps_done else settings.routing
        experts = fetches(engine, before, routing, figures["tokens_per_s"], nbytes, self._host_rate)
        middle = figures["prompt_tokens"] + settings.new // 2  # the run reads from one more key and value every step
        moved = step_bytes(engine.config, self._recorded.sizes, middle, engine.dtype)
        rate = moved["total"] * figures["tokens_per_s"]
        return {
            "context": context,
            "routing": routing,
            **figures,
            "step_mb": {name: round(nbytes / 1e6, 2) for name, nbytes in moved.items()},
            "gb_per_s": round(rate / 1e9, 1),
            "share_of_copy": round(rate / self._copy_rate, 5),
            "tokens_per_s_at_copy_rate": round(self._copy_rate / moved["total"], 1),
            "experts": experts,
        }

    def _memory(self, subject: Subject, cap: MemoryCap) -> dict[str, Any]:
        """What a run at the peak context holds, tier by tier, and on a CUDA card its peak above the weights."""
        engine, tiers = subject.engine, {}
        cuda = self._device.type == "cuda"
        self._say("peak memory")
        if cuda:
            torch.cuda.empty_cache()
        cap.since_here()

        def look(event: Any) -> None:
            tiers.update(engine.memory())

        prompt = subject.prompt(self._peak_context, 6_000_000)
        subject.run(prompt, self._settings.new, self._settings.seed, on_token=look)
        (peak, reserved), weights = cap.since_here(), engine.loaded_bytes
        return {
            "context": self._peak_context,
            "engine_context": engine.context,
            "weights_gb": round(weights / 1e9, 3),
            "peak_above_weights_gb": round((peak - weights) / 1e9, 3) if cuda else None,
            "reserved_above_weights_gb": round((reserved - weights) / 1e9, 3) if cuda else None,
            "tiers": tiers,
        }

    def _profile(self, subject: Subject) -> dict[str, Any]:
        settings = self._settings
        self._say("profile")
        decode = profile_decode(subject.engine, subject.prompt(min(settings.contexts), 7_000_000), settings.profile_steps, settings.seed)
        return {"decode_step": decode, "prefill": profile_prefill(subject.engine, subject.prompt(settings.prompt, 7_000_001), settings.seed)}

    def _model(self, engine: Engine) -> dict[str, Any]:
        text = engine.config.text
        return {
            "name": engine.name,
            "layers": text.num_hidden_layers,
            "experts": text.num_experts,
            "experts_per_token": text.num_experts_per_tok,
            "vocabulary": [engine.tokenizer.size, text.vocab_size],
            "format": self._options.expert_format,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "weights_gb": round(engine.weight_bytes / 1e9, 3),
        }

    def _kernels(self, heard: list[str]) -> dict[str, Any]:
        """Whether compiled kernels can run here, and what the engine logged: each kernel that is not used, and why."""
        target = support.target(self._device)
        found = None if target is None else {"capability": list(target.capability), "fp8_native": target.fp8_native, "early_launch": target.pdl}
        return {"target": found, "log": heard}

    def _require_memory(self, engine: Engine) -> None:
        budget = engine.vram_budget
        needed, working = engine.weight_bytes if budget is None else engine.smallest_bytes, engine.working_bytes(engine.context)
        free = free_bytes(self._device)
        self._say(
            f"{needed / 1e9:.1f} GB of weights{'' if budget is None else ' at least'} + {working / 1e9:.1f} GB for {engine.context} tokens = {(needed + working) / 1e9:.1f} GB; "
            + ("free memory unknown" if free is None else f"{free / 1e9:.1f} GB free on {self._device}")
        )
        if free is not None and needed + working > free:  # a budget that is too small was refused when the engine was opened
            raise MemoryBudgetError(
                f"{engine.name} needs {(needed + working) / 1e9:.1f} GB on {self._device} ({needed / 1e9:.1f} GB of weights and {working / 1e9:.1f} GB "
                f"for {engine.context} tokens), {free / 1e9:.1f} GB are free. Use --vram-gb to hold a part of the weights, a smaller --context and --prompt, or --layers N for a quick look."
            )


@contextmanager
def heard_log() -> Iterator[list[str]]:
    """Collects what the engine's own modules log, such as a kernel that is not used and why."""
    heard: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if line not in heard:
                heard.append(line)

    collector = Collector(logging.INFO)
    logger = logging.getLogger(__package__.rpartition(".")[0])  # of this package alone
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        logger.setLevel(before)
        logger.removeHandler(collector)
