"""What do `/livez` and `/readyz` say to everyone? The status alone: nothing about pods and policies."""

from __future__ import annotations

from starlette.responses import Response

PROBE_PATHS = frozenset({"/livez", "/readyz"})


def probe_answer(path: str, *, is_ready: bool) -> tuple[int, bytes]:
    """HTTP status and JSON body for one of `PROBE_PATHS`."""
    if path == "/livez":
        return 200, b'{"status":"alive"}'
    return (200, b'{"status":"ready"}') if is_ready else (503, b'{"status":"not ready"}')


def probe_response(path: str, *, is_ready: bool) -> Response:
    status, body = probe_answer(path, is_ready=is_ready)
    return Response(body, status, media_type="application/json")
