"""Talking to the person at the terminal: UTF-8 output, one-line errors, quiet subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


class RunnerError(Exception):
    """A failure with a one-line explanation for the user.

    `code` is the process's exit code: USAGE for a wrong option or folder, FAILURE for the rest.
    `details` (the tail of a log, say) is printed under the line; `log` is the file it came from.
    """

    def __init__(self, message: str, *, code: int = FAILURE, details: str = "", log: Path | None = None):
        super().__init__(message)
        self.code, self.details, self.log = code, details, log


def use_utf8_output() -> None:
    """Write UTF-8 whatever the locale or console code page, and never die on a character."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def say(text: str = "") -> None:
    print(text, flush=True)


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log file, or an empty string."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without the settings that would redirect a venv's Python or pip."""
    dropped = {
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "__PYVENV_LAUNCHER__",
    }
    kept = {key: value for key, value in os.environ.items() if key.upper() not in dropped}
    return {**kept, **extra}


def run_logged(command: list[str], log: Path, *, what: str, verbose: bool = False) -> None:
    """Run a command with its output in `log` (and on screen when verbose); RunnerError when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", errors="replace") as sink:
        sink.write("\n$ " + " ".join(command) + "\n")
        sink.flush()
        env = clean_environment(
            PYTHONIOENCODING="utf-8",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PIP_NO_INPUT="1",
            DEBIAN_FRONTEND="noninteractive",
        )
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise RunnerError(f"{what} failed: cannot start {command[0]}: {error}") from error
        try:
            for line in process.stdout:
                sink.write(line)
                if verbose:
                    say("    " + line.rstrip())
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
    if code != 0:
        raise RunnerError(f"{what} failed (exit code {code})", details=tail(log), log=log)
