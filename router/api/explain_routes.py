"""Why did this request go there, and where would that one go?

    GET  /admin/explain/{request_id}     a decision that was made, with all its numbers and what came of it
    POST /admin/preview                  the decision about a chat that is not sent

This file never forwards a request and never decides anything itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from router.api.admin import only_local
from router.errors import BodyTooLarge
from router.observe.receipts import RecordedDecision, explained
from router.proxy.headers import HeaderList, first_values
from router.types import Endpoint, InferenceRequest

Read = Callable[[Endpoint, Mapping[bytes, bytes], bytes, str], InferenceRequest]


@dataclass(frozen=True, slots=True)
class ExplainRoutes:
    """Over what the router keeps of its decisions: `find` by request id, `elsewhere` as JSON from the other workers,
    `read` a body, `preview` a request."""

    find: Callable[[str], RecordedDecision | None]
    elsewhere: Callable[[str], Awaitable[bytes | None]]
    read: Read
    preview: Callable[[InferenceRequest, HeaderList], Awaitable[RecordedDecision]]
    max_body_bytes: int

    def add_to(self, app: FastAPI) -> None:
        """Both calls, for this machine alone."""

        @app.get("/admin/explain/{request_id:path}")
        async def explain(request: Request, request_id: str) -> Response:
            only_local(request)
            kept = self.find(request_id)
            found = explained_json(kept) if kept is not None else await self.elsewhere(request_id)
            if found is None:
                raise HTTPException(404, f"No decision about `{request_id}` is kept: see receipts.keep.")
            return _json(found)

        @app.post("/admin/preview")
        async def preview(request: Request) -> Response:
            only_local(request)
            headers: HeaderList = list(request.scope["headers"])
            body = await _body(request, self.max_body_bytes)
            asked = self.read(Endpoint.CHAT, first_values(headers), body, f"preview-{uuid.uuid4().hex}")
            return _json(explained_json(await self.preview(asked, headers)))


async def _body(request: Request, max_bytes: int) -> bytes:
    """All of it. Raises `BodyTooLarge` before more than that is held."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLarge(f"The body is larger than the {max_bytes} bytes that are taken.")
    return body


def explained_json(kept: RecordedDecision) -> bytes:
    """A decision as it is shown."""
    return msgspec.json.encode(explained(kept))


def _json(found: bytes) -> Response:
    return Response(found, media_type="application/json")
