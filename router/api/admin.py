"""The admin calls about pods and policies. Only processes on the router's own machine may make them.

GET    /admin/pods                  every pod with its state and load
POST   /admin/pods                  add a pod: an entry as under `pods` in router.yaml
DELETE /admin/pods/{id}             remove it
POST   /admin/pods/{id}/drain       send it no new requests
POST   /admin/pods/{id}/undrain     let it join again
GET    /admin/policies              the active policies, and why the files may not be active
POST   /admin/policies/reload       read the files now: 200 with the changes, or 400 with file and line
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from router.api.admin_commands import AdminCommands
from router.api.views import describe_policies
from router.config.schema import PodConfig
from router.errors import ConfigError, MalformedRequest
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent


def only_local(request: Request) -> None:
    """Refuse a call from another machine with 403: who can add a pod can read every prompt."""
    host = request.client.host if request.client else ""
    try:
        local = not host or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise HTTPException(403, f"Admin calls are only accepted from the router's own machine, not from {host}.")


def add_pod_routes(
    app: FastAPI, fleet: Fleet, commands: AdminCommands, describe: Callable[[], list[dict[str, Any]]]
) -> None:
    """Add the calls about pods to the application."""

    @app.get("/admin/pods")
    async def pods(request: Request) -> list[dict[str, Any]]:
        only_local(request)
        return describe()

    @app.post("/admin/pods", status_code=201)
    async def add(request: Request, pod: PodConfig) -> dict[str, str]:
        only_local(request)
        try:
            commands.add(pod)
        except ConfigError as error:
            raise MalformedRequest(str(error)) from error
        return {"status": "joining", "url": pod.url}

    @app.delete("/admin/pods/{pod_id:path}")
    async def remove(request: Request, pod_id: str) -> dict[str, str]:
        only_local(request)
        if not commands.remove(pod_id):
            raise _unknown(pod_id)
        return {"status": "gone", "pod": pod_id}

    @app.post("/admin/pods/{pod_id:path}/drain")
    async def drain(request: Request, pod_id: str) -> dict[str, str]:
        return apply(request, pod_id, PodEvent.DRAIN)

    @app.post("/admin/pods/{pod_id:path}/undrain")
    async def undrain(request: Request, pod_id: str) -> dict[str, str]:
        return apply(request, pod_id, PodEvent.UNDRAIN)

    def apply(request: Request, pod_id: str, event: PodEvent) -> dict[str, str]:
        only_local(request)
        if fleet.status(pod_id) is None:
            raise _unknown(pod_id)
        return {"status": commands.drain(pod_id, event).value, "pod": pod_id}


def add_policy_routes(app: FastAPI, feed: PolicyFeed, commands: AdminCommands) -> None:
    """Add the calls about policies to the application."""

    @app.get("/admin/policies")
    async def policies(request: Request) -> dict[str, Any]:
        only_local(request)
        return describe_policies(feed)

    @app.post("/admin/policies/reload")
    async def reload(request: Request) -> dict[str, Any]:
        only_local(request)
        done = await commands.reload()
        if done.error:
            raise MalformedRequest(done.error)
        return {"version": done.version, "changed": done.changed, "review": done.review}


def _unknown(pod_id: str) -> HTTPException:
    return HTTPException(404, f"Unknown pod `{pod_id}`.")
