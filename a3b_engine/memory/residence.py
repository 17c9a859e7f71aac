"""The weights of one engine: on the device as far as there is room, the rest in RAM or in the checkpoint's files."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any, Callable, Sequence

import torch

from ..config import ModelConfig, VisionConfig
from ..errors import CheckpointError, MemoryBudgetError
from ..model.moe import ExpertWeights
from ..parts import Progress, WeightSource
from .homes import Homes
from .pinned import PinnedArena, PinnedMemoryError
from .placement import Placement, Sizes, row_bytes
from .pool import CHUNK_BYTES, SlotPool
from .pooled import PooledExperts
from .record import RecordLayout

log = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
VISION = "visual."


class Residence:
    """Loads, moves and drops the weights of one model. Holds nothing on the device until `load`.

    Routed experts are in slots (`SlotPool`), whose number follows the room there is, or, where nothing is to be saved, tensors as the
    source gives them.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, device: torch.device, dtype: torch.dtype, dequantize: bool, *, slots: bool, park: bool) -> None:
        """slots: put experts in slots; without, all weights are on the device as the source gives them. park: keep all experts in pinned RAM, and the rest in ordinary RAM, when the weights leave the device."""
        self._source, self._config, self._device, self._dtype, self._dequantize, self._park = source, config, device, dtype, dequantize, park
        text = config.text
        tiers = source.tier_bytes(dtype, dequantize)
        self._layout: RecordLayout | None = None
        self.shapes: ExpertWeights | None = None
        try:
            self.shapes = source.expert_shapes(dtype, dequantize)
            self._layout = RecordLayout(self.shapes) if slots else None
        except CheckpointError as reason:  # layers in different formats: no slot would fit them all
            log.info("experts stay on the device as a whole: %s", reason)
        layers = text.num_hidden_layers
        count = layers * text.num_experts
        if self._layout is None:  # nothing can wait elsewhere
            tiers = {**tiers, "rest": tiers["rest"] + tiers["embedding"] + tiers["vision"], "embedding": 0, "vision": 0}
        self.sizes = Sizes(
            rest=tiers["rest"], embedding=tiers["embedding"], vision=tiers["vision"],
            record=-(-tiers["experts"] // count) if self._layout is None else self._layout.nbytes,
            row=-(-tiers["experts"] // count) * layers if self._layout is None else row_bytes(self._layout.nbytes, layers, device),
            layers=layers, experts=text.num_experts, top_k=text.num_experts_per_tok, whole_only=self._layout is None,
            vision_passing=0 if config.vision is None else _passing(config.vision, tiers["vision"], dtype),
        )  # fmt: skip
        self._stored_experts = tiers["experts"]
        self.placement: Placement | None = None
        self.weights: dict[str, Any] = {}
        self.pool: SlotPool | None = None
        self._homes: Homes | None = None
        self._host: list[PinnedArena] = []
        self._in_arenas: set[str] = set()  # weights that lie in those
        self.vision: dict[str, Any] = {}
        self._parked: dict[str, Any] = {}

    # Sizes

    @property
    def nbytes(self) -> int:
        """Bytes of weights on the device now."""
        if self.placement is None:
            return 0
        if self.pool is None:
            return self.sizes.rest + self.sizes.embedding + self.sizes.vision + self._stored_experts
        return self.placement.nbytes(self.sizes)

    @property
    def full_bytes(self) -> int:
        """Bytes of everything on the device."""
        if self._layout is None:
            return self.sizes.rest + self.sizes.embedding + self.sizes.vision + self._stored_experts
        return self.sizes.all

    @property
    def visiting_bytes(self) -> int:
        """Room that a long prompt needs for experts that have no slot."""
        return 0 if self.placement is None else (self.sizes.experts - self.placement.rows) * self.sizes.record

    @property
    def host_bytes(self) -> tuple[int, int]:
        """Bytes in pinned and in ordinary RAM."""
        homes = self._homes
        pinned = sum(arena.nbytes for arena in self._host) + (homes.pinned_bytes if homes is not None else 0)
        plain = sum(weight.nbytes for name, weight in self._parked.items() if name not in self._in_arenas) + (homes.plain_bytes if homes is not None else 0)
        return (pinned, plain) if self._device.type == "cuda" else (0, pinned + plain)

    def expert_counts(self) -> dict[str, int]:
        """Experts in all, on the device, with a place in pinned RAM, and those that are in the files alone."""
        total = self.sizes.experts * self.sizes.layers
        if self.placement is None or self.pool is None:
            here = total if self.placement is not None else 0
            return {"experts": total, "experts_on_device": here, "experts_pinned": 0, "experts_on_disk": 0}
        here = self.placement.rows * self.sizes.layers
        pinned = self._homes.pinned
        return {"experts": total, "experts_on_device": here, "experts_pinned": pinned, "experts_on_disk": self.pool.in_files}

    def experts(self) -> list[PooledExperts] | None:
        """What the text model takes as its routed experts; None where they are among `weights`."""
        return None if self.pool is None else [PooledExperts(self.pool, layer) for layer in range(self.sizes.layers)]

    # Loading

    def load(self, placement: Placement, room: float, progress: Progress | None, cancel: Callable[[], object] | None) -> None:
        """Bring the weights to the device as `placement` says, never taking more than `room` bytes. After any exception nothing is left
        on the device."""
        try:
            if self._layout is None:
                self.weights = self.vision = self._source.load(self._device, self._dtype, self._dequantize, progress, cancel)
                self.placement = Placement(self.sizes.experts, True, True)
            else:
                self._bring(placement, room, progress, cancel)
        except BaseException:
            self.drop(park=False)
            raise

    def _bring(self, placement: Placement, room: float, progress: Progress | None, cancel: Callable[[], object] | None) -> None:
        sizes = self.sizes
        parked = bool(self._parked) and self._homes is not None and self._homes.has_all
        if self._parked and not parked:
            log.info("RAM was too short to keep all experts; they are read again")
            self._parked = {}
        if self._homes is None:
            self._homes = Homes(self._layout, sizes.layers, sizes.experts, self._device, self._read)
        self.pool = pool = SlotPool(self.shapes, sizes.layers, sizes.top_k, self._device, self._homes)
        # While layers come from the files, some of them stand on the device beside the slots: then rows are added behind.
        passing = 0 if parked else self._source.passing_bytes(self._dtype, self._dequantize) + 2 * CHUNK_BYTES
        first = placement.rows
        while first > 0 and replace(placement, rows=first).nbytes(sizes) + passing > room:
            first -= 1
        pool.add_rows(first)
        first = pool.rows
        if parked:
            self.weights = {name: self._placed(name, weight, placement) for name, weight in self._parked.items()}
            pool.fill()
        else:
            self._homes.plan(first, self._park or first < placement.rows)
            self.weights = self._source.load(
                self._device, self._dtype, self._dequantize, progress, cancel,
                take_experts=pool.take_in, on_host=lambda name: self._on_host(name, placement),
            )  # fmt: skip
            pool.settle()
        asked, placement = placement, self._pin(placement)
        if placement.embedding and not asked.embedding:  # what it takes is taken from the experts
            rows = max(sizes.fewest_rows, placement.rows - -(-sizes.embedding // sizes.row))
            pool.remove_rows(pool.rows - rows)
            placement = replace(placement, rows=rows)
        if pool.add_rows(placement.rows - pool.rows):
            pool.fill()
        if pool.rows < sizes.fewest_rows:
            raise MemoryBudgetError(
                f"{self._device} had memory for {pool.rows} of {sizes.experts} experts a layer, at least {sizes.fewest_rows} are needed. "
                "Close what else uses it, or choose a smaller expert_format (int4, int3)."
            )
        if pool.without_home:
            log.info("RAM for pinned memory is short: %d of %d experts are brought by the host when they are needed, which is slow", pool.without_home, sizes.experts * sizes.layers)
        self.placement = replace(placement, rows=pool.rows)
        self.vision = {name: weight for name, weight in self.weights.items() if name.startswith(VISION)}
        if pool.full and not self._park:
            self._synchronize()  # copies from there may be under way
            self._homes.close()
            pool.refresh()

    def _read(self, layer: int, ids: Sequence[int]) -> ExpertWeights | None:
        return self._source.read_experts(layer, ids, self._dtype, self._dequantize)

    def _on_host(self, name: str, placement: Placement) -> bool:
        if name == EMBEDDING:
            return not placement.embedding and self.sizes.embedding > 0
        return name.startswith(VISION) and not placement.vision

    def _placed(self, name: str, weight: Any, placement: Placement) -> Any:
        return weight if self._on_host(name, placement) else weight.to(self._device, non_blocking=True)

    def _pin(self, placement: Placement) -> Placement:
        """What stays in RAM, into pinned RAM: the device reads embedding rows there, and the vision tower comes faster. Where there is
        none for the embedding, it goes to the device. Returns what is where then."""
        for names in ([EMBEDDING], [name for name in self.weights if name.startswith(VISION)]):
            names = [name for name in names if self._on_host(name, placement) and name not in self._in_arenas]
            dense = [name for name in names if isinstance(self.weights[name], torch.Tensor)]
            if not dense or self._device.type == "cpu":
                continue
            sizes = [-(-self.weights[name].nbytes // 256) * 256 for name in dense]
            try:
                arena = PinnedArena(sum(sizes), self._device)
                memory, at = arena.take().host, 0
            except PinnedMemoryError as problem:
                log.info("%s", problem)
                if EMBEDDING in names:  # the device cannot read it where it is
                    self.weights[EMBEDDING] = self.weights[EMBEDDING].to(self._device)
                    placement = replace(placement, embedding=True)
                continue
            self._host.append(arena)
            for name, nbytes in zip(dense, sizes):
                weight = self.weights[name]
                place = memory[at : at + weight.nbytes].view(weight.dtype).view(weight.shape)
                place.copy_(weight)
                self.weights[name], at = place, at + nbytes
                self._in_arenas.add(name)
                if name in self._parked:
                    self._parked[name] = place
        return placement

    # More and less

    def shrink(self, wanted: float) -> int:
        """Give back cold experts until `wanted` bytes are free, down to the fewest rows. Returns the bytes."""
        if self.pool is None or self.placement is None or wanted <= 0:
            return 0
        rows = min(self.placement.rows - self.sizes.fewest_rows, math.ceil(min(wanted, self.sizes.all) / self.sizes.row))
        if rows <= 0:
            return 0
        freed = self.pool.remove_rows(rows)
        self.placement = replace(self.placement, rows=self.pool.rows)
        log.info("%d of %d experts of a layer stay on %s; the others wait in RAM", self.pool.rows, self.sizes.experts, self._device)
        return freed

    def grow(self, room: float) -> int:
        """Take up to `room` more bytes for expert slots. Returns the bytes."""
        if self.pool is None or self.placement is None:
            return 0
        rows = min(self.sizes.experts - self.placement.rows, int(max(0.0, min(room, self.sizes.all)) // self.sizes.row))
        if rows <= 0:
            return 0
        taken = self.pool.add_rows(rows)
        self.placement = replace(self.placement, rows=self.pool.rows)
        self.pool.fill()
        return taken

    def drop(self, park: bool) -> None:
        """Give back everything on the device, and, unless `park`, in RAM."""
        if park and self.placement is not None and self.pool is not None:
            if not self._parked:
                self._parked = {name: weight.to("cpu") for name, weight in self.weights.items()}
            self.pool.secure_all()
        elif not park:
            if self._homes is not None:
                self._synchronize()
                self._homes.close()
            self._homes, self._parked = None, {}
        self.weights, self.vision = {}, {}
        if not park:
            for arena in self._host:
                arena.close()
            self._host, self._in_arenas = [], set()
        self.pool = self.placement = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)


def _passing(vision: VisionConfig, nbytes: int, dtype: torch.dtype) -> int:
    """Bytes of the vision tower that are on a device at a time when its blocks come one by one: two blocks, and what is no block."""
    merged = vision.hidden_size * vision.spatial_merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    around = vision.hidden_size * (patch + vision.num_position_embeddings) + merged * (merged + vision.out_hidden_size)
    return min(nbytes, 2 * nbytes // vision.depth + around * dtype.itemsize)
