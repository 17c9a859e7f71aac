"""Reading and checking the header of one safetensors file.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}},
then the data. Nothing in it is trusted: the file may be cut, a pointer, a web page or hostile.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .dtypes import DTYPE_BITS

# The largest real header (184,000 tensors in one file) is about 28 MB. Parsing costs up to ~25 times
# the text in Python objects, so the cap also bounds what a hostile file can make us allocate.
MAX_JSON_BYTES = 32 * 1024 * 1024
MAX_RANK = 8
MAX_NAME = 512
DOWNLOAD_AGAIN = "Incomplete download? Delete this file and download it again into the same folder."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `offset` is absolute in `file`, `dtype` a safetensors code."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def shown(text: str, limit: int = 160) -> str:
    """`text` as printable ASCII of bounded length, for messages that quote names from a file."""
    text = ascii(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_json_object(data: bytes, what: str) -> dict:
    """Parse hostile JSON that must be an object. `what` names the source in the error.

    Refuses duplicate keys (two readers could see two different files), non-finite numbers and
    nesting deep enough to exhaust the interpreter's stack.
    """

    def unique(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return result

    def refuse(literal):
        raise ValueError(f"{literal} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise CheckpointError(f"{what}: JSON nested too deeply; this is not a checkpoint file.") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{what}: not valid JSON ({shown(str(error))}). {DOWNLOAD_AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}.")
    return value


def regular_file_size(path: Path) -> int:
    """Size of `path` in bytes; CheckpointError unless it is a readable regular file (links followed)."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file.")
    return status.st_size


def describe_non_tensor_file(start: bytes, size: int) -> str | None:
    """Why a file that begins with `start` is no safetensors file, when it is a known impostor."""
    if start[8:9] == b"{":
        return None  # a safetensors header; the length in front of it may happen to spell another format's first bytes
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return (
            f"is a Git LFS pointer of {size} bytes, not the weights themselves. Incomplete download? "
            "Run `git lfs pull` in that folder, or download the file again."
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"is a web page of {size} bytes, not weights (a login or error page was saved). {DOWNLOAD_AGAIN}"
    if start.startswith(b"GGUF"):
        return "is a GGUF file under a .safetensors name. Use the official FP8 or BF16 repository."
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return "is a PyTorch pickle file under a .safetensors name; pickles are never opened."
    return None


def read_header(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """The tensors of one safetensors file and its `__metadata__`.

    Raises CheckpointError naming the file, the size found and the size expected for pointers, cut or
    over-long files, and naming the tensor for bad dtypes, shapes, offsets, overlaps and holes.
    """
    size = regular_file_size(path)
    try:
        with open(path, "rb") as stream:
            start = stream.read(256)
            reason = describe_non_tensor_file(start, size)
            if reason:
                raise CheckpointError(f"{path}: {reason}")
            if size < 10:
                raise CheckpointError(
                    f"{path}: file is {size} bytes, too short for a safetensors file. {DOWNLOAD_AGAIN}"
                )
            length = int.from_bytes(start[:8], "little")
            if length > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes (at most {MAX_JSON_BYTES} are accepted; the file "
                    f"is {size} bytes). Not a safetensors file, or damaged. {DOWNLOAD_AGAIN}"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: file is {size} bytes, its header alone needs {8 + length}. {DOWNLOAD_AGAIN}"
                )
            stream.seek(8)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from None
    header = parse_json_object(raw, f"{path}: header")
    return _check_entries(path, header, data_start=8 + length, file_size=size)


def _check_entries(path: Path, header: dict, data_start: int, file_size: int):
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header __metadata__ must map names to text. {DOWNLOAD_AGAIN}")
    tensors = [_check_entry(path, name, entry, data_start) for name, entry in header.items()]
    end = data_start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            raise CheckpointError(f"{path}: the data of tensor {shown(info.name)} overlaps another tensor.")
        if info.offset > end:
            raise CheckpointError(
                f"{path}: {info.offset - end} unclaimed bytes before the data of tensor {shown(info.name)}."
            )
        end = info.offset + info.nbytes
    if file_size < end:
        raise CheckpointError(f"{path}: file is {file_size} bytes, its header says {end}. {DOWNLOAD_AGAIN}")
    if file_size > end:
        raise CheckpointError(
            f"{path}: file is {file_size} bytes, {file_size - end} more than its header says ({end}). "
            f"Damaged, or two downloads mixed. {DOWNLOAD_AGAIN}"
        )
    return tensors, metadata


def _check_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}: {what}. {DOWNLOAD_AGAIN}")

    if not name or len(name) > MAX_NAME:
        raise bad(f"its name has {len(name)} characters (1 to {MAX_NAME} are accepted)")
    if not isinstance(entry, dict):
        raise bad("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"unknown dtype {shown(str(dtype), 40)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(size) for size in shape):
        raise bad(f"bad shape {shown(str(shape), 60)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(size) for size in offsets):
        raise bad(f"bad data_offsets {shown(str(offsets), 60)}")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise bad(f"{dtype} {shape} needs {bits / 8:g} bytes, data_offsets {offsets} hold {end - begin}")
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, end - begin)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48
