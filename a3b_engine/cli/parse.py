"""`parse`: an answer of any model, from a file or standard input, as one JSON object."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import IO

from ..errors import ScriptError
from .console import fail, print_json, use_utf8

MOST_BYTES = 256_000_000  # of an input; the parser reads the first 4 million characters
_PIECE = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "parse",
        help="read a comic script from an answer",
        description="Read a comic script from the text of any model and print it as one JSON object: status (ok, repaired,"
        " truncated, failed), panels, dialogue, report, and the fields of the page.",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="text file, or - for standard input (default)")
    parser.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "keep", "placeholder"),
        help="stop: a text without a script ends with exit code 2 (a script that was cut is printed with status truncated); keep: only panels that are whole;"
        " placeholder: neutral pictures for missing panels (default %(default)s)",
    )
    parser.add_argument("--panels", type=int, metavar="N", help="number of panels the script should have")
    parser.add_argument("--json", action="store_true", help="print JSON without line breaks (the output is always JSON)")


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 2 with one line on stderr for a file that cannot be read or a failed parse with `stop`."""
    from ..script.panels import apply_on_error
    from ..script.parse import parse_script
    from ..script.schema import MAX_PANELS, SCHEMA_VERSION, VERSION_KEY, ComicScript

    use_utf8()
    if options.panels is not None and not 1 <= options.panels <= MAX_PANELS:
        return fail(f"--panels {options.panels}: a number from 1 to {MAX_PANELS} is expected.")
    try:
        text, remarks = _read(options.file)
    except OSError as error:
        return fail(f"{options.file}: {error.strerror or error}. Give a text file, or - for standard input.")
    except ScriptError as error:
        return fail(error)
    result = parse_script(text, expected_panels=options.panels)
    script = result.script or ComicScript()
    if options.on_error == "stop" and result.status == "failed":
        return fail(result.cause)
    if options.on_error == "placeholder" or (options.on_error == "keep" and result.status != "failed"):
        try:
            script = apply_on_error(result, options.on_error)
        except ScriptError as error:
            return fail(str(error))
    page = script.model_dump()
    output = {
        VERSION_KEY: SCHEMA_VERSION,
        "status": result.status,
        "cause": result.cause,
        "panels": page.pop("panels"),
        "dialogue": page.pop("dialogue"),
        **page,
        "partial": list(result.partial),
        "report": remarks + result.report,
    }
    print_json(output, indent=None if options.json else 2)
    return 0


def _read(name: str) -> tuple[str, list[str]]:
    """The text of a file or of standard input, as UTF-8 with or without a byte order mark. Raises OSError, and ScriptError
    for an input without an end or for none at all."""
    if name != "-":
        with open(Path(name), "rb") as stream:
            data = _whole(stream, name)
    elif sys.stdin is None:
        raise ScriptError("standard input is closed, as in services and in programs without a console. Give a text file.")
    else:
        data = _whole(getattr(sys.stdin, "buffer", sys.stdin), "standard input")
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        if data[:2] in (b"\xff\xfe", b"\xfe\xff") and len(data) % 2 == 0:
            return data.decode("utf-16", "replace"), ["info: the text is UTF-16"]
        text = data.decode("utf-8-sig", "replace")
        return text, [f"warning: byte {error.start} is not UTF-8; unreadable bytes are replaced by U+FFFD"]


def _whole(stream: IO, name: str) -> bytearray:
    """All of a stream, read in pieces, as a device or a pipe need not end."""
    data = bytearray()
    while piece := stream.read(_PIECE):
        data += piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        if len(data) > MOST_BYTES:
            raise ScriptError(f"{name}: more than {MOST_BYTES / 1e6:g} MB, far more than any comic script has. Give the text of one answer.")
    if piece is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # a pipe that does not wait: its rest would be lost
    return data
