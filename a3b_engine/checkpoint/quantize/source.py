"""The weights of a checkpoint with its routed experts in few bits and its head in FP8: rounded while they are loaded, or read from a cache."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, Sequence

import torch

from ...config import TextConfig
from ...model.linear import Weight
from ...model.moe import ExpertWeights
from ..experts import TakeExperts, expert_shapes, load_experts, passing_bytes
from ..names import is_expert_stack, stack_names
from ..packed import PackedWeight
from ..reader import LoadCancelled, load_weights, no_weight
from ..storage import LoadPlan
from .cache import CacheWriter, ExpertCache
from .calibration import TOKENS, Calibration, calibration_tokens
from .experts import Portions, packed_bytes, quantize_experts
from .head import HEAD, head_bytes, load_head, rounds_head
from .matrix import WORK_BYTES, default_group
from .steps import require_many_bits

if TYPE_CHECKING:
    from ...tokenizer import Tokenizer

_EMBEDDING = "embed_tokens.weight"


class QuantizedExperts:
    """The tensors of a checkpoint's files, the routed experts in few bits and a plain head in FP8 (see `parts.WeightSource`).

    Experts are rounded layer by layer while they are loaded. With `cache` they are written to a folder beside the files as well,
    and read from there the next time. Rounding the head takes a moment: it is done each time.
    """

    def __init__(
        self, plan: LoadPlan, bits: int, config: TextConfig, tokenizer: Tokenizer, group: int | None = None, cache: bool = False
    ) -> None:
        """group: columns that share a scale; None: as many as fit, up to 64.

        Raises `CheckpointError` for experts that are stored in few bits already, or whose sizes groups do not divide.
        """
        self._config, self._tokenizer, self._bits = config, tokenizer, bits
        self._experts = {name: entry for name, entry in plan.entries.items() if is_expert_stack(name)}
        for entry in self._experts.values():
            require_many_bits(plan, entry)
        self._group = default_group({name: entry.shape[-1] for name, entry in self._experts.items()}, bits, group)
        self._plan = plan
        self._head = plan.entries[HEAD] if rounds_head(plan) else None
        apart = {*self._experts, *([HEAD] if self._head is not None else ())}
        self._rest = replace(plan, entries={name: entry for name, entry in plan.entries.items() if name not in apart})
        self._cache = ExpertCache(plan, bits, self._group) if cache else None
        self._cached = self._with_cached()
        self.has_vision = plan.has_vision

    @property
    def form(self) -> str:
        """What the weights become, as "int4-g64+fp8-head"."""
        return f"int{self._bits}-g{self._group}" + ("" if self._head is None else "+fp8-head")

    def _with_cached(self) -> LoadPlan | None:
        """The plan with the experts of the cache, if that has them."""
        found = self._cache.entries() if self._cache is not None else None
        return None if found is None else replace(self._rest, entries={**self._rest.entries, **found})

    # Sizes

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return sum(self.tier_bytes(dtype, dequantize).values())

    def tier_bytes(self, dtype: torch.dtype, dequantize: bool) -> dict[str, int]:
        """See `WeightSource.tier_bytes`."""
        tiers = self._plan.tier_bytes(dtype, dequantize)
        if not dequantize:
            tiers["experts"] = sum(packed_bytes(entry.shape, self._bits, self._group) for entry in self._experts.values())
            if self._head is not None:
                tiers["rest"] += head_bytes(self._head.shape) - self._head.device_bytes(dtype, False)
        return tiers

    def passing_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.passing_bytes`."""
        if self._cached is not None:
            return passing_bytes(self._cached, dtype, dequantize)
        layers = max(1, self._config.num_hidden_layers)
        made = self.tier_bytes(dtype, False)["experts"] // layers + (self.tier_bytes(dtype, True)["experts"] // layers if dequantize else 0)
        return passing_bytes(self._plan, dtype, False) + made + WORK_BYTES

    def expert_shapes(self, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """See `WeightSource.expert_shapes`."""
        if dequantize:
            return expert_shapes(self._plan, dtype, True)
        return ExpertWeights(*(self._packed_shape(self._experts[name].shape) for name in stack_names(0)))

    def _packed_shape(self, shape: tuple[int, ...]) -> PackedWeight:
        *lead, columns = shape
        codes = torch.empty((*lead, columns * self._bits // 8), dtype=torch.uint8, device="meta")
        scale = torch.empty((*lead, columns // self._group), dtype=torch.float16, device="meta")
        return PackedWeight(codes, scale, None, None, "int", self._group, self._bits)

    # Weights

    def read_experts(self, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> ExpertWeights | None:
        """See `WeightSource.read_experts`: from the cache only."""
        return None if self._cached is None else load_experts(self._cached, layer, ids, dtype, dequantize)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Callable[[int, int], None] | None = None,
        cancel: Callable[[], object] | None = None, *, take_experts: TakeExperts | None = None, on_host: Callable[[str], bool] = no_weight,
    ) -> dict[str, Weight]:  # fmt: skip
        """See `WeightSource.load`; unless `dequantize`, the experts come as `PackedWeight` and the head as `ScaledWeight`."""
        weights: dict[str, Weight] = {}
        ahead = 0 if self._head is None else replace(self._plan, entries={HEAD: self._head}, aliases={}).stored_bytes

        def behind(done: int, total: int) -> None:
            progress(ahead + done, ahead + total)

        try:
            if self._head is not None:
                weights[HEAD] = load_head(self._plan, torch.device(device), cancel)
                if dequantize:
                    weights[HEAD] = weights[HEAD].dequantize(dtype)
            return weights | self._load_others(device, dtype, dequantize, None if progress is None else behind, cancel, take_experts, on_host)
        except BaseException as error:
            weights.clear()
            traceback.clear_frames(error.__traceback__)  # whoever holds the exception would hold tensors
            raise

    def _load_others(self, device, dtype, dequantize: bool, progress, cancel, take_experts: TakeExperts | None, on_host) -> dict[str, Weight]:
        """All but a head that is rounded."""
        self._cached = self._with_cached()  # it may have been deleted, or written by another engine
        if self._cached is not None:
            return load_weights(
                self._cached, device, dtype, dequantize=dequantize, progress=progress, cancel=cancel, take_experts=take_experts, on_host=on_host
            )
        writer = self._cache.writer(self._experts) if self._cache is not None else None
        work = _Rounding(self, device, dtype, dequantize, progress, cancel, on_host, writer)
        try:
            weights = work.run(take_experts)
        except BaseException:
            work.weights.clear()
            if writer is not None:
                writer.abandon()
            raise
        if writer is not None and writer.finish():
            self._cached = self._with_cached()
        return weights


class _Rounding:
    """One load that rounds: the other weights first, then layer after layer."""

    def __init__(self, source: QuantizedExperts, device, dtype, dequantize: bool, progress, cancel, on_host, writer: CacheWriter | None) -> None:
        self._source, self._device, self._dtype, self._dequantize, self._on_host = source, torch.device(device), dtype, dequantize, on_host
        self._progress, self._cancel, self._writer = progress, cancel, writer
        self._done, self._total = 0, source._rest.stored_bytes + replace(source._plan, entries=source._experts, aliases={}).stored_bytes
        self.weights: dict[str, Weight] = {}

    def run(self, take_experts: TakeExperts | None) -> dict[str, Weight]:
        source, device, dtype = self._source, self._device, self._dtype
        self.weights = load_weights(source._rest, device, dtype, dequantize=self._dequantize, cancel=self._cancel, on_host=self._on_host)
        self._report(source._rest.stored_bytes)
        tokens = calibration_tokens(source._tokenizer, min(TOKENS, source._config.max_position_embeddings))
        table = self.weights[_EMBEDDING]
        calibration = Calibration(source._config, table[torch.tensor(tokens, device=table.device)].to(device))
        experts = replace(source._plan, entries=source._experts, aliases={})
        portions = Portions(experts.stored_bytes, sum(entry.shape[0] for entry in source._experts.values()), self._report)

        def round_layer(layer: int, stacks: ExpertWeights) -> None:
            base, names = f"layers.{layer}.", stack_names(layer)
            of_layer = {name: weight for name, weight in self.weights.items() if name.startswith(base)}
            of_layer.update(zip(names, (stacks.gate, stacks.up, stacks.down)))
            packed = quantize_experts(of_layer, calibration, source._bits, source._group, portions)
            if self._writer is not None:
                self._writer.write(packed)
            made = {name: weight.dequantize(dtype) if self._dequantize else weight for name, weight in packed.items()}
            made = {name: weight.to("cpu") if self._on_host(name) else weight for name, weight in made.items()}
            if take_experts is None:
                self.weights.update(made)
            else:
                take_experts(layer, ExpertWeights(*(made[name] for name in names)))

        load_weights(experts, device, dtype, cancel=self._cancel, take_experts=round_layer)
        return self.weights

    def _report(self, nbytes: int) -> None:
        if self._cancel is not None and self._cancel() is True:
            raise LoadCancelled("Loading the model was cancelled; nothing of it is left in memory.")
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
