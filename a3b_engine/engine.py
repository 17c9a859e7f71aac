"""`Engine`: one checkpoint, opened, loaded and asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

from .chat import Rendered, render_chat
from .errors import CheckpointError, GrammarError, ImageError, PromptError
from .grammar import GrammarCompiler, Matcher
from .image import ImageFeatures, PreparedImage, prepare_picture, to_patches, to_pictures
from .options import EXPERT_FORMATS, EngineOptions
from .parts import EngineParts, parts_of_folder
from .prompt import Prompt
from .resident import ResidentModel
from .runtime.answer import Answer, TokenEvent
from .runtime.cache import SequenceState
from .runtime.forward import PREFILL_CHUNK, forward_chunks
from .runtime.generation import Generation
from .runtime.place import without_autograd, working_on
from .sampling import SamplingParams

__all__ = ["EXPERT_FORMATS", "Engine"]


class Engine(ResidentModel):
    """A checkpoint with its tokenizer and template; its weights come and go with `load_weights` / `unload_weights`.

    Make one with `Engine.load` (ready to use), `Engine.open` or `Engine.from_parts` (nothing on the device yet). Calls are
    serialised by a lock; results never depend on torch's global generators.
    """

    def __init__(self, parts: EngineParts, options: EngineOptions) -> None:
        """See `Engine.open` and `Engine.from_parts`, which are the names to use."""
        super().__init__(parts, options)
        self._grammars = GrammarCompiler(self.tokenizer, self.config.text.vocab_size, self.config.eos_token_ids)

    @classmethod
    def open(cls, folder: str | Path, device: str | torch.device = "cpu", **options: Any) -> "Engine":
        """Read configuration, tensor table, tokenizer and template of a checkpoint folder; no weight is read.

        device: "cpu" or "cuda:N". dtype: compute type, by default bfloat16 on a GPU and float32 on a CPU (a torch dtype
        or its name). expert_format: "stored", or "int4" or "int3", which round the routed experts while they are loaded.
        vram_budget: bytes the engine may hold on the device, None for no cap of its own; under a cap, experts that find no room wait
        in RAM. context: most tokens of prompt plus answer. park: keep the weights in RAM when they leave the device.
        cache_experts: keep rounded experts in a folder beside the checkpoint's files for the next load.
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

    # Asking

    def encode_image(self, rgb: Any, size: int = 384, fit: str = "keep") -> list[ImageFeatures]:
        """Pictures -> features, one entry a picture.

        rgb: float [H, W, C] or [B, H, W, C] in 0..1, uint8, PIL, or a list of these. size, fit: see
        `image.prepare_picture`. Features stay on the CPU until a prompt uses them.
        """
        if not self.has_vision:
            raise ImageError(f"{self.name}: this checkpoint has no vision part. Use the full (image-text) repository, or a prompt without pictures.")
        return self._encode([prepare_picture(picture, self.parts.processor, size, fit) for picture in to_pictures(rgb)])

    @without_autograd()
    def _encode(self, pictures: Sequence[PreparedImage]) -> list[ImageFeatures]:
        with self._lock:
            self._require_loaded()
            with working_on(self.device, self.config.vision.hidden_size):
                vision = self._eyes()
                # Copied under the lock: the next picture of this size is written over it.
                features = [vision.encode(to_patches(each, self.parts.processor, self.device), each.grid).cpu() for each in pictures]
        return [
            ImageFeatures(features=found, grid=each.grid, picture=each.pixels, source=self._source) for found, each in zip(features, pictures)
        ]  # fmt: skip

    @property
    def _source(self) -> str:
        return f"{self.parts.identity}|{self.dtype}"

    def render(self, prompt: Prompt, thinking: bool = False) -> Rendered:
        """The prompt as the model will see it: `.text` from the checkpoint's template, `.token_ids` with image tokens expanded."""
        counts = [image.n_tokens for image in prompt.images]
        return render_chat(prompt, self.parts.template, self.tokenizer, self.config, counts, thinking)

    @without_autograd()
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
        self._make_room(self._runner.working_bytes(tokens, kept=False) + self._residence.visiting_bytes)
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
            self._answer_is_over(runner)

    @without_autograd()
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
                (image,) = self._encode([PreparedImage(image.picture[: rows * factor, : columns * factor], (rows, columns))])
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
