"""From the tensors of a folder to the tensors of the engine: which bytes make up which weight.

Every tensor of the files is consumed exactly once, knowingly unused, or an error; every weight of the engine is
found or an error. Names are compared whole after their prefix is taken off, never by parts.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ModelConfig
from ..errors import CheckpointError
from .dtypes import DENSE_CODES, DTYPE_BITS
from .header import TensorInfo, shown
from .index import CheckpointIndex
from .names import DEFAULT_PREFIX, expected_tensors, is_expert_stack, kept_in_float32, may_stay_scaled, shapes_in_files, strip_prefix
from .schemes import Module, classify, declared_block_size, group_modules, refuse_unsupported, scale_layout, scale_of, split_name

__all__ = ["Entry", "Fp8Storage", "LoadPlan", "Piece", "build_plan", "expected_tensors"]

log = logging.getLogger(__name__)

# Activation and cache scales describe how other engines round activations; weights do not need them.
_UNUSED_PARTS = frozenset({"input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale", "inv_freq"})
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of a file, and the tensor it belongs to (for messages)."""

    name: str
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Where the scales of an FP8 weight lie.

    The pieces, joined, are the scale as `stored_shape`. Each row then stands for `row_repeat` rows, of which the first
    `row_skip` do not belong to this weight (a fused gate|up whose halves meet inside a block), giving `shape`.
    `copies` > 1 repeats a single stored value for every matrix of a stack.
    """

    block: tuple[int, int]
    dtype: str
    pieces: tuple[Piece, ...]
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    row_repeat: int = 1
    row_skip: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine weight: its pieces, joined in order, are its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    fp8: Fp8Storage | None = None

    @property
    def stays_scaled(self) -> bool:
        return self.fp8 is not None and may_stay_scaled(self.name)


@dataclass
class LoadPlan:
    """What to read for a model. `aliases` maps a weight to the one it shares memory with (tied head)."""

    folder: Path
    entries: dict[str, Entry]
    aliases: dict[str, str]
    has_vision: bool
    unused: list[str] = field(default_factory=list)

    def device_bytes(self, compute_dtype, dequantize: bool) -> int:
        """Bytes the weights take when loaded with this compute dtype (a torch dtype)."""
        total = 0
        for entry in self.entries.values():
            count = math.prod(entry.shape)
            if entry.stays_scaled and not dequantize:
                total += count + 4 * math.prod(entry.fp8.shape)
            else:
                total += count * (4 if kept_in_float32(entry.name) else compute_dtype.itemsize)
        return total

    @property
    def stored_bytes(self) -> int:
        """Bytes read from the files."""
        pieces = (piece for entry in self.entries.values() for piece in (*entry.pieces, *(entry.fp8.pieces if entry.fp8 else ())))
        return sum(piece.nbytes for piece in pieces)


def build_plan(index: CheckpointIndex, config: ModelConfig) -> LoadPlan:
    """Match the files' tensors to the architecture of `config`.

    Raises UnsupportedFormatError for storage formats the engine does not read, CheckpointError for missing,
    unexpected, doubled or misshapen tensors, naming the first few and their count.
    """
    return _Planner(index, config).build()


class _Planner:
    def __init__(self, index: CheckpointIndex, config: ModelConfig) -> None:
        self.index, self.config = index, config
        self.folder = index.folder
        self.block = declared_block_size(config.quantization)
        self.unused: list[str] = []
        self.consumed: set[str] = set()  # names in the files
        self.missing: list[str] = []
        self.prefix = DEFAULT_PREFIX
        modules = [module for module in group_modules(index.tensors.values()).values() if not self._is_mtp(module.name)]
        refuse_unsupported(modules, index.metadata, config.quantization, self.folder)
        self.modules = self._by_canonical_name(modules)

    @staticmethod
    def _is_mtp(name: str) -> bool:
        return (strip_prefix(f"{name}.") or ("",))[0].startswith("mtp.")

    def _by_canonical_name(self, modules: list[Module]) -> dict[str, Module]:
        found: dict[str, Module] = {}
        for module in modules:
            stripped = strip_prefix(f"{module.name}.")
            if stripped is None:
                continue  # named as unexpected at the end, unless its kind is knowingly unused
            name = stripped[0][:-1]
            if name in found:
                raise CheckpointError(
                    f"{self.folder}: {shown(found[name].name)} and {shown(module.name)} are the same module under two "
                    "prefixes. Two checkpoints mixed in one folder? Keep one."
                )
            found[name] = module
            if name == "embed_tokens":
                self.prefix = stripped[1]
        return found

    def build(self) -> LoadPlan:
        expected = expected_tensors(self.config)
        has_vision = self.config.vision is not None and any(name.startswith("visual.") for name in self.modules)
        if not has_vision:
            expected = {name: shape for name, shape in expected.items() if not name.startswith("visual.")}
        aliases = {}
        if self.config.text.tie_word_embeddings:
            # A tied head follows the embedding even when a saver wrote both.
            aliases["lm_head.weight"] = "embed_tokens.weight"
            del expected["lm_head.weight"]
        entries = {}
        for name, shape in expected.items():
            entry = self._expert_stack(name, shape) if is_expert_stack(name) else self._plain(name, shape)
            if entry is not None:
                entries[name] = entry
        self._require_complete()
        self._require_known(has_vision, bool(aliases))
        return LoadPlan(self.folder, entries, aliases, has_vision, sorted(self.unused))

    # Weights

    def _plain(self, name: str, shape: tuple[int, ...]) -> Entry | None:
        module_name, part = split_name(name)
        module = self.modules.get(module_name)
        info = module.parts.get(part) if module else None
        if info is None:
            self.missing.append(self._file_name(name))
            return None
        allowed = shapes_in_files(name, shape, self.config)
        if info.shape not in allowed:
            raise self._wrong_shape(info, allowed[0])
        self.consumed.add(info.name)
        if part == "weight" and classify(module).scheme == "fp8":
            if len(info.shape) != 2:
                raise CheckpointError(f"{info.file}: tensor {shown(info.name)} is stored as {info.dtype}, which only matrices may be.")
            return Entry(name, shape, info.dtype, (_whole(info),), self._scales(module, info, info.shape, 0, info.shape[0]))
        self._require_float(info)
        return Entry(name, shape, info.dtype, (_whole(info),))

    def _expert_stack(self, name: str, shape: tuple[int, ...]) -> Entry | None:
        """gate, up or down of all experts of a layer, from one tensor per expert or from the fused tensors."""
        base, which = name.removesuffix(".weight").rsplit(".", 1)
        fused = [f"{base}.gate_up_proj", f"{base}.down_proj"]
        if any(module in self.modules for module in fused):
            return self._fused_experts(name, shape, fused[which == "down"], which)
        return self._separate_experts(name, shape, base, which)

    def _fused_experts(self, name: str, shape: tuple[int, ...], module_name: str, which: str) -> Entry | None:
        count, rows, columns = shape
        module = self.modules.get(module_name)
        info = module.parts.get("weight") if module else None
        if info is None:
            self.missing.append(self.prefix + module_name)
            return None
        file_rows = rows if which == "down" else 2 * rows  # gate rows, then up rows
        if info.shape != (count, file_rows, columns):
            raise self._wrong_shape(info, (count, file_rows, columns))
        self.consumed.add(info.name)
        first = rows if which == "up" else 0
        row_bytes = columns * DTYPE_BITS[info.dtype] // 8
        pieces = (_whole(info),)
        if which != "down":
            pieces = tuple(_rows(info, expert * file_rows + first, rows, row_bytes) for expert in range(count))
        if classify(module).scheme == "fp8":
            return Entry(name, shape, info.dtype, pieces, self._scales(module, info, info.shape, first, rows))
        self._require_float(info)
        return Entry(name, shape, info.dtype, pieces)

    def _separate_experts(self, name: str, shape: tuple[int, ...], base: str, which: str) -> Entry | None:
        count, rows, columns = shape
        infos: list[TensorInfo] = []
        scales: list[Fp8Storage | None] = []
        for expert in range(count):
            module = self.modules.get(f"{base}.{expert}.{which}_proj")
            info = module.parts.get("weight") if module else None
            if info is None:
                self.missing.append(f"{self.prefix}{base}.{expert}.{which}_proj.weight")
                continue
            if info.shape != (rows, columns):
                raise self._wrong_shape(info, (rows, columns))
            self.consumed.add(info.name)
            is_fp8 = classify(module).scheme == "fp8"
            if not is_fp8:
                self._require_float(info)
            infos.append(info)
            scales.append(self._scales(module, info, info.shape, 0, rows) if is_fp8 else None)
        if len(infos) < count:
            return None
        kinds = {(info.dtype, scale and (scale.dtype, scale.block)) for info, scale in zip(infos, scales)}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{infos[0].file}: the experts of {shown(f'{self.prefix}{base}')} are stored in different ways "
                f"({', '.join(sorted({info.dtype for info in infos}))}, or different scale blocks); they must agree within a layer."
            )
        pieces = tuple(_whole(info) for info in infos)
        first = scales[0]
        if first is None:
            return Entry(name, shape, infos[0].dtype, pieces)
        scale_pieces = tuple(piece for scale in scales for piece in scale.pieces)
        storage = Fp8Storage(first.block, first.dtype, scale_pieces, (count, *first.stored_shape), (count, *first.shape))
        return Entry(name, shape, infos[0].dtype, pieces, storage)

    def _scales(self, module: Module, weight: TensorInfo, shape: tuple[int, ...], first: int, rows: int) -> Fp8Storage:
        """The scales of rows [first, first + rows) of each matrix of `weight` [N, K] or [E, N, K]."""
        scale = scale_of(module)
        self.consumed.add(scale.name)
        layout = scale_layout(weight, scale, self.block)
        lead = shape[:-2]
        count = lead[0] if lead else 1
        height, columns = layout.shape
        block_rows = layout.block[0]
        start, stop = first // block_rows, -(-(first + rows) // block_rows)
        if height == 1 and rows < shape[-2]:
            unit, repeat, skip = rows, 1, 0  # one value for all rows, so for any part of them
        elif first % block_rows == 0:
            unit, repeat, skip = block_rows, 1, 0
        else:
            # The halves of a fused weight meet inside a block: smaller blocks with repeated values say the same.
            unit = math.gcd(first, block_rows)
            repeat, skip = block_rows // unit, (first - start * block_rows) // unit
        row_bytes = columns * DTYPE_BITS[scale.dtype] // 8
        stacked = 1 if layout.broadcast else count
        if start == 0 and stop == height:
            pieces = (_whole(scale),)
        else:
            pieces = tuple(_rows(scale, matrix * height + start, stop - start, row_bytes) for matrix in range(stacked))
        return Fp8Storage(
            block=(unit, layout.block[1]),
            dtype=scale.dtype,
            pieces=pieces,
            stored_shape=(*((stacked,) if lead else ()), stop - start, columns),
            shape=(*lead, -(-rows // unit), columns),
            row_repeat=repeat,
            row_skip=skip,
            copies=count if layout.broadcast else 1,
        )

    # Checks

    def _file_name(self, canonical: str) -> str:
        """The name a person would look for in the files."""
        if canonical.startswith("lm_head."):
            return canonical
        return f"model.{canonical}" if canonical.startswith("visual.") else self.prefix + canonical

    def _wrong_shape(self, info: TensorInfo, expected: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{info.file}: tensor {shown(info.name)} has shape {list(info.shape)}, config.json asks for {list(expected)}. "
            "config.json and weights of different models in one folder?"
        )

    def _require_float(self, info: TensorInfo) -> None:
        if info.dtype not in DENSE_CODES:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} is stored as {info.dtype}; expected one of {', '.join(DENSE_CODES)} "
                "(or FP8 with its scale, for matrices). Damaged, or a format this engine does not know."
            )

    def _require_complete(self) -> None:
        missing = list(dict.fromkeys(self.missing))  # gate and up may both miss the fused tensor
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} tensor(s) of the model are missing: {_first_few(missing)}. "
                "Incomplete download, or config.json of another model? Download the folder again."
            )

    def _require_known(self, has_vision: bool, tied: bool) -> None:
        mtp, unknown = 0, []
        for name in self.index.tensors:
            if name in self.consumed:
                continue
            stripped = (strip_prefix(name) or ("",))[0]
            if stripped.startswith("mtp."):
                mtp += 1
            elif not (
                split_name(name)[1] in _UNUSED_PARTS
                or (tied and stripped.startswith("lm_head."))
                or (not has_vision and stripped.startswith("visual."))
            ):
                unknown.append(name)
                continue
            self.unused.append(name)
        if unknown:
            raise CheckpointError(
                f"{self.folder}: {len(unknown)} tensor(s) that this architecture does not have: {_first_few(sorted(unknown))}. "
                "Not a Qwen3.5/3.6 mixture-of-experts checkpoint, or a variant this engine does not know."
            )
        if mtp:
            log.info("%s: %d multi-token-prediction tensors are not used", self.folder.name, mtp)


def _first_few(items: list[str]) -> str:
    return ", ".join(shown(item) for item in items[:_NAMED]) + (", ..." if len(items) > _NAMED else "")


def _whole(info: TensorInfo) -> Piece:
    return Piece(info.name, info.file, info.offset, info.nbytes)


def _rows(info: TensorInfo, first: int, count: int, row_bytes: int) -> Piece:
    return Piece(info.name, info.file, info.offset + first * row_bytes, count * row_bytes)
