"""A checkpoint folder -> a new one with fewer bits, layer by layer, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import ModelConfig
from ...errors import CheckpointError, ConfigError
from ...tokenizer import Tokenizer
from ..index import INDEX_NAME, CheckpointIndex
from ..names import is_expert_stack
from ..plan import build_plan
from ..schemes import declared_block_size, split_name
from ..write import BLOCK, fp8_config, write_json
from .calibration import TOKENS, calibration_tokens
from .head import rounds_head
from .matrix import default_group
from .record import METHOD, VERSION
from .shard import Output, ShardWriter, shard_size
from .steps import BlockFp8, CalibrationText, Copy, Step, steps_to_few_bits, steps_to_fp8

log = logging.getLogger(__name__)

FORMS = {"int4": 4, "int3": 3, "fp8": 8}
RECORD = "a3b_quantize.json"
UNFINISHED = ".a3b-unfinished"
SHARD_BYTES = 2 * 1024**3
_SPARE_BYTES = 64 * 1024**2
# What a checkpoint consists of beside its weights; nothing else of a folder is taken along.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """folder: the result. bytes: of its weights. resumed: files taken over from an interrupted run. made: False when the
    folder held this very result already."""

    folder: Path
    bytes: int
    resumed: int = 0
    made: bool = True


def convert(
    source: Path, target: Path, to: str, *, group: int | None = None, device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None, cancel: Callable[[], object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:  # fmt: skip
    """Write `source` (a checkpoint folder, FP8 or BF16) to the new folder `target` as `to`: "int4", "int3" or "fp8".

    int4, int3: the routed experts get codes with float16 scales over `group` columns (None: as many as fit, up to 64; see `matrix.quantize_matrix`,
    with the statistics of `calibration`, whose last bits depend on the device), a head of plain floats becomes FP8 (see `head`); everything else is
    copied byte for byte. fp8: from a BF16 checkpoint, the
    modules that the official FP8 files hold so. No more than a layer is in memory. Work goes on in a folder beside the target, which gets
    its name when everything is on the disk; after an interruption the same call goes on behind the last finished file.
    progress(done, total bytes of the source); cancel is called between pieces and may raise.
    Raises `CheckpointError` (also for no room on the disk and a target that holds something else) and `ConfigError`.
    """
    if to not in FORMS:
        raise ConfigError(f"to: found {to!r}, expected one of {', '.join(FORMS)}.")
    source, target = Path(source), Path(target)
    index = CheckpointIndex.open(source)
    config = ModelConfig.from_folder(source)
    plan = build_plan(index, config)
    if to == "fp8":
        steps = steps_to_fp8(index, plan)
    else:
        limit = min(TOKENS, config.text.max_position_embeddings)
        text = CalibrationText(plan, config.text, calibration_tokens(Tokenizer.from_folder(source), limit))
        group = default_group({name: entry.shape[-1] for name, entry in plan.entries.items() if is_expert_stack(name)}, FORMS[to], group)
        steps = steps_to_few_bits(index, plan, FORMS[to], group, text)
    shards = _shards(steps, shard_bytes)
    job = _job(source, index, to, group, shard_bytes, rounds_head(plan))
    size = sum(output.nbytes for step in steps for output in step.outputs)
    if _holds(target, job):
        return Converted(target, size, made=False)
    folder = _working_folder(source, target, job)
    names = _shard_names(len(shards))
    sizes = [shard_size(_outputs(shard)) for shard in shards]
    finished = [(folder / name).is_file() and (folder / name).stat().st_size == size for name, size in zip(names, sizes)]
    _require_room(folder, sum(size for size, done in zip(sizes, finished) if not done))
    write_json(folder / RECORD, job)
    device = torch.device(device)
    poll = _Poll(sum(step.read_bytes for step in steps), progress, cancel)
    last_work = max((number for number, done in enumerate(finished) if not done), default=-1)
    for number, shard in enumerate(shards):
        if finished[number]:
            for step in shard if number < last_work else ():
                step.skip(device, poll)
            continue
        with ShardWriter(folder / names[number], _outputs(shard)) as writer:
            for step in shard:
                step.run(writer.write, device, poll)
            writer.finish()
    weight_map = {output.name: name for name, shard in zip(names, shards) for output in _outputs(shard)}
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    write_json(folder / "config.json", _config(source, config, steps, to, group))
    build_plan(CheckpointIndex.open(folder), ModelConfig.from_folder(folder))  # what is read back is whole
    if target.exists():
        target.rmdir()  # empty, as was checked
    os.replace(folder, target)
    return Converted(target, size, resumed=sum(finished))


class _Poll:
    """Adds up the bytes that steps report."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None, cancel: Callable[[], object] | None) -> None:
        self._done, self._total, self._progress, self._cancel = 0, total, progress, cancel

    def __call__(self, nbytes: int) -> None:
        if self._cancel is not None:
            self._cancel()
        self._done += nbytes
        if self._progress is not None and nbytes:
            self._progress(self._done, self._total)


