"""What the figures were measured on, and how much memory it has left."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch


def describe(device: torch.device) -> dict[str, object]:
    """Name and capability of the device, versions of what runs on it, date. Values that cannot be found are None."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "type": device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1) if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton") or _version("triton-windows"),
        "cuda": torch.version.cuda if cuda else None,
        "driver": _driver() if cuda else None,
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on the device; of a CPU, the RAM without swap. None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return _free_ram()
    except (OSError, ValueError, AttributeError):
        return None


def _free_ram() -> int | None:
    if sys.platform == "win32":
        return _free_ram_of_windows()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines() if ":" in line)
        free = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
        inside = _free_in_control_group()
        return min((value for value in (free, inside) if value is not None), default=None)
    # Elsewhere all of it: a bound that is too high, but still one.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_control_group() -> int | None:
    """What a container may still take, where it has a limit of its own."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))


def _free_ram_of_windows() -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64) for name in ("total", "available", "total_page", "available_page", "total_virtual", "available_virtual", "extended")
        ]

    status = MemoryStatus()
    status.length = ctypes.sizeof(status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return int(status.available)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the NVIDIA driver, from the tool that comes with it."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    versions = answer.stdout.split()
    return versions[0] if versions else None
