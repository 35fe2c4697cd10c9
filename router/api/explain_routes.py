"""The admin calls that explain routing decisions.

GET  /admin/explain/{request_id}     a past decision with its costs and the outcome
POST /admin/preview                  the decision for a chat request that is not sent
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from router.errors import BodyTooLarge
from router.observe.receipts import RecordedDecision, explained
from router.proxy.headers import HeaderList, first_values
from router.types import Endpoint, InferenceRequest

Read = Callable[[Endpoint, Mapping[bytes, bytes], bytes, str], InferenceRequest]


@dataclass(frozen=True, slots=True)
class ExplainRoutes:
    """The two calls. `find` returns a decision by request id, `elsewhere` one of another worker as JSON, `read` parses
    a body, `preview` decides without sending."""

    find: Callable[[str], RecordedDecision | None]
    elsewhere: Callable[[str], Awaitable[bytes | None]]
    read: Read
    preview: Callable[[InferenceRequest, HeaderList], Awaitable[RecordedDecision]]
    max_body_bytes: int

    def add_to(self, router: APIRouter) -> None:
        """Add both calls to the router of the admin paths."""

        @router.get("/explain/{request_id:path}")
        async def explain(request_id: str) -> Response:
            kept = self.find(request_id)
            found = explained_json(kept) if kept is not None else await self.elsewhere(request_id)
            if found is None:
                raise HTTPException(404, f"No decision about `{request_id}` is in memory (limited by receipts.keep).")
            return _json(found)

        @router.post("/preview")
        async def preview(request: Request) -> Response:
            headers: HeaderList = list(request.scope["headers"])
            body = await _body(request, self.max_body_bytes)
            parsed = self.read(Endpoint.CHAT, first_values(headers), body, f"preview-{uuid.uuid4().hex}")
            return _json(explained_json(await self.preview(parsed, headers)))


async def _body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as it exceeds the limit."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLarge(f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes).")
    return body


def explained_json(kept: RecordedDecision) -> bytes:
    """The decision as JSON."""
    return msgspec.json.encode(explained(kept))


def _json(found: bytes) -> Response:
    return Response(found, media_type="application/json")
