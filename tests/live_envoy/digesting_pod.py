"""A pod that answers with the digest of the body that it has received, whole or in chunks, or with recorded events."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CHOICE = '{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
EVENTS = b"".join(
    (
        b": a comment\r\n\r\n",
        f"data: {_CHOICE % 'Grüße 🦊'}\n\n".encode(),
        f"event: x\r\nid: 1\r\ndata:{_CHOICE % ('long ' * 30_000)}\r\n\r\n".encode(),
        *(f"data: {_CHOICE % number}\n\n".encode() for number in range(200)),
        b"data: {not JSON}\n\ndata: [DONE]\n\n: no end",
    )
)
"""A stream with everything that event streams may have."""
MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "vllm", "max_model_len": 8192}]}


class _Pod(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps(MODELS if self.path == "/v1/models" else {}).encode())

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/digest":
            self._answer(hashlib.sha256(body).hexdigest().encode())
        else:
            self._stream()

    def _stream(self) -> None:
        """Send the events in chunks that begin and end anywhere."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chance, start = random.Random(39), 0
        while piece := EVENTS[start : start + chance.choice((1, 7, 100, 5000))]:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            start += len(piece)
        self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        pieces = []
        while size_bytes := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size_bytes))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def digesting_pod() -> Iterator[int]:
    """Runs one; yields its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pod) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()
