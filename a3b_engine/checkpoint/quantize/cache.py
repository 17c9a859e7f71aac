"""Experts in few bits, kept in a folder beside the checkpoint they were made from.

    <checkpoint>/a3b-experts-int4-g64/experts.safetensors     codes and scales, see `stored`
    <checkpoint>/a3b-experts-int4-g64/a3b_experts.json        what they were made from and how

The folder appears when it is whole. A checkpoint whose files have other sizes or times than it says makes it worthless, and so
does a file that does not have the size its header asks for; then it is made again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ...errors import A3BError
from ..header import read_header
from ..names import is_expert_stack
from ..packed import PackedWeight
from ..schemes import Module, group_modules
from ..storage import LoadPlan
from ..write import write_json
from .record import METHOD, ROUNDING, VERSION, stored_names
from .shard import Output, ShardWriter, shard_size
from .stored import PackedEntry, packed_stack

log = logging.getLogger(__name__)

FILE, RECORD = "experts.safetensors", "a3b_experts.json"
UNFINISHED = ".a3b-unfinished"
_NAMES = {FILE, RECORD, f"{FILE}.part"}
_SPARE_BYTES = 64 * 1024**2
_ABANDONED_SECONDS = 6 * 3600


class ExpertCache:
    """The cache of one checkpoint for one form of its experts."""

    def __init__(self, plan: LoadPlan, bits: int, group: int) -> None:
        self.folder = plan.folder / f"a3b-experts-int{bits}-g{group}"
        self._plan, self._bits, self._group = plan, bits, group
        self._files = {piece.file for entry in plan.entries.values() for piece in entry.pieces}

    def entries(self) -> dict[str, PackedEntry] | None:
        """Plan entries of all expert stacks by canonical name; None, with a line in the log, where a cache is there that will not do."""
        if not (self.folder / RECORD).is_file():
            return None
        try:
            told = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
            if told != self._record():
                log.info("%s: made from other files or in another way; it is made again", self.folder)
                return None
            return self._read_entries()
        except (OSError, ValueError, RecursionError, A3BError) as error:
            log.info("%s: damaged (%s); it is made again", self.folder, error)
            return None

    def writer(self, experts: Mapping[str, object]) -> CacheWriter | None:
        """Takes the stacks of `experts` (plan entries by canonical name); None, with a line in the log, where there is no place for them."""
        outputs = []
        for name, entry in experts.items():
            *lead, columns = entry.shape
            codes, scale = stored_names(name)
            outputs += [Output(codes, "U8", (*lead, columns * self._bits // 8)), Output(scale, "F16", (*lead, columns // self._group))]
        needed = shard_size(outputs) + _SPARE_BYTES
        try:
            _clean_up(self.folder)
            if self.folder.exists() and not (self.folder.is_dir() and _is_ours(self.folder)):
                log.info("%s: holds something else; quantised experts are not kept", self.folder)
                return None
            free = shutil.disk_usage(self.folder.parent).free
            if free < needed:
                log.info("%s: quantised experts are not kept: %.1f GB are needed on this disk, %.1f GB are free", self.folder, needed / 1e9, free / 1e9)
                return None
            return CacheWriter(self.folder, outputs, self._record())
        except OSError as error:
            log.info("%s: quantised experts cannot be kept (%s)", self.folder, error.strerror or error)
            return None

    def _record(self) -> dict:
        """What a cache must say of itself to be good for this checkpoint."""
        files = {}
        for path in sorted(self._files):
            status = path.stat()
            files[path.name] = [status.st_size, status.st_mtime_ns]
        return {"made_by": METHOD, "version": VERSION, "rounding": ROUNDING, "bits": self._bits, "group": self._group, "files": files}

    def _read_entries(self) -> dict[str, PackedEntry]:
        modules = group_modules(read_header(self.folder / FILE)[0])
        found = {}
        for name, entry in self._plan.entries.items():
            if not is_expert_stack(name):
                continue
            module = name.removesuffix(".weight")
            stack = packed_stack(modules.get(module, Module(module, {})), name, entry.shape, {})
            if (stack.bits, stack.group) != (self._bits, self._group):
                raise ValueError(f"{name}: {stack.bits} bits in groups of {stack.group}")
            found[name] = stack
        return found


class CacheWriter:
    """Writes the file of a cache in a folder of its own. The first error of the disk ends it with a line in the log, nothing else."""

    def __init__(self, folder: Path, outputs: list[Output], record: dict) -> None:
        self._folder, self._record = folder, record
        self._work = folder.with_name(f"{folder.name}.{os.getpid()}-{time.time_ns()}{UNFINISHED}")
        self._work.mkdir()
        self._writer: ShardWriter | None = None
        try:
            self._writer = ShardWriter(self._work / FILE, outputs)
        except BaseException:
            _remove(self._work)
            raise

    def write(self, packed: Mapping[str, PackedWeight]) -> None:
        """Stacks by canonical name."""
        if self._writer is None:
            return
        try:
            for name, weight in packed.items():
                codes, scale = stored_names(name)
                self._writer.write(codes, weight.codes)
                self._writer.write(scale, weight.scale)
        except OSError as error:
            self._give_up(error)

    def finish(self) -> bool:
        """Everything is written: to its name, in place of an older one. Whether the cache is there now."""
        if self._writer is None:
            return False
        try:
            self._writer.finish()
            write_json(self._work / RECORD, self._record)
            if self._folder.exists():
                old = self._work.with_name(f"{self._folder.name}.old-{time.time_ns()}{UNFINISHED}")
                os.replace(self._folder, old)
                _remove(old)
            os.replace(self._work, self._folder)
        except OSError as error:
            self._give_up(error)
            return False
        self._writer = None
        log.info("%s: quantised experts are kept for the next time (%.1f GB)", self._folder, (self._folder / FILE).stat().st_size / 1e9)
        return True

    def abandon(self) -> None:
        """Leave nothing behind. Never raises."""
        if self._writer is not None:
            try:
                self._writer.__exit__(None, None, None)
            except OSError as error:
                log.debug("%s: %s", self._work, error)
            self._writer = None
            _remove(self._work)

    def _give_up(self, error: OSError) -> None:
        log.info("%s: quantised experts cannot be kept (%s)", self._folder, error.strerror or error)
        self.abandon()


def _is_ours(folder: Path) -> bool:
    return all(path.name in _NAMES for path in folder.iterdir())


def _remove(folder: Path) -> None:
    """A folder of ours, but never a file that is not. Never raises."""
    try:
        for name in _NAMES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        log.debug("%s: %s", folder, error)


def _clean_up(folder: Path) -> None:
    """What a process that ended in the middle left behind."""
    for path in folder.parent.glob(f"{folder.name}.*{UNFINISHED}"):
        times = [entry.stat().st_mtime for entry in (path, *path.iterdir())]
        if time.time() - max(times) > _ABANDONED_SECONDS and _is_ours(path):
            _remove(path)
