"""From the tensors of a folder to the tensors of the engine: which bytes make up which weight.

Every tensor of the files is consumed exactly once, knowingly unused, or an error; every weight of the engine is
found or an error. Names are compared whole after their prefix is taken off, never by parts.
"""

from __future__ import annotations

import logging
import math

from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedFormatError
from .dialects import dialect_of, require_known_dialect
from .dtypes import DENSE_CODES, DTYPE_BITS
from .header import TensorInfo, shown
from .index import CheckpointIndex
from .names import DEFAULT_PREFIX, expected_tensors, is_expert_stack, shapes_in_files, strip_prefix
from .packed_plan import PACKED_FORMATS, PackedEntry, packed_entry
from .schemes import ADVICE, Module, classify, declared_block_size, group_modules, refuse_unsupported, scale_layout, scale_of, split_name
from .storage import Entry, Fp8Storage, LoadPlan, Piece, rows_of, whole

__all__ = ["Entry", "Fp8Storage", "LoadPlan", "Piece", "build_plan", "expected_tensors"]

log = logging.getLogger(__name__)

# Activation and cache scales describe how other engines round activations; weights do not need them.
_UNUSED_PARTS = frozenset({"input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale", "inv_freq"})
_NAMED = 5


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
        self.dialect = dialect_of(config.quantization, self.folder)
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

    def _plain(self, name: str, shape: tuple[int, ...]) -> Entry | PackedEntry | None:
        module_name, part = split_name(name)
        module = self.modules.get(module_name)
        if part == "weight" and module and (scheme := classify(module).scheme) in PACKED_FORMATS:
            return self._packed(name, shape, [module], scheme)
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
            return Entry(name, shape, info.dtype, (whole(info),), self._scales(module, info, info.shape, 0, info.shape[0]))
        self._require_float(info)
        return Entry(name, shape, info.dtype, (whole(info),))

    def _packed(self, name: str, shape: tuple[int, ...], modules: list[Module], scheme: str) -> PackedEntry:
        example = modules[0].parts.get(PACKED_FORMATS[scheme].codes) or next(iter(modules[0].parts.values()))
        require_known_dialect(scheme, self.dialect, example.name, self.folder)
        entry, consumed = packed_entry(name, shape, modules, scheme, self.dialect)
        self.consumed.update(consumed)
        return entry

    def _expert_stack(self, name: str, shape: tuple[int, ...]) -> Entry | PackedEntry | None:
        """gate, up or down of all experts of a layer, from one tensor per expert or from the fused tensors."""
        base, which = name.removesuffix(".weight").rsplit(".", 1)
        own = self.modules.get(f"{base}.{which}")
        if own is not None:
            from .quantize.stored import packed_stack

            self.consumed.update(info.name for info in own.parts.values())
            return packed_stack(own, name, shape, self.config.quantization)
        fused = [f"{base}.gate_up_proj", f"{base}.down_proj"]
        if any(module in self.modules for module in fused):
            return self._fused_experts(name, shape, fused[which == "down"], which)
        return self._separate_experts(name, shape, base, which)

    def _fused_experts(self, name: str, shape: tuple[int, ...], module_name: str, which: str) -> Entry | None:
        count, rows, columns = shape
        module = self.modules.get(module_name)
        if module and classify(module).scheme in PACKED_FORMATS:
            info = next(iter(module.parts.values()))
            raise UnsupportedFormatError(
                f"{info.file}: tensor {shown(info.name)} holds all experts in one 4-bit tensor; they are read one tensor an expert. "
                f"{ADVICE}"
            )
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
        pieces = (whole(info),)
        if which != "down":
            pieces = tuple(rows_of(info, expert * file_rows + first, rows, row_bytes) for expert in range(count))
        if classify(module).scheme == "fp8":
            return Entry(name, shape, info.dtype, pieces, self._scales(module, info, info.shape, first, rows))
        self._require_float(info)
        return Entry(name, shape, info.dtype, pieces)

    def _separate_experts(self, name: str, shape: tuple[int, ...], base: str, which: str) -> Entry | PackedEntry | None:
        count, rows, columns = shape
        modules = [self.modules.get(f"{base}.{expert}.{which}_proj") for expert in range(count)]
        schemes = {classify(module).scheme for module in modules if module}
        if schemes & PACKED_FORMATS.keys():
            return self._packed_experts(name, shape, base, which, modules, schemes)
        infos: list[TensorInfo] = []
        scales: list[Fp8Storage | None] = []
        for expert, module in enumerate(modules):
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
            raise self._different(infos[0], base, f"{', '.join(sorted({info.dtype for info in infos}))}, or different scale blocks")
        pieces = tuple(whole(info) for info in infos)
        first = scales[0]
        if first is None:
            return Entry(name, shape, infos[0].dtype, pieces)
        scale_pieces = tuple(piece for scale in scales for piece in scale.pieces)
        storage = Fp8Storage(first.block, first.dtype, scale_pieces, (count, *first.stored_shape), (count, *first.shape))
        return Entry(name, shape, infos[0].dtype, pieces, storage)

    def _packed_experts(
        self, name: str, shape: tuple[int, ...], base: str, which: str, modules: list[Module | None], schemes: set[str | None]
    ) -> PackedEntry | None:
        missing = [f"{self.prefix}{base}.{expert}.{which}_proj" for expert, module in enumerate(modules) if module is None]
        self.missing += missing
        if missing:
            return None
        if len(schemes) > 1:
            raise self._different(next(iter(modules[0].parts.values())), base, ", ".join(sorted(map(str, schemes))))
        return self._packed(name, shape, modules, schemes.pop())

    def _different(self, info: TensorInfo, base: str, ways: str) -> CheckpointError:
        return CheckpointError(
            f"{info.file}: the experts of {shown(f'{self.prefix}{base}')} are stored in different ways "
            f"({ways}; one is {shown(info.name)}); they must agree within a layer."
        )

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
            pieces = (whole(scale),)
        else:
            pieces = tuple(rows_of(scale, matrix * height + start, stop - start, row_bytes) for matrix in range(stacked))
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
