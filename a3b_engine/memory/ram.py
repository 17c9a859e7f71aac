"""What the system says of its RAM, and how much of it may be pinned."""

from __future__ import annotations

import sys
from pathlib import Path

_RESERVE_BYTES = 4 * 1024**3  # that stay free whatever is pinned, or this share of all RAM if that is more:
_RESERVE_SHARE = 0.15


def room_to_pin(pinned: int) -> int:
    """How many bytes may be pinned beside `pinned` of this process: what is available without the reserve (4 GB, or 15 % of all RAM if that
    is more), within the limit of a container on Linux, within half of all RAM on Windows. 0 where the system does not say what it has."""
    total, available = ram()
    if sys.platform == "linux":
        limit, free = container_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
        total, available = min(total, limit), min(available, free)
    room = available - max(_RESERVE_BYTES, int(total * _RESERVE_SHARE))
    if sys.platform == "win32":
        room = min(room, total // 2 - pinned)
    return max(0, int(room))


def ram() -> tuple[int, int]:
    """Bytes of RAM, and of those what programs can have without swapping."""
    try:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    except ImportError:
        pass
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return 0, 0


def container_limits(membership: Path, mounted: Path) -> tuple[int, int]:
    """The lowest memory limit among the control groups this process is in, and the bytes left below all of them. Files in the page
    cache do not count as used: they go when room is needed."""
    limit_of_all = room = sys.maxsize
    for limit, usage, folder in _control_groups(membership, mounted):
        try:
            allowed = (folder / limit).read_text(encoding="ascii").strip()
            used = int((folder / usage).read_text(encoding="ascii"))
            entries = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            cached = sum(int(entry[1]) for entry in entries if entry[0] in ("active_file", "inactive_file"))
        except (OSError, ValueError, IndexError):
            continue
        if allowed.isdigit():  # else "max"
            limit_of_all = min(limit_of_all, int(allowed))
            room = min(room, max(0, int(allowed) - max(0, used - cached)))
    return limit_of_all, room


def _control_groups(membership: Path, mounted: Path) -> list[tuple[str, str, Path]]:
    """(file of the limit, file of the usage, folder) of the process's own groups and all above them, both versions of them."""
    found = []
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if not controllers:
            names, top = ("memory.max", "memory.current"), mounted
        elif "memory" in controllers.split(","):
            names, top = ("memory.limit_in_bytes", "memory.usage_in_bytes"), mounted / "memory"
        else:
            continue
        own = top / path.lstrip("/")
        found += [(*names, folder) for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return found
