"""Reads the bodies of requests to an ASGI application, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import BodyTooLarge, RouterError
from router.request.error_responses import error_body, error_headers, response_for


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """ASGI middleware: passes a request with its whole body on to `app`. A larger body is not read to its end."""

    app: ASGIApp
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, self.max_bytes)
        except BodyTooLarge as error:
            await refuse(send, error)
            return
        if body is not None:
            await self.app(scope, replayed(body, receive), send)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The request's body; None if the client disconnects. Raises `BodyTooLarge` as soon as the limit is exceeded."""
    too_large = BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise too_large
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        more = message.get("more_body", False)
    return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns the body at the first call, then what `receive` returns."""
    unread = [body]

    async def again() -> Message:
        if not unread:
            return await receive()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return again


async def refuse(send: Send, error: RouterError) -> None:
    """Answer with the error and close the connection, without reading the rest of the request."""
    body = error_body(error)
    headers = [*error_headers(error, body), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response_for(error).status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
