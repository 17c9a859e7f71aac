"""`python -m a3b_engine COMMAND`: the engine without ComfyUI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from .cli.console import READER_GONE, ReaderGone, fail, lost, say, use_utf8
from .errors import A3BError

COMMANDS = ("generate", "parse", "bench", "quantize")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 an answer with a form was cut, 2 bad input, 141 the reader of the output went)."""
    use_utf8()
    parser = argparse.ArgumentParser(prog="python -m a3b_engine", description="Qwen3.5/3.6 mixture-of-experts engine and comic script tools.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: import_module(f".cli.{name}", __package__) for name in COMMANDS}  # light: a command imports when it runs
    for module in modules.values():
        module.add_parser(subparsers)
    try:
        options = _parsed(parser, arguments)
        return modules[options.command].run(options)
    except ReaderGone:
        return READER_GONE
    except (A3BError, OSError) as error:
        return fail(error)
    except ModuleNotFoundError as error:
        return fail(f"this Python lacks the package {error.name!r}: use ComfyUI's Python, or install requirements.txt")
    except KeyboardInterrupt:
        return fail("interrupted")


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        return parser.parse_args(arguments)
    except SystemExit:
        say(end="")  # a help text that nobody reads: said here, not by Python at its end
        raise
    except OSError as error:  # the same from Python 3.10's argparse
        lost(sys.stdout, error)


if __name__ == "__main__":
    sys.exit(main())
