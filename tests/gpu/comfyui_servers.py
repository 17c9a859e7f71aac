"""Real ComfyUIs on the card for test_comfyui_gpu.py, one process for each set of flags, all started at once: that takes half a minute."""

import json
import os
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "tests" / "host") if str(path) not in sys.path]

from tools.runner.hosts import Host, find_python  # noqa: E402
from tools.runner.paths import DEMO_MODEL, PACK_NAME  # noqa: E402
from tools.runner.server import ComfyServer  # noqa: E402

PACKS = {
    PACK_NAME: ROOT,
    "a3b-test-witness": ROOT / "tests" / "host" / "witness_pack",
    "a3b-test-residency": Path(__file__).resolve().parent / "comfyui_pack",
}
FLAGS = {
    "dynamic": [],  # what current ComfyUI does by itself on NVIDIA
    "classic": ["--disable-dynamic-vram"],
    "lowvram": ["--lowvram"],
    "highvram": ["--highvram"],
    "novram": ["--novram"],
    "reserve": ["--reserve-vram", "20"],
    "not-smart": ["--disable-smart-memory"],
}
DEMO = DEMO_MODEL.name


def comfyui_host():
    """The ComfyUI that A3B_COMFYUI names, run by COMFYUI_PYTHON, its own Python or this one."""
    folder = Path(os.environ["A3B_COMFYUI"]).expanduser().resolve()
    named = os.environ.get("COMFYUI_PYTHON")
    return Host("card", folder, Path(named) if named else find_python(folder) or Path(sys.executable))


def server_for(name, work, gpu=True):
    host = comfyui_host()
    page = work / "page"
    page.mkdir(parents=True, exist_ok=True)
    (page / "index.html").write_text("<!doctype html><title>no front end is needed here</title>", encoding="utf-8")
    passed_on = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONPYCACHEPREFIX") if name in os.environ}
    return ComfyServer(
        host,
        work,
        gpu=gpu,
        packs=PACKS,
        environment=passed_on,
        flags=["--front-end-root", str(page), *FLAGS[name]],
    )


class Servers:
    """All of them, started side by side; what went wrong with one is told when it is asked for."""

    def __init__(self, work, names, gpu=True):
        self._servers = {name: server_for(name, work / name, gpu) for name in names}
        self._problems = {}
        self._threads = {name: threading.Thread(target=self._start, args=(name,)) for name in names}
        for thread in self._threads.values():
            thread.start()

    def _start(self, name):
        try:
            self._servers[name].start(timeout=150)
        except Exception as problem:
            self._problems[name] = problem

    def wait(self):
        """Until every one of them is up, or is not: a process that is starting takes memory of the card."""
        for thread in self._threads.values():
            thread.join()

    def ready(self, name):
        self.wait()
        if name in self._problems:
            raise self._problems[name]
        return self._servers[name]

    def stop(self):
        self.wait()
        for server in self._servers.values():
            server.stop()


def run_check(server, name, rounds, timeout=110):
    """One check of the residency pack in that process; its report."""
    graph = {"1": {"class_type": "A3BTestResidency", "inputs": {"check": name, "rounds": rounds}}}
    entry = server.client.wait(server.client.queue(graph), timeout)
    return json.loads(entry["outputs"]["1"]["text"][0])


def on_card(server):
    """What ComfyUI says of its device: bytes in use by tensors of this process."""
    device = server.client.get("/system_stats")["devices"][0]
    return device["torch_vram_total"] - device["torch_vram_free"]
