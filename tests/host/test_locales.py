"""A ComfyUI whose console cannot show what the model writes."""

from comfy_server import NODES, finished, make_server, shown_text, text_workflow
from tools.runner.client import run_error

ROBOT = "\U0001f916"


def test_emoji_on_a_gbk_console(host, tmp_path):
    """U17, U20: the whole way under LC_ALL=C with a strict GBK console; the answer is forced to hold an emoji."""
    environment = {"PYTHONIOENCODING": "gbk:strict", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with make_server(host, tmp_path, **environment) as server:
        assert all(server.client.object_info(name) for name in NODES)
        workflow = text_workflow(server, regex=ROBOT + "{3}", text=f"Say {ROBOT}", seed=5)
        entry = finished(server, workflow)
        assert run_error(entry) == ""
        assert shown_text(entry, workflow, "A3BGenerate") == ROBOT * 3
        assert "UnicodeEncodeError" not in server.log.read_text(encoding="gbk", errors="replace")
