"""Sends sessions to a router and records the result of each request.

Sessions start when they are due, whether the router keeps up or not. Within a session each turn waits for the previous
response and for its think time. Times count from when a request was due, not from when it was sent, so that a stall
affects all requests due during it ("coordinated omission", Gil Tene). `late_s` is the lateness of the driver itself.
Responses are streamed, with usage. The router's upstream pool is the client, because it has the lowest overhead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from loadtest.traffic.chat_workload import ChatSession
from router.config.schema import Limits
from router.errors import ConnectFailed, RouterError, UpstreamBroken
from router.frontends.http.headers import request_message
from router.frontends.http.upstream import UpstreamPool
from router.request.inbound import IncomingResponse, first_values
from router.types import Endpoint

TIMEOUTS = Limits(connect_timeout_s=5.0, first_byte_timeout_s=120.0, idle_timeout_s=120.0)
_HEADERS = [(b"content-type", b"application/json")]
_decode_chunk = msgspec.json.Decoder(dict[str, Any]).decode

SendRequest: TypeAlias = Callable[[UpstreamPool, bytes, float], Awaitable[IncomingResponse]]
"""Sends a request and waits for the response headers. The number is the session's `read_pause_s`."""


@dataclass(slots=True)
class RequestResult:
    """One request and its result. `sent_s` counts from the start of the drive; `late_s` is the time between due and
    sent. `ttft_s` and `e2e_s` count from when it was due."""

    kind: str
    asked: Mapping[str, Any]
    sent_s: float
    late_s: float = 0.0
    status: int = 0
    id: str = ""
    """The router's id of the request, as in its receipts."""
    router: str = ""
    pod: str = ""
    engine: str = ""
    """What a mock engine calls itself, also behind routers that do not name the pod."""
    predicted_cached_tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def due_s(self) -> float:
        return self.sent_s - self.late_s


OnProgress: TypeAlias = Callable[[RequestResult], None]
"""Called after each request."""


@dataclass(frozen=True, slots=True)
class DriveResults:
    """All requests in the order they were sent."""

    served: tuple[RequestResult, ...]
    wall_s: float


def _exchange(pool: UpstreamPool, message: bytes, _: float) -> Awaitable[IncomingResponse]:
    """Ignore the session's pauses."""
    return pool.exchange(message)


def with_header(line: str) -> SendRequest:
    """Send with one more header."""
    first = b"content-type: application/json\r\n"

    def exchange(pool: UpstreamPool, message: bytes, _pause_s: float) -> Awaitable[IncomingResponse]:
        return pool.exchange(message.replace(first, b"%b%b\r\n" % (first, line.encode()), 1))

    return exchange


