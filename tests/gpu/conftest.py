"""The small models and the report of tests/parity, for the tests that need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).resolve().parents[1] / "parity"
if str(PARITY) not in sys.path:
    sys.path.insert(0, str(PARITY))

from differences import differences_of, summarise  # noqa: E402


@pytest.fixture(scope="session")
def differences(pytestconfig: pytest.Config):
    return differences_of(pytestconfig)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    summarise(terminalreporter, config)
