"""Random weights under every canonical name, made on the device."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import torch

from ..checkpoint.experts import TakeExperts
from ..checkpoint.names import TIERS, expected_tensors, is_expert_stack, kept_in_float32, layer_of, may_stay_scaled, stack_names, tier_of
from ..checkpoint.quantize.head import HEAD
from ..checkpoint.reader import no_weight
from ..checkpoint.scaled import ScaledWeight
from ..config import ModelConfig
from ..model.linear import Weight
from ..model.moe import ExpertWeights
from ..options import EXPERT_BITS
from ..parts import Progress, WeightSource
from .packed import FORMS, STORED, packed_bytes, random_packed

BLOCK = 128
_CODES_AT_ONCE = 1 << 26


class RandomWeights:
    """A weight source without files: FP8 with 128x128 block scales where the official files have it, the rest dense.

    The same seed gives the same weights on the same kind of device. Two things are not random: the head's rows of the
    end tokens are zero. Their logit is then exactly 0, far below the best of a few hundred thousand normal ones, so that
    top-k sampling never draws an end, while a grammar that leaves nothing else can still end its answer.
    """

    has_vision = True

    def __init__(self, config: ModelConfig, seed: int = 0, experts: str = STORED) -> None:
        """experts: how the routed ones are kept, "stored" for FP8 as in the official files or a name of `packed.FORMS`. Beside those that
        the engine rounds by itself the head is FP8, as it makes it."""
        self._config, self._seed = config, seed
        self._form = None if experts == STORED else FORMS[experts]
        self._rounds_head = experts in EXPERT_BITS

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return sum(self._nbytes(name, shape, dtype, dequantize) for name, shape in expected_tensors(self._config).items())

    def tier_bytes(self, dtype: torch.dtype, dequantize: bool) -> dict[str, int]:
        """See `WeightSource.tier_bytes`."""
        tiers = dict.fromkeys(TIERS, 0)
        for name, shape in expected_tensors(self._config).items():
            tiers[tier_of(name, tied=False)] += self._nbytes(name, shape, dtype, dequantize)
        return tiers

    def passing_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.passing_bytes`: a layer of experts, and its largest stack once more while it is made."""
        sizes = [self._nbytes(name, expected_tensors(self._config)[name], dtype, dequantize) for name in stack_names(0)]
        return sum(sizes) + 5 * max(sizes)

    def expert_shapes(self, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """See `WeightSource.expert_shapes`."""
        shapes = expected_tensors(self._config)
        generator = torch.Generator().manual_seed(0)
        stacks = []
        for name in stack_names(0):
            count, *matrix = shapes[name]
            one = self._make(name, (1, *matrix), generator, dtype, dequantize).to("meta")
            stacks.append(one[torch.zeros(count, dtype=torch.int64, device="meta")])
        return ExpertWeights(*stacks)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None,
        *, take_experts: TakeExperts | None = None, on_host: Callable[[str], bool] = no_weight,
    ) -> dict[str, Weight]:  # fmt: skip
        """See `WeightSource.load`. Takes the largest tensor twice while it is made."""
        generator = torch.Generator(device=device).manual_seed(self._seed)
        weights: dict[str, Weight] = {}
        done, total = 0, self.device_bytes(dtype, dequantize)
        ends = torch.tensor(self._config.eos_token_ids, device=device)
        shapes = expected_tensors(self._config)
        # As files are read: what stays is not to stand in memory that experts leave behind, which could not be given back then.
        for name in sorted(shapes, key=is_expert_stack):
            shape = shapes[name]
            if cancel is not None:
                cancel()
            weight = self._make(name, shape, generator, dtype, dequantize)
            if name == HEAD:
                (weight.data.view(torch.uint8) if isinstance(weight, ScaledWeight) else weight)[ends] = 0
            done += weight.nbytes
            if on_host(name):
                weight = weight.to("cpu")
                if device.type == "cuda":
                    torch.cuda.empty_cache()  # or what is made next would stand where this one was, and tear that memory
            weights[name] = weight
            if progress is not None:
                progress(done, total)
            if take_experts is not None and is_expert_stack(name):
                names = stack_names(layer_of(name))
                if all(each in weights for each in names):
                    take_experts(layer_of(name), ExpertWeights(*map(weights.pop, names)))
        return weights

    def read_experts(self, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> None:
        """See `WeightSource.read_experts`: weights of one layer cannot be made without those before it."""
        return None

    def _make(
        self, name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, dequantize: bool
    ) -> Weight:
        device = generator.device
        if self._form is not None and is_expert_stack(name):
            packed = random_packed(self._form, shape, generator)
            return packed.dequantize(dtype) if dequantize else packed
        if self._is_scaled(name):
            # Codes up to 0x6f are finite, at most 120 in size; the scale brings the weights to a usual spread.
            codes = torch.empty(shape, dtype=torch.uint8, device=device)
            for piece in codes.split(max(1, _CODES_AT_ONCE * shape[0] // math.prod(shape))):  # the head is large
                piece.random_(0, 0x70, generator=generator)
                piece |= torch.randint(0, 2, piece.shape, dtype=torch.uint8, device=device, generator=generator) << 7
            scale = torch.full(scale_shape(shape), 5e-4, dtype=torch.float32, device=device)
            weight = ScaledWeight(codes.view(torch.float8_e4m3fn), scale, (BLOCK, BLOCK))
            return weight.dequantize(dtype) if dequantize else weight
        if kept_in_float32(name):
            return torch.rand(shape, dtype=torch.float32, device=device, generator=generator) * 0.1
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)

    def _is_scaled(self, name: str) -> bool:
        return is_scaled(name) or name == HEAD and self._rounds_head

    def _nbytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, dequantize: bool) -> int:
        count = math.prod(shape)
        if self._form is not None and is_expert_stack(name) and not dequantize:
            return packed_bytes(self._form, shape)
        if self._is_scaled(name) and not dequantize:
            return count + 4 * math.prod(scale_shape(shape))
        return count * (4 if kept_in_float32(name) else dtype.itemsize)


class RecordedWeights:
    """Another source, whose tensors' sizes are kept by name each time it loads."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.has_vision = source.has_vision
        #: Canonical name -> bytes on the device; empty before the first load.
        self.sizes: dict[str, int] = {}

    def device_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.device_bytes`."""
        return self._source.device_bytes(dtype, dequantize)

    def tier_bytes(self, dtype: torch.dtype, dequantize: bool) -> dict[str, int]:
        """See `WeightSource.tier_bytes`."""
        return self._source.tier_bytes(dtype, dequantize)

    def passing_bytes(self, dtype: torch.dtype, dequantize: bool) -> int:
        """See `WeightSource.passing_bytes`."""
        return self._source.passing_bytes(dtype, dequantize)

    def expert_shapes(self, dtype: torch.dtype, dequantize: bool) -> ExpertWeights:
        """See `WeightSource.expert_shapes`."""
        return self._source.expert_shapes(dtype, dequantize)

    def load(
        self, device: torch.device, dtype: torch.dtype, dequantize: bool, progress: Progress | None = None, cancel: Callable[[], object] | None = None,
        *, take_experts: TakeExperts | None = None, on_host: Callable[[str], bool] = no_weight,
    ) -> dict[str, Weight]:  # fmt: skip
        """See `WeightSource.load`."""
        sizes: dict[str, int] = {}

        def take(layer: int, experts: ExpertWeights) -> None:
            stacks = (experts.gate, experts.up, experts.down)
            sizes.update((name, stack.nbytes) for name, stack in zip(stack_names(layer), stacks))
            take_experts(layer, experts)

        weights = self._source.load(
            device, dtype, dequantize, progress, cancel, take_experts=None if take_experts is None else take, on_host=on_host
        )  # fmt: skip
        self.sizes = {**sizes, **{name: weight.nbytes for name, weight in weights.items()}}
        return weights

    def read_experts(self, layer: int, ids: Sequence[int], dtype: torch.dtype, dequantize: bool) -> ExpertWeights | None:
        """See `WeightSource.read_experts`."""
        return self._source.read_experts(layer, ids, dtype, dequantize)


def is_scaled(name: str) -> bool:
    """The official FP8 files keep the head in bfloat16, though the engine could use it scaled."""
    return may_stay_scaled(name) and name != HEAD


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the block scales of a weight [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
