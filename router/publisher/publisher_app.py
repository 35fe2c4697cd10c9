"""The publisher's HTTP server: health, metrics, holders, standardised KV events, and new model revisions.

This file does not publish by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from router.errors import shortened
from router.publisher.published_holder import PublishState
from router.publisher.publisher import Publisher
from router.publisher.standard_events import MalformedEvent, StandardIntake, parse_standard_event

MAX_ECHOED_CHARACTERS = 200
_Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class NewRevision(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    revision: str


def publisher_app(
    publisher: Publisher, render_metrics: Callable[[], bytes], standard: StandardIntake, lifespan: _Lifespan
) -> FastAPI:
    app = FastAPI(title="warmroute publish", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = shortened(".".join(str(part) for part in first["loc"] if part != "body"), MAX_ECHOED_CHARACTERS)
        return JSONResponse({"error": shortened(first["msg"], MAX_ECHOED_CHARACTERS), "field": field}, 422)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        states = [holder.state for holder in publisher.holders]
        ready = bool(states) and all(state in _READY for state in states)
        return JSONResponse({"holders": describe(publisher)}, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def render() -> Response:
        return Response(render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/kv-events")
    async def kv_events(request: Request) -> JSONResponse:
        try:
            return JSONResponse(apply_events(standard, await request.body()))
        except MalformedEvent as error:
            return JSONResponse({"error": str(error), "field": error.field}, 422)

    @app.post("/revision")
    async def revision(new: NewRevision) -> JSONResponse:
        try:
            publisher.replace_revision(new.model, new.revision)
        except KeyError:
            known = ", ".join(sorted(publisher.generations))
            model = shortened(new.model, MAX_ECHOED_CHARACTERS)
            return JSONResponse({"error": f"model {model!r} is not published; known: {known}"}, 404)
        return JSONResponse({"model": new.model, "revision": new.revision})

    return app


def apply_events(standard: StandardIntake, body: bytes) -> dict[str, int]:
    """Publish standardised events: a JSON object, a list of objects, or one object per line. Raises `MalformedEvent`;
    the events before the invalid one are published."""
    counts = {"applied": 0, "known": 0}
    for fields in _objects(body):
        counts["applied" if standard.apply(parse_standard_event(fields)) else "known"] += 1
    return counts


def _objects(body: bytes) -> Iterator[Any]:
    try:
        if body.lstrip()[:1] == b"[":
            yield from msgspec.json.decode(body, type=list[Any])
            return
        for line in body.splitlines():
            if line.strip():
                yield msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise MalformedEvent("event", f"is not JSON: {error}") from error


_READY = (PublishState.PUBLISHING, PublishState.STANDBY)


def describe(publisher: Publisher) -> list[dict[str, Any]]:
    """All holders as JSON values."""
    return [
        {
            "holder": holder.id,
            "model": holder.generation.model,
            "revision": holder.generation.revision,
            "state": holder.state.value,
            "complete": holder.complete,
            "pending_blocks": holder.pending_blocks,
            "written_blocks": holder.written_blocks,
            "reloads": holder.reloads,
            "orphans": holder.blocks.orphans,
            "rejected_reason": holder.blocks.rejected_reason,
        }
        for holder in publisher.holders
    ]
