"""Virtual environments: the runner's own, and overlays on top of another ComfyUI's Python."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .console import USAGE, RunnerError, clean_environment, run_logged, say
from .paths import LOGS, ROOT, VENV, WORK

REQUIREMENTS = ROOT / "requirements.txt"
HOST_REQUIREMENTS = ROOT / "tools" / "runner" / "requirements-host.txt"
TEST_REQUIREMENTS = ROOT / "requirements-test.txt"


def venv_python(folder: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def python_answers(python: Path, code: str = "pass", timeout: float = 120) -> str | None:
    """What a one-line program prints under that interpreter, or None when it does not run."""
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            env=clean_environment(PYTHONIOENCODING="utf-8"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def require_venv_support() -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise RunnerError(
            f"this Python {version} cannot make virtual environments (ensurepip is missing): install "
            f"the package python{version}-venv (Debian, Ubuntu: apt install python{version}-venv) "
            "and run this again",
            code=USAGE,
        )


def ensure_venv(verbose: bool = False) -> Path:
    """The runner's own environment under .a3b/venv, made when absent or broken. Returns its Python."""
    python = venv_python(VENV)
    if python_answers(python, "import pip") is not None:
        return python
    require_venv_support()
    if VENV.exists():
        say("The environment in .a3b/venv does not run any more: making it anew.")
        shutil.rmtree(VENV)
    say("Making a Python environment in .a3b/venv ...")
    run_logged(
        [sys.executable, "-m", "venv", str(VENV)],
        LOGS / "venv.log",
        what="making a virtual environment in .a3b/venv",
        verbose=verbose,
    )
    return python


def requirement_text(path: Path) -> str:
    """A requirements file with the files it names by `-r` written out, for the stamp."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            lines.append(requirement_text(ROOT / line[3:].strip()))
        elif line.strip() and not line.startswith("#"):
            lines.append(line.strip())
    return "\n".join(lines)


def ensure_requirements(python: Path, name: str, files: list[Path], *, why: str, verbose: bool = False) -> None:
    """Install requirement files once; a stamp keyed by their content makes the next call free."""
    version = python_answers(python, "import sys; print(sys.version)") or ""
    content = "\n".join([version, *(requirement_text(path) for path in files)])
    digest = hashlib.sha256(content.encode("utf-8")).hexdigest()
    stamp = python.parent.parent / f".a3b-{name}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return
    say(f"Installing {why} (the first time this takes a few minutes) ...")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-warn-script-location"]
    for path in files:
        command += ["-r", str(path)]
    run_logged(command, LOGS / "pip.log", what=f"installing {why}", verbose=verbose)
    stamp.write_text(digest, encoding="utf-8")


def ensure_overlay(python: Path, label: str, *, verbose: bool = False) -> Path:
    """A Python that sees everything `python` sees, plus what this pack needs.

    The pack's requirements go into an environment of our own under .a3b/ that looks into the other one's
    packages, so nothing is ever installed into a ComfyUI that belongs to the user. When `python` has all
    of them already, it is returned as it is.
    """
    if missing_requirements(python) == []:
        return python
    key = hashlib.sha256(str(python).encode("utf-8")).hexdigest()[:10]
    folder = WORK / "overlays" / f"{label}-{key}"
    overlay = venv_python(folder)
    if python_answers(overlay, "import pip") is None:
        sites = python_answers(python, "import site; print('\\n'.join(site.getsitepackages()))")
        if sites is None or python_answers(python, "import venv, ensurepip") is None:
            raise RunnerError(
                f"{python} lacks packages that this pack needs and cannot make a virtual environment: "
                f'run  "{python}" -m pip install -r "{REQUIREMENTS}"  and start this again',
                code=USAGE,
            )
        shutil.rmtree(folder, ignore_errors=True)
        run_logged(
            [str(python), "-m", "venv", str(folder)],
            LOGS / "venv.log",
            what=f"making an environment on top of {python}",
            verbose=verbose,
        )
        own = python_answers(overlay, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        hook = "".join(f"import site; site.addsitedir({path!r})\n" for path in sites.splitlines())
        (Path(own) / "a3b_overlay.pth").write_text(hook, encoding="utf-8")
    ensure_requirements(overlay, "pack", [REQUIREMENTS], why=f"what the pack needs beside {python}", verbose=verbose)
    return overlay


def missing_requirements(python: Path) -> list[str] | None:
    """Lines of requirements.txt that this interpreter does not satisfy; None when it does not run at all."""
    bounds = [line.split(">=") for line in requirement_text(REQUIREMENTS).splitlines()]
    code = (
        "import importlib.metadata as m, re\n"
        "def number(v): return [int(n) for n in re.findall(r'\\d+', v)[:3]]\n"
        "def has(name, least='0'):\n"
        "    try: return number(m.version(name)) >= number(least)\n"
        "    except m.PackageNotFoundError: return False\n"
        f"print(' '.join(b[0] for b in {bounds!r} if not has(*b)))"
    )
    answer = python_answers(python, code)
    return None if answer is None else answer.split()
