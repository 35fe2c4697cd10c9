"""Serves a request with an ASGI application: passes it and the response on as ASGI's messages."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Scope

from router.frontends.http.exchange import Exchange

log = structlog.get_logger()


async def serve_with(app: ASGIApp, client: Exchange) -> None:
    """Answer with `app`. It is not cancelled when the client disconnects, so that an operator's command is carried out
    completely; it gets the message `http.disconnect`."""
    received, gone = client.received, asyncio.Event()
    client.on_disconnect = gone.set
    body = [received.body]
    path, _, query = received.target.partition(b"?")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if client.http_1_0 else "1.1",
        "method": received.method,
        "scheme": "http",
        "path": unquote(received.path),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": received.headers,
        "state": {"tenant": received.tenant},
    }

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if client.disconnected:
            return
        if message["type"] == "http.response.start":
            client.start(message["status"], message["headers"])
            return
        if (piece := message.get("body")) and not client.put(piece):
            await client.ready()
        if not message.get("more_body"):
            client.finish()

    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered
        log.exception("request failed", path=received.path)
