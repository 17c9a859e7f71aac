"""`python -m a3b_engine parse`: inputs without an end, and none at all."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from a3b_engine.__main__ import main
from a3b_engine.cli import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '{"panels":[{"shot":"wide","action":"runs"}]}'
CAP = 3_000_000


class Source(io.RawIOBase):
    """Spaces after `text`, without an end. Taking twice the cap of it fails the test instead of filling the RAM."""

    def __init__(self, text=b""):
        self.text, self.given = text, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.given += len(buffer)
        assert self.given < 2 * CAP, "read without a limit"
        piece, self.text = self.text[: len(buffer)], self.text[len(buffer) :]
        buffer[:] = piece.ljust(len(buffer))
        return len(buffer)


class Waiting(io.RawIOBase):
    """A pipe that does not wait for its writer."""

    def readable(self):
        return True

    def readinto(self, buffer):
        return None


def of_stream(monkeypatch, raw):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))


def told(capsys, *arguments):
    """(exit code, the only line of standard error) of a command without output."""
    code = main(["parse", *arguments])
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1, (out, err)
    return code, err


def test_an_endless_input_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(parse, "MOST_BYTES", CAP, raising=False)
    of_stream(monkeypatch, Source(SCRIPT.encode()))
    code, line = told(capsys)
    assert code == 2 and "standard input: more than 3 MB" in line


@pytest.mark.parametrize("excess", [0, 1])
def test_a_file_has_a_largest_size(monkeypatch, capsys, tmp_path, excess):
    monkeypatch.setattr(parse, "MOST_BYTES", CAP, raising=False)
    path = tmp_path / "answer.txt"
    path.write_bytes(SCRIPT.encode().ljust(CAP + excess))
    if excess:
        code, line = told(capsys, str(path))
        assert code == 2 and f"{path}: more than 3 MB" in line
    else:
        assert main(["parse", str(path)]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "ok"


def test_the_largest_size_is_far_above_any_answer():
    assert parse.MOST_BYTES == 256_000_000


def test_a_closed_standard_input_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # services, cron, Windows' pythonw
    code, line = told(capsys)
    assert code == 2 and "standard input is closed" in line


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_closed_standard_input_of_a_process():
    done = subprocess.run(["sh", "-c", 'exec "$0" -m a3b_engine parse <&-', sys.executable], cwd=ROOT, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"standard input is closed" in done.stderr


def test_a_pipe_that_does_not_wait_is_no_empty_text(monkeypatch, capsys):
    of_stream(monkeypatch, Waiting())
    code, line = told(capsys)
    assert code == 2 and "temporarily unavailable" in line


def test_a_standard_input_of_text_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCRIPT))  # as embedding programs put one there
    assert main(["parse"]) == 0 and json.loads(capsys.readouterr().out)["status"] == "ok"
