"""Scripts as files: pairs of JSON and readable text that never overwrite, and files of two folders by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import ScriptError
from .safe_names import split_prefix

ENDINGS = (".json", ".fountain")  # what is read back, what people read
MAX_FILE_BYTES = 32 * 2**20
MAX_LISTED = 1000
_MAX_DEPTH = 4
_ATTEMPTS = 1000
_MARKED = re.compile(r"(.*\S)\s*\[(\w+)\]\s*\Z", re.DOTALL)


def save_pair(root: Path, prefix: str, title: str, texts: tuple[str, str]) -> tuple[Path, Path]:
    """Write JSON and readable text under a new number, as UTF-8; returns their paths. Raises ScriptError.

    Names are those of ComfyUI's own nodes: `<prefix>_00001_.json`. Neither file existed before, also when several
    processes save at once.
    """
    below, stem = split_prefix(prefix, title)
    folder = root / below
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = _last_number(folder, stem) + 1
        for attempt in range(number, number + _ATTEMPTS):
            paths = tuple(folder / f"{stem}_{attempt:05}_{ending}" for ending in ENDINGS)
            if _written(paths, texts):
                return paths
    except OSError as error:
        raise ScriptError(
            f"filename_prefix: cannot write to {folder} ({error.strerror or error}). Choose another prefix, or free the folder."
        ) from None
    raise ScriptError(f"filename_prefix: no free number was found for {stem} in {folder}. Choose another prefix.")


def _written(paths: tuple[Path, ...], texts: tuple[str, ...]) -> bool:
    """Whether all files could be made new; if not, none is left behind. Raises OSError."""
    made = []
    try:
        for path, text in zip(paths, texts):
            with open(path, "x", encoding="utf-8", newline="\n") as file:
                made.append(path)
                file.write(text)
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            return False
        raise
    return True


def _last_number(folder: Path, stem: str) -> int:
    """The highest number of a file of this stem, whatever its ending and case; 0 if there is none."""
    pattern = re.compile(re.escape(stem) + r"_(\d{1,9})_?\.", re.IGNORECASE)
    found = [pattern.match(name) for name in os.listdir(folder)]
    return max((int(match[1]) for match in found if match), default=0)


# -- reading ---------------------------------------------------------------------------------------------------------


def script_names(roots: Mapping[str, Path]) -> list[str]:
    """Names of the JSON files below the folders (of 1000 each at most), as `comic/page_00001_.json [output]`; those of
    the first folder have no mark."""
    names = []
    for number, (mark, root) in enumerate(roots.items()):
        names += [f"{name} [{mark}]" if number else name for name in sorted(_json_files(root))]
    return names


def _json_files(root: Path) -> list[str]:
    """Names below a folder that `find_script` finds again; no pipes, no dead links."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if len(inside.parts) < _MAX_DEPTH else []
        for name in files:
            below = (inside / name).as_posix()
            if name.lower().endswith(".json") and not name.startswith(".") and _stays_below(below) and os.path.isfile(root / below):
                found.append(below)
        if len(found) > MAX_LISTED:
            break
    return found[:MAX_LISTED]


def _stays_below(name: str) -> bool:
    """Whether a name with slashes is one below a folder on every system: Windows takes a part with a colon for a drive
    or a stream, wherever it stands, and drops dots and spaces at the end of a part."""
    parts = name.split("/")
    leads_up = any(not part.strip(" .") and part.strip() not in ("", ".") for part in parts)
    return not (name.startswith("/") or leads_up or ":" in name or "\\" in name) and all(c.isprintable() for c in name)


def find_script(name: str, roots: Mapping[str, Path]) -> Path:
    """The file of a listed or typed name: relative to one of the folders, with or without its mark `[output]`.

    A name without a mark is looked for in the folders in their order. Backslashes of a workflow saved on Windows
    match; spaces around a typed name do not count, if no file has them; links that stand below the folders are
    followed, as ComfyUI does. Raises ScriptError for a name that leads elsewhere and for one that is not there.
    """
    marked = _MARKED.match(name)
    wanted, mark = (marked[1], marked[2]) if marked else (name, "")
    if mark and mark not in roots:
        wanted, mark = name, ""
    spellings = [wanted.replace("\\", "/"), wanted.replace("\\", "/").strip()]
    if not all(map(_stays_below, spellings)):
        raise ScriptError(f"{name[:120]!r} is not a name below ComfyUI's {' or '.join(roots)} folder. Put the file there")
    for root in [roots[mark]] if mark else roots.values():
        for spelling in spellings:
            path = root.joinpath(*spelling.split("/"))
            if spelling.strip() and os.path.isfile(path):  # False, too, for a name that no system takes
                return path
    places = ", ".join(f"{key}: {root}" for key, root in roots.items())
    raise ScriptError(f"{name[:120]!r} was not found ({places}). Choose a listed file, or press R to refresh the list")


def read_text(path: Path) -> str:
    """The text of a file: UTF-8, or UTF-16 with its mark. Raises ScriptError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ScriptError(f"{path.name} cannot be read ({error.strerror or error}). Check the file's permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise ScriptError(f"{path.name} is larger than {MAX_FILE_BYTES // 2**20} MB, which no script is. Choose another file")
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path.name} is not UTF-8 text (byte {error.start}). Save it as UTF-8 in your editor") from None
