"""Hostile text ends in bounded time and memory, and raises nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from a3b_engine.errors import ScriptError
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script

SIZE = 1_000_000


def rep(piece, head="", tail=""):
    return head + piece * (SIZE // len(piece)) + tail


HOSTILE = {
    "braces": rep("{"),
    "brackets": rep("["),
    "quotes": rep('"'),
    "quotes in a value": rep('"', '{"a":"'),
    "quotes and commas in a value": rep('",', '{"a":"'),
    "quotes and braces in a value": rep('"}', '{"a":"'),
    "curly quotes": rep("\u201c\u201d", "{\u201ca\u201d\uff1a\u201c"),
    "nested objects": rep('{"a":'),
    "nested lists": rep('[{"a":'),
    "nested, then a list": '{"panels":' + "[" * 900 + "]" * 900 + "}",
    "empty objects": rep("{},", "[", "{}]"),
    "zeros": rep("0,", "["),
    "panels without end": rep('{"shot":"wide"},', '{"panels":['),
    "panels": rep('{"shot":"wide"},', '{"panels":[', '{"shot":"wide"}]}'),
    "single objects with a flaw": rep('{"shot":"wide",}\n'),
    "one long number": rep("9", '{"panels":'),
    "one long shot": rep("close ", '{"panels":[{"shot":"', '"}]}'),
    "many props in a text": rep("a,", '{"panels":[{"shot":"wide","props":"', '"}]}'),
    "many rows": rep('{"line":"a"},', '{"panels":[{"shot":"wide"}],"dialogue":[', '{"line":"b"}]}'),
    "open comments": rep("/*", "{"),
    "line comments": rep("//\n", "{"),
    "backslashes": rep("\\", '{"a":"'),
    "escaped braces": rep('{\\"'),
    "line breaks in a value": rep('\n"', '{"a":"'),
    "thinking": rep("<think></think>"),
    "closing tags": rep("{</think>"),
    "fences": rep("```json\n{\n"),
    "prose markers": rep("Panel 1: "),
    "stars": rep("* "),
    "words": rep("b c, ", "{a:"),
    "numbered keys": "{" + ",".join(f'"panel_{n}":"x"' for n in range(60_000)) + "}",
    "half surrogates": rep("\\ud800", '{"panels":[{"shot":"', '"}]}'),
    "raw half surrogates": rep("\ud800{"),
    "white space": rep(" ", "{"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_takes_less_than_two_seconds(name):
    start = time.process_time()
    result = parse_script(HOSTILE[name])
    spent = time.process_time() - start
    panel_lists(result, on_error="placeholder")
    assert spent < 2.0
    assert len(result.report) <= 210 and all(len(line) < 2000 for line in result.report)


def test_memory_stays_below_200_mb():
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory of a process is read from /proc, which is not there")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from a3b_engine.script.parse import parse_script;"
        "[parse_script(t) for t in ('{' * 10**6, '[' + '{},' * 333000 + '{}]', '[' + '0,' * 500000,"
        " '{\"panels\":[{\"shot\":\"wide\",\"props\":\"' + 'a,' * 500000 + '\"}]}', '{\"panels\":[' + '{\"shot\":\"wide\"},' * 62500)];"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 200


def test_torch_is_not_imported():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import a3b_engine.cli.parse, a3b_engine.script.panels, a3b_engine.script.presets, a3b_engine.script.grammar; print('torch' in sys.modules)"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("value", [None, 5, b"{}", ["a"]])
def test_only_text_is_taken(value):
    with pytest.raises(ScriptError, match="a string is expected"):
        parse_script(value)
