"""The publisher's HTTP server: health, metrics, holders, standardised KV events, and new model revisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest

from router.errors import shortened
from router.feeds.supervise import in_turns
from router.fleet.fleet import Fleet
from router.guards import Bound
from router.observe.declared import of_pods, of_publisher
from router.observe.fast_metrics import Registry
from router.observe.metrics import KNOWN_STATES, KvStreamMetrics, add_process_metrics
from router.publisher.published_holder import PublishState
from router.publisher.publisher import Publisher
from router.publisher.standard_events import MalformedEvent, StandardIntake, parse_standard_event

MAX_ECHOED_CHARACTERS = 200
EVENTS = Bound("KV events", 4 * 1024 * 1024, 262_144)
"""A list of them, or one in a line."""
_LIST, _ANY = msgspec.json.Decoder(list[Any]), msgspec.json.Decoder(Any)
_Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class NewRevision(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    revision: str


_REVISION = msgspec.json.Decoder(NewRevision)


class PublisherMetrics:
    """The registry and its metrics. Those of holders are read when they are rendered."""

    def __init__(self) -> None:
        self.registry = r = Registry(of_publisher)
        add_process_metrics(r)
        self.kv = KvStreamMetrics(r)

    def render(self, publisher: Publisher, fleet: Fleet) -> bytes:
        r, pods = self.registry, {status.pod.id: status for status in fleet.snapshot.pods}
        self.kv.keep(pods)
        r[of_pods.POD_STATE].replace_states({(pod,): status.state for pod, status in pods.items()}, KNOWN_STATES)
        holders = {(holder.generation.model, holder.id): holder for holder in publisher.holders}
        states = {labels: holder.state for labels, holder in holders.items()}
        r[of_publisher.PUBLISHER_STATE].replace_states(states, PublishState)
        r[of_publisher.PUBLISHER_COMPLETE].replace({labels: holder.complete for labels, holder in holders.items()})
        r[of_publisher.PUBLISHER_PENDING].replace({labels: holder.pending_blocks for labels, holder in holders.items()})
        r[of_publisher.PUBLISHER_WRITTEN].replace({labels: holder.written_blocks for labels, holder in holders.items()})
        r[of_publisher.PUBLISHER_RELOADS].replace({labels: holder.reloads for labels, holder in holders.items()})
        r[of_publisher.PUBLISHER_ORPHANS].replace({labels: holder.blocks.orphans for labels, holder in holders.items()})
        return generate_latest(self.registry)


def publisher_app(
    publisher: Publisher, render_metrics: Callable[[], bytes], standard: StandardIntake, lifespan: _Lifespan
) -> FastAPI:
    app = FastAPI(title="warmroute publish", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

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
            return JSONResponse(await apply_events(standard, await request.body()))
        except MalformedEvent as error:
            return JSONResponse({"error": str(error), "field": error.field}, 422)

    @app.post("/revision")
    async def revision(request: Request) -> JSONResponse:
        try:
            new = EVENTS.json(await request.body(), _REVISION)
            publisher.replace_revision(new.model, new.revision)
        except ValueError as error:
            message, _, field = str(error).partition(" - at `$.")
            return JSONResponse({"error": shortened(message, MAX_ECHOED_CHARACTERS), "field": field.rstrip("`")}, 422)
        except KeyError:
            known = ", ".join(sorted(publisher.generations))
            model = shortened(new.model, MAX_ECHOED_CHARACTERS)
            return JSONResponse({"error": f"model {model!r} is not published; known: {known}"}, 404)
        return JSONResponse({"model": new.model, "revision": new.revision})

    return app


async def apply_events(standard: StandardIntake, body: bytes) -> dict[str, int]:
    """Publish standardised events, in turns: a JSON object, a list of objects, or one object per line. Raises
    `MalformedEvent`; the events before the invalid one are published."""
    counts = {"applied": 0, "known": 0}
    async for fields in in_turns(_objects(body)):
        counts["applied" if standard.apply(parse_standard_event(fields)) else "known"] += 1
    return counts


def _objects(body: bytes) -> Iterator[Any]:
    try:
        if body.lstrip()[:1] == b"[":
            yield from EVENTS.json(body, _LIST)
            return
        for line in body.splitlines():
            if line.strip():
                yield EVENTS.json(line, _ANY)
    except ValueError as error:
        raise MalformedEvent("event", f"is not JSON: {error}") from error


_READY = (PublishState.PUBLISHING, PublishState.STANDBY)


def describe(publisher: Publisher) -> list[dict[str, Any]]:
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
