"""The model's place in ComfyUI's memory manager, checked with the manager of every host (see contract_residency.py)."""

import json
import os
import subprocess

import pytest
from contract_residency import CHECKS
from contract_residency import __file__ as SCRIPT


@pytest.fixture(scope="session")
def reports(host):
    """check name -> its report; all checks of a host run in one process of its own interpreter."""
    paths = [str(host.standins)] if host.standins else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1"}
    command = [str(host.python), SCRIPT, str(host.folder)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert done.returncode == 0, done.stderr[-4000:]
    return {report["check"]: report for report in map(json.loads, lines)}


@pytest.mark.parametrize("name", list(CHECKS))
def test_memory_contract(reports, name):
    assert reports[name]["ok"], reports[name].get("error")
