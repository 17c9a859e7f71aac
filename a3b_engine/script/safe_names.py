"""File names that every system takes, from texts that nobody has checked: a prefix typed by a user, a title of a model."""

from __future__ import annotations

import re
import time
import unicodedata
from pathlib import PurePosixPath

from ..errors import ScriptError

MAX_NAME_BYTES = 100  # UTF-8; systems take 255 with the counter and the ending
MAX_FOLDERS = 6
_FORBIDDEN = re.compile(r'[<>:"|?*/\\\x00-\x1f\x7f]')
# Windows gives these to devices, whatever ending follows.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])(?:\.|\Z)", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:")
_TIMES = {"year": "%Y", "month": "%m", "day": "%d", "hour": "%H", "minute": "%M", "second": "%S"}


def safe_name(text: str, default: str = "script") -> str:
    """One part of a path, without anything that leads elsewhere or that Windows refuses; `default` if nothing is left."""
    # Format characters turn the reading direction of a name or hide in it.
    visible = "".join(" " if c.isspace() else c for c in unicodedata.normalize("NFC", text) if c.isspace() or unicodedata.category(c)[0] != "C")
    name = _FORBIDDEN.sub("_", visible).strip().rstrip(". ")
    name = _cut(name).rstrip(". ")
    if not name.strip("._ "):
        return default
    return f"_{name}" if _DEVICES.match(name) else name


def split_prefix(prefix: str, title: str = "") -> tuple[PurePosixPath, str]:
    """Folder below the output folder and beginning of the file name, from a `filename_prefix` such as "comic/%title%".

    Filled in: %title% and, as in ComfyUI's own nodes, %year% %month% %day% %hour% %minute% %second%. Both kinds of
    slash part folders. Raises ScriptError for a path that is absolute or leads up.
    """
    parts = prefix.replace("\\", "/").split("/")
    if prefix.replace("\\", "/").startswith("/") or _DRIVE.match(prefix) or ".." in [part.strip() for part in parts]:
        raise ScriptError(
            f"filename_prefix: {prefix[:80]!r} leads out of the output folder. Give a name, or folders below it such as comic/page."
        )
    now = time.localtime()
    filled = []
    for part in parts:
        for word, code in _TIMES.items():
            part = part.replace(f"%{word}%", time.strftime(code, now))
        part = part.replace("%title%", _FORBIDDEN.sub("_", title))
        if part.strip() not in ("", "."):
            filled.append(safe_name(part))
    if len(filled) > MAX_FOLDERS + 1:
        raise ScriptError(f"filename_prefix: {len(filled) - 1} folders inside each other; at most {MAX_FOLDERS} are made.")
    *folders, stem = filled if filled and parts[-1].strip() not in ("", ".") else [*filled, safe_name("")]
    return PurePosixPath(*folders), stem


def _cut(name: str) -> str:
    """The beginning that fits, with no character cut in two."""
    return name.encode("utf-8")[:MAX_NAME_BYTES].decode("utf-8", "ignore")
