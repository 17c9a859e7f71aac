"""A model's weights and what works on them: they come, grow, shrink and go, and say what they take."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from typing import Callable, NoReturn

import torch

from .checkpoint.packed import PackedWeight
from .errors import MemoryBudgetError, NotLoadedError
from .memory.placement import most_rows, working_area
from .memory.residence import Residence
from .model.text import TextModel
from .model.vision import VisionModel
from .options import EngineOptions
from .parts import EngineParts
from .runtime.budget import CHUNKS, Budget, Division
from .runtime.forward import PREFILL_CHUNK
from .runtime.place import without_autograd, working_on
from .runtime.report import memory_report, size
from .runtime.runner import Runner
from .runtime.vision_graph import VisionRunner

log = logging.getLogger(__name__)

# FP8 weights are multiplied out once at load on a CPU, where each product would otherwise repeat it, if that stays small.
CPU_DEQUANTIZE_BELOW = 4 * 1024**3


class ResidentModel:
    """What `engine.Engine` is made of below its questions: one model on one device. Calls are serialised by a lock."""

    def __init__(self, parts: EngineParts, options: EngineOptions) -> None:
        self.parts = parts = parts.with_experts(options.expert_format, options.cache_experts)
        self.name, self.config, self.tokenizer = parts.name, parts.config, parts.tokenizer
        self.device, self.dtype, self.vram_budget = options.device, options.dtype, options.vram_budget
        self.expert_format, self._park = options.expert_format, options.park
        self.context = min(options.context, self.config.text.max_position_embeddings)
        self.reroute: Callable[[int, torch.Tensor], None] | None = None  # bench alone replaces the experts that a router chose
        self._dequantize = self.device.type == "cpu" and parts.weights.device_bytes(self.dtype, True) < CPU_DEQUANTIZE_BELOW
        slots = self.device.type != "cpu" or self.vram_budget is not None
        self._residence = Residence(parts.weights, self.config, self.device, self.dtype, self._dequantize, slots=slots, park=options.park)
        self._budget = Budget(
            self.config, self.dtype, self.context, self._residence.sizes, by_kernels=self.device.type == "cuda", has_vision=self.has_vision
        )  # fmt: skip
        self._text: TextModel | None = None
        self._vision: VisionRunner | None = None
        self._runner: Runner | None = None
        self._lock = threading.RLock()
        self._chunk = PREFILL_CHUNK  # tokens of a prompt at once
        self._unload_behind: bool | None = None  # with `park` or without, as soon as the answer being written is over
        if self._division(math.inf) is None:
            self._refuse(self._total(math.inf))

    @property
    def is_loaded(self) -> bool:
        return self._text is not None

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint can see: a text-only export cannot."""
        return self.config.vision is not None and self.parts.weights.has_vision

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights when all of them are on the device."""
        return self._residence.full_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of weights that the engine takes where there is room to spare: all, or what `vram_budget` leaves for them; once loaded,
        what `grow` can reach."""
        division, residence = self._division(math.inf), self._residence
        if division is None:
            return 0
        placement = division.placement
        placed = residence.placement
        if placed is not None:  # what has no place on the device now gets none before the next load
            rows = placement.rows
            if placed.embedding and not placement.embedding:  # there was no pinned RAM for it
                working = self._budget.working(self.context, self._chunk, kept=False)
                rows = most_rows(residence.sizes, self._total(math.inf), working, self._budget.seeing, True, placed.vision)
            placement = replace(placed, rows=max(rows, placed.rows))
        return min(self.weight_bytes, placement.nbytes(residence.sizes))

    @property
    def smallest_bytes(self) -> int:
        """Bytes of weights on the device with the fewest experts that the engine runs with."""
        return min(self._residence.sizes.smallest, self.weight_bytes)

    @property
    def least_bytes(self) -> int:
        """The least for everything that the engine runs with at its context."""
        return self._budget.least

    @property
    def least_room(self) -> int:
        """The smallest `room` that `load_weights` makes do with."""
        return max(self.smallest_bytes, self._budget.least - self._budget.answering())

    @property
    def experts_may_shrink(self) -> bool:
        """Whether another `expert_format` would make the weights smaller."""
        shapes = self._residence.shapes
        return self.expert_format == "stored" and (shapes is None or not isinstance(shapes.gate, PackedWeight))

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self._residence.nbytes

    def load_weights(
        self, progress: Callable[[int, int], None] | None = None, cancel: Callable[[], None] | None = None, room: float = math.inf
    ) -> None:
        """Put the weights on the device, as many of the experts as there is room for; nothing happens when they are there.

        progress(done_bytes, total_bytes); `cancel` is called between reads and may raise. room: bytes that weights may take, beside
        what an answer needs; `vram_budget` holds as well. Raises `MemoryBudgetError` where not even the fewest experts fit.
        After any exception nothing is left on the device.
        """
        with self._lock, without_autograd():
            if self.is_loaded:
                return
            if self._unload_behind is not None:
                raise NotLoadedError(f"{self.name} is being unloaded. Load it again when the answer is over.")
            began = time.perf_counter()
            division = self._division(room)
            if division is None:
                self._refuse(self._total(room))
            try:
                self._residence.load(division.placement, self._total(room), progress, cancel)
                self._chunk = self._beside_embedding(division, self._total(room))
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # what passed through on the way
                self._arrange()
            except BaseException:
                self.unload_weights()
                raise
            log.debug("%s: %.2f GB in %.1f s", self.name, self.loaded_bytes / 1e9, time.perf_counter() - began)

    def _arrange(self) -> None:
        residence = self._residence
        if self.has_vision and residence.placement.vision:
            self._vision = VisionRunner(VisionModel(self.config.vision, residence.vision))
        text = TextModel(self.config.text, residence.weights, residence.experts())
        with working_on(self.device, self.config.text.hidden_size):
            self._runner = Runner(
                text, self.config, self.tokenizer.size, self.context, chunk=self._chunk, pool=residence.pool, reroute=lambda: self.reroute
            )  # fmt: skip
        self._text = text

    def unload_weights(self) -> None:
        """Give back everything on the device, and in RAM unless the engine was opened with `park`. Never raises;
        `load_weights` brings it back."""
        self._unload(self._park)

    def close(self) -> None:
        """Give back everything. Never raises."""
        self._unload(False)

    def _unload(self, park: bool) -> None:
        with self._lock, without_autograd():
            busy = self._runner is not None and self._runner.is_busy
            if self._runner is not None:
                self._runner.release()
            self._text = self._vision = self._runner = None
            if busy:  # asked for by a caller's on_token: the card still reads what the answer needs
                self._unload_behind = park
                return
            try:
                self._residence.drop(park)
            except Exception:  # parking failed: give back all the same
                log.exception("%s: experts could not be kept in RAM", self.name)
                self._residence.drop(park=False)
            if self.device.type == "cuda" and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _answer_is_over(self, runner: Runner) -> None:
        with self._lock:
            runner.finish()
            if self._unload_behind is not None:
                park, self._unload_behind = self._unload_behind, None
                self._unload(park)

    def release(self, wanted: float = math.inf) -> int:
        """Give back what is on the device until `wanted` bytes are free: kept prompts, graphs of pictures, buffers and graphs of
        decoding, then the experts that were not asked for the longest, down to the fewest. Returns the bytes.

        The engine goes on working, more slowly where experts have to be fetched; `grow` takes room again.
        """
        with self._lock:
            freed = self.release_caches(wanted)
            return freed + self.shrink(wanted - freed)

    def release_caches(self, wanted: float = math.inf) -> int:
        """The first part of `release`: all but the weights."""
        freed = 0
        with self._lock:
            if self._runner is None:
                return 0
            pictures = [self._vision.release] if self._vision is not None else []
            for give_back in [lambda: self._runner.drop_kept(wanted), *pictures, self._runner.release]:
                if freed < wanted:
                    freed += give_back()
            if freed and self.device.type == "cuda":
                torch.cuda.empty_cache()
        return freed

    def shrink(self, wanted: float) -> int:
        """The last part of `release`: experts alone."""
        with self._lock, without_autograd():
            freed = self._residence.shrink(wanted)
            if freed and self.device.type == "cuda":
                torch.cuda.empty_cache()
            return freed

    def grow(self, room: float = math.inf) -> int:
        """Take up to `room` more bytes of the device for experts, within `vram_budget`. Returns the bytes."""
        with self._lock, without_autograd():
            return self._residence.grow(min(room, self.most_bytes - self.loaded_bytes))

    def memory(self) -> dict[str, int]:
        """Bytes held on the device now: weights (all of them) and of these experts; sequence (of the running answer, or set aside
        for the next one), decode (buffers of the decode step), prefixes (kept beginnings of prompts) and pictures (graphs of
        the vision tower), visiting (places for experts that a prompt brings); their total; then host_pinned and host_pageable in RAM; experts, experts_on_device, experts_pinned
        and experts_on_disk as numbers of experts; and weights_when_loaded."""
        caches = self._runner.nbytes() if self._runner is not None else {"sequence": 0, "decode": 0, "prefixes": 0}
        caches["pictures"] = self._vision.nbytes if self._vision is not None else 0
        caches["visiting"] = self._residence.pool.visiting_bytes if self._residence.pool is not None else 0
        held = {"weights": self.loaded_bytes, **caches}
        pinned, plain = self._residence.host_bytes
        return {
            **held, "total": sum(held.values()), "host_pinned": pinned, "host_pageable": plain, **self._residence.expert_counts(),
            "weights_when_loaded": self.weight_bytes,
        }  # fmt: skip

    def memory_report(self) -> str:
        """What is where, why, and what would make it faster, in sentences."""
        return memory_report(self)

    def expert_counts(self) -> tuple[int, int] | None:
        """Experts that decode steps asked for since the weights came, and those of them that had to be fetched; None where all are
        on the device."""
        pool = self._residence.pool
        return None if pool is None or pool.full else pool.counts()

    @property
    def cached_bytes(self) -> int:
        """Bytes on the device that `release_caches` would give back."""
        memory = self.memory()
        return memory["total"] - memory["weights"]

    def working_bytes(self, tokens: int) -> int:
        """Estimate of what a run over `tokens` tokens (prompt and answer) needs beside the weights, `cached_bytes` included."""
        tokens = min(tokens, self.context)
        beside = self._residence.visiting_bytes
        return beside + (self._runner.working_bytes(tokens) if self._runner is not None else self._budget.working(tokens))

    @property
    def seeing_bytes(self) -> int:
        """Estimate of what `encode_image` needs beside the weights on the device."""
        comes = self.has_vision and self.is_loaded and not self._residence.placement.vision
        return self._budget.seeing + (self._residence.sizes.vision_passing if comes else 0)

    # Inside

    def _eyes(self) -> VisionRunner | VisionModel:
        """The vision tower; where it has no place on the device, its blocks come one after the other."""
        if self._vision is not None:
            return self._vision
        if self.vram_budget is not None:  # what earlier answers left may be in the way
            self.release_caches(self.memory()["total"] + self.seeing_bytes - self.vram_budget)
        return VisionModel(self.config.vision, self._residence.vision, self.device)

    def _require_loaded(self) -> None:
        if not self.is_loaded:
            raise NotLoadedError(f"{self.name}: the weights are not loaded. Call load_weights() first.")

    def _total(self, room: float) -> float:
        """Bytes for everything where weights may take `room`."""
        return min(math.inf if self.vram_budget is None else self.vram_budget, room + self._budget.answering())

    def _division(self, room: float) -> Division | None:
        return self._budget.divide(self._total(room))

    def _room(self) -> int | None:
        """Bytes that the budget leaves beside the weights and the graphs of pictures; None without one."""
        if self.vram_budget is None:
            return None
        beside = self._residence.visiting_bytes + (self._vision.nbytes if self._vision is not None else 0)
        return self.vram_budget - self.loaded_bytes - beside

    def _make_room(self, working: int) -> None:
        """See to it that an answer fits within the budget: where it takes more than was kept free, experts give way."""
        if self.vram_budget is None:
            return
        lacking = self.loaded_bytes + working - self.vram_budget
        if lacking > 0 and self.shrink(lacking) < lacking:
            self._refuse(self.vram_budget)

    def _beside_embedding(self, division: Division, total: float) -> int:
        """The tokens of a prompt at once. Where there was no pinned RAM for the embedding it went to the device: experts give way until
        an answer fits beside it."""
        residence, sizes, placed, seeing = self._residence, self._residence.sizes, self._residence.placement, self._budget.seeing
        if placed.embedding == division.placement.embedding:
            return division.chunk
        working = 0
        for chunk in (chunk for chunk in CHUNKS if chunk <= division.chunk):
            working = self._budget.working(self.context, chunk, kept=False)
            rows = min(placed.rows, most_rows(sizes, total, working, seeing, True, placed.vision))
            if rows >= sizes.fewest_rows:
                residence.shrink((placed.rows - rows) * sizes.row)
                return chunk
        fewest = replace(placed, rows=sizes.fewest_rows)
        least = fewest.nbytes(sizes) + working_area(sizes, fewest.rows, working, seeing, fewest.vision)
        raise MemoryBudgetError(
            f"{self.name}: the system gave no pinned RAM for the embedding ({size(sizes.embedding)}), so that it must be on {self.device}; at least "
            f"{size(least)} are needed there then, and there are {size(total)}. Free RAM (close other programs), raise vram_gb (0 lets ComfyUI "
            "decide), lower context, or choose a smaller expert_format (int4, int3)."
        )

    def _refuse(self, total: float) -> NoReturn:
        sizes, least = self._residence.sizes, self._budget.least
        working = least - sizes.smallest
        if size(total) == size(least):  # they differ by less than is shown
            least = total + 10 ** (8 if total >= 1e8 else 5)
        have = f"the budget is {size(total)}" if self.vram_budget is not None else f"there are {size(max(0.0, total))}"
        raise MemoryBudgetError(
            f"{self.name} needs at least {size(least)} on {self.device}, and {have}. Needed are {size(sizes.rest)} that every token reads, "
            f"{size(sizes.row * sizes.fewest_rows)} for {sizes.fewest_rows} of {sizes.experts} experts a layer, and {size(working)} to work in with a context "
            f"of {self.context} tokens. Raise vram_gb (0 lets ComfyUI decide), lower context, choose a smaller expert_format (int4, int3), "
            "or use a smaller checkpoint."
        )
