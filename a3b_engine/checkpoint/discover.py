"""Finding checkpoint folders below a models folder."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from pathlib import Path

log = logging.getLogger(__name__)

MODEL_TYPE = "qwen3_5"
# Version control, download bookkeeping and hub internals: many small files, never a checkpoint.
SKIPPED = frozenset({".git", ".cache", ".locks", ".no_exist", "._____temp", "__pycache__", "blobs"})
MAX_FOLDERS = 50_000
MAX_CONFIG_BYTES = 4 * 1024 * 1024


def find_checkpoint_folders(root: Path, max_depth: int = 6) -> list[Path]:
    """Folders at most `max_depth` levels below `root` (itself included) that hold a checkpoint of this family.

    A checkpoint folder has a config.json whose model_type begins with "qwen3_5", and *.safetensors files or their
    index. One whose config.json cannot be read is listed too, so that opening it can say why. Links are followed,
    each real folder is listed once. Sorted; unreadable folders are skipped, never an error.
    """
    root = Path(root)
    found: list[Path] = []
    seen: set[str] = set()
    queue: deque[tuple[Path, int]] = deque([(root, 0)])
    while queue:
        folder, depth = queue.popleft()
        # Breadth first, so that a real folder near the root wins over a deep link to it; the real path also ends
        # loops of links.
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        if len(seen) > MAX_FOLDERS:
            log.warning("%s: more than %d folders; the search for checkpoints stops here", root, MAX_FOLDERS)
            break
        names, children = _scan(folder)
        if "config.json" in names and _has_weights(names) and _may_be_ours(folder / "config.json"):
            found.append(folder)
        if depth < max_depth:
            queue.extend((folder / name, depth + 1) for name in children)
    return sorted(found)


def _scan(folder: Path) -> tuple[set[str], list[str]]:
    """Names of the files and of the subfolders worth entering, real ones before links."""
    names: set[str] = set()
    children: list[tuple[bool, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:
                    is_folder = False  # a link into nowhere or a loop: a name without a folder
                if not is_folder:
                    names.add(entry.name)
                elif entry.name not in SKIPPED:
                    children.append((entry.is_symlink(), entry.name))
    except OSError as error:
        log.debug("%s: not searched for checkpoints (%s)", folder, error)
    return names, [name for _, name in sorted(children)]


def _has_weights(names: set[str]) -> bool:
    return any(
        name.endswith((".safetensors", ".safetensors.index.json")) and not name.startswith("adapter_") for name in names
    )


def _may_be_ours(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            return True
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return True
    if not isinstance(config, dict):
        return True
    text = config.get("text_config")
    types = [config.get("model_type"), text.get("model_type") if isinstance(text, dict) else None]
    return any(isinstance(kind, str) and kind.startswith(MODEL_TYPE) for kind in types)
