"""What a conversion writes, cut into steps that each read a little and write it at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Protocol

import torch

from ...config import TextConfig
from ...errors import CheckpointError, UnsupportedFormatError
from ..dtypes import DENSE_CODES, DTYPE_BITS, torch_dtype
from ..header import TensorInfo, shown
from ..index import CheckpointIndex
from ..names import is_expert_stack, strip_prefix
from ..plan import Entry, LoadPlan
from ..reader import load_weights
from ..schemes import split_name
from ..write import BLOCK, FP8_MODULE, quantize_fp8_block
from .calibration import Calibration
from .experts import Portions, quantize_experts
from .head import FP8_LIMIT, HEAD, bands, rounds_head
from .matrix import check_matrix, check_shape
from .record import stored_names
from .shard import Output

_COPY_BYTES = 8 * 1024 * 1024
_LAYER = re.compile(r"layers\.(\d+)\.")

Write = Callable[..., None]
Poll = Callable[[int], None]


class CalibrationText:
    """The text that goes through the layers; its embedding is read when the first layer asks."""

    def __init__(self, plan: LoadPlan, config: TextConfig, tokens: list[int]) -> None:
        self._plan, self._config, self._tokens = plan, config, tokens
        self._calibration: Calibration | None = None

    def here(self, device: torch.device) -> Calibration:
        if self._calibration is None:
            name = "embed_tokens.weight"
            entry = self._plan.entries[name]
            table = load_weights(replace(self._plan, entries={name: entry}, aliases={}), "cpu", torch.bfloat16 if entry.dtype == "BF16" else torch.float32)[name]
            self._calibration = Calibration(self._config, table[torch.tensor(self._tokens)].to(device))
        return self._calibration


class Step(Protocol):
    """One piece of work. `read_bytes` of the source become `outputs`."""

    outputs: tuple[Output, ...]
    read_bytes: int

    def run(self, write: Write, device: torch.device, poll: Poll) -> None:
        """write(name, data, at=0) as in `ShardWriter`; poll(bytes of the source finished since the last call) may raise."""

    def skip(self, device: torch.device, poll: Poll) -> None:
        """The outputs are there from an earlier run."""


@dataclass(frozen=True)
class Copy:
    """A tensor as it is."""

    source: TensorInfo

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.source.name, self.source.dtype, self.source.shape),)

    @property
    def read_bytes(self) -> int:
        return self.source.nbytes

    def run(self, write: Write, device: torch.device, poll: Poll) -> None:
        for at in range(0, self.source.nbytes, _COPY_BYTES):
            raw = _read(self.source, at, min(_COPY_BYTES, self.source.nbytes - at))
            write(self.source.name, raw, at)
            poll(len(raw))

    def skip(self, device: torch.device, poll: Poll) -> None:
        poll(self.read_bytes)


@dataclass(frozen=True)
class FewBits:
    """The routed experts of a layer in few bits: for each stack `<base>.codes` (uint8) and `<base>.scale` (float16)."""

    plan: LoadPlan
    layer: int
    prefix: str
    bits: int
    group: int
    text: CalibrationText

    @property
    def entries(self) -> dict[str, Entry]:
        """Every weight of the layer."""
        return {name: entry for name, entry in self.plan.entries.items() if name.startswith(f"layers.{self.layer}.")}

    @property
    def outputs(self) -> tuple[Output, ...]:
        found = []
        for name, entry in self.entries.items():
            if is_expert_stack(name):
                *lead, columns = entry.shape
                codes, scale = stored_names(self.prefix + name)
                found.append(Output(codes, "U8", (*lead, columns * self.bits // 8)))
                found.append(Output(scale, "F16", (*lead, columns // self.group)))
        return tuple(found)

    @property
    def read_bytes(self) -> int:
        return replace(self.plan, entries=self.entries, aliases={}).stored_bytes

    def run(self, write: Write, device: torch.device, poll: Poll) -> None:
        weights = self._load(device, poll)
        matrices = sum(weights[name].shape[0] for name in weights if is_expert_stack(name))
        portions = Portions(self.read_bytes, matrices, poll)
        packed = quantize_experts(weights, self.text.here(device), self.bits, self.group, portions)
        for name, weight in packed.items():
            codes, scale = stored_names(self.prefix + name)
            write(codes, weight.codes)
            write(scale, weight.scale)

    def skip(self, device: torch.device, poll: Poll) -> None:
        """The layer is written already: only the text goes through it."""
        self.text.here(device).advance(self._load(device, poll))
        poll(self.read_bytes)

    def _load(self, device: torch.device, poll: Poll) -> dict:
        first = next(entry for name, entry in self.entries.items() if is_expert_stack(name))
        dtype = torch.float32 if first.fp8 or first.dtype == "F64" else torch_dtype(first.dtype)
        return load_weights(replace(self.plan, entries=self.entries, aliases={}), device, dtype, cancel=lambda: poll(0))


@dataclass(frozen=True)
class BlockFp8:
    """A matrix, or the matrices of fused experts, as e4m3 with 128x128 block scales under the official names. Large ones in bands."""

    source: TensorInfo

    def _matrices(self) -> Iterator[tuple[str, int, int]]:
        """Module name, first row and rows of each matrix in the source seen as [all rows, K]."""
        module = split_name(self.source.name)[0]
        if len(self.source.shape) == 2:
            yield module, 0, self.source.shape[0]
            return
        base, which = module.rsplit(".", 1)
        count, rows, _ = self.source.shape
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        height = rows // len(parts)
        for expert in range(count):
            for place, part in enumerate(parts):
                yield f"{base}.{expert}.{part}", expert * rows + place * height, height

    @property
    def outputs(self) -> tuple[Output, ...]:
        columns = self.source.shape[-1]
        found = []
        for module, _, rows in self._matrices():
            scale = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
            found += [Output(f"{module}.weight", "F8_E4M3", (rows, columns)), Output(f"{module}.weight_scale_inv", "BF16", scale)]
        return tuple(found)

    @property
    def read_bytes(self) -> int:
        return self.source.nbytes

    def run(self, write: Write, device: torch.device, poll: Poll) -> None:
        columns = self.source.shape[-1]
        row_bytes = columns * DTYPE_BITS[self.source.dtype] // 8
        scale_row_bytes = 2 * -(-columns // BLOCK[1])
        for module, first, rows in self._matrices():
            for begin, stop in bands(rows):
                raw = _read(self.source, (first + begin) * row_bytes, (stop - begin) * row_bytes)
                weight = torch.frombuffer(raw, dtype=torch_dtype(self.source.dtype)).view(stop - begin, columns).to(device).float()
                check_matrix(weight, module, "FP8", FP8_LIMIT)
                codes, scale = quantize_fp8_block(weight)
                write(f"{module}.weight", codes, begin * columns)
                write(f"{module}.weight_scale_inv", scale, begin // BLOCK[0] * scale_row_bytes)
                poll(len(raw))

    def skip(self, device: torch.device, poll: Poll) -> None:
        poll(self.read_bytes)


def steps_to_few_bits(index: CheckpointIndex, plan: LoadPlan, bits: int, group: int, text: CalibrationText) -> list[Step]:
    """Every tensor as it is, but the routed experts in `bits` bits and a plain head in FP8. Layers in order."""
    replaced: set[str] = set()
    layers: dict[int, str] = {}
    for name, entry in plan.entries.items():
        if is_expert_stack(name):
            require_many_bits(plan, entry)
            check_shape(entry.shape[-1], bits, group, name)
            replaced.update(piece.name for piece in (*entry.pieces, *(entry.fp8.pieces if entry.fp8 else ())))
            layers[int(name.split(".")[1])] = (strip_prefix(entry.pieces[0].name) or ("", ""))[1]
    steps: list[Step] = [FewBits(plan, layer, prefix, bits, group, text) for layer, prefix in layers.items()]
    head = {piece.name for piece in plan.entries[HEAD].pieces} if rounds_head(plan) else set()
    steps += [BlockFp8(info) if name in head else Copy(info) for name, info in index.tensors.items() if name not in replaced]
    return sorted(steps, key=lambda step: _place(step.outputs[0].name))


def steps_to_fp8(index: CheckpointIndex, plan: LoadPlan) -> list[Step]:
    """The modules that the official FP8 files hold so, from a file of plain floats; the rest as it is."""
    steps: list[Step] = []
    for info in index.tensors.values():
        module, part = split_name(info.name)
        if part != "weight" or not FP8_MODULE.fullmatch(module):
            steps.append(Copy(info))
            continue
        if info.dtype not in DENSE_CODES:
            raise UnsupportedFormatError(
                f"{plan.folder}: {shown(info.name)} is stored as {info.dtype} already; FP8 is made from a BF16 file. Give the BF16 repository."
            )
        steps.append(BlockFp8(info))
    return sorted(steps, key=lambda step: _place(step.outputs[0].name))


def require_many_bits(plan: LoadPlan, entry: Entry) -> None:
    """Few bits are made of 8 or more: what was rounded to few once would lose twice."""
    if entry.fp8 is None and entry.dtype not in DENSE_CODES:
        raise UnsupportedFormatError(
            f"{plan.folder}: its experts ({shown(entry.name)}) are stored in few bits already. Use them as stored, or give the FP8 or BF16 file."
        )


def _place(name: str) -> tuple[int, str]:
    layer = _LAYER.search(name)
    return (int(layer[1]) if layer and not name.startswith(("mtp.", "model.mtp.", "model.visual.")) else -1, name)


def _read(info: TensorInfo, at: int, nbytes: int) -> bytearray:
    raw = bytearray(nbytes)
    filled = 0
    with open(info.file, "rb", buffering=0) as stream:
        stream.seek(info.offset + at)
        while filled < nbytes:
            count = stream.readinto(memoryview(raw)[filled:])
            if not count:
                raise CheckpointError(f"{info.file}: ends inside tensor {shown(info.name)}. The file changed while it was read; is a download still running?")
            filled += count
    return raw
