"""What an engine is made of: a checkpoint folder gives these parts, and so can anything else (the benchmark makes them up)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Protocol, Sequence

import torch

from .chat import ChatTemplate
from .checkpoint.experts import TakeExperts, expert_shapes, load_experts, passing_bytes
from .checkpoint.index import CheckpointIndex
from .checkpoint.plan import LoadPlan, build_plan
from .checkpoint.reader import load_weights, no_weight
from .config import ModelConfig, TextConfig, VisionConfig
from .errors import CheckpointError, ConfigError
from .image import ImageProcessorConfig
from .model.linear import Weight
from .model.moe import ExpertWeights
from .options import EXPERT_BITS
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .checkpoint.quantize.source import QuantizedExperts

Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """Where the weights come from, as often as they are wanted.

    dtype: of dense weights. dequantize: multiply weights of 8 bits and fewer out.
    """

    #: Whether there are weights for pictures.
    has_vision: bool

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """Bytes that `load` with the same arguments puts on the device."""

    def tier_bytes(self, dtype: torch.dtype, dequantize: bool) -> dict[str, int]:
        """`device_bytes` by part of the model (see `checkpoint.names.TIERS`). An embedding that is the head too counts as "rest"."""

    def passing_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """Bytes that `load` takes on the device for a time, beside what it has handed over or will return, at most."""

    def expert_shapes(self, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """Stacks like those of every layer that `load` makes, on the meta device. Nothing is read.

        Raises `CheckpointError` where the layers' experts are not stored alike.
        """

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None,
        *, take_experts: TakeExperts | None = None, on_host: Callable[[str], bool] = no_weight,
    ) -> dict[str, Weight]:  # fmt: skip
        """Canonical name (see `checkpoint.names`) -> weight on `device`, or on the CPU where on_host(name); after an exception
        nothing is left there.

        progress(done_bytes, total_bytes); `cancel` is called between pieces and may raise. take_experts(layer, stacks) gets the
        routed experts of each layer in order, and they are neither kept nor returned; copies may be under way on the current
        stream.
        """

    def read_experts(self, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> ExpertWeights | None:
        """Some experts of a layer on the CPU, in that order, the bits that `load` would give them; None where they cannot be read
        one by one."""


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

    def with_experts(self, expert_format: str, cache: bool = False) -> EngineParts:
        """The same model with its experts kept in `expert_format` (see `options.EXPERT_FORMATS`).

        cache: experts that are rounded to it are kept in a folder beside the checkpoint's files, and read from there next time.
        Raises `ConfigError` where the weights do not come from a folder, `CheckpointError` where they cannot be kept so.
        """
        if expert_format == "stored":
            return self
        if not isinstance(self.weights, FolderWeights):
            raise ConfigError(f"expert_format: found {expert_format!r}, but the weights of {self.name} come as they are. Choose stored.")
        weights = self.weights.quantized(EXPERT_BITS[expert_format], self.config.text, self.tokenizer, cache)
        return replace(self, identity=f"{self.identity}|{weights.form}", weights=weights)


class FolderWeights:
    """The tensors of a checkpoint's files."""

    def __init__(self, plan: LoadPlan, files: Sequence[Path] = ()) -> None:
        """files: those that the plan was made of; reading them when they have changed since is refused."""
        self._plan = plan
        self.has_vision = plan.has_vision
        self._marks = {file: _mark(file) for file in files}

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return self._plan.device_bytes(dtype, dequantize)

    def tier_bytes(self, dtype: torch.dtype, dequantize: bool) -> dict[str, int]:
        """See `WeightSource.tier_bytes`."""
        return self._plan.tier_bytes(dtype, dequantize)

    def passing_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.passing_bytes`."""
        return passing_bytes(self._plan, dtype, dequantize)

    def expert_shapes(self, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """See `WeightSource.expert_shapes`."""
        return expert_shapes(self._plan, dtype, dequantize)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None,
        *, take_experts: TakeExperts | None = None, on_host: Callable[[str], bool] = no_weight,
    ) -> dict[str, Weight]:  # fmt: skip
        """See `WeightSource.load`."""
        self._require_unchanged()
        return load_weights(
            self._plan, device, dtype, dequantize=dequantize, progress=progress, cancel=cancel, take_experts=take_experts, on_host=on_host
        )

    def read_experts(self, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """See `WeightSource.read_experts`."""
        self._require_unchanged()
        return load_experts(self._plan, layer, ids, dtype, dequantize)

    def quantized(self, bits: int, config: TextConfig, tokenizer: Tokenizer, cache: bool) -> QuantizedExperts:
        """The same weights, but the routed experts in `bits` bits; `cache`: kept in a file beside the checkpoint."""
        from .checkpoint.quantize.source import QuantizedExperts

        return QuantizedExperts(self._plan, bits, config, tokenizer, cache=cache)


    def _require_unchanged(self) -> None:
        for file, mark in self._marks.items():
            if _mark(file) != mark:
                raise CheckpointError(f"{file}: changed or gone since the checkpoint was opened. Restore it, or open the checkpoint again.")


def _mark(file: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where it cannot be asked."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def parts_of_folder(folder: str | Path) -> EngineParts:
    """Configuration, tensor table, tokenizer, template and picture processor of a checkpoint folder; no weight is read.

    Raises `ConfigError`, `CheckpointError`.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    index = CheckpointIndex.open(folder)
    plan = build_plan(index, config)
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
        weights=FolderWeights(plan, index.files),
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
