"""Hostile text ends in bounded time and memory, and raises nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_answers import HOSTILE

from a3b_engine.errors import ScriptError
from a3b_engine.script.parse import parse_script

ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEGABYTES = 2.0, 200
# Parses the texts on standard input in turn; prints a line for each, with the largest size the process had so far, in MB.
MEASURE = """
import ctypes, json, sys, time
sys.path[:0] = sys.argv[1:]
from script_checks import check_form, check_lists
from a3b_engine.script.parse import parse_script

def peak():
    if sys.platform == "win32":
        class Counters(ctypes.Structure):
            _fields_ = [("cb", ctypes.c_ulong), ("faults", ctypes.c_ulong), ("peak", ctypes.c_size_t)] + [(n, ctypes.c_size_t) for n in "abcdefg"]
        counters = Counters(cb=ctypes.sizeof(Counters))
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        query = kernel.K32GetProcessMemoryInfo
        query.argtypes = [ctypes.c_void_p, ctypes.POINTER(Counters), ctypes.c_ulong]
        assert query(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
        return counters.peak / 2**20
    try:  # ru_maxrss of Linux counts the parent before the start, too
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)

while size := sys.stdin.buffer.readline():
    text = sys.stdin.buffer.read(int(size)).decode("utf-8", "surrogatepass")
    start = time.process_time()
    result = parse_script(text)
    seconds = time.process_time() - start
    check_form(result)
    check_lists(result)
    longest = max(map(len, [result.cause, *result.report]))
    print(json.dumps({"seconds": seconds, "peak": peak(), "lines": len(result.report), "longest": longest}), flush=True)
"""


@pytest.fixture(scope="module")
def measured():
    """name -> what was measured while its text was parsed."""
    texts = [text.encode("utf-8", "surrogatepass") for text in HOSTILE.values()]
    given = b"".join(b"%d\n%s" % (len(text), text) for text in texts)
    command = [sys.executable, "-c", MEASURE, str(ROOT / "tests"), str(ROOT)]
    done = subprocess.run(command, input=given, capture_output=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = list(HOSTILE)
    assert len(lines) == len(names), f"{names[len(lines)]}: {done.stderr.decode(errors='replace')[-2000:]}"
    return dict(zip(names, lines))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_takes_less_than_two_seconds_and_200_mb(measured, name):
    assert measured[name]["seconds"] < SECONDS
    assert 10 < measured[name]["peak"] < MEGABYTES
    assert measured[name]["lines"] <= 210 and measured[name]["longest"] < 2000


@pytest.mark.parametrize("name", ["quotes in a value", "panels without end", "yaml deep", "missing open"])
def test_the_command_line_takes_less_than_two_seconds(name, tmp_path):
    path = tmp_path / "answer.txt"
    path.write_bytes(HOSTILE[name].encode("utf-8", "surrogatepass"))
    command = [sys.executable, "-m", "a3b_engine", "parse", str(path), "--on-error", "placeholder", "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=60)
    spent = time.perf_counter() - start
    assert done.returncode == 0 and json.loads(done.stdout)["panels"] and done.stderr == b""
    assert spent < 2 * SECONDS  # with the start of Python, beside the other suites' processes


def test_a_text_beyond_the_limit_is_read_up_to_it():
    result = parse_script('{"panels":[{"shot":"wide","action":"a"}]}' + " " * 4_000_000 + "x")
    assert result.status == "truncated" and result.script.panels[0].action == "a"
    assert any("only the first 4000000 are read" in line for line in result.report)


def test_torch_is_not_imported():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import a3b_engine.cli.parse, a3b_engine.script.panels, a3b_engine.script.presets, a3b_engine.script.grammar; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("value", [None, 5, b"{}", ["a"]])
def test_only_text_is_taken(value):
    with pytest.raises(ScriptError, match="a string is expected"):
        parse_script(value)
