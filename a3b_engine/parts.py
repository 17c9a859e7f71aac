"""What an engine is made of: a checkpoint folder gives these parts, and so can anything else (the benchmark makes them up)."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Protocol

import torch

from .chat import ChatTemplate
from .checkpoint.index import CheckpointIndex
from .checkpoint.names import is_expert_stack
from .checkpoint.plan import LoadPlan, build_plan
from .checkpoint.reader import LoadCancelled, load_weights
from .checkpoint.scaled import ScaledWeight
from .config import ModelConfig, TextConfig, VisionConfig
from .errors import CheckpointError, ConfigError
from .image import ImageProcessorConfig
from .options import EXPERT_BITS
from .tokenizer import Tokenizer

Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """Where the weights come from, as often as they are wanted."""

    #: Whether there are weights for pictures.
    has_vision: bool

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """Bytes that `load` with the same arguments puts on the device."""

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None
    ) -> dict[str, torch.Tensor | ScaledWeight]:
        """Canonical name (see `checkpoint.names`) -> weight on `device`; after an exception nothing is left there.

        dtype: of dense weights. dequantize: multiply scaled weights out. progress(done_bytes, total_bytes); `cancel` is
        called between pieces and may raise.
        """


@dataclass(frozen=True, eq=False)
class EngineParts:
    """One model, not loaded yet.

    name: for messages. identity: two parts with the same one have the same weights. processor: its patches are those that
    `config.vision` reads.
    """

    name: str
    identity: str
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer
    template: ChatTemplate
    processor: ImageProcessorConfig

    def with_experts(self, expert_format: str) -> EngineParts:
        """The same model with its experts kept in `expert_format` (see `options.EXPERT_FORMATS`).

        Raises `ConfigError` where the weights do not come from a folder, `CheckpointError` where they cannot be kept so.
        """
        if expert_format == "stored":
            return self
        if not isinstance(self.weights, FolderWeights):
            raise ConfigError(f"expert_format: found {expert_format!r}, but the weights of {self.name} come as they are. Choose stored.")
        weights = self.weights.quantized(EXPERT_BITS[expert_format], self.config.text, self.tokenizer)
        return replace(self, identity=f"{self.identity}|{expert_format}", weights=weights)


class FolderWeights:
    """The tensors of a checkpoint's files."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self.has_vision = plan.has_vision

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return self._plan.device_bytes(dtype, dequantize)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None
    ) -> dict[str, torch.Tensor | ScaledWeight]:
        """See `WeightSource.load`."""
        return load_weights(self._plan, device, dtype, dequantize=dequantize, progress=progress, cancel=cancel)

    def quantized(self, bits: int, config: TextConfig, tokenizer: Tokenizer) -> QuantizedExperts:
        """The same weights, but the routed experts in `bits` bits."""
        return QuantizedExperts(self._plan, bits, config, tokenizer)


class QuantizedExperts:
    """The tensors of a checkpoint's files, the routed experts rounded to few bits while they are loaded.

    One layer stands on the device as in the files at a time, beside what is finished.
    """

    def __init__(self, plan: LoadPlan, bits: int, config: TextConfig, tokenizer: Tokenizer, group: int = 32) -> None:
        """Raises `CheckpointError` for experts that are stored in few bits already, or whose sizes groups do not divide."""
        from .checkpoint.quantize.matrix import check_shape
        from .checkpoint.quantize.steps import require_many_bits

        self._bits, self._group, self._config, self._tokenizer = bits, group, config, tokenizer
        self._experts = {name: entry for name, entry in plan.entries.items() if is_expert_stack(name)}
        for name, entry in self._experts.items():
            require_many_bits(plan, entry)
            check_shape(entry.shape[-1], bits, group, name)
        self._plan = plan
        self._rest = replace(plan, entries={name: entry for name, entry in plan.entries.items() if name not in self._experts})
        self.has_vision = plan.has_vision

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        from .checkpoint.quantize.experts import packed_bytes

        if dequantize:
            return self._plan.device_bytes(dtype, True)
        packed = sum(packed_bytes(entry.shape, self._bits, self._group) for entry in self._experts.values())
        return self._rest.device_bytes(dtype, False) + packed

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """See `WeightSource.load`; the experts come as `PackedWeight`."""
        from .checkpoint.quantize.calibration import TOKENS, Calibration, calibration_tokens
        from .checkpoint.quantize.experts import Portions, quantize_experts

        total, begun = self._plan.stored_bytes, self._rest.stored_bytes
        done = 0

        def report(nbytes: int) -> None:
            nonlocal done
            if cancel is not None and cancel() is True:
                raise LoadCancelled("Loading the model was cancelled; nothing of it is left in memory.")
            done += nbytes
            if progress is not None:
                progress(done, total)

        weights: dict[str, Any] = {}
        try:
            weights = load_weights(self._rest, device, dtype, dequantize=dequantize, cancel=cancel)
            report(begun)
            tokens = calibration_tokens(self._tokenizer, min(TOKENS, self._config.max_position_embeddings))
            embedded = weights["embed_tokens.weight"][torch.tensor(tokens, device=device)]
            calibration = Calibration(self._config, embedded)
            for layer in range(self._config.num_hidden_layers):
                base = f"layers.{layer}."
                part = replace(self._plan, entries={name: entry for name, entry in self._experts.items() if name.startswith(base)}, aliases={})
                stacks = load_weights(part, device, dtype, cancel=cancel)
                portions = Portions(part.stored_bytes, sum(stack.shape[0] for stack in stacks.values()), report)
                of_layer = {name: weight for name, weight in weights.items() if name.startswith(base)} | stacks
                packed = quantize_experts(of_layer, calibration, self._bits, self._group, portions)
                weights.update((name, weight.dequantize(dtype) if dequantize else weight) for name, weight in packed.items())
            return weights
        except BaseException as error:
            weights.clear()
            traceback.clear_frames(error.__traceback__)  # whoever holds the exception would hold tensors
            raise


def parts_of_folder(folder: str | Path) -> EngineParts:
    """Configuration, tensor table, tokenizer, template and picture processor of a checkpoint folder; no weight is read.

    Raises `ConfigError`, `CheckpointError`.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    plan = build_plan(CheckpointIndex.open(folder), config)
    tokenizer = Tokenizer.from_folder(folder)
    if min(config.eos_token_ids) >= tokenizer.size:
        raise CheckpointError(
            f"{folder}: no end token {list(config.eos_token_ids)} is among the {tokenizer.size} tokens of tokenizer.json, "
            "so no answer would end. tokenizer.json of another model, or without its added tokens? Restore the published file."
        )
    return EngineParts(
        name=folder.name or folder.resolve().name,
        identity=str(folder.resolve()),
        config=config,
        weights=FolderWeights(plan),
        tokenizer=tokenizer,
        template=ChatTemplate.from_folder(folder),
        processor=_processor_of(folder, config.vision),
    )


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
