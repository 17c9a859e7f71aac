"""The small models and the report of tests/parity, for the tests that need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

PARITY = Path(__file__).resolve().parents[1] / "parity"
if str(PARITY) not in sys.path:
    sys.path.insert(0, str(PARITY))

from differences import differences, pytest_terminal_summary  # noqa: E402, F401
