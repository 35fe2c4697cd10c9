"""Mock pods with a constant service time, so that a delay seen by clients is the router's.

    python -m loadtest.faults.soak_pods 9001 9002 9003 9004

All pods run in one process. They do not parse bodies. Request headers select what a pod does wrong: `x-soak-fault`
(`500`, `501`, `cut`, `reset`, `garbage`, `hang`) and `x-soak-bytes` (size of a streamed response, sent as fast as the
router reads).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import cast

import httptools
import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.bench.bodies import MODEL

PREFILL_S = 0.02
CHUNK_S = 0.01
CHUNKS = 16
UNARY_S = 0.06
PIECE = b"data: " + b"x" * 16_000 + b"\n\n"
_TAIL_BYTES = 200
_STREAM = b'"stream":true'
_CONTEXT_TOKENS = 131_072

_METRICS = "".join(
    f'vllm:{name}{{engine="0",model_name="{MODEL}"}} {value}\n'
    for name, value in {"num_requests_running": 3, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.1}.items()
).encode()
_MODELS = msgspec.json.encode(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": _CONTEXT_TOKENS}]}
)
_CONFIG = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10000",engine="0"} 1.0\n'
_PAGES = {
    b"/health": b"",
    b"/metrics": _METRICS + _CONFIG,
    b"/v1/models": _MODELS,
    b"/version": b'{"version":"0.32.0"}',
}
_USAGE = {"prompt_tokens": 300, "completion_tokens": CHUNKS, "total_tokens": 300 + CHUNKS}
_UNARY = msgspec.json.encode(
    {"id": "soak", "object": "chat.completion", "model": MODEL, "choices": [], "usage": _USAGE}
)
_CHUNK = b"data: " + msgspec.json.encode(
    {"id": "soak", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " token"}}]}
)
_ERROR = b'{"error":{"message":"injected fault","type":"server_error","code":500}}'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


def response(status: bytes, body: bytes) -> bytes:
    """A response with a length."""
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def chunk(piece: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class SoakPod(asyncio.Protocol):
    """One connection of the router."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._target, self._tail, self._headers = b"", b"", dict[bytes, bytes]()

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- httptools ---

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._tail = (self._tail + body[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def on_message_complete(self) -> None:
        headers, target, streamed = self._headers, self._target.partition(b"?")[0], _STREAM in self._tail
        self._closes = headers.get(b"connection") == b"close"
        self._begin()
        if target in _PAGES:
            self._end(response(b"200 OK", _PAGES[target]))
        elif not target.endswith(b"completions"):
            self._end(response(b"501 Not Implemented", _ERROR))
        elif fault := headers.get(b"x-soak-fault"):
            self._fail(fault)
        elif size := headers.get(b"x-soak-bytes"):
            self._task = asyncio.ensure_future(self._pour(int(size)))
        elif streamed:
            self._later(PREFILL_S, self._first_chunk)
        else:
            self._later(UNARY_S, lambda: self._end(response(b"200 OK", _UNARY)))

    # --- responses ---

    def _end(self, last: bytes) -> None:
        self._transport.write(last)
        if self._closes:
            self._transport.close()

    def _later(self, delay_s: float, action: object) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)  # type: ignore[arg-type]

    def _first_chunk(self) -> None:
        self._transport.write(_STREAM_HEAD + chunk(_CHUNK + b"\n\n"))
        self._later(CHUNK_S, lambda: self._next_chunk(CHUNKS - 1))

    def _next_chunk(self, left: int) -> None:
        if left:
            self._transport.write(chunk(_CHUNK + b"\n\n"))
            self._later(CHUNK_S, lambda: self._next_chunk(left - 1))
        else:
            self._end(chunk(b"data: [DONE]\n\n") + _END)

    async def _pour(self, size: int) -> None:
        """Stream `size` bytes as fast as the router reads."""
        self._transport.write(_STREAM_HEAD)
        for _ in range(max(1, size // len(PIECE))):
            await self._writable.wait()
            await asyncio.sleep(0)  # an event that is set does not let the other connections run
            self._transport.write(chunk(PIECE))
        self._end(chunk(b"data: [DONE]\n\n") + _END)

    def _fail(self, fault: bytes) -> None:
        if fault in (b"500", b"501"):
            self._end(response(fault + b" Injected", _ERROR))
        elif fault == b"cut":
            self._transport.write(_STREAM_HEAD + chunk(_CHUNK + b"\n\n"))
            self._transport.close()
        elif fault == b"garbage":
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n\0\0\0")
            self._transport.close()
        elif fault == b"reset":
            self._transport.abort()


async def serve(ports: list[int], pod: type[SoakPod] = SoakPod) -> None:
    """Listen until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    servers = [await loop.create_server(pod, "127.0.0.1", port, backlog=1024) for port in ports]
    await stop.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
