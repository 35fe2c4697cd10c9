"""An OTLP collector for tests: decodes what arrives over HTTP with `opentelemetry-proto`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The spans that it received, and the resources that they came with. With `silent` it never responds."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""
        self.status = 200
        self.silent = threading.Event()
        self.closed = threading.Event()

    def receive(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        for group in request.resource_spans:
            self.resources.append(attributes(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> Span:
        """The only span of this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span


def attributes(pairs: Any) -> dict[str, Any]:
    """The attributes of a span or resource."""

    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")

    return {pair.key: value(pair) for pair in pairs}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.silent.is_set():
                collector.closed.wait()
            if collector.status == 200:
                collector.receive(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_values: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
