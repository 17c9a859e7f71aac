"""What an engine is made of: a checkpoint folder gives these parts, and so can anything else (the benchmark makes them up)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Protocol

import torch

from .chat import ChatTemplate
from .checkpoint.index import CheckpointIndex
from .checkpoint.plan import LoadPlan, build_plan
from .checkpoint.reader import load_weights
from .checkpoint.scaled import ScaledWeight
from .config import ModelConfig, VisionConfig
from .errors import CheckpointError
from .image import ImageProcessorConfig
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
