"""run.py's own parts: options, links, stamps, the WebSocket reader, and a server that never outlives us."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.runner import cli, console, environment, guard, hosts, links, server, websocket, workflow

ROOT = Path(__file__).resolve().parents[2]


def test_words_after_the_suites_go_to_pytest():
    options = cli.parse_arguments(["test", "unit", "host", "-k", "seed", "--verbose", "-x"])
    assert options.suites == ["unit", "host"] and options.pytest == ["-k", "seed", "-x"] and options.verbose


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["test", "units"], "unknown suite 'units'"),
        (["demo", "--lang", "fr"], "invalid choice: 'fr'"),
        (["demo", "--colour"], "--colour"),
        ([], "demo | test"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.parse_arguments(arguments)
    assert caught.value.code == console.USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--comfyui", "nowhere"], "nowhere is not a ComfyUI folder"),
        (["--model", "nowhere"], "no config.json"),
        (["--python", sys.executable], "--python belongs to --comfyui"),
        (["--gpu"], "--gpu belongs to --comfyui"),
        (["--port", "70000"], "between 1 and 65535"),
    ],
)
def test_demo_errors_are_one_line(arguments, words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "demo", *arguments],
        capture_output=True,
        timeout=60,
        encoding="utf-8",
        env=console.clean_environment(LC_ALL="C"),
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode == console.USAGE and len(lines) == 1 and words in lines[0], done.stderr


@pytest.mark.parametrize(
    "settings", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "gbk:strict"}]
)
def test_output_is_utf8_everywhere(settings):
    code = "from tools.runner.console import *; use_utf8_output(); say('\\u6f2b\\u753b \\U0001f916')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        env={**console.clean_environment(), **settings},
    )
    assert done.stdout.decode("utf-8").strip() == "\u6f2b\u753b \U0001f916"


def test_standard_library_only():
    """run.py must start before anything is installed."""
    names = [path.stem for path in (ROOT / "tools" / "runner").glob("*.py")]
    code = (
        "import sys; before = set(sys.modules)\n"
        + "".join(f"import tools.runner.{name}\n" for name in names if name != "__init__")
        + "names = {name.split('.')[0] for name in set(sys.modules) - before} - {'tools'}\n"
        "print(sorted(name for name in names if name not in sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + code],
        capture_output=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_links_are_replaced_and_targets_are_kept(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name, encoding="utf-8")
    link = tmp_path / "place" / "link"
    for name in ("one", "one", "two"):
        links.link_folder(tmp_path / name, link, copy_allowed=False)
        assert (link / "file").read_text(encoding="utf-8") == name
    assert (tmp_path / "one" / "file").exists()


def test_copy_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("not allowed")

    monkeypatch.setattr(os, "symlink", refuse)
    (tmp_path / "pack" / ".git").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("", encoding="utf-8")
    if os.name != "nt":  # there a junction takes the symlink's place
        with pytest.raises(console.RunnerError, match="not allowed"):
            links.link_folder(tmp_path / "pack", tmp_path / "no", copy_allowed=False)
    links.link_folder(tmp_path / "pack", tmp_path / "copy", copy_allowed=True)
    assert (tmp_path / "copy" / "__init__.py").exists()


def test_requirements_are_installed_once_per_content(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(environment, "run_logged", lambda command, log, **_options: calls.append(command))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    base, top = tmp_path / "base.txt", tmp_path / "top.txt"
    base.write_text("numpy\n", encoding="utf-8")
    top.write_text("# words\n-r base.txt\npytest\n", encoding="utf-8")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    for expected in (1, 1):
        environment.ensure_requirements(python, "test", [top], why="things")
        assert len(calls) == expected
    base.write_text("numpy>=2\n", encoding="utf-8")
    environment.ensure_requirements(python, "test", [top], why="things")
    assert len(calls) == 2


def test_failing_commands_say_what_and_where(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(console.RunnerError, match="making tea failed .exit code 3.") as caught:
        console.run_logged([sys.executable, "-c", "print('no kettle'); raise SystemExit(3)"], log, what="making tea")
    assert "no kettle" in caught.value.details and caught.value.log == log


def serve_bytes(payload):
    """A one-connection server: answers the handshake, then sends `payload` in small pieces."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener, listener.accept()[0] as peer:
            while b"\r\n\r\n" not in peer.recv(4096):
                pass
            peer.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            for start in range(0, len(payload), 50):
                peer.sendall(payload[start : start + 50])
            peer.recv(4096)

    threading.Thread(target=answer, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def frame(opcode, payload, final=True):
    length = len(payload)
    head = bytes([(0x80 if final else 0) | opcode])
    if length < 126:
        return head + bytes([length]) + payload
    if length < 65536:
        return head + bytes([126]) + length.to_bytes(2, "big") + payload
    return head + bytes([127]) + length.to_bytes(8, "big") + payload


def test_websocket_messages():
    small, large = {"type": "status"}, {"text": "x" * 300, "more": "y" * 70000}
    text = json.dumps(small).encode()
    payload = (
        frame(1, text)
        + frame(9, b"ping")
        + frame(1, text[:5], final=False)
        + frame(0, text[5:])
        + frame(2, b"\0\0\0\3picture")
        + frame(1, json.dumps(large).encode())
        + frame(8, b"")
    )
    with websocket.WebSocket(serve_bytes(payload), "/ws") as events:
        assert [events.receive(5) for _ in range(4)] == [small, small, b"\0\0\0\3picture", large]
        with pytest.raises(ConnectionError):
            events.receive(5)


def test_websocket_waits_no_longer_than_asked():
    with websocket.WebSocket(serve_bytes(b""), "/ws") as events:
        begin = time.monotonic()
        assert events.receive(0.2) is None
        assert 0.15 < time.monotonic() - begin < 2


def test_workflow_nodes_are_found_by_class():
    flow = workflow.Workflow({"7": {"class_type": "A", "inputs": {"x": 1}}, "8": {"class_type": "B", "inputs": {}}})
    changed = flow.copy().set("A", x=2)
    assert changed.graph["7"]["inputs"] == {"x": 2} and flow.inputs("A") == {"x": 1}
    with pytest.raises(console.RunnerError, match="no input 'y'"):
        flow.set("A", y=1)
    with pytest.raises(console.RunnerError, match="0 nodes of class C"):
        flow.node("C")


def test_python_of_a_comfyui(tmp_path):
    assert hosts.find_python(tmp_path / "ComfyUI") is None
    for place in ("python_embeded/python.exe", "ComfyUI/.venv/bin/python", "ComfyUI/venv/Scripts/python.exe"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("", encoding="utf-8")
        assert hosts.find_python(tmp_path / "ComfyUI") == tmp_path / place


def test_current_comfyui_named_wrongly_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    with pytest.raises(console.RunnerError, match="not a ComfyUI folder"):
        hosts.current_host()


def test_unusable_comfyui_at_home_is_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert hosts.current_host() is None and capsys.readouterr().out == ""
    (tmp_path / "ComfyUI" / "comfy").mkdir(parents=True)
    (tmp_path / "ComfyUI" / "main.py").write_text("", encoding="utf-8")
    assert hosts.current_host() is None
    assert "Passing over" in capsys.readouterr().out


FAKE_COMFY = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "stdin": sys.stdin.read()}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake_host(tmp_path):
    folder = tmp_path / "host"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text(FAKE_COMFY, encoding="utf-8")
    (folder / "comfy" / "cli_args.py").write_text('parser.add_argument("--user-directory")', encoding="utf-8")
    return hosts.Host("fake", folder, Path(sys.executable))


def is_running(pid):
    """Whether that process exists and is no zombie (POSIX)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
def test_server_starts_and_stops(fake_host, tmp_path):
    with server.ComfyServer(fake_host, tmp_path / "work") as running:
        facts = running.client.get("/system_stats")
        assert "--cpu" in facts["argv"] and "--user-directory" in facts["argv"]
        assert "--database-url" not in facts["argv"], "a flag this ComfyUI does not know"
        assert facts["argv"][facts["argv"].index("--listen") + 1] == "127.0.0.1"
        paths = json.loads((tmp_path / "work" / "extra_model_paths.yaml").read_text(encoding="ascii"))
        assert (Path(paths["a3b"]["custom_nodes"]) / "a3b-comic-script" / "pyproject.toml").is_file()
    assert not is_running(facts["pid"])


def test_server_that_ends_at_once(fake_host, tmp_path):
    (fake_host.folder / "main.py").write_text("raise SystemExit('no engine on board')", encoding="utf-8")
    with pytest.raises(console.RunnerError, match="ended while starting") as caught:
        server.ComfyServer(fake_host, tmp_path / "work").start()
    assert "no engine on board" in caught.value.details


def test_busy_port_is_named(fake_host, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(console.RunnerError, match=f"port {port} .* in use"):
            server.ComfyServer(fake_host, tmp_path / "work", port=port).start()


@needs_proc
def test_server_dies_with_a_killed_parent(fake_host, tmp_path):
    """Even kill -9 of run.py leaves no ComfyUI behind."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\n"
        "from tools.runner.hosts import Host\nfrom tools.runner.server import ComfyServer\n"
        "s = ComfyServer(Host('fake', Path(sys.argv[2]), Path(sys.executable)), Path(sys.argv[3])).start()\n"
        "print(s.client.get('/system_stats')['pid'], flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT), str(fake_host.folder), str(tmp_path / "work")],
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_guard_is_a_script_of_its_own():
    assert Path(guard.__file__) == server.GUARD
