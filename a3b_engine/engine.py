"""`Engine`: one checkpoint, opened, loaded and asked."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

from .chat import Rendered, render_chat
from .errors import CheckpointError, GrammarError, ImageError, MemoryBudgetError, NotLoadedError, PromptError
from .grammar import GrammarCompiler, Matcher
from .image import ImageFeatures, PreparedImage, prepare_picture, to_patches, to_pictures
from .model.text import TextModel
from .model.vision import VisionModel
from .options import EXPERT_FORMATS, EngineOptions
from .parts import EngineParts, parts_of_folder
from .prompt import Prompt
from .runtime.answer import Answer, TokenEvent
from .runtime.cache import SequenceState
from .runtime.forward import PREFILL_CHUNK, forward_chunks
from .runtime.generation import Generation
from .runtime.place import working_on
from .runtime.runner import Runner, working_bytes
from .runtime.vision_graph import VisionRunner
from .sampling import SamplingParams

__all__ = ["EXPERT_FORMATS", "Engine"]

log = logging.getLogger(__name__)

# FP8 weights are multiplied out once at load on a CPU, where each product would otherwise repeat it, if that stays small.
CPU_DEQUANTIZE_BELOW = 4 * 1024**3


class Engine:
    """A checkpoint with its tokenizer and template; its weights come and go with `load_weights` / `unload_weights`.

    Make one with `Engine.load` (ready to use), `Engine.open` or `Engine.from_parts` (nothing on the device yet). Calls are
    serialised by a lock; results never depend on torch's global generators.
    """

    def __init__(self, parts: EngineParts, options: EngineOptions) -> None:
        """See `Engine.open` and `Engine.from_parts`, which are the names to use."""
        self.parts = parts = parts.with_experts(options.expert_format)
        self.name, self.config, self.tokenizer = parts.name, parts.config, parts.tokenizer
        self.device, self.dtype, self.vram_budget = options.device, options.dtype, options.vram_budget
        self.context = min(options.context, self.config.text.max_position_embeddings)
        self._grammars = GrammarCompiler(self.tokenizer, self.config.text.vocab_size, self.config.eos_token_ids)
        self._dequantize = self.device.type == "cpu" and parts.weights.device_bytes(self.dtype, True) < CPU_DEQUANTIZE_BELOW
        self.weight_bytes = parts.weights.device_bytes(self.dtype, self._dequantize)
        self._weights: dict[str, Any] = {}
        self._text: TextModel | None = None
        self._vision: VisionRunner | None = None
        self._runner: Runner | None = None
        self._lock = threading.RLock()
        self._check_budget(self.working_bytes(1))

    @classmethod
    def open(cls, folder: str | Path, device: str | torch.device = "cpu", **options: Any) -> "Engine":
        """Read configuration, tensor table, tokenizer and template of a checkpoint folder; no weight is read.

        device: "cpu" or "cuda:N". dtype: compute type, by default bfloat16 on a GPU and float32 on a CPU (a torch dtype
        or its name). expert_format: "stored". vram_budget: bytes the engine may hold on the device, None for no cap of
        its own. context: most tokens of prompt plus answer.
        Raises `ConfigError`, `CheckpointError`, `PromptError`, `MemoryBudgetError`.
        """
        checked = EngineOptions.checked(device, **options)
        return cls(parts_of_folder(folder), checked)

    @classmethod
    def from_parts(cls, parts: EngineParts, device: str | torch.device = "cpu", **options: Any) -> "Engine":
        """An engine of these parts, wherever they come from; options and errors as in `open`, nothing is loaded yet."""
        return cls(parts, EngineOptions.checked(device, **options))

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu", **options: Any) -> "Engine":
        """`open` and `load_weights` in one."""
        engine = cls.open(folder, device, **options)
        engine.load_weights()
        return engine

    # Weights

    @property
    def is_loaded(self) -> bool:
        return self._text is not None

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint can see: a text-only export cannot."""
        return self.config.vision is not None and self.parts.weights.has_vision

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self.weight_bytes if self.is_loaded else 0

    def load_weights(self, progress: Callable[[int, int], None] | None = None, cancel: Callable[[], None] | None = None) -> None:
        """Put the weights on the device; nothing happens when they are there.

        progress(done_bytes, total_bytes); `cancel` is called between reads and may raise. After any exception nothing
        is left on the device.
        """
        with self._lock, torch.no_grad():
            if self.is_loaded:
                return
            began = time.perf_counter()
            try:
                self._weights = self.parts.weights.load(self.device, self.dtype, self._dequantize, progress, cancel)
                vision = VisionRunner(VisionModel(self.config.vision, self._weights)) if self.has_vision else None
                text = TextModel(self.config.text, self._weights)
                with working_on(self.device, self.config.text.hidden_size):
                    self._runner = Runner(text, self.config, self.tokenizer.size, self.context)
                self._text, self._vision = text, vision
            except BaseException:
                self.unload_weights()
                raise
            log.debug("%s: %.2f GB in %.1f s", self.name, self.weight_bytes / 1e9, time.perf_counter() - began)

    def unload_weights(self) -> None:
        """Give back everything on the device. Never raises; `load_weights` brings it back."""
        with self._lock:
            self._text = self._vision = self._runner = None
            self._weights = {}
            if self.device.type == "cuda" and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    close = unload_weights

    def release_caches(self, wanted: float = math.inf) -> int:
        """Give back what is on the device beside the weights until `wanted` bytes are free: kept prompts first, then graphs of
        pictures, then buffers and graphs of decoding. Returns the bytes.

        The next answer makes again what it needs.
        """
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

    def memory(self) -> dict[str, int]:
        """Bytes held now: weights on the device; sequence (of the running answer, or set aside for the next one), decode
        (buffers of the decode step), prefixes (kept beginnings of prompts) and pictures (graphs of the vision tower);
        their total; and the size when loaded."""
        caches = self._runner.nbytes() if self._runner is not None else {"sequence": 0, "decode": 0, "prefixes": 0}
        caches["pictures"] = self._vision.nbytes if self._vision is not None else 0
        held = {"weights": self.loaded_bytes, **caches}
        return {**held, "total": sum(held.values()), "weights_when_loaded": self.weight_bytes}

    @property
    def cached_bytes(self) -> int:
        """Bytes on the device that `release_caches` would give back."""
        memory = self.memory()
        return memory["total"] - memory["weights"]

    def working_bytes(self, tokens: int) -> int:
        """Estimate of what a run over `tokens` tokens (prompt and answer) needs beside the weights, `cached_bytes` included."""
        tokens = min(tokens, self.context)
        if self._runner is not None:
            return self._runner.working_bytes(tokens)
        return working_bytes(self.config.text, self.dtype, tokens)

    # Asking

    def encode_image(self, rgb: Any, size: int = 384, fit: str = "keep") -> list[ImageFeatures]:
        """Pictures -> features, one entry a picture.

        rgb: float [H, W, C] or [B, H, W, C] in 0..1, uint8, PIL, or a list of these. size, fit: see
        `image.prepare_picture`. Features stay on the CPU until a prompt uses them.
        """
        if not self.has_vision:
            raise ImageError(f"{self.name}: this checkpoint has no vision part. Use the full (image-text) repository, or a prompt without pictures.")
        pictures = to_pictures(rgb)
        return [self._encode(prepare_picture(picture, self.parts.processor, size, fit)) for picture in pictures]

    @torch.no_grad()
    def _encode(self, prepared: PreparedImage) -> ImageFeatures:
        with self._lock:
            self._require_loaded()
            with working_on(self.device, self.config.vision.hidden_size):
                # Copied under the lock: the next picture of this size is written over it.
                features = self._vision.encode(to_patches(prepared, self.parts.processor, self.device), prepared.grid).cpu()
        return ImageFeatures(features=features, grid=prepared.grid, picture=prepared.pixels, source=self._source)

    @property
    def _source(self) -> str:
        return f"{self.parts.identity}|{self.dtype}"

    def render(self, prompt: Prompt, thinking: bool = False) -> Rendered:
        """The prompt as the model will see it: `.text` from the checkpoint's template, `.token_ids` with image tokens expanded."""
        counts = [image.n_tokens for image in prompt.images]
        return render_chat(prompt, self.parts.template, self.tokenizer, self.config, counts, thinking)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        schema: dict | str | None = None,
        regex: str | None = None,
        thinking: bool = False,
        on_token: Callable[[TokenEvent], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Answer:
        """Write an answer.

        schema (JSON schema) or regex constrain the answer, after the thinking if that is on. on_token is called every
        step; cancel is asked every step, and ends the answer by returning True or by raising.
        Raises `PromptError`, `GrammarError`, `MemoryBudgetError`, `NotLoadedError`.
        """
        if schema is not None and regex is not None:
            raise GrammarError("Give a JSON schema or a regular expression, not both.")
        matcher: Matcher | None = None
        if schema is not None:
            matcher = self._grammars.json_schema(schema)
        elif regex is not None:
            matcher = self._grammars.regex(regex)
        sampling = sampling or SamplingParams()
        with self._lock:
            self._require_loaded()
            prompt = replace(prompt, images=self._own_features(prompt.images))
            rendered = self.render(prompt, thinking)
            self._require_known_tokens(rendered.token_ids)
            if rendered.opens_thinking and not thinking:  # a template that always thinks: close the block at once
                sampling = replace(sampling, thinking_budget=0)
            placed = [prompt.images[span.image_index] for span in rendered.image_spans]
            return self._write(rendered.token_ids, placed, sampling, thinking=rendered.opens_thinking, matcher=matcher, on_token=on_token, cancel=cancel)

    def _write(self, token_ids: list[int], images: Sequence[ImageFeatures], sampling: SamplingParams, **options: Any) -> Answer:
        """The answer to a prompt as token ids (`images` one entry an occurrence); options as in `Generation`."""
        room = self.context - len(token_ids)
        if room < 1:
            raise PromptError(
                f"The prompt has {len(token_ids)} tokens, the context only {self.context}. Raise `context` on Load A3B Model, shorten the text, or encode pictures smaller."
            )
        tokens = len(token_ids) + min(room, sampling.max_new_tokens)
        self._check_budget(self.working_bytes(tokens))
        runner = self._runner  # a caller's on_token may unload
        runner.limit_kept(tokens, self._room())
        generation = Generation(self.config, self.tokenizer, sampling, room=room, **options)
        try:
            with working_on(self.device, self.config.text.hidden_size):
                return generation.run(
                    len(token_ids), sum(image.n_tokens for image in images),
                    lambda poll: runner.start(token_ids, images, sampling, tokens, poll),
                )  # fmt: skip
        finally:
            runner.finish()

    @torch.no_grad()
    def logits(
        self, token_ids: Sequence[int], images: Sequence[ImageFeatures] | None = None, *, chunk_size: int = PREFILL_CHUNK
    ) -> torch.Tensor:
        """Logits of every position, float32 [T, vocab] on the CPU, nothing masked: for conformance checks.

        images: one entry an occurrence, in order; None takes image tokens as they are. chunk_size: tokens a forward pass; the result does not depend on it.
        """
        with self._lock:
            self._require_loaded()
            vocab = self.config.text.vocab_size
            bad = next((t for t in token_ids if not 0 <= t < vocab), None)
            if bad is not None or not len(token_ids):
                raise PromptError(f"token_ids: found {bad if len(token_ids) else 'an empty list'}, expected ids from 0 to {vocab - 1}.")
            chunks = forward_chunks(self._text, self.config, self._new_state(), list(token_ids), images, chunk_size=chunk_size)
            return torch.cat([self._text.logits(hidden).cpu() for hidden in chunks])

    # Inside

    def _new_state(self) -> SequenceState:
        return SequenceState(self.config.text, self.context, self.device, self.dtype)

    def _own_features(self, images: Sequence[ImageFeatures]) -> list[ImageFeatures]:
        """Features of this engine; pictures that another checkpoint encoded are encoded again from their pixels."""
        if images and not self.has_vision:
            raise PromptError(f"{self.name}: this checkpoint has no vision part, but the prompt has {len(images)} pictures.")
        factor = self.parts.processor.factor
        own = []
        for image in images:
            if not isinstance(image, ImageFeatures):
                raise PromptError(f"Prompt images must come from encode_image, found {type(image).__name__}.")
            if image.source != self._source:
                rows, columns = (side // factor for side in image.picture.shape[:2])
                image = self._encode(PreparedImage(image.picture[: rows * factor, : columns * factor], (rows, columns)))
            own.append(image)
        return own

    def _require_known_tokens(self, token_ids: Sequence[int]) -> None:
        """A tokenizer with more ids than the model has embeddings would otherwise fail deep inside, on CUDA for good."""
        vocab = self.config.text.vocab_size
        if not token_ids or max(token_ids) >= vocab:
            found = f"token {max(token_ids)} of {vocab} that the model knows" if token_ids else "no token at all"
            raise CheckpointError(
                f"{self.name}: the prompt became {found}. tokenizer.json and chat template belong to another model; restore the published files."
            )

    def _require_loaded(self) -> None:
        if not self.is_loaded:
            raise NotLoadedError(f"{self.name}: the weights are not loaded. Call load_weights() first.")

    def _room(self) -> int | None:
        """Bytes that the budget leaves beside the weights and the graphs of pictures; None without one."""
        if self.vram_budget is None:
            return None
        return self.vram_budget - self.weight_bytes - (self._vision.nbytes if self._vision is not None else 0)

    def _check_budget(self, working: int) -> None:
        if self.vram_budget is None:
            return
        needed = self.weight_bytes + working
        if needed > self.vram_budget:
            raise MemoryBudgetError(
                f"{self.name} needs {needed / 1e9:.1f} GB ({self.weight_bytes / 1e9:.1f} GB of weights and {working / 1e9:.1f} GB for this context), "
                f"the budget is {self.vram_budget / 1e9:.1f} GB. Raise vram_gb (0 lets ComfyUI decide), lower context, or use a smaller checkpoint."
            )