def _outputs(shard: list[Step]) -> list[Output]:
    return [output for step in shard for output in step.outputs]


def _shards(steps: list[Step], limit: int) -> list[list[Step]]:
    shards: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        nbytes = sum(output.nbytes for output in step.outputs)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _job(source: Path, index: CheckpointIndex, to: str, group: int | None, shard_bytes: int, head: bool) -> dict:
    """What makes two runs the same: the source's files and what is asked for."""
    files = {}
    for path in sorted(index.files):
        status = path.stat()
        files[path.name] = [status.st_size, status.st_mtime_ns]
    job = {"made_by": METHOD, "version": VERSION, "to": to, "shard_bytes": shard_bytes, "source": source.resolve().name, "files": files}
    return job if to == "fp8" else {**job, "group": group, **({"head": "fp8"} if head else {})}


def _holds(target: Path, job: dict) -> bool:
    """Whether `target` is the finished result of `job`. Raises when something else is there."""
    if not target.exists():
        return False
    if target.is_dir():
        names = [path.name for path in target.iterdir()]
        if not names:
            return False
        found = _read_job(target) if "config.json" in names else None
        if found == job:
            CheckpointIndex.open(target)  # says what is missing or cut
            return True
        if found is not None and found == {name: value for name, value in job.items() if name != "head"}:
            raise CheckpointError(f"{target}: an earlier version made it of the same files, with the head as it was. It can be used as it is; delete it to have it made anew.")
    raise CheckpointError(f"{target}: exists and holds something else. Give a new folder, or delete this one first.")


def _read_job(folder: Path) -> object:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _working_folder(source: Path, target: Path, job: dict) -> Path:
    """The folder beside `target` in which the work goes on; files of another job of ours are removed from it."""
    origin, goal = source.resolve(), target.resolve()
    if goal == origin or origin in goal.parents:
        raise CheckpointError(f"{target}: lies inside the source folder. Give a folder beside it.")
    if not goal.parent.is_dir():
        raise CheckpointError(f"{goal.parent}: there is no such folder. Make it first.")
    folder = goal.with_name(goal.name + UNFINISHED)
    if folder.exists():
        found = _read_job(folder)
        if found == job:
            for path in folder.glob("*.part"):
                path.unlink()
            return folder
        if any(folder.iterdir()) and not (isinstance(found, dict) and found.get("made_by") == METHOD):
            raise CheckpointError(f"{folder}: exists and was not made by this command. Delete it or give another target.")
        if isinstance(found, dict):
            log.warning("%s: was begun with other files or by another version; it is begun anew", folder)
        for path in folder.iterdir():
            path.unlink()
    else:
        folder.mkdir()
    return folder


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes + _SPARE_BYTES:
        if not any(path.name.endswith(".safetensors") for path in folder.iterdir()):
            shutil.rmtree(folder)
        raise CheckpointError(
            f"{folder.parent}: {free / 1e9:.1f} GB are free on this disk, {(nbytes + _SPARE_BYTES) / 1e9:.1f} GB are needed. Make room or give a folder on another disk."
        )


def _config(source: Path, config: ModelConfig, steps: list[Step], to: str, group: int | None) -> dict:
    """config.json of the result: the source's, with a `quantization_config` that says what was done."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8-sig"))
    before = raw.pop("quantization_config", None)
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"].pop("quantization_config", None)
    if to == "fp8":
        kept = [step.source.name.removesuffix(".weight") for step in steps if isinstance(step, Copy)]
        raw["quantization_config"] = fp8_config(kept)
        return raw
    told = {
        "quant_method": METHOD,
        "version": VERSION,
        "bits": FORMS[to],
        "group_size": group,
        "symmetric": True,
        "scale_dtype": "float16",
        "modules": ["mlp.experts"],
        "other_modules": before,
    }
    rounded = [split_name(step.source.name)[0] for step in steps if isinstance(step, BlockFp8)]
    if rounded:
        told["fp8_modules"] = rounded
    block = declared_block_size(config.quantization) or (BLOCK if rounded else None)
    raw["quantization_config"] = {**told, "weight_block_size": list(block)} if block else told
    return raw
