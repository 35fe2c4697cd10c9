"""Adds `discovery.k8s.io/v1` to an API server that has only v1beta1 of EndpointSlices.

The API server passes requests for v1 on to this server, after it has checked token and permissions, as it does for the
servers of any APIService. Objects and versions are those of v1beta1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.live_k8s.api_server import CORE, ApiServer, checked

GROUP = "/apis/discovery.k8s.io"
SERVICES = f"{CORE}/namespaces/kube-system/services"
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
NAME = "newer-slices"


@asynccontextmanager
async def newer_slices(server: ApiServer) -> AsyncIterator[None]:
    """Serve v1 until the end of the block."""
    async with httpx.AsyncClient(
        base_url=server.url, headers=dict(server.client().headers), verify=False, trust_env=False, timeout=None
    ) as api:
        certificate, key = server.certificates / "server.crt", server.certificates / "server.key"
        config = uvicorn.Config(_app(api), port=0, ssl_certfile=certificate, ssl_keyfile=str(key), log_config=None)
        listener = uvicorn.Server(config)
        serving = asyncio.create_task(listener.serve())
        while not listener.started:
            await asyncio.sleep(0.01)
        port = listener.servers[0].sockets[0].getsockname()[1]
        await _register(api, port)
        try:
            yield
        finally:
            await api.delete(f"{API_SERVICES}/v1.discovery.k8s.io")
            await api.delete(f"{SERVICES}/{NAME}")
            listener.should_exit = listener.force_exit = True
            await serving


async def _register(api: httpx.AsyncClient, port: int) -> None:
    """Returns when the API server passes requests on."""
    service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    checked(await api.post(SERVICES, json={"metadata": {"name": NAME}, "spec": service}))
    version = {
        "group": "discovery.k8s.io",
        "version": "v1",
        "groupPriorityMinimum": 16200,
        "versionPriority": 20,
        "service": {"namespace": "kube-system", "name": NAME, "port": port},
        "insecureSkipTLSVerify": True,
    }
    checked(await api.post(API_SERVICES, json={"metadata": {"name": "v1.discovery.k8s.io"}, "spec": version}))
    while (await api.get(f"{GROUP}/v1/endpointslices")).is_error:
        await asyncio.sleep(0.1)


def _app(api: httpx.AsyncClient) -> Starlette:
    async def version(_: Request) -> Response:
        verbs = ["get", "list", "watch"]
        kind = {"name": "endpointslices", "namespaced": True, "kind": "EndpointSlice", "verbs": verbs}
        return JSONResponse({"kind": "APIResourceList", "groupVersion": "discovery.k8s.io/v1", "resources": [kind]})

    async def objects(request: Request) -> Response:
        path = f"{GROUP}/v1beta1/{request.path_params['path']}"
        response = await api.send(api.build_request("GET", path, params=request.url.query), stream=True)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async for line in response.aiter_lines():
                    yield json.dumps(_newer(json.loads(line))).encode() + b"\n"
            finally:
                await response.aclose()

        return StreamingResponse(lines(), response.status_code, media_type="application/json")

    return Starlette(routes=[Route(f"{GROUP}/v1", version), Route(f"{GROUP}/v1/{{path:path}}", objects)])


def _newer(found: Any) -> Any:
    """A slice, a list or an event of them in v1, where the zone is a field and not in `topology`."""
    if isinstance(found, list):
        return [_newer(one) for one in found]
    if not isinstance(found, dict):
        return found
    new = {key: _newer(value) for key, value in found.items() if key != "topology"}
    if found.get("apiVersion") == "discovery.k8s.io/v1beta1":
        new["apiVersion"] = "discovery.k8s.io/v1"
    if zone := found.get("topology", {}).get("topology.kubernetes.io/zone"):
        new["zone"] = zone
    return new
