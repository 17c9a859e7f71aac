"""All tensors of a checkpoint folder: which file, where in it, what dtype and shape.

Opening an index is the cheap integrity check (milliseconds per shard, no weight is read): every shard is
there, none is a pointer or cut, no download is unfinished, and the index agrees with the files.
"""

from __future__ import annotations

import codecs
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .header import (
    DOWNLOAD_AGAIN,
    MAX_JSON_BYTES,
    TensorInfo,
    describe_non_tensor_file,
    parse_json_object,
    read_header,
    regular_file_size,
    shown,
)
from .schemes import refuse_foreign_files

log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
PARTIAL_SUFFIXES = (".incomplete", ".aria2", ".part", ".crdownload", ".download", ".tmp")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<tail>\.safetensors)")
_MAX_SHARDS = 10_000


@dataclass
class CheckpointIndex:
    """`tensors` maps names as they stand in the files; `metadata` joins the files' `__metadata__`."""

    folder: Path
    tensors: dict[str, TensorInfo]
    files: list[Path]
    total_bytes: int
    metadata: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> CheckpointIndex:
        """Read and check the headers of every safetensors file that belongs to the checkpoint in `folder`.

        With an index file, exactly the files it names are opened; without one, every *.safetensors of the
        folder except adapters. Raises CheckpointError (or UnsupportedFormatError when the folder holds
        another kind of model file) naming the file and what to do.
        """
        folder = Path(folder)
        names = _list_folder(folder)
        weight_map = _read_weight_map(folder, names)
        wanted = sorted(set(weight_map.values())) if weight_map is not None else _files_without_index(folder, names)
        partial = _unfinished_downloads(folder, names)
        _require_files(folder, wanted, partial)
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        for name in wanted:
            found, file_metadata = read_header(folder / name)
            metadata.update(file_metadata)
            for info in found:
                owner = weight_map.get(info.name, name) if weight_map is not None else name
                if owner != name:
                    continue  # the index takes this tensor from another file
                if info.name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {shown(info.name)} stands in two files, {tensors[info.name].file.name} and "
                        f"{name}. Two downloads mixed in one folder? Keep one set of files."
                    )
                tensors[info.name] = info
        _require_listed(folder, weight_map, tensors)
        if partial:
            log.warning("%s: unfinished download parts beside a whole checkpoint, first: %s", folder, partial[0])
        total = sum(info.nbytes for info in tensors.values())
        return cls(folder, tensors, [folder / name for name in wanted], total, metadata)


def _list_folder(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read as a folder ({error.strerror or error}).") from None


def _read_weight_map(folder: Path, names: list[str]) -> dict[str, str] | None:
    candidates = [name for name in names if name.endswith(".safetensors.index.json")]
    if not candidates:
        return None
    if INDEX_NAME in candidates:
        candidates = [INDEX_NAME]
    if len(candidates) > 1:
        raise CheckpointError(f"{folder}: several index files ({', '.join(map(shown, candidates[:4]))}); keep one.")
    path = folder / candidates[0]
    size = regular_file_size(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: file is {size} bytes, at most {MAX_JSON_BYTES} are accepted for an index.")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from None
    reason = describe_non_tensor_file(raw[:256], size)
    if reason:
        raise CheckpointError(f"{path}: {reason}")
    weight_map = parse_json_object(raw.removeprefix(codecs.BOM_UTF8), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map. {DOWNLOAD_AGAIN}")
    for tensor, file in weight_map.items():
        _check_file_name(path, tensor, file)
    return weight_map


def _check_file_name(path: Path, tensor: str, file: object) -> None:
    """A shard is a plain file name: never a path out of the folder, on any operating system.

    The file of that name may itself be a link (the hub cache links snapshots to blobs); such links were
    made by the person who owns the folder, whereas the index comes from the download.
    """
    if (
        not isinstance(file, str)
        or not file.endswith(".safetensors")
        or len(file) > 255
        or any(character in '/\\:*?"<>|' or ord(character) < 32 for character in file)
    ):
        raise CheckpointError(
            f"{path}: tensor {shown(tensor)} is mapped to {shown(str(file))}; only plain *.safetensors file names inside "
            "the folder are accepted. Do not use this checkpoint unless you trust where it comes from."
        )


def _files_without_index(folder: Path, names: list[str]) -> list[str]:
    files = [name for name in names if name.endswith(".safetensors")]
    model_files = [name for name in files if not name.startswith("adapter_model")]
    if not model_files:
        refuse_foreign_files(folder, names)
        if files:
            raise CheckpointError(f"{folder}: holds only a LoRA adapter ({files[0]}); choose the folder of the base model.")
        partial = _unfinished_downloads(folder, names)
        if partial:
            raise CheckpointError(
                f"{folder}: no finished *.safetensors file, only unfinished parts ({shown(partial[0])}). Incomplete "
                "download? Let it finish or start it again."
            )
        raise CheckpointError(f"{folder}: no *.safetensors file in this folder. Choose the folder that holds the weights.")
    # Without an index the shard names themselves say how many there must be.
    wanted = set(model_files)
    for name in model_files:
        match = _SHARD.fullmatch(name)
        if match and int(match["count"]) <= _MAX_SHARDS:
            numbers = range(1, int(match["count"]) + 1)
            wanted.update(f"{match['stem']}-{number:05d}-of-{match['count']}{match['tail']}" for number in numbers)
    return sorted(wanted)


def _require_files(folder: Path, wanted: list[str], partial: list[str]) -> None:
    missing = [name for name in wanted if not (folder / name).exists()]
    if missing:
        named = ", ".join(map(shown, missing[:5])) + (" ..." if len(missing) > 5 else "")
        text = f"{folder}: {len(missing)} of {len(wanted)} weight files missing: {named}. Incomplete download?"
        if (folder / missing[0]).is_symlink():
            text += f" ({shown(missing[0])} is a link whose target is gone.)"
        if partial:
            text += f" {len(partial)} unfinished part(s) found, first: {shown(partial[0])}."
        raise CheckpointError(text + " Download the missing files into this folder.")
    for name in wanted:
        for suffix in PARTIAL_SUFFIXES:
            # aria2 and browsers preallocate: the size is right long before the content is.
            if f"{name}{suffix}" in partial:
                raise CheckpointError(
                    f"{folder / name}: {name}{suffix} beside it says that its download has not finished. Incomplete "
                    f"download? Let it finish, or delete {name}{suffix} if you know that the file is whole."
                )


def _require_listed(folder: Path, weight_map: dict[str, str] | None, tensors: dict[str, TensorInfo]) -> None:
    absent = [name for name in weight_map or () if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} tensor(s) listed in the index are not in their files, first: {shown(absent[0])} in "
            f"{weight_map[absent[0]]}. Files of two releases mixed, or an incomplete download? Download the folder again."
        )
    if not tensors:
        raise CheckpointError(f"{folder}: its *.safetensors files hold no tensors. {DOWNLOAD_AGAIN}")


def _unfinished_downloads(folder: Path, names: list[str]) -> list[str]:
    """Names of download leftovers in the places where the usual tools keep them. None is ever opened."""
    found = [name for name in names if name.endswith(PARTIAL_SUFFIXES)]
    places = [folder / ".cache" / "huggingface" / "download", folder / "._____temp"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    for place in places:
        try:
            found += sorted(entry.name for entry in place.iterdir() if entry.name.endswith(PARTIAL_SUFFIXES))
        except OSError:
            continue  # the place does not exist: the folder came by another tool
    return found
