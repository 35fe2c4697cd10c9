"""What does the router answer itself?

Health, metrics, the merged model list and the pods' admin calls: plain FastAPI. Everything that goes on to a pod is
taken by `EdgeProtocol` before FastAPI sees it. This file never forwards a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from router.api.error_responses import error_body, error_headers, response_for
from router.api.explain_routes import ExplainRoutes
from router.api.local import only_local
from router.api.openai_edge import OpenAiEdge
from router.config.schema import PodConfig
from router.errors import ConfigError, MalformedRequest, MethodNotAllowed, RouterError, UnknownEndpoint
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import PodId, PodState, PodStatus

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
AddPod = Callable[[PodConfig], None]
RemovePod = Callable[[str], bool]
DrainPod = Callable[[PodId, PodEvent], PodState]


class App:
    """Both halves of what is served: `edge` by `EdgeProtocol`, the rest as an ASGI application."""

    def __init__(self, edge: OpenAiEdge, own: FastAPI) -> None:
        self.edge = edge
        self.is_stopping = False
        """Whoever asks from now on should ask another router next time."""
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._own(scope, receive, send)

    def begin_stopping(self) -> None:
        """From now on `/readyz` says no, and so does every answer: the connection that it came over ends with it."""
        self.is_stopping = self._own.state.is_stopping = True


def own_app(
    fleet: Fleet,
    render_metrics: Callable[[], Awaitable[bytes]],
    describe_pods: Callable[[], list[dict[str, Any]]],
    add_pod: AddPod,
    remove_pod: RemovePod,
    drain_pod: DrainPod,
    explain: ExplainRoutes,
    lifespan: Lifespan,
    describe_policies: Callable[[], dict[str, str]],
) -> FastAPI:
    """What the router itself answers."""
    app = FastAPI(title="warmroute", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.is_stopping = False
    _health(app, fleet, describe_policies)
    _models(app, fleet)
    _admin(app, describe_pods, add_pod, remove_pod)
    _drain(app, fleet, drain_pod)
    explain.add_to(app)
    _errors(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _health(app: FastAPI, fleet: Fleet, describe_policies: Callable[[], dict[str, str]]) -> None:
    @app.get("/health")  # the engines' name for it: probes that were made for a pod find a router in its place
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        states = [status.state.value for status in fleet.snapshot.pods]
        stops, any_ready = app.state.is_stopping, PodState.READY.value in states
        ready = any_ready and not stops
        detail = {
            "status": "stopping" if stops else "ready" if ready else "no pod is ready",
            "pods": {s: states.count(s) for s in set(states)},
            "policies": describe_policies(),
        }
        return JSONResponse(detail, status_code=200 if ready else 503)


def _models(app: FastAPI, fleet: Fleet) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(model_cards(fleet.snapshot.pods).values())}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card = model_cards(fleet.snapshot.pods).get(name)
        if card is None:
            raise HTTPException(404, f"The model `{name}` does not exist.")
        return JSONResponse(card)


def model_cards(statuses: tuple[PodStatus, ...]) -> dict[str, dict[str, Any]]:
    """One card a model over all pods; `max_model_len` is the least of them, which every pod can keep."""
    cards: dict[str, dict[str, Any]] = {}
    for status in statuses:
        pod = status.pod
        for name in (*pod.models, *pod.adapters):
            card = cards.setdefault(
                name, {"id": name, "object": "model", "created": 0, "owned_by": "warmroute", "max_model_len": None}
            )
            if name in pod.adapters:
                card["parent"] = pod.models[0] if pod.models else None
            if pod.max_model_len_tokens is not None:
                card["max_model_len"] = min(card["max_model_len"] or pod.max_model_len_tokens, pod.max_model_len_tokens)
    return cards


def _admin(
    app: FastAPI, describe_pods: Callable[[], list[dict[str, Any]]], add_pod: AddPod, remove_pod: RemovePod
) -> None:
    """Only from this machine: whoever may add a pod may read every prompt."""

    @app.get("/admin/pods")
    async def pods(request: Request) -> list[dict[str, Any]]:
        only_local(request)
        return describe_pods()

    @app.post("/admin/pods", status_code=201)
    async def add(request: Request, pod: PodConfig) -> dict[str, str]:
        only_local(request)
        try:
            add_pod(pod)
        except ConfigError as error:
            raise MalformedRequest(str(error)) from error
        return {"status": "joining", "url": pod.url}

    @app.delete("/admin/pods/{pod_id:path}")
    async def remove(request: Request, pod_id: str) -> dict[str, str]:
        only_local(request)
        if not remove_pod(pod_id):
            raise HTTPException(404, f"There is no pod `{pod_id}`.")
        return {"status": "gone", "pod": pod_id}


def _drain(app: FastAPI, fleet: Fleet, drain_pod: DrainPod) -> None:
    """A draining pod keeps what it has and gets nothing new; undrained, it joins again through a probe."""

    def tell(request: Request, pod_id: str, event: PodEvent) -> dict[str, str]:
        only_local(request)
        if fleet.status(pod_id) is None:
            raise HTTPException(404, f"There is no pod `{pod_id}`.")
        return {"status": drain_pod(pod_id, event).value, "pod": pod_id}

    @app.post("/admin/pods/{pod_id:path}/drain")
    async def drain(request: Request, pod_id: str) -> dict[str, str]:
        return tell(request, pod_id, PodEvent.DRAIN)

    @app.post("/admin/pods/{pod_id:path}/undrain")
    async def undrain(request: Request, pod_id: str) -> dict[str, str]:
        return tell(request, pod_id, PodEvent.UNDRAIN)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(RouterError)
    async def ours(_request: Request, error: Exception) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _error_response(MethodNotAllowed(f"{request.url.path} does not take {request.method}."))
        if error.status_code == 404 and error.detail == "Not Found":
            return _error_response(UnknownEndpoint(f"Unknown path: {request.url.path}"))
        body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, status_code=error.status_code)


def _error_response(error: Exception) -> Response:
    body = error_body(error)
    headers = {name.decode(): value.decode() for name, value in error_headers(error, body)}
    return Response(body, status_code=response_for(error).status, headers=headers)
