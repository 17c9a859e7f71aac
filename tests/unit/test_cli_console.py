"""Output of the commands when nobody reads it, or when it cannot be written."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from a3b_engine.__main__ import main
from a3b_engine.cli import console
from a3b_engine.cli.console import READER_GONE, ReaderGone

ROOT = Path(__file__).resolve().parents[2]
PANEL = '{"shot":"wide","action":"a door opens, and behind it stands a very old lamp"}'
SCRIPT = '{"title":"T","panels":[' + ",".join([PANEL] * 60) + "]}"


class Broken(io.StringIO):
    """A stream that fails at every write, as a closed pipe or a full disk does."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def write(self, text):
        raise OSError(self.code, os.strerror(self.code))


def ends_without_a_reader(*arguments, text=None, stderr=subprocess.PIPE):
    """(exit code, standard error) of a command whose reader has gone before the first word, as behind `| head -0`."""
    # The command waits for its text, or reads a model, so that the reader is gone by then.
    command = subprocess.Popen(
        [sys.executable, "-m", "a3b_engine", *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
    )  # fmt: skip
    command.stdout.close()
    if text is not None:
        command.stdin.write(text.encode("utf-8"))
    command.stdin.close()
    told = command.stderr.read().decode("utf-8") if command.stderr else ""
    if command.stderr:
        command.stderr.close()
    return command.wait(120), told


@pytest.mark.parametrize("text", [SCRIPT, '{"panels":[{"action":"runs"}]}'])  # more and less than a buffer
def test_parse_ends_quietly_when_its_reader_goes(text):
    assert ends_without_a_reader("parse", text=text) == (READER_GONE, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_generate_ends_quietly_when_its_reader_goes(random_checkpoint, options):
    command = ["generate", "--model", str(random_checkpoint), "--device", "cpu", "--prompt", "x", "--max-new-tokens", "9", *options]
    assert ends_without_a_reader(*command) == (READER_GONE, "")


def test_a_help_text_nobody_reads_is_no_error():
    code, told = ends_without_a_reader("generate", "--help")
    assert code in (0, READER_GONE) and told == ""  # argparse itself says nothing of a text longer than a buffer


def test_an_error_nobody_reads_keeps_its_exit_code():
    assert ends_without_a_reader("parse", "no such file", stderr=subprocess.STDOUT) == (2, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_2():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "a3b_engine", "parse"], cwd=ROOT, input=SCRIPT.encode(), stdout=full, stderr=subprocess.PIPE)
    told = done.stderr.decode("utf-8")
    assert done.returncode == 2 and told.count("\n") == 1 and "No space left" in told


@pytest.mark.parametrize("code, kind", [(errno.EPIPE, ReaderGone), (errno.EINVAL, ReaderGone), (errno.ENOSPC, OSError)])
def test_what_a_failed_write_means(monkeypatch, code, kind):
    """Windows says EINVAL where the reader of a pipe has gone."""
    monkeypatch.setattr(sys, "stdout", Broken(code))
    with pytest.raises(kind):
        console.say("a word")
    monkeypatch.setattr(sys, "stderr", Broken(code))
    console.note("progress that nobody can read is given up")
    assert console.fail("a word") == console.BAD_INPUT


BENCH = ["--context", "8", "--prompt", "8", "--new", "2", "--repeat", "1", "--no-image", "--no-grammar", "--no-profile", "--device", "cpu"]


def of_quantize(model, place):
    return ["quantize", str(model), str(place / "new"), "--to", "int4", "--device", "cpu", "--json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full")
def test_work_goes_on_where_progress_cannot_be_written(random_checkpoint, tmp_path):
    command = [sys.executable, "-m", "a3b_engine", *of_quantize(random_checkpoint, tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0 and json.loads(done.stdout)


def test_figures_are_measured_where_progress_cannot_be_written(monkeypatch, capsys, random_checkpoint):
    monkeypatch.setattr(sys, "stderr", Broken(errno.ENOSPC))
    assert main(["bench", "--model", str(random_checkpoint), *BENCH, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_without_a_console_may_work(monkeypatch, random_checkpoint, tmp_path, stream):
    monkeypatch.setattr(sys, stream, None)
    console.say("a word")
    console.note("a word")
    assert main(of_quantize(random_checkpoint, tmp_path)) == 0 and (tmp_path / "new" / "config.json").is_file()
