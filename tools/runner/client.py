"""A small client of ComfyUI's HTTP interface (every version since 2024)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from .console import RunnerError
from .websocket import WebSocket

# no proxy, whatever the environment says: the server is on this machine
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PromptRejected(RunnerError):
    """ComfyUI refused a workflow before running it. `error` and `node_errors` are its own words."""

    def __init__(self, answer: dict):
        self.error, self.node_errors = answer.get("error"), answer.get("node_errors") or {}
        super().__init__("ComfyUI refused the workflow: " + self.sentence())

    def sentence(self) -> str:
        found = []
        for node, entry in self.node_errors.items():
            for error in entry.get("errors", []):
                found.append(f"node {node} ({entry.get('class_type')}): {error.get('message')}: {error.get('details')}")
        if not found:
            found.append(str(self.error.get("message") if isinstance(self.error, dict) else self.error))
        return "; ".join(found)


class ComfyClient:
    def __init__(self, url: str, timeout: float = 60):
        self.url, self.timeout = url, timeout

    def read(self, path: str, data: bytes | None = None, kind: str = "application/json") -> bytes:
        """The body of a GET, or of a POST when there is data."""
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": kind} if data else {})
        with OPENER.open(request, timeout=self.timeout) as response:
            return response.read()

    def get(self, path: str):
        return json.loads(self.read(path))

    def post(self, path: str, payload: dict):
        body = self.read(path, json.dumps(payload).encode("utf-8"))
        return json.loads(body) if body else None

    def is_up(self) -> bool:
        try:
            self.get("/system_stats")
            return True
        except (OSError, ValueError):
            return False

    def object_info(self, node: str = "") -> dict:
        """Descriptions of all nodes, or of one by its class name (empty when unknown)."""
        return self.get(f"/object_info/{node}" if node else "/object_info")

    def upload_image(self, file: Path, name: str = "") -> str:
        """Put a picture into ComfyUI's input folder; returns the name to use in a Load Image node."""
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="overwrite"\r\n\r\ntrue\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name or file.name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        body = head + file.read_bytes() + f"\r\n--{boundary}--\r\n".encode("ascii")
        answer = json.loads(self.read("/upload/image", body, f"multipart/form-data; boundary={boundary}"))
        return "/".join(part for part in (answer.get("subfolder"), answer["name"]) if part)

    def queue(self, workflow: dict, client_id: str | None = None) -> str:
        """Queue a workflow in API form; returns its prompt id. PromptRejected when it does not validate."""
        payload = {"prompt": workflow, **({"client_id": client_id} if client_id else {})}
        try:
            return self.post("/prompt", payload)["prompt_id"]
        except urllib.error.HTTPError as error:
            body = error.read()
            try:
                raise PromptRejected(json.loads(body)) from None
            except ValueError:
                raise RunnerError(f"ComfyUI answered HTTP {error.code} to the workflow: {body[:200]!r}") from None

    def history(self, prompt_id: str) -> dict | None:
        """The finished run's entry (prompt, outputs, status), or None while it waits or runs."""
        return self.get(f"/history/{prompt_id}").get(prompt_id)

    def wait(
        self, prompt_id: str, timeout: float = 600, poll: float = 0.1, between: Callable[[], None] = lambda: None
    ) -> dict:
        """Wait until a run has ended in whatever way; `between` is called at each look."""
        deadline = time.monotonic() + timeout
        while (entry := self.history(prompt_id)) is None:
            if time.monotonic() > deadline:
                raise RunnerError(f"the run did not end within {timeout:.0f} s")
            between()
            time.sleep(poll)
        return entry

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def free(self, unload_models: bool = True, free_memory: bool = True) -> None:
        """What the two unload buttons of the front end send."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def view(self, image: dict) -> bytes:
        """The bytes of an output image as named in a history entry."""
        return self.read("/view?" + urllib.parse.urlencode(image))

    def events(self, client_id: str) -> WebSocket:
        """The stream of live messages (progress, text, errors) for runs queued with that client id."""
        return WebSocket(self.url.replace("http://", ""), f"/ws?clientId={client_id}")


def run_error(entry: dict) -> str:
    """The message of the exception that ended a run, 'interrupted' for a cancelled one, '' for a success."""
    for kind, details in entry.get("status", {}).get("messages", []):
        if kind == "execution_error":
            return f"{details.get('exception_type', '')}: {details.get('exception_message', '')}".strip()
        if kind == "execution_interrupted":
            return "interrupted"
    return ""
