"""A real ComfyUI as a child process on 127.0.0.1, with the pack linked in and folders of its own."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from .client import ComfyClient
from .console import USAGE, RunnerError, clean_environment, tail
from .hosts import Host
from .links import link_folder
from .paths import PACK_NAME, ROOT, WORK

GUARD = Path(__file__).resolve().parent / "guard.py"
ADDRESS = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        if os.name != "nt":  # there it would allow two servers on one port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
    return True


@dataclass
class ComfyServer:
    """One ComfyUI process: start() it, talk through `client`, stop() it (also on leaving a `with`).

    `work` receives input/, output/, temp/, user/, custom_nodes/, models/ and server.log; the host's own
    folders are not written to. `models` are checkpoint folders to show under the pack's LLM root, by name.
    `environment` overrides variables of the child. `packs` are the custom nodes to load, by the name of their folder.
    """

    host: Host
    work: Path
    port: int = 0
    gpu: bool = False
    packs: dict[str, Path] = field(default_factory=lambda: {PACK_NAME: ROOT})
    models: list[Path] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.work / "server.log"

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}"

    @property
    def client(self) -> ComfyClient:
        return ComfyClient(self.url)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def prepare(self) -> Path:
        """Make the work folders and the file that tells ComfyUI where the pack and the models are."""
        for name in ("input", "output", "temp", "user", "custom_nodes", "models"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        section = {}
        for name, folder in self.packs.items():
            link_folder(folder, self.work / "custom_nodes" / name, copy_allowed=True)
            section["custom_nodes"] = str(self.work / "custom_nodes")
        for folder in self.models:
            link_folder(folder, self.work / "models" / folder.resolve().name, copy_allowed=False)
            section["LLM"] = str(self.work / "models")
        paths = self.work / "extra_model_paths.yaml"
        # JSON in plain ASCII is YAML too, and needs no quoting rules for Windows or Chinese paths
        paths.write_text(json.dumps({"a3b": section} if section else {}), encoding="ascii")
        return paths

    def command(self, paths: Path) -> list[str]:
        command = [
            str(self.host.python),
            str(GUARD),
            str(self.host.folder / "main.py"),
            "--listen",
            ADDRESS,
            "--port",
            str(self.port),
            "--disable-auto-launch",
            "--input-directory",
            str(self.work / "input"),
            "--output-directory",
            str(self.work / "output"),
            "--temp-directory",
            str(self.work / "temp"),
            "--extra-model-paths-config",
            str(paths),
        ]
        if not self.gpu:
            command.append("--cpu")
        optional = {
            "--user-directory": [str(self.work / "user")],
            "--database-url": ["sqlite:///:memory:"],
            "--disable-api-nodes": [],
            "--disable-all-custom-nodes": [],
        }
        if self.packs:
            optional["--whitelist-custom-nodes"] = list(self.packs)
        for flag, values in optional.items():
            if self.host.supports(flag):
                command += [flag, *values]
        return command + self.flags

    def start(self, timeout: float = 180) -> ComfyServer:
        """Start the process and wait until it answers; RunnerError with the log's end when it does not."""
        if self.port and not port_is_free(self.port):
            raise RunnerError(f"port {self.port} on {ADDRESS} is in use: choose another with --port", code=USAGE)
        self.port = self.port or free_port()
        command = self.command(self.prepare())
        # Compiled files go to our own folder: nothing is written into the user's ComfyUI.
        own = {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": str(WORK / "pycache")}
        environment = clean_environment(**{**own, **self.environment})
        if self.host.standins:
            environment["PYTHONPATH"] = str(self.host.standins)
        with open(self.log, "wb") as sink:
            # its own session: Ctrl-C reaches this process only, which then stops the server in order
            self.process = subprocess.Popen(
                command,
                cwd=self.host.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)
        try:
            self.wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.client.is_up():
            if self.process.poll() is not None:
                raise RunnerError(
                    f"ComfyUI in {self.host.folder} ended while starting (exit code {self.process.returncode})",
                    details=tail(self.log),
                    log=self.log,
                )
            if time.monotonic() > deadline:
                raise RunnerError(
                    f"ComfyUI in {self.host.folder} did not answer within {timeout:.0f} s",
                    details=tail(self.log),
                    log=self.log,
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server; safe to call twice and at any time."""
        atexit.unregister(self.stop)
        process, self.process = self.process, None
        if process is None:
            return
        try:
            process.stdin.close()  # the guard in the child sees this and exits
        except OSError:
            pass
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def remove_work(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def __enter__(self) -> ComfyServer:
        return self.start()

    def __exit__(self, *_exception) -> None:
        self.stop()
