"""100,000 mutated answers: no crash, no invented text, no unequal lists, one result for one text, none of them slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_checks import check_form, check_lists, check_sources

from a3b_engine.script.parse import ParseResult
from a3b_engine.script.schema import ComicScript, Panel

CASES = 100_000
PROGRAM = Path(__file__).with_name("parser_fuzz.py")
REPLAY = "python tests/fuzz/parser_fuzz.py --case {}"


def workers() -> int:
    """Processors this process may use, at most 8."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, min(8, len(usable)))


def test_mutated_answers():
    share = -(-CASES // workers())
    commands = [
        [sys.executable, "-X", "utf8", str(PROGRAM), "--first", str(first), "--count", str(min(share, CASES - first))]
        for first in range(0, CASES, share)
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8") for command in commands]
    try:
        outputs = [process.communicate() for process in running]
    finally:
        for process in running:
            process.kill()
    outcomes = []
    for process, (out, err) in zip(running, outputs):
        assert out, f"the run ended with exit code {process.returncode}:\n{err[-2000:]}"
        outcomes.append(json.loads(out))
    failures = [failure for outcome in outcomes for failure in outcome["failures"]]
    shown = "\n".join(f"{REPLAY.format(failure['case'])}\n{failure['error']}" for failure in failures[:5])
    assert not failures, f"replay with\n{shown}"
    assert sum(outcome["cases"] for outcome in outcomes) == CASES
    statuses = {status for outcome in outcomes for status in outcome["statuses"]}
    assert statuses == {"ok", "repaired", "truncated", "failed"}
    seconds, number = max(outcome["slowest"] for outcome in outcomes)
    print(f"slowest: case {number}, {seconds:.3f} s")


def test_the_checks_find_what_they_look_for():
    invented = ParseResult("ok", ComicScript(panels=[Panel(action="made up")]))
    with pytest.raises(AssertionError, match="made up"):
        check_sources(invented, '{"panels":[{"action":"something else"}]}')
    with pytest.raises(AssertionError):
        check_form(ParseResult("ok", None))
    with pytest.raises(AssertionError):
        check_lists(ParseResult("ok", ComicScript(panels=[Panel(index=1, action="a"), Panel(index=1, action="b")])))
