"""A ComfyUI whose console cannot show what the model writes."""

import re

import pytest
from comfy_server import NODES, finished, make_server, shown_text, text_workflow
from tools.runner.client import run_error
from tools.runner.paths import PACK_NAME

ROBOT = "\U0001f916"
ERROR = "UnicodeEncodeError"
STARTED = "Starting server"
# what Python's logging prints of a line that the console refused
REFUSED_LINE = re.compile(r"^--- Logging error ---$.*?^Arguments: .*?$", re.MULTILINE | re.DOTALL)


def concerning_the_pack(log):
    """The log from the server's start on, and of what stands before only that which names this pack: while it starts,
    ComfyUI logs the folders of all the packs that it has, and passes over."""
    before, started, after = log.partition(STARTED)
    if not started:
        return log
    pieces = REFUSED_LINE.findall(before) + REFUSED_LINE.sub("", before).splitlines()
    return "\n".join([piece for piece in pieces if PACK_NAME in piece] + [after])


def test_emoji_on_a_gbk_console(host, tmp_path):
    """U17, U20: the whole way under LC_ALL=C with a strict GBK console; the answer is forced to hold an emoji."""
    environment = {"PYTHONIOENCODING": "gbk:strict", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with make_server(host, tmp_path, **environment) as server:
        assert all(server.client.object_info(name) for name in NODES)
        workflow = text_workflow(server, regex=ROBOT + "{3}", text=f"Say {ROBOT}", seed=5)
        entry = finished(server, workflow)
        assert run_error(entry) == ""
        assert shown_text(entry, workflow, "A3BGenerate") == ROBOT * 3
        log = server.log.read_text(encoding="gbk", errors="replace")
        assert STARTED in log and ERROR not in concerning_the_pack(log)


def refused(file, message):
    return (
        f"--- Logging error ---\nTraceback (most recent call last):\n{ERROR}: 'gbk' codec can't encode character\n"
        f'Call stack:\n  File "{file}", line 1, in load\nMessage: {message!r}\nArguments: ()\n'
    )


@pytest.mark.parametrize(
    "log, concerned",
    [
        (refused("/ComfyUI/nodes.py", "Skipping \udce6") + f"0.1 seconds: {PACK_NAME}\n{STARTED}\n", False),
        (f"0.1 seconds: {PACK_NAME}\n" + refused("/ComfyUI/nodes.py", "Skipping \udce6") + f"{STARTED}\n", False),
        (refused(f"/custom_nodes/{PACK_NAME}/nodes/load.py", "Found \udce6") + f"{STARTED}\n", True),
        (f"Cannot import {PACK_NAME}: {ERROR}\n{STARTED}\n", True),
        (f"{STARTED}\n" + refused("/ComfyUI/execution.py", ROBOT), True),
        (refused("/ComfyUI/nodes.py", "Skipping \udce6"), True),  # a server that never started
    ],
)
def test_only_what_concerns_the_pack_counts(log, concerned):
    assert (ERROR in concerning_the_pack(log)) == concerned
