"""`Engine`: one checkpoint, opened, loaded and asked."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

from .chat import ChatTemplate, Rendered, render_chat
from .checkpoint.index import CheckpointIndex
from .checkpoint.plan import build_plan
from .checkpoint.reader import load_weights
from .config import ModelConfig, VisionConfig
from .errors import CheckpointError, ConfigError, GrammarError, ImageError, MemoryBudgetError, NotLoadedError, PromptError
from .grammar import GrammarCompiler, Matcher
from .image import ImageFeatures, ImageProcessorConfig, PreparedImage, prepare_picture, to_patches, to_pictures
from .model.moe import dense_elements_at_once
from .model.text import TextModel
from .model.vision import VisionModel
from .prompt import Prompt
from .runtime.answer import Answer, TokenEvent
from .runtime.cache import SequenceState, sequence_bytes
from .runtime.forward import PREFILL_CHUNK, forward_chunks
from .runtime.generation import Generation
from .runtime.threads import suitable_threads
from .sampling import SamplingParams
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

EXPERT_FORMATS = ("stored",)
# FP8 weights are multiplied out once at load on a CPU, where each product would otherwise repeat it, if that stays small.
CPU_DEQUANTIZE_BELOW = 4 * 1024**3

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """A checkpoint with its tokenizer and template; its weights come and go with `load_weights` / `unload_weights`.

    Make one with `Engine.load` (ready to use) or `Engine.open` (nothing on the device yet). Calls are serialised by a
    lock; results never depend on torch's global generators.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str | None = None,
        expert_format: str = "stored",
        vram_budget: int | None = None,
        context: int = 8192,
    ) -> None:
        """See `Engine.open`, which is the name to use."""
        if expert_format not in EXPERT_FORMATS:
            raise ConfigError(f"expert_format: found {expert_format!r}, expected one of {', '.join(EXPERT_FORMATS)}.")
        self.folder = Path(folder)
        self.name = self.folder.name or self.folder.resolve().name
        self.device = _device(device)
        self.dtype = _compute_dtype(dtype, self.device)
        self.config = ModelConfig.from_folder(self.folder)
        if not isinstance(context, int) or isinstance(context, bool) or context < 1:
            raise PromptError(f"context: found {context!r}, expected a positive number of tokens.")
        self.context = min(context, self.config.text.max_position_embeddings)
        self._plan = build_plan(CheckpointIndex.open(self.folder), self.config)
        self.tokenizer = Tokenizer.from_folder(self.folder)
        if min(self.config.eos_token_ids) >= self.tokenizer.size:
            raise CheckpointError(
                f"{self.folder}: no end token {list(self.config.eos_token_ids)} is among the {self.tokenizer.size} tokens of tokenizer.json, "
                "so no answer would end. tokenizer.json of another model, or without its added tokens? Restore the published file."
            )
        self._template = ChatTemplate.from_folder(self.folder)
        self._processor = _processor_of(self.folder, self.config.vision)
        self._grammars = GrammarCompiler(self.tokenizer, self.config.text.vocab_size, self.config.eos_token_ids)
        self._dequantize = self.device.type == "cpu" and self._plan.device_bytes(self.dtype, True) < CPU_DEQUANTIZE_BELOW
        self.weight_bytes = self._plan.device_bytes(self.dtype, self._dequantize)
        self._weights: dict[str, Any] = {}
        self._text: TextModel | None = None
        self._vision: VisionModel | None = None
        self._state: SequenceState | None = None
        self._lock = threading.RLock()
        self.vram_budget = vram_budget
        self._check_budget(self.working_bytes(1))

    @classmethod
    def open(cls, folder: str | Path, device: str | torch.device = "cpu", **options: Any) -> "Engine":
        """Read configuration, tensor table, tokenizer and template of a checkpoint folder; no weight is read.

        device: "cpu" or "cuda:N". dtype: compute type, by default bfloat16 on a GPU and float32 on a CPU (a torch dtype
        or its name). expert_format: "stored". vram_budget: bytes the engine may hold on the device, None for no cap of
        its own. context: most tokens of prompt plus answer.
        Raises `ConfigError`, `CheckpointError`, `MemoryBudgetError`.
        """
        return cls(folder, device, **options)

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
        return self.config.vision is not None and self._plan.has_vision

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
                self._weights = load_weights(
                    self._plan, self.device, self.dtype, dequantize=self._dequantize, progress=progress, cancel=cancel
                )
                vision = VisionModel(self.config.vision, self._weights) if self.has_vision else None
                self._text, self._vision = TextModel(self.config.text, self._weights), vision
            except BaseException:
                self.unload_weights()
                raise
            log.debug("%s: %.2f GB in %.1f s", self.name, self.weight_bytes / 1e9, time.perf_counter() - began)

    def unload_weights(self) -> None:
        """Give back everything on the device. Never raises; `load_weights` brings it back."""
        with self._lock:
            self._text = self._vision = self._state = None
            self._weights = {}
            if self.device.type == "cuda" and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    close = unload_weights

    def memory(self) -> dict[str, int]:
        """Bytes held now: weights on the device, state of the running sequence, their sum, and the size when loaded."""
        sequence = self._state.nbytes if self._state is not None else 0
        weights = self.loaded_bytes
        return {"weights": weights, "sequence": sequence, "total": weights + sequence, "weights_when_loaded": self.weight_bytes}

    def working_bytes(self, tokens: int) -> int:
        """Estimate of what a run over `tokens` tokens (prompt and answer) needs beside the weights."""
        text = self.config.text
        tokens = min(tokens, self.context)
        chunk = min(tokens, PREFILL_CHUNK)
        # Widest activations of a prefill chunk: about ten float32 operands of a DeltaNet layer.
        activations = chunk * (10 * 4 * text.conv_dim + 8 * self.dtype.itemsize * text.hidden_size)
        # A group of experts made dense: three matrices, one of them also as float32 while it is multiplied out.
        experts = dense_elements_at_once(text) * (3 * self.dtype.itemsize + 8)
        return sequence_bytes(text, tokens, self.dtype) + activations + experts + 8 * text.vocab_size

    # Asking

    def encode_image(self, rgb: Any, size: int = 384, fit: str = "keep") -> list[ImageFeatures]:
        """Pictures -> features, one entry a picture.

        rgb: float [H, W, C] or [B, H, W, C] in 0..1, uint8, PIL, or a list of these. size, fit: see
        `image.prepare_picture`. Features stay on the CPU until a prompt uses them.
        """
        if not self.has_vision:
            raise ImageError(f"{self.name}: this checkpoint has no vision part. Use the full (image-text) repository, or a prompt without pictures.")
        pictures = to_pictures(rgb)
        return [self._encode(prepare_picture(picture, self._processor, size, fit)) for picture in pictures]

    @torch.no_grad()
    def _encode(self, prepared: PreparedImage) -> ImageFeatures:
        with self._lock:
            self._require_loaded()
            with suitable_threads(self.device, self.config.vision.hidden_size):
                features = self._vision.encode(to_patches(prepared, self._processor), prepared.grid)
        return ImageFeatures(features=features.cpu(), grid=prepared.grid, picture=prepared.pixels, source=self._source)

    @property
    def _source(self) -> str:
        return f"{self.folder.resolve()}|{self.dtype}"

    def render(self, prompt: Prompt, thinking: bool = False) -> Rendered:
        """The prompt as the model will see it: `.text` from the checkpoint's template, `.token_ids` with image tokens expanded."""
        counts = [image.n_tokens for image in prompt.images]
        return render_chat(prompt, self._template, self.tokenizer, self.config, counts, thinking)

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
            self._check_budget(self.working_bytes(len(rendered.token_ids) + sampling.max_new_tokens))
            self._state = self._new_state()
            try:
                generation = Generation(
                    self._text, self.config, self.tokenizer, self._state, sampling,
                    thinking=rendered.opens_thinking, matcher=matcher, on_token=on_token, cancel=cancel,
                )  # fmt: skip
                with suitable_threads(self.device, self.config.text.hidden_size):
                    return generation.run(rendered.token_ids, placed)
            finally:
                self._state = None

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
        factor = self._processor.factor
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

    def _check_budget(self, working: int) -> None:
        if self.vram_budget is None:
            return
        needed = self.weight_bytes + working
        if needed > self.vram_budget:
            raise MemoryBudgetError(
                f"{self.name} needs {needed / 1e9:.1f} GB ({self.weight_bytes / 1e9:.1f} GB of weights and {working / 1e9:.1f} GB for this context), "
                f"the budget is {self.vram_budget / 1e9:.1f} GB. Raise vram_gb (0 lets ComfyUI decide), lower context, or use a smaller checkpoint."
            )


def _device(device: str | torch.device) -> torch.device:
    """The device by name; one that this machine does not have is refused before anything is read."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: found {device!r}, expected 'cpu' or 'cuda:0', 'cuda:1', ...") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(f"device: found {device!r}, but torch sees {count} CUDA devices here. Choose another one, or 'cpu'.")
    elif found.type != "cpu":
        try:
            torch.zeros(1, device=found).cpu()
        except Exception as error:  # each backend has its own way to be absent
            raise ConfigError(f"device: found {device!r}, which does not work here. Choose 'cpu' or 'cuda:0', 'cuda:1', ...") from error
    return found


def _processor_of(folder: Path, vision: VisionConfig | None) -> ImageProcessorConfig:
    """The picture processor of a checkpoint; its patches must be those that the vision tower reads."""
    processor = ImageProcessorConfig.from_folder(folder)
    if vision is None:
        return processor
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.spatial_merge_size}
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return replace(processor, **sizes)
    for name, size in sizes.items():
        if getattr(processor, name) != size:
            raise CheckpointError(f"{path}: {name} is {getattr(processor, name)}, config.json asks for {size}. Restore the published file.")
    return processor


def _compute_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}.")
    return dtype
