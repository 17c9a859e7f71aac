"""How `run.py test` shares suites out, counts them and closes."""

import os
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tools.runner import console, suites


@pytest.mark.parametrize(
    "suite, options, cores, expected",
    [
        ("unit", [], 1, 0),
        ("unit", [], 2, 2),
        ("parity", ["-k", "seed"], 3, 3),
        ("unit", [], 64, 4),
        ("unit", ["-x", "--pdb"], 64, 0),
        ("unit", ["-s"], 64, 0),
        *[("unit", [cluster], 64, 0) for cluster in ("-sv", "-vs", "-xs", "-vvxs")],
        *[("unit", [value], 64, 4) for value in ("-rs", "-rxs", "-kseed", "-mslow", "-v", "-x", "--lf")],
        ("unit", ["--capture", "no"], 64, 0),
        ("unit", ["-x", "-p", "no:xdist"], 64, 0),
        ("unit", ["-pno:xdist"], 64, 0),
        ("unit", ["-p", "no:randomly", "-k", "no:xdist"], 64, 4),
        ("parity", ["--collect-only", "-k", "seed"], 64, 0),
        ("unit", ["--co"], 64, 0),
        ("fuzz", [], 64, 0),
        ("host", [], 64, 0),
        ("browser", [], 64, 0),
        ("gpu", [], 64, 0),
    ],
)
def test_as_many_processes_as_cores_share_a_suite_out(suite, options, cores, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert suites.workers(suite, options) == expected
    monkeypatch.delattr(os, "sched_getaffinity")  # Windows and macOS
    assert suites.workers(suite, options) == expected


SAMPLES = {
    "good": "import os\n\n\ndef test_one():\n    pass\n\n\ndef test_two():\n    assert os.environ['OMP_NUM_THREADS'] == '1'\n",
    "skipped": "import pytest\n\npytest.importorskip('no_such_module')\n",
    "wrong": "import pytest\n\n\n@pytest.mark.skip(reason='why not')\ndef test_one():\n    pass\n\n\ndef test_two():\n    assert 0\n",
    "unreadable": "import no_such_module\n",
    "dies": "import os\n\n\ndef test_one():\n    os._exit(0)\n",
}


@pytest.fixture
def sample_suite(tmp_path, monkeypatch):
    """Make a unit suite of those SAMPLES, for `run_suite` on this Python; all cores there are take part."""
    for plugin in ("xdist", "pytest_timeout"):
        pytest.importorskip(plugin)
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def sample_suite(*names):
        for name in names:
            (folder / f"test_{name}.py").write_text(SAMPLES[name], encoding="utf-8")

    return sample_suite


@pytest.mark.parametrize(
    "files, passed, failed, skipped",
    [(("good", "skipped"), 2, 0, 1), (("good", "skipped", "wrong"), 2, 1, 2), (("dies", "good"), None, 1, 0)],
)
def test_a_shared_suite_is_counted_and_a_process_that_dies_fails_it(files, passed, failed, skipped, sample_suite):
    sample_suite(*files)
    outcome = suites.run_suite("unit", Path(sys.executable), [])
    assert (outcome.failed, outcome.skipped, outcome.problem) == (failed, skipped, "")
    assert passed is None or outcome.passed == passed  # how far the others came when one died is not settled
    assert suites.report([outcome]) == (console.FAILURE if failed else 0)


def test_a_suite_runs_without_the_plugin_that_shares_it_out(sample_suite, monkeypatch):
    sample_suite("good")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which that sample wants to see
    outcome = suites.run_suite("unit", Path(sys.executable), ["-p", "no:xdist"])
    assert (outcome.passed, outcome.failed, outcome.problem) == (2, 0, "")


@pytest.mark.parametrize(
    "files, more, code, told",
    [
        (("good",), [], 0, ["test_good.py::test_one", "test_good.py::test_two"]),
        (("good",), ["-k", "no_such_test"], console.FAILURE, [suites.NOTHING_SELECTED]),
        (("good", "unreadable"), [], console.FAILURE, ["test_unreadable.py", "some files cannot be read"]),
    ],
)
def test_a_list_of_tests_is_no_failed_run(files, more, code, told, sample_suite, monkeypatch, capfd):
    sample_suite(*files)
    for name in ("ensure_venv", "ensure_requirements"):
        monkeypatch.setattr(suites, name, lambda *_, **__: Path(sys.executable))
    assert suites.run_tests(["unit"], ["--co", *more]) == code
    out = capfd.readouterr().out
    assert all(words in out for words in told) and " passed" not in out
    assert (suites.NOTHING_SELECTED in out) == (suites.NOTHING_SELECTED in told)


def test_counts_of_a_suite():
    outcome = suites.Outcome("unit")
    suites.count(
        xml.fromstring(
            "<testsuites><testsuite><testcase/><testcase><skipped/></testcase><testcase><failure/><error/></testcase>"
            "<testcase><error/></testcase></testsuite></testsuites>"
        ),
        outcome,
    )
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)


@pytest.mark.parametrize(
    "outcomes, line, code",
    [
        ([suites.Outcome("unit", passed=3), suites.Outcome("gpu", skipped=1)], "3 passed, 0 failed, 1 skipped", 0),
        ([suites.Outcome("unit", passed=3, failed=1)], "3 passed, 1 failed", 1),
        ([suites.Outcome("unit", passed=3, problem="pytest ended with exit code 3")], "3 passed, 1 failed", 1),
        ([suites.Outcome("unit")], "0 passed, 0 failed", 1),
    ],
)
def test_closing_line(outcomes, line, code, capsys):
    assert suites.report(outcomes) == code
    assert capsys.readouterr().out.splitlines()[-1] == line
