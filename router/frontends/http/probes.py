"""What do `/livez` and `/readyz` say to everyone? The status alone: nothing about pods and policies."""

from __future__ import annotations

from starlette.types import Send

PROBE_PATHS = frozenset({"/livez", "/readyz"})


def probe_answer(path: str, *, is_ready: bool) -> tuple[int, bytes]:
    """HTTP status and JSON body for one of `PROBE_PATHS`."""
    if path == "/livez":
        return 200, b'{"status":"alive"}'
    return (200, b'{"status":"ready"}') if is_ready else (503, b'{"status":"not ready"}')


async def answer_probe(send: Send, path: str, *, is_ready: bool) -> None:
    """Answer and close the connection, without reading a body: a prober keeps no connection in use."""
    status, body = probe_answer(path, is_ready=is_ready)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
