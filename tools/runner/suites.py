"""`run.py test`: everything the suites need, then pytest suite by suite, then one line of figures."""

from __future__ import annotations

import os
import re
import subprocess
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

from .browser import ensure_browser
from .console import FAILURE, clean_environment, say
from .environment import TEST_REQUIREMENTS, ensure_requirements, ensure_venv
from .hosts import current_host, ensure_2024_host
from .paths import ROOT, WORK

SUITES = ("unit", "fuzz", "parity", "host", "browser", "gpu")
RESULTS = WORK / "results"
TEST_LIMIT = 600  # seconds for one test before it counts as hung
SUITE_LIMIT = 3000
NO_TESTS_COLLECTED = 5
NOTHING_SELECTED = "No test ran: nothing matches the selection."
SHARED_OUT = {"unit", "parity"}  # among processes; fuzz starts its own, and a ComfyUI or a card is one for all tests
MOST_WORKERS = 4  # each holds PyTorch and models of its own, up to two gigabytes
LISTING = {"--collect-only", "--collectonly", "--co"}  # pytest options with which no test runs
# pytest options that need the test in pytest's own process, or forbid the plugin that starts others
ALONE = LISTING | {"--capture=no", "--pdb", "--trace", "-pno:xdist"}
ALONE_PAIRS = {("-p", "no:xdist"), ("--capture", "no")}
NO_CAPTURE = re.compile("-[dfhlqvxV]*s")  # also among other flags, as -xs; in -rs and -ks it is the value of an option


@dataclass
class Outcome:
    """Counts of one suite, what went wrong outside its tests ('' for nothing), and whether the selection left it none."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    problem: str = ""
    empty: bool = False


def run_tests(suites: list[str], pytest_options: list[str], verbose: bool = False) -> int:
    chosen = [name for name in SUITES if name in suites] or list(SUITES)
    python = ensure_venv(verbose)
    ensure_requirements(
        python, "test", [TEST_REQUIREMENTS], why="PyTorch and the other packages for the tests", verbose=verbose
    )
    if {"host", "browser"} & set(chosen):
        ensure_2024_host(python, verbose)
        current = current_host(verbose)
        say(
            f"Current ComfyUI: {current.folder}"
            if current
            else "Current ComfyUI: none here, so only the one of 2024 is tested (COMFYUI_DIR names one, or ~/ComfyUI)"
        )
    if "browser" in chosen:
        ensure_browser(verbose)
    outcomes = [run_suite(name, python, pytest_options) for name in chosen]
    if LISTING & set(pytest_options):
        return report_listing(outcomes)
    return report(outcomes)


def workers(name: str, pytest_options: list[str]) -> int:
    """Processes that share out the tests of a suite: one a core, at most MOST_WORKERS; 0 for none beside pytest itself."""
    if name not in SHARED_OUT or needs_one_process(pytest_options):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS) if cores > 1 else 0


def needs_one_process(pytest_options: list[str]) -> bool:
    pairs = zip(pytest_options, pytest_options[1:])
    return bool(ALONE & set(pytest_options) or ALONE_PAIRS & set(pairs)) or any(map(NO_CAPTURE.match, pytest_options))


def run_suite(name: str, python: Path, pytest_options: list[str]) -> Outcome:
    say(f"\n=== {name} ===")
    RESULTS.mkdir(parents=True, exist_ok=True)
    figures = RESULTS / f"{name}.xml"
    figures.unlink(missing_ok=True)
    number, sharing, threads = workers(name, pytest_options), [], {}
    if number:
        # Whole files, so that what a file's tests share is made once; in their order, as the longest are not the fullest.
        # A process that dies ends the suite, as it does where there is only one.
        sharing = [f"--numprocesses={number}", "--max-worker-restart=0", "--dist=loadfile", "--no-loadscope-reorder"]
        threads = {"OMP_NUM_THREADS": "1"}  # the other cores have work
    command = [
        str(python),
        "-m",
        "pytest",
        "-c",
        str(ROOT / "tests" / "pytest.ini"),
        str(ROOT / "tests" / name),
        "-q",
        "-rs",
        f"--timeout={TEST_LIMIT}",
        f"--junitxml={figures}",
        *sharing,
        *pytest_options,
    ]
    outcome, begin = Outcome(name), time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(PYTHONIOENCODING="utf-8", **threads), stdin=subprocess.DEVNULL
    )
    try:
        code = process.wait(SUITE_LIMIT)
    except subprocess.TimeoutExpired:
        code, outcome.problem = None, f"still running after {SUITE_LIMIT} s, ended"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    outcome.seconds = time.monotonic() - begin
    if figures.is_file():
        count(xml.parse(figures).getroot(), outcome)
    outcome.empty = code == NO_TESTS_COLLECTED
    if code not in (0, NO_TESTS_COLLECTED, None) and not outcome.failed:
        outcome.problem = f"pytest ended with exit code {code}"
    return outcome


def count(root: xml.Element, outcome: Outcome) -> None:
    """Read the counts of a JUnit file. A test whose teardown failed too is one failure."""
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome.failed += 1
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def report(outcomes: list[Outcome]) -> int:
    say()
    for entry in outcomes:
        say(
            f"{entry.suite:8} {entry.passed:5} passed {entry.failed:4} failed {entry.skipped:4} skipped "
            f"{entry.seconds:7.1f} s  {entry.problem}".rstrip()
        )
    passed, failed, skipped = (
        sum(getattr(entry, kind) for entry in outcomes) for kind in ("passed", "failed", "skipped")
    )
    failed += sum(bool(entry.problem) for entry in outcomes)
    if not passed and not failed:
        say(NOTHING_SELECTED)
    say(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return FAILURE if failed or not passed else 0


def report_listing(outcomes: list[Outcome]) -> int:
    """After a list of tests there is nothing to count; only what went wrong is told."""
    if all(entry.empty for entry in outcomes):
        say(NOTHING_SELECTED)
        return FAILURE
    wrong = [entry for entry in outcomes if entry.problem or entry.failed]
    for entry in wrong:
        say(f"{entry.suite}: {entry.problem or 'some files cannot be read'}")
    return FAILURE if wrong else 0


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")
