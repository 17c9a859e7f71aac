"""Putting a folder under another name without copying it, on every system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .console import RunnerError

NEVER_COPIED = (".git", ".a3b", "__pycache__", "tests")


def is_link(path: Path) -> bool:
    """True for a symbolic link and for a Windows junction."""
    if path.is_symlink():
        return True
    try:
        return os.name == "nt" and bool(os.readlink(path))
    except OSError:
        return False


def link_folder(target: Path, link: Path, *, copy_allowed: bool) -> None:
    """Make `link` lead to the folder `target`: a symlink, else a Windows junction, else (if allowed) a copy."""
    target = target.resolve()
    link.parent.mkdir(parents=True, exist_ok=True)
    if is_link(link):
        if link.resolve() == target:
            return
        link.rmdir() if os.name == "nt" else link.unlink()
    elif link.exists():
        shutil.rmtree(link)
    try:
        os.symlink(target, link, target_is_directory=True)
        return
    except OSError as error:
        reason = error
    if os.name == "nt":
        import _winapi

        try:
            _winapi.CreateJunction(str(target), str(link))
            return
        except OSError as error:
            reason = error
    if not copy_allowed:
        raise RunnerError(f"cannot link {link} to {target}: {reason}")
    shutil.copytree(target, link, ignore=shutil.ignore_patterns(*NEVER_COPIED))
