"""How do LMCache servers reach their coordinator?

Over HTTP, at these paths. This file decides nothing: it decodes, asks the `Coordinator`, and answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.publisher.lmcache import SILENT_FOR_S, Coordinator, UnknownServer


def routes(coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> APIRouter:
    """The paths that servers call. Without authentication, as LMCache's own: keep them in the cluster."""
    router = APIRouter()

    @router.post("/instances")
    async def register(request: Request) -> Response:
        return await _answer(request, lambda body: coordinator.register(body, clock()))

    @router.get("/instances")
    async def instances() -> dict[str, Any]:
        return coordinator.instances()

    @router.put("/instances/{name}/heartbeat")
    async def heartbeat(name: str) -> Response:
        try:
            return JSONResponse(coordinator.heartbeat(name, clock()))
        except UnknownServer:
            return JSONResponse({"error": f"unknown instance {name}; re-register"}, 404)

    @router.delete("/instances/{name}")
    async def deregister(name: str) -> Response:
        coordinator.deregister(name)
        return Response(status_code=204)

    @router.post("/events")
    async def events(request: Request) -> Response:
        return await _answer(request, lambda body: coordinator.events(body, clock()))

    return router


async def _answer(request: Request, take: Callable[[Any], dict[str, Any]]) -> Response:
    try:
        return JSONResponse(take(msgspec.json.decode(await request.body())))
    except msgspec.DecodeError as error:
        return JSONResponse({"detail": str(error)}, 422)


async def expire_silent(coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
    """Run beside the routes, until cancelled: a server that died does not say so."""
    while True:
        await asyncio.sleep(SILENT_FOR_S / 10)
        coordinator.expire(clock())
