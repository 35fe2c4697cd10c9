"""The operators' page, `/ui`: one HTML file, and the stream of snapshots that it shows.

The file contains no data, so that a browser can load it without a token. The page asks for the token and sends it with
each request for data. One snapshot is computed a second for all viewers, and none while nobody watches.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.errors import Saturated

PAGE_PATH, EVENTS_PATH = "/ui", "/ui/events"
INTERVAL_S = 1.0
MAX_VIEWERS = 16
_FILE = Path(__file__).with_name("live_page.html")


class SnapshotStream:
    """Sends the values of `compute` to all viewers, one every `INTERVAL_S`. A viewer that reads slowly skips values."""

    def __init__(self, compute: Callable[[], Awaitable[bytes]]) -> None:
        self._compute = compute
        self._watched = asyncio.Event()
        self._tick = asyncio.Event()
        self._latest = b""
        self._runs = False
        self.viewers = 0

    async def run(self) -> None:
        """Compute while there are viewers, until cancelled; then end their streams."""
        self._runs = True
        try:
            while True:
                await self._watched.wait()
                self._publish(await self._compute())
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._runs = False
            self._publish(b"")

    def _publish(self, value: bytes) -> None:
        self._latest = value
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    @contextmanager
    def viewer(self) -> Iterator[AsyncIterator[bytes]]:
        """A viewer from now on: the values, as server-sent events. Raises `Saturated` if there are `MAX_VIEWERS`."""
        if self.viewers >= MAX_VIEWERS:
            raise Saturated(f"{MAX_VIEWERS} pages are open, the maximum; close one of them.")
        self.viewers += 1
        self._watched.set()
        try:
            yield self._events()
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._watched.clear()

    async def _events(self) -> AsyncIterator[bytes]:
        while self._runs:
            await self._tick.wait()
            if self._latest:
                yield b"data: %b\n\n" % self._latest


class EventsResponse(Response):
    """Streams the snapshots. It counts as a viewer from before its first byte until it ends, however that is."""

    def __init__(self, stream: SnapshotStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream.viewer() as events:
            headers = {"cache-control": "no-store"}
            await StreamingResponse(events, media_type="text/event-stream", headers=headers)(scope, receive, send)


def add_page_routes(app: FastAPI, stream: SnapshotStream) -> None:
    page = _FILE.read_bytes()
    headers = page_headers(page)

    @app.get(PAGE_PATH)
    async def operators_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/")
    async def root() -> Response:
        return RedirectResponse(PAGE_PATH)

    @app.get(EVENTS_PATH)
    async def events() -> Response:
        return EventsResponse(stream)


def page_headers(page: bytes) -> dict[str, str]:
    """Headers that allow the page its own script and styles, by their hashes, and requests to this listener only."""
    script, style = (_hash_of(tag, page) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


def _hash_of(tag: bytes, page: bytes) -> str:
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return f"sha256-{b64encode(sha256(content).digest()).decode()}"
