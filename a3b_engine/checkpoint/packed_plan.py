"""Where the parts of a 4-bit weight lie in the files, and that they are what their format says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..errors import CheckpointError, UnsupportedFormatError
from .dialects import Dialect
from .dtypes import DTYPE_BITS, torch_dtype
from .header import TensorInfo, shown
from .names import kept_in_float32, may_stay_scaled
from .packed import PackedWeight
from .repack import PLACE
from .schemes import Module
from .storage import Piece, pieces_of, whole

_GROUPS = (16, 32, 64, 128)
_SCALES = ("F16", "BF16", "F32")
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class _Format:
    """Names and dtypes of one format's tensors. `down`: packed down K, transposed against the weight, as GPTQ and AWQ are."""

    title: str
    codes: str
    scale: str
    code_dtype: str = "I32"
    scale_dtypes: tuple[str, ...] = _SCALES
    zero: str = ""
    zero_required: bool = False
    factor: str = ""
    order: str = ""
    dense_shape: str = ""
    down: bool = False
    codes_along_rows: bool = False
    values: str = "int"
    divides: bool = False


PACKED_FORMATS = {
    "nvfp4_ct": _Format("NVFP4 (compressed-tensors)", "weight_packed", "weight_scale", "U8", ("F8_E4M3",), factor="weight_global_scale", values="e2m1", divides=True),
    "nvfp4_modelopt": _Format("NVFP4 (ModelOpt)", "weight", "weight_scale", "U8", ("F8_E4M3",), factor="weight_scale_2", values="e2m1"),
    "int4_ct": _Format("int4 (compressed-tensors pack-quantized)", "weight_packed", "weight_scale", zero="weight_zero_point", order="weight_g_idx", dense_shape="weight_shape"),
    "gptq": _Format("GPTQ int4", "qweight", "scales", zero="qzeros", zero_required=True, order="g_idx", down=True),
    "awq": _Format("AWQ int4", "qweight", "scales", zero="qzeros", zero_required=True, down=True, codes_along_rows=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of every matrix: `pieces` in order, each [rows, columns] of `dtype`. `place` names how it is repacked, "" not at all."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    place: str = ""


    def of_experts(self, count: int, ids: Sequence[int]) -> Part:
        """The tensors of some matrices of a stack of `count`."""
        return replace(self, pieces=pieces_of(self.pieces, count, ids))


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One engine weight of 4 bits, as a plan's entry. `checks` are read to be compared, not to be kept."""

    name: str
    shape: tuple[int, ...]
    values: str
    group: int
    codes: Part
    scale: Part
    zero: Part | None
    factor: Part | None
    divides: bool
    checks: tuple[tuple[Part, Callable[[str, torch.Tensor], None]], ...]
    fp8: None = None
    stays_scaled: bool = False

    @property
    def dtype(self) -> str:
        return self.codes.dtype

    @property
    def pieces(self) -> tuple[Piece, ...]:
        parts = (self.codes, self.scale, self.zero, self.factor, *(part for part, _ in self.checks))
        return tuple(piece for part in parts if part is not None for piece in part.pieces)

    def device_bytes(self, compute_dtype: torch.dtype, dequantize: bool) -> int:
        """Bytes on the device when loaded."""
        count = math.prod(self.shape)
        if dequantize or not may_stay_scaled(self.name):
            return count * (4 if kept_in_float32(self.name) else compute_dtype.itemsize)
        groups = count // self.group
        total = count // 2 + groups * DTYPE_BITS[self.scale.dtype] // 8
        return total + (groups if self.zero else 0) + (4 * len(self.factor.pieces) if self.factor else 0)

    def of_experts(self, ids: Sequence[int]) -> PackedEntry:
        """The entry of some experts of this stack [E, N, K]."""
        count, *matrix = self.shape
        parts = {key: part and part.of_experts(count, ids) for key, part in (("codes", self.codes), ("scale", self.scale), ("zero", self.zero), ("factor", self.factor))}
        checks = tuple((part.of_experts(count, ids), check) for part, check in self.checks)
        return replace(self, shape=(len(ids), *matrix), checks=checks, **parts)

    def prepare(self, allocate: Allocate, copy: Callable[..., None]) -> PackedWeight:
        """The weight, its tensors made by `allocate` and handed to `copy` to be filled (see `reader._Loading.copy_piece`)."""
        *lead, columns = self.shape
        groups = (*lead, columns // self.group)
        codes = allocate((*lead, columns // 2), torch.uint8)
        scale = allocate(groups, torch_dtype(self.scale.dtype))
        zero = allocate(groups, torch.uint8) if self.zero else None
        factor = allocate((*lead[:-1], 1, 1), torch.float32) if self.factor else None
        for part, target in ((self.codes, codes), (self.scale, scale), (self.zero, zero), (self.factor, factor)):
            if part is None:
                continue
            matrices = target.view(-1, *target.shape[-2:])
            for piece, matrix in zip(part.pieces, matrices, strict=True):
                check = partial(_require_factor, piece) if part is self.factor else None
                code, columns = part.dtype, part.shape[-1] if part.shape else 1
                if part is self.codes and not part.place:  # the bytes as they are, in words or not
                    code, columns, matrix = "I8", columns * DTYPE_BITS[code] // 8, matrix.view(torch.int8)
                copy(piece, code, matrix, place=PLACE.get(part.place), columns=columns, check=check)
        for part, check in self.checks:
            for piece in part.pieces:
                copy(piece, part.dtype, None, columns=part.shape[-1], check=partial(check, f"{piece.file}: tensor {shown(piece.name)}"))
        return PackedWeight(codes, scale, zero, factor, self.values, self.group, 4, self.divides)


def packed_entry(name: str, shape: tuple[int, ...], modules: Sequence[Module], scheme: str, dialect: Dialect) -> tuple[PackedEntry, list[str]]:
    """The entry of weight `name` [N, K] or [E, N, K] from one module a matrix, and the names of the tensors it consumes.

    Raises CheckpointError for parts that are missing or do not fit each other, UnsupportedFormatError for variants that
    are not read; both name one tensor.
    """
    layout = PACKED_FORMATS[scheme]
    if len(shape) < 2:
        info = next(iter(modules[0].parts.values()))
        raise CheckpointError(f"{info.file}: tensor {shown(info.name)} is of {layout.title}, which only matrices may be.")
    rows, columns = shape[-2:]
    found = [_parts_of(module, layout, rows, columns) for module in modules]
    first = found[0]
    for parts in found[1:]:
        for key in first.keys() | parts.keys():
            one, other = first.get(key), parts.get(key)
            if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
                odd = other or one
                raise CheckpointError(f"{odd.file}: tensor {shown(odd.name)} has no like in every expert of {shown(name)}; they must agree within a layer.")
    group = columns // first["scale"].shape[0 if layout.down else 1]
    parts = {key: Part(info.dtype, info.shape, tuple(whole(parts[key]) for parts in found)) for key, info in first.items()}
    symmetric = scheme == "gptq" and dialect.symmetric
    checks = []
    if "dense_shape" in parts:
        checks.append((parts["dense_shape"], partial(_require_shape, (rows, columns))))
    if "order" in parts:
        checks.append((parts["order"], partial(_require_in_order, columns, group)))
    elif layout.order and dialect.reordered:
        info = first["codes"]
        raise UnsupportedFormatError(
            f"{info.file}: the configuration declares columns in the order of their activations, but {shown(modules[0].name)}.{layout.order} "
            f"does not stand beside {shown(info.name)}. Use a repository quantised without act-order."
        )
    zero = parts.get("zero")
    first_version = scheme == "gptq" and dialect.gptq_format == "gptq"
    if symmetric:
        checks.append((zero, partial(_require_symmetric, 7 if first_version else 8)))
        zero = None
    elif first_version and not dialect.carries:
        checks.append((zero, _require_no_wrapped_zero))
    places = {"gptq": ("gptq_codes", "gptq_zeros_v1" if first_version else "gptq_zeros"), "awq": ("awq_codes", "awq_zeros")}
    code_place, zero_place = places.get(scheme, ("", "ct_zeros"))
    entry = PackedEntry(
        name=name,
        shape=shape,
        values=layout.values,
        group=group,
        codes=_placed(parts["codes"], code_place),
        scale=_placed(parts["scale"], "transposed" if layout.down else ""),
        zero=None if zero is None else _placed(zero, zero_place),
        factor=parts.get("factor"),
        divides=layout.divides,
        checks=tuple(checks),
    )
    return entry, [info.name for parts in found for info in parts.values()]


def _placed(part: Part, place: str) -> Part:
    return Part(part.dtype, part.shape, part.pieces, place)


def _parts_of(module: Module, layout: _Format, rows: int, columns: int) -> dict[str, TensorInfo]:
    """The format's tensors in `module`, each of the dtype and shape that a weight [rows, columns] asks for."""
    names = {"codes": layout.codes, "scale": layout.scale, "zero": layout.zero, "factor": layout.factor, "order": layout.order, "dense_shape": layout.dense_shape}
    found = {key: module.parts[name] for key, name in names.items() if name and name in module.parts}
    needed = ["codes", "scale"] + ["factor"] * bool(layout.factor) + ["zero"] * layout.zero_required
    for key in needed:
        if key not in found:
            present = next(iter(module.parts.values()))
            raise CheckpointError(
                f"{present.file}: tensor {shown(module.name)}.{names[key]} is missing beside {shown(present.name)} ({layout.title}). "
                "Incomplete download? Download the folder again."
            )
    codes, scale = found["codes"], found["scale"]
    per_code = 2 if layout.code_dtype == "U8" else 8
    if columns % 8 or (layout.down and rows % 8):
        raise CheckpointError(f"{codes.file}: tensor {shown(codes.name)} packs 8 codes a word, but the weight is {[rows, columns]} by config.json.")
    packed = (rows, columns // per_code)
    if layout.down:
        packed = (columns, rows // 8) if layout.codes_along_rows else (columns // 8, rows)
    if codes.dtype == layout.code_dtype and codes.shape != packed:
        _refuse_other_bits(codes, layout, rows, columns)
    _require(codes, (layout.code_dtype,), packed)
    count = scale.shape[0 if layout.down else -1] if len(scale.shape) == 2 else 0
    group = columns // count if count and columns % count == 0 else 0
    if layout.values == "e2m1":
        group = 16
    elif group not in (*_GROUPS, columns):
        raise CheckpointError(
            f"{scale.file}: scale {shown(scale.name)} {list(scale.shape)} does not fit a weight {[rows, columns]} in groups of 16, 32, 64, 128 or all columns."
        )
    if columns % group:
        raise CheckpointError(f"{scale.file}: scale {shown(scale.name)}: {columns} columns are not whole groups of {group}.")
    groups = columns // group
    _require(scale, layout.scale_dtypes, (groups, rows) if layout.down else (rows, groups))
    if "zero" in found:
        _require(found["zero"], ("I32",), (groups, rows // 8) if layout.down else (-(-rows // 8), groups))
    if "factor" in found and found["factor"].shape not in ((), (1,)):
        _require(found["factor"], ("F32",), (1,))
    elif "factor" in found:
        _require(found["factor"], ("F32",), found["factor"].shape)
    if "order" in found:
        _require(found["order"], ("I32", "I64"), (columns,))
    if "dense_shape" in found:
        _require(found["dense_shape"], ("I64", "I32"), (2,))
    return found


def _refuse_other_bits(codes: TensorInfo, layout: _Format, rows: int, columns: int) -> None:
    for bits in (2, 3, 5, 6, 7, 8):
        words = -(-columns * bits // 32)
        if codes.shape == ((words, rows) if layout.down else (rows, words)):
            raise UnsupportedFormatError(
                f"{codes.file}: tensor {shown(codes.name)} holds codes of {bits} bits ({layout.title.replace('int4 ', '').replace(' int4', '')}); 4 bits are read. "
                "Use a 4-bit repository, or the official FP8 or BF16 one."
            )


def _require(info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if info.dtype not in dtypes or info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} is {info.dtype} {list(info.shape)}, expected {' or '.join(dtypes)} {list(shape)}. "
            "Damaged, an unknown variant, or config.json of another model."
        )


# What only the data tells


def _require_factor(piece: Piece, value: torch.Tensor) -> None:
    number = float(value)
    if not 0 < number < math.inf:
        raise CheckpointError(f"{piece.file}: tensor {shown(piece.name)} is {number}; a tensor scale must be a positive number. Damaged?")


def _require_shape(expected: tuple[int, int], what: str, value: torch.Tensor) -> None:
    if tuple(value.tolist()) != expected:
        raise CheckpointError(f"{what} says {value.tolist()}, config.json asks for {list(expected)}. Damaged, or config.json of another model.")


def _require_in_order(columns: int, group: int, what: str, value: torch.Tensor) -> None:
    if not torch.equal(value.long(), torch.arange(columns) // group):
        raise UnsupportedFormatError(
            f"{what} sorts the columns by their activations (act-order, desc_act); groups that are scattered over the columns are not read. "
            "Use a repository quantised without act-order."
        )


def _require_symmetric(stored: int, what: str, value: torch.Tensor) -> None:
    if not bool((value.contiguous().view(torch.uint8) == stored * 17).all()):
        raise CheckpointError(
            f"{what} holds zeros other than {stored}, which a symmetric weight of the declared format stores. Either sym or "
            "checkpoint_format (gptq, gptq_v2) of config.json does not belong to these weights."
        )


def _require_no_wrapped_zero(what: str, value: torch.Tensor) -> None:
    """A zero of 0, lowered by one: quantisers differ in what they left in the word, so no reading is certain."""
    halves = value.contiguous().view(torch.uint8)
    if bool(((halves & 15) == 15).any() or ((halves >> 4) == 15).any()):
        raise UnsupportedFormatError(
            f"{what} holds a zero of 15, which stands for -1 in GPTQ's first format and is read differently by different programs. "
            "Use a symmetric repository, or one in checkpoint_format gptq_v2."
        )
