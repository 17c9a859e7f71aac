"""What the commands share: UTF-8 streams, JSON output, one-line errors."""

from __future__ import annotations

import json
import sys
from typing import Any

# Exit codes
CUT = 1
BAD_INPUT = 2


def use_utf8() -> None:
    """Make the standard streams of this process write UTF-8 whatever the console's code page; only for commands."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def fail(message: object) -> int:
    """One line on stderr; returns the exit code for bad input."""
    print(f"a3b_engine: {' '.join(str(message).split())}", file=sys.stderr)
    return BAD_INPUT
