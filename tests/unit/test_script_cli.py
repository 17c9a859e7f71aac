"""`python -m a3b_engine parse`: one JSON object on stdout, one line on stderr, UTF-8 whatever the console."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '{"title":"T","panels":[{"shot":"wide","action":"\U0001f916 runs"}],"dialogue":[{"panel":1,"speaker":"\u6797","line":"\u597d"}]}'
CUT = '{"panels":[{"shot":"wide","action":"runs"},{"shot":"close","action":"her ey'


def parse(*arguments, text="", data=None, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "a3b_engine", "parse", *arguments],
        input=text.encode("utf-8") if data is None else data,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")


@pytest.mark.parametrize("environment", [{}, {"PYTHONIOENCODING": "gbk:strict"}, {"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_u17_u20_output_is_utf8(environment):
    code, out, err = parse(text=SCRIPT, **environment)
    value = json.loads(out)
    assert (code, err, value["status"], value["title"]) == (0, "", "ok", "T")
    assert value["panels"][0]["action"] == "\U0001f916 runs" and value["dialogue"][0]["speaker"] == "\u6797"
    assert {"status", "panels", "dialogue", "report"} <= set(value)


def test_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "\u7b54 answer.txt"
    path.write_text(SCRIPT, encoding="utf-8-sig")
    code, out, _ = parse(str(path), "--json")
    assert code == 0 and out.count("\n") == 1 and json.loads(out)["status"] == "ok"


def test_bytes_that_are_not_utf8_are_reported():
    code, out, _ = parse("-", data=b'{"panels":[{"shot":"wide","action":"caf\xe9"}]}')
    value = json.loads(out)
    assert code == 0 and value["panels"][0]["action"] == "caf\ufffd" and "not UTF-8" in value["report"][0]


@pytest.mark.parametrize("arguments", [("missing.txt",), (".",), ("--panels", "0"), ("--on-error", "maybe")])
def test_bad_input_is_exit_code_2(arguments):
    code, out, err = parse(*arguments, text=SCRIPT)
    assert code == 2 and out == "" and "Traceback" not in err and err


def test_j36_stop_says_why():
    code, out, err = parse("--on-error", "stop", text="I'm sorry, I can't continue this scene.")
    assert code == 2 and out == "" and err.count("\n") == 1 and "I can't continue this scene" in err


@pytest.mark.parametrize("choice, count", [("keep", 0), ("placeholder", 2)])
def test_failed_without_stop_prints_json(choice, count):
    code, out, _ = parse("--on-error", choice, "--panels", "2", text="I'm sorry, I can't continue this scene.")
    value = json.loads(out)
    assert code == 0 and value["status"] == "failed" and len(value["panels"]) == count
    assert "sorry" in value["cause"] and "sorry" not in json.dumps(value["panels"])


@pytest.mark.parametrize("choice, count", [("stop", 2), ("keep", 1), ("placeholder", 2)])
def test_j13_truncated(choice, count):
    code, out, _ = parse("--on-error", choice, text=CUT)
    value = json.loads(out)
    assert code == 0 and value["status"] == "truncated" and len(value["panels"]) == count


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 100, bytes(range(256)) * 40, b"\xff\xfe{", b"\xff\xfe" + SCRIPT.encode("utf-16-le"), b"\xef\xbb\xbf" + SCRIPT.encode(), b"{" * 5000, b"\xed\xa0\xbd"],
)
@pytest.mark.parametrize("choice", ["stop", "placeholder"])
def test_any_bytes_give_json_or_one_line(data, choice):
    code, out, err = parse("-", "--on-error", choice, data=data)
    assert code in (0, 2) and "Traceback" not in err
    assert json.loads(out)["panels"] if code == 0 else out == "" and err.count("\n") == 1


def test_every_form_that_is_read_is_printed_under_the_same_names():
    table = "| Panel | Shot | Action |\n|---|---|---|\n| 1 | wide | a door |\n"
    outline = "panels:\n- index: 1\n  shot: wide\n  action: a door\n"
    outputs = [json.loads(parse(text=text)[1]) for text in (table, outline, '{"panels":[{"index":1,"shot":"wide","action":"a door"}]}')]
    assert outputs[0]["panels"] == outputs[1]["panels"] == outputs[2]["panels"]
    assert [output["status"] for output in outputs] == ["repaired", "repaired", "ok"]
