"""What the commands share: UTF-8 streams, JSON output, one-line errors, a reader that goes."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any, NoReturn, TextIO

# Exit codes
CUT = 1
BAD_INPUT = 2
READER_GONE = 141  # 128 + SIGPIPE: what a shell shows of any program whose reader went, on Windows too
# Windows has EINVAL for a write into a pipe that nobody reads.
_NO_READER = (errno.EPIPE, errno.EINVAL)


class ReaderGone(Exception):
    """Nobody reads the output of this process any more, as behind `| head`: no error, there is nobody to tell."""


def use_utf8() -> None:
    """Make the standard streams of this process write UTF-8 whatever the console's code page; only for commands."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def say(text: str = "", end: str = "\n") -> None:
    """To standard output, at once. Raises ReaderGone, or OSError for a full disk and the like."""
    _write(sys.stdout, text + end)


def note(text: str = "", end: str = "\n") -> None:
    """To standard error, at once: progress and remarks. What cannot be written is given up, and the work goes on."""
    try:
        _write(sys.stderr, text + end)
    except (ReaderGone, OSError):
        pass


def print_json(value: Any, indent: int | None = 2) -> None:
    say(json.dumps(value, ensure_ascii=False, indent=indent))


def fail(message: object) -> int:
    """One line on stderr; returns the exit code for bad input."""
    note(f"a3b_engine: {' '.join(str(message).split())}")
    return BAD_INPUT  # tells, also where the line cannot


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return  # a process without a console: Windows' pythonw
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        lost(stream, error)


def lost(stream: TextIO, error: OSError) -> NoReturn:
    """After `error` from writing to a stream. Raises ReaderGone, or the error for a full disk and the like."""
    _silence(stream)
    if error.errno in _NO_READER:
        raise ReaderGone from None
    raise error


def _silence(stream: TextIO) -> None:
    """Send what the stream still holds nowhere: Python writes it once more at its end, and would complain then."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
    except (OSError, ValueError):
        pass  # a stream without a file of the system has nothing to write at the end