@dataclass(slots=True)
class LoadDriver:
    """Sends requests to routers in turn and records them. A router that refuses the connection is skipped, as by a
    balancer."""

    urls: Sequence[str]
    on_progress: OnProgress
    exchange: SendRequest = _exchange
    served: list[RequestResult] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    _pools: deque[UpstreamPool] = field(init=False)

    def __post_init__(self) -> None:
        self._pools = deque(UpstreamPool(url, url, TIMEOUTS) for url in self.urls)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    async def until(self, due_s: float) -> None:
        """Wait until `due_s` after the start of the drive; return at once if that has passed."""
        await asyncio.sleep(max(0.0, due_s - self.elapsed_s()))

    async def send(
        self,
        endpoint: Endpoint,
        asked: Mapping[str, Any],
        kind: str,
        due_s: float | None = None,
        read_pause_s: float = 0.0,
    ) -> RequestResult:
        """Send one streamed request, due now or earlier. Never raises for a failed request: see `error`."""
        body = msgspec.json.encode({**asked, "stream": True, "stream_options": {"include_usage": True}})
        sent_s = self.elapsed_s()
        result = RequestResult(kind, asked, sent_s, late_s=0.0 if due_s is None else sent_s - due_s)
        self.served.append(result)
        self._pools.rotate()
        for pool in tuple(self._pools):
            message = request_message("POST", endpoint.encode(), pool.host_header, _HEADERS, body)
            result.router, result.error = pool.pod, ""
            try:
                await self._read_response(await self.exchange(pool, message, read_pause_s), result)
            except RouterError as error:
                result.error = f"{type(error).__name__}: {error}"
                if isinstance(error, ConnectFailed):
                    continue
            break
        result.e2e_s = self.elapsed_s() - result.due_s
        self.on_progress(result)
        return result

    def results(self) -> DriveResults:
        return DriveResults(tuple(self.served), self.elapsed_s())

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    async def _read_response(self, reply: IncomingResponse, result: RequestResult) -> None:
        try:
            result.status = reply.status
            headers = first_values(reply.headers)
            result.id = headers.get(b"x-request-id", b"").decode("latin-1")
            result.pod = headers.get(b"x-warmroute-pod", b"").decode("latin-1")
            predicted = headers.get(b"x-warmroute-cached-tokens")
            result.predicted_cached_tokens = int(predicted) if predicted else None
            if reply.status != 200:
                result.error = f"status {reply.status}: {(await _read_body(reply))[:300]!r}"
                return
            await self._read_stream(reply, result)
        finally:
            reply.close()

    async def _read_stream(self, reply: IncomingResponse, result: RequestResult) -> None:
        buffered, ended, texts = b"", False, []
        while data := await reply.read():
            *frames, buffered = (buffered + data).split(b"\n\n")
            for frame in frames:
                payload = frame.removeprefix(b"event: error\n").removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    ended = True
                elif payload and not payload.startswith(b":"):  # a comment: some routers keep slow streams alive
                    texts.append(self._add_chunk(payload, result))
        result.text = "".join(texts)
        if not ended:
            raise UpstreamBroken("the stream ended without [DONE]")

    def _add_chunk(self, payload: bytes, result: RequestResult) -> str:
        """The text of a chunk. The first chunk with text sets the TTFT."""
        try:
            chunk = _decode_chunk(payload)
            if chunk.get("error") is not None:
                raise UpstreamBroken(f"error in the stream: {chunk['error']}")
            if (usage := chunk.get("usage")) is not None:
                result.prompt_tokens = usage.get("prompt_tokens", 0)
                result.output_tokens = usage.get("completion_tokens", 0)
                result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                result.engine = chunk.get("system_fingerprint") or ""
            said = (one.get("delta") or one for one in chunk.get("choices", ()))
            text = "".join(one.get("text") or one.get("content") or "" for one in said)
        except (msgspec.DecodeError, TypeError, AttributeError) as error:
            raise UpstreamBroken(f"invalid stream chunk: {error}") from error
        if text and result.ttft_s is None:
            result.ttft_s = self.elapsed_s() - result.due_s
        return text


async def drive(
    urls: str | Sequence[str],
    model: str,
    sessions: Iterable[ChatSession],
    on_progress: OnProgress = lambda _: None,
    exchange: SendRequest = _exchange,
) -> DriveResults:
    """Run all sessions against the router at `urls`, or several in turn. A session ends at its first error."""
    driver = LoadDriver([urls] if isinstance(urls, str) else urls, on_progress, exchange)
    try:
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(play(driver, model, session))
        return driver.results()
    finally:
        driver.close()


async def play(
    driver: LoadDriver, model: str, session: ChatSession, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Send the turns of one session, each when it is due, with more `options` of the API. It ends at its first
    error."""
    answers: list[str] = []
    ready_s = session.start_s
    for turn in session.turns:
        due_s = ready_s + turn.think_s
        await driver.until(due_s)
        messages = session.messages(answers)
        asked = {"model": model, "messages": messages, "max_tokens": turn.max_tokens, **options}
        result = await driver.send(Endpoint.CHAT, asked, session.kind, due_s, session.read_pause_s)
        if result.error:
            return
        answers.append(result.text)
        ready_s = result.due_s + result.e2e_s


async def _read_body(reply: IncomingResponse) -> bytes:
    body = b""
    while data := await reply.read():
        body += data
    return body
