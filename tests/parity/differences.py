"""The largest difference of every kind that a session saw: printed at its end, and written as JSON on request.

A suite takes part by importing the fixture and the hooks into its conftest. The tests may be shared out among processes.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest


class Differences:
    """Largest (or, for similarities, smallest) figure of each kind, and where it was seen. NaN is worse than any number."""

    def __init__(self) -> None:
        self.rows: dict[str, dict] = {}

    def note(self, kind: str, value: float, where: str, limit: float, *, smallest: bool = False) -> float:
        """Remember `value` and return it, so that a test can assert on the same number."""
        self._add(kind, {"value": value, "where": where, "limit": limit, "smallest": smallest, "checks": 1})
        return value

    def take_in(self, rows: dict[str, dict]) -> None:
        """Add the rows of another process of the session."""
        for kind, new in rows.items():
            self._add(kind, new)

    def _add(self, kind: str, new: dict) -> None:
        row = self.rows.setdefault(kind, {**new, "checks": 0})
        value, worst = new["value"], row["value"]
        further = value < worst if new["smallest"] else value > worst
        if further or (math.isnan(value) and not math.isnan(worst)):
            row.update(value=value, where=new["where"])
        row["checks"] += new["checks"]


FOUND = pytest.StashKey[Differences]()


@pytest.fixture(scope="session")
def differences(pytestconfig: pytest.Config) -> Differences:
    return _differences_of(pytestconfig)


def _differences_of(config: pytest.Config) -> Differences:
    return config.stash.setdefault(FOUND, Differences())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process hands its rows, as JSON, to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["differences"] = json.dumps(_differences_of(session.config).rows)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """A worker process has ended; one that crashed left nothing."""
    rows = getattr(node, "workeroutput", {}).get("differences", "{}")
    _differences_of(node.config).take_in(json.loads(rows))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures once, however many conftest files ask for it, and write them to `A3B_PARITY_REPORT`."""
    rows = _differences_of(config).rows
    config.stash[FOUND] = Differences()
    if not rows:
        return
    terminalreporter.section("differences from the reference")
    for kind, row in rows.items():
        terminalreporter.write_line(
            f"{kind:<46} {row['value']:.3g}  (limit {row['limit']:g}, {row['checks']} checks, worst: {row['where']})")
    target = os.environ.get("A3B_PARITY_REPORT")
    if target:
        Path(target).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
