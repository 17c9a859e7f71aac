"""The command line of run.py."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from pathlib import Path

from .console import INTERRUPTED, RunnerError, say, use_utf8_output
from .suites import SUITES


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Try the pack in a real ComfyUI, or test it. "
        "Everything it needs is kept in .a3b/ beside this file.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | test")

    demo = commands.add_parser("demo", help="run the comic workflow on the bundled pictures and stories")
    demo.add_argument("--serve", action="store_true", help="leave ComfyUI running for the browser")
    demo.add_argument("--comfyui", type=Path, metavar="DIR", help="use this ComfyUI and its Python; only this pack's nodes are loaded")
    demo.add_argument("--python", type=Path, metavar="FILE", help="the Python that runs --comfyui")
    demo.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint folder (default: the bundled demonstration model)"
    )
    demo.add_argument(
        "--lang", choices=("both", "en", "zh"), default="both", help="language of the story and the answer (default: one after the other)"
    )
    demo.add_argument("--gpu", action="store_true", help="let ComfyUI use the graphics card (with --comfyui)")
    demo.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1 (default: 8188 with --serve, else any free one)"
    )
    demo.add_argument("--verbose", action="store_true", help="show what pip and the other steps print")

    test = commands.add_parser(
        "test",
        usage="run.py test [SUITE ...] [--verbose] [PYTEST OPTION ...]",
        help="run the test suites",
        epilog="For example: run.py test unit host -k seed -x. Unit and parity tests are shared out among up to "
        "four processes, one a core; -n 0 runs them one after the other.",
    )
    test.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of: {', '.join(SUITES)} (default: all)")
    test.add_argument("--verbose", action="store_true", help="show what pip and the other steps print")
    return parser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Options of either command. What follows the suites of `test` is handed to pytest as it stands."""
    parser, for_pytest = build_parser(), []
    if arguments[:1] == ["test"] and not {"-h", "--help"} & set(arguments):
        suites = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[1:]))
        rest = arguments[1 + len(suites) :]
        for_pytest = [word for word in rest if word != "--verbose"]
        arguments = ["test", *suites, *(["--verbose"] if "--verbose" in rest else [])]
    options = parser.parse_args(arguments)
    options.pytest = for_pytest
    unknown = [name for name in getattr(options, "suites", []) if name not in SUITES]
    if unknown:
        parser.error(f"unknown suite {unknown[0]!r}: choose among {', '.join(SUITES)}")
    return options


def stop_on_signal(_number, _frame):
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    use_utf8_output()
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, stop_on_signal)  # so that a plain `kill` cleans up like Ctrl-C
    try:
        if options.command == "demo":
            from .demo import run_demo

            return run_demo(options)
        from .suites import run_tests

        return run_tests(options.suites, options.pytest, verbose=options.verbose)
    except KeyboardInterrupt:
        say("\nStopped.")
        return INTERRUPTED
    except RunnerError as error:
        if error.details:
            print(error.details, file=sys.stderr)
        print(f"run.py: {error}", file=sys.stderr)
        if error.log:
            print(f"The whole log: {error.log}", file=sys.stderr)
        return error.code
