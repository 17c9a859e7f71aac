"""The receiving half of a WebSocket client (RFC 6455), enough to follow ComfyUI's live messages."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class WebSocket:
    """`receive(timeout)` gives the next message: a dict for JSON text, bytes for binary, None on timeout."""

    def __init__(self, host: str, path: str, timeout: float = 10):
        name, _, port = host.partition(":")
        self.socket = socket.create_connection((name, int(port)), timeout=timeout)
        self.buffer = b""
        key = base64.b64encode(os.urandom(16)).decode("ascii")
        self.socket.sendall(
            (
                f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
            ).encode("ascii")
        )
        while b"\r\n\r\n" not in self.buffer:
            self.fill()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(f"no WebSocket at {host}{path}: {head[:80]!r}")

    def fill(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def take_frame(self) -> tuple[int, int, bytes] | None:
        """One whole frame from the buffer as (final, opcode, payload); None when more bytes are needed."""
        if len(self.buffer) < 2:
            return None
        length, start = self.buffer[1] & 127, 2
        for marker, size, form in ((126, 2, ">H"), (127, 8, ">Q")):
            if length == marker:
                if len(self.buffer) < 2 + size:
                    return None
                length, start = struct.unpack(form, self.buffer[2 : 2 + size])[0], 2 + size
                break
        if len(self.buffer) < start + length:
            return None
        frame = self.buffer[0] >> 7, self.buffer[0] & 15, self.buffer[start : start + length]
        self.buffer = self.buffer[start + length :]
        return frame

    def receive(self, timeout: float) -> dict | bytes | None:
        deadline, whole, kind = time.monotonic() + timeout, b"", TEXT
        while True:
            frame = self.take_frame()
            if frame is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.socket.settimeout(left)
                try:
                    self.fill()
                except TimeoutError:
                    return None
                continue
            final, opcode, payload = frame
            if opcode == CLOSE:
                raise ConnectionError("the server closed the connection")
            if opcode == PING:
                self.send(PONG, payload)
                continue
            if opcode in (TEXT, BINARY):
                whole, kind = b"", opcode
            elif opcode == PONG:
                continue
            whole += payload
            if final:
                return json.loads(whole) if kind == TEXT else whole

    def send(self, opcode: int, payload: bytes) -> None:
        """Send a short control frame (clients must mask what they send)."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        self.socket.sendall(bytes([0x80 | opcode, 0x80 | len(payload)]) + mask + masked)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()
