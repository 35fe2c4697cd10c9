"""The endpoints that the router answers itself: health, metrics, models and admin calls, with FastAPI.

`EdgeProtocol` takes every request for a pod before FastAPI sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from router.admission.gate import AdmissionGate
from router.api.admin import ExplainRoutes, add_pod_routes, add_policy_routes, admin_router
from router.api.admin_commands import AdminCommands
from router.api.error_responses import error_body, error_headers, error_object, response_for
from router.api.openai_edge import OpenAiEdge
from router.api.request_target import shown
from router.api.views import describe_readiness, model_cards
from router.engines.forwarded_paths import changes_engine
from router.errors import MethodNotAllowed, RouterError, UnknownEndpoint
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class App:
    """The served application: `edge` forwards requests to pods, `own` answers the others, `gate` checks both."""

    def __init__(self, edge: OpenAiEdge, own: FastAPI, gate: AdmissionGate) -> None:
        self.edge = edge
        self.gate = gate
        self.is_stopping = False
        """Each response closes its connection, so that the client reconnects to another router."""
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # the server sends no body
        await self._own(scope, receive, send)

    def begin_stopping(self) -> None:
        """Make `/readyz` fail and each response close its connection."""
        self.is_stopping = self._own.state.is_stopping = True


@dataclass(frozen=True, slots=True)
class OwnRoutes:
    """The objects behind the router's own endpoints."""

    fleet: Fleet
    policies: PolicyFeed
    commands: AdminCommands
    explain: ExplainRoutes
    describe_pods: Callable[[], list[dict[str, Any]]]
    render_metrics: Callable[[], Awaitable[bytes]]


def own_app(routes: OwnRoutes, lifespan: Lifespan) -> FastAPI:
    """The ASGI application with these endpoints."""
    app = FastAPI(title="warmroute", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.is_stopping = False
    _add_health(app, routes)
    _add_models(app, routes.fleet)
    admin = admin_router()
    add_pod_routes(admin, routes.fleet, routes.commands, routes.describe_pods)
    add_policy_routes(admin, routes.policies, routes.commands)
    routes.explain.add_to(admin)
    app.include_router(admin)
    _add_error_handlers(app)
    return app


def _add_health(app: FastAPI, routes: OwnRoutes) -> None:
    @app.get("/health")  # engines have this path: probes written for a pod work for the router, too
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        ready, detail = describe_readiness(routes.fleet, routes.policies, is_stopping=app.state.is_stopping)
        return JSONResponse(detail, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await routes.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, fleet: Fleet) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(model_cards(fleet.snapshot.pods).values())}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card = model_cards(fleet.snapshot.pods).get(name)
        if card is None:
            raise HTTPException(404, f"The model `{name}` does not exist.")
        return JSONResponse(card)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RouterError)
    async def router_error(_request: Request, error: Exception) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _error_response(MethodNotAllowed(f"{request.url.path} does not support {request.method}."))
        if error.status_code == 404 and error.detail == "Not Found":
            return _error_response(UnknownEndpoint(_unknown_path(request.url.path)))
        body = error_object(str(error.detail), "invalid_request_error")
        return Response(body, status_code=error.status_code, media_type="application/json")


def _unknown_path(path: str) -> str:
    operators = "`edge.control_paths`, because it changes engines" if changes_engine(path) else "`edge.extra_paths`"
    return (
        f"Unknown path {shown(path)!r}. The router forwards the OpenAI and Anthropic inference paths; "
        f"its operator can add this one under {operators}."
    )


def _error_response(error: Exception) -> Response:
    body = error_body(error)
    headers = {name.decode(): value.decode() for name, value in error_headers(error, body)}
    return Response(body, status_code=response_for(error).status, headers=headers)
