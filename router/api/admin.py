"""The admin calls. Only processes on the router's own machine may make them.

GET    /admin/pods                  every pod with its state and load
POST   /admin/pods                  add a pod: an entry as under `pods` in router.yaml
DELETE /admin/pods/{id}             remove it
POST   /admin/pods/{id}/drain       send it no new requests
POST   /admin/pods/{id}/undrain     let it join again
GET    /admin/policies              the active policies, and the error if the files are invalid
POST   /admin/policies/reload       read the files now: 200 with the changes, or 400 with file and line
GET    /admin/explain/{request_id}  a past decision with its costs and the outcome
POST   /admin/preview               the decision for a chat request that is not sent
"""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.exceptions import HTTPException

from router.api.admin_commands import AdminCommands
from router.api.views import describe_policies, explained_json
from router.config.schema import PodConfig
from router.errors import BodyTooLarge, ConfigError, MalformedRequest
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet, PodEvent
from router.observe.receipts import RecordedDecision
from router.proxy.headers import HeaderList, first_values
from router.types import Endpoint, InferenceRequest

ReadRequest = Callable[[Endpoint, Mapping[bytes, bytes], bytes, str], InferenceRequest]


async def only_local(request: Request) -> None:
    """Refuse calls from other machines with 403, because a caller that can add a pod can read every prompt."""
    host = request.client.host if request.client else ""
    try:
        local = not host or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise HTTPException(403, f"Admin calls are only accepted from the router's own machine, not from {host}.")


def admin_router() -> APIRouter:
    """A router for paths under /admin, which only accepts local calls."""
    return APIRouter(prefix="/admin", dependencies=[Depends(only_local)])


def add_pod_routes(
    router: APIRouter, fleet: Fleet, commands: AdminCommands, describe: Callable[[], list[dict[str, Any]]]
) -> None:
    @router.get("/pods")
    async def pods() -> list[dict[str, Any]]:
        return describe()

    @router.post("/pods", status_code=201)
    async def add(pod: PodConfig) -> dict[str, str]:
        try:
            commands.add(pod)
        except ConfigError as error:
            raise MalformedRequest(str(error)) from error
        return {"status": "joining", "url": pod.url}

    @router.delete("/pods/{pod_id:path}")
    async def remove(pod_id: str) -> dict[str, str]:
        if not commands.remove(pod_id):
            raise HTTPException(404, f"Unknown pod `{pod_id}`.")
        return {"status": "gone", "pod": pod_id}

    @router.post("/pods/{pod_id:path}/drain")
    async def drain(pod_id: str) -> dict[str, str]:
        return apply(pod_id, PodEvent.DRAIN)

    @router.post("/pods/{pod_id:path}/undrain")
    async def undrain(pod_id: str) -> dict[str, str]:
        return apply(pod_id, PodEvent.UNDRAIN)

    def apply(pod_id: str, event: PodEvent) -> dict[str, str]:
        if fleet.status(pod_id) is None:
            raise HTTPException(404, f"Unknown pod `{pod_id}`.")
        return {"status": commands.drain(pod_id, event).value, "pod": pod_id}


def add_policy_routes(router: APIRouter, feed: PolicyFeed, commands: AdminCommands) -> None:
    @router.get("/policies")
    async def policies() -> dict[str, Any]:
        return describe_policies(feed)

    @router.post("/policies/reload")
    async def reload() -> dict[str, Any]:
        done = await commands.reload()
        if done.error:
            raise MalformedRequest(done.error)
        return {"version": done.version, "changed": done.changed, "review": done.review}


@dataclass(frozen=True, slots=True)
class ExplainRoutes:
    """The calls about decisions. `find` returns a decision by request id, `find_remote` the JSON of another worker's,
    `read` parses a body, `preview` decides without sending."""

    find: Callable[[str], RecordedDecision | None]
    find_remote: Callable[[str], Awaitable[bytes | None]]
    read: ReadRequest
    preview: Callable[[InferenceRequest, HeaderList], Awaitable[RecordedDecision]]
    max_body_bytes: int

    def add_to(self, router: APIRouter) -> None:
        @router.get("/explain/{request_id:path}")
        async def explain(request_id: str) -> Response:
            kept = self.find(request_id)
            found = explained_json(kept) if kept is not None else await self.find_remote(request_id)
            if found is None:
                raise HTTPException(404, f"No decision about `{request_id}` is in memory (limited by receipts.keep).")
            return Response(found, media_type="application/json")

        @router.post("/preview")
        async def preview(request: Request) -> Response:
            headers: HeaderList = list(request.scope["headers"])
            body = await _body(request, self.max_body_bytes)
            parsed = self.read(Endpoint.CHAT, first_values(headers), body, f"preview-{uuid.uuid4().hex}")
            found = explained_json(await self.preview(parsed, headers))
            return Response(found, media_type="application/json")


async def _body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as it exceeds the limit."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLarge(f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes).")
    return body
