"""How the experts of a layer are shared out among launches of many tokens, by the layouts of their weights, and in tiles of what size."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch

from ..checkpoint.packed import PackedWeight
from ..model.linear import Weight
from ..model.moe import MoEWeights
from .fp8_gemm import stored
from .gemv import CodeFormat, code_format, common_format
from .launcher import TRITON_TYPES, Launcher, Launchers
from .moe_prefill_programs import experts_down_kernel, experts_up_kernel
from .packed_prefill import PackedForm, packed_form
from .packed_prefill_programs import packed_down_kernel, packed_up_kernel
from .support import Target, UnsupportedByKernel

_DENSE_STEP = 64  # columns


class ExpertTiles(NamedTuple):
    """Tokens a tile; weight rows, warps and stages of the two launches; tiles of rows that a program of `down` takes behind each
    other; whether `up` reads e4m3 codes by pairs (weight_tiles.product_of_pairs); whether scales of packed weights multiply the
    weights (None: by their groups)."""

    tokens: int
    up_rows: int
    up_warps: int
    up_stages: int
    down_rows: int
    down_warps: int
    down_stages: int
    down_run: int = 1
    up_pairs: bool = False
    scaled: bool | None = None


def expert_tiles(load: float, target: Target, packed: bool = False) -> ExpertTiles:
    """By how many tokens an expert gets on average, and by the shared memory of the card (and the registers that packed weights
    leave free on sm_80). Measured on an H200."""
    if target.interpreted:
        return ExpertTiles(16, 16, 4, 1, 16, 4, 1, down_run=2, up_pairs=True)
    width = 16 if load <= 20 else 32 if load <= 96 else 64
    if target.capability in ((9, 0), (10, 0)) or (target.capability == (8, 0) and not packed):
        return ExpertTiles(width, 64, 4, 3, 64, 4, 3, down_run=4, up_pairs=target.capability == (9, 0))
    return ExpertTiles(width, 32 if width == 64 else 64, 4, 2, 64, 4, 2, down_run=4)


class ExpertPart:
    """The two launches of the routed experts (a stack of each matrix), of the shared one, or of both: `routed`, `shared` are their gate,
    up and down. `packed`, `dense`: whether any weight is packed, whether all are dense.
    """

    def __init__(
        self, routed: Sequence[Weight], shared: Sequence[Weight], count: int, top_k: int, width: int, launchers: Launchers, dtype: torch.dtype
    ) -> None:
        target, each = launchers.target, [matrices for matrices in (routed, shared) if matrices]
        self.routed, self.shared, self._launchers = bool(routed), bool(shared), launchers
        self._experts_each = count / top_k if routed else 1.0
        inner = [matrices[0].shape[-2] for matrices in each]
        outputs, self.inner = each[0][2].shape[-2], max(inner)
        common = dict(EXPERTS=count, TOP_K=top_k, WIDTH=width)
        gate_up, down = [matrix for matrices in each for matrix in matrices[:2]], [matrices[2] for matrices in each]
        self._up_form, up_code = _layout(gate_up, dtype, target)
        self._down_form, down_code = _layout(down, dtype, target)
        packed = [isinstance(form, PackedForm) for form in (self._up_form, self._down_form)]
        self.packed = any(packed)
        self.dense = not self.packed and self._up_form.name == self._down_form.name == "dense"
        if self.packed and inner[0] != inner[-1]:
            raise UnsupportedByKernel("packed experts of different sizes in one launch")
        self._up, self._down = dict(K=outputs, **common), dict(OUTPUTS=outputs, **common)
        for options, form, code, is_packed in ((self._up, self._up_form, up_code, packed[0]), (self._down, self._down_form, down_code, packed[1])):
            if is_packed:
                options.update(INNER=inner[0], **form.constants(target))
                form.step(inner[0] if options is self._down else outputs)  # refuses what cannot be cut into steps
                continue
            options.update(
                CODE=TRITON_TYPES[code], FORMAT=form.name, INNER=inner[0], SHARED_INNER=inner[-1], ROW_BLOCK=form.row_block,
                SCALE_COLUMNS=form.scale_columns, PER_SCALE=form.per_scale, BK=(16 if target.interpreted else _DENSE_STEP) if form.name == "dense" else form.group,
            )  # fmt: skip
        if not packed[1]:
            last = code_format(down[-1], target)
            self._down.update(SHARED_SCALE_COLUMNS=last.scale_columns, SHARED_PER_SCALE=last.per_scale)
        self._launches: dict[ExpertTiles, tuple[Launcher, Launcher]] = {}

    def tiles(self, tokens: int) -> ExpertTiles:
        return expert_tiles(tokens / self._experts_each, self._launchers.target, self.packed)

    def grid(self, tokens: int, table: torch.Tensor, size: ExpertTiles, across: int) -> tuple[tuple[int, int, int], int]:
        """The grid, and how many of its tiles are the shared expert's; table: of tiles, as RoutePlan leaves it."""
        shared = -(-tokens // size.tokens) if self.shared else 0
        return (across, shared + (table.shape[0] if self.routed else 0), 1), shared

    def launches(self, size: ExpertTiles) -> tuple[Launcher, Launcher]:
        """Up and down."""
        found = self._launches.get(size)
        if found is None:
            up = dict(BN=size.up_rows, BM=size.tokens, num_warps=size.up_warps, num_stages=size.up_stages)
            down = dict(BN=size.down_rows, BM=size.tokens, num_warps=size.down_warps, num_stages=size.down_stages, RUN=size.down_run)
            up_kernel, down_kernel = experts_up_kernel, experts_down_kernel
            if isinstance(self._up_form, PackedForm):
                up_kernel = packed_up_kernel
                up.update(self._up_form.step(self._up["K"], size.scaled))
            else:
                up["BY_PAIRS"] = size.up_pairs
            if isinstance(self._down_form, PackedForm):
                down_kernel = packed_down_kernel
                down.update(self._down_form.step(self._down["INNER"], size.scaled))
            get = self._launchers.get
            found = self._launches[size] = get(up_kernel, **self._up, **up), get(down_kernel, **self._down, **down)
        return found


def expert_parts(weights: MoEWeights, top_k: int, launchers: Launchers, dtype: torch.dtype) -> list[ExpertPart]:
    """One part where routed and shared experts are of one layout, else the shared one's ahead of the routed one's."""
    experts, width = weights.experts, max(weights.experts.gate.shape[1], weights.shared_gate.shape[0])
    routed = (experts.gate, experts.up, experts.down)
    shared = (weights.shared_gate, weights.shared_up, weights.shared_down)
    rest = (experts.gate.shape[0], top_k, width, launchers, dtype)
    try:
        return [ExpertPart(routed, shared, *rest)]
    except UnsupportedByKernel:
        return [ExpertPart((), shared, *rest), ExpertPart(routed, (), *rest)]


def _layout(weights: list[Weight], dtype: torch.dtype, target: Target) -> tuple[CodeFormat | PackedForm, torch.dtype]:
    """The one layout of these and the type of their codes; UnsupportedByKernel where they differ. Matrices of different widths may
    have different numbers of scales a row."""
    packed = [isinstance(weight, PackedWeight) for weight in weights]
    if all(packed):
        return packed_form(weights, target), torch.uint8
    if any(packed):
        raise UnsupportedByKernel("packed and other weights in one launch")
    form = code_format(weights[0], target)
    if weights[0].shape[-1] == weights[-1].shape[-1]:
        form = common_format(weights, target)
    else:
        other = code_format(weights[-1], target)
        if (form.name, form.row_block, form.group) != (other.name, other.row_block, other.group):
            raise UnsupportedByKernel("routed and shared experts of different layouts")
    kinds = {stored(weight, form, dtype, target).dtype for weight in weights}
    if len(kinds) > 1:
        raise UnsupportedByKernel("weights of different types in one launch")
    return form, kinds.pop()
