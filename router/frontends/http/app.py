"""The endpoints that the public listener answers itself, with FastAPI.

`EdgeProtocol` takes every request for a pod before FastAPI sees it. The endpoints for operators are in `admin.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from router.admission.names import NamesInUse
from router.engines.forwarded_paths import LORA_PATHS, added_path, changes_engine, meant_hint
from router.errors import MethodNotAllowed, RouterError, UnknownEndpoint, UnknownModel, status_of
from router.feeds.supervise import in_turns
from router.fleet.fleet import Fleet
from router.frontends.http.request_head import shown
from router.request.error_responses import error_body, error_headers, error_object

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def probe_response(path: str, *, is_ready: bool) -> Response:
    if path == "/livez":
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "ready"}) if is_ready else JSONResponse({"status": "not ready"}, 503)


_Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
OnRefused: TypeAlias = Callable[[RouterError], None]


def public_app(
    fleet: Fleet,
    is_ready: Callable[[], bool],
    lifespan: _Lifespan,
    on_refused: OnRefused,
    names: NamesInUse | None = None,
    waiting: Collection[str] | None = None,
    hosted: Collection[str] = (),
) -> FastAPI:
    """The router's own endpoints for clients. They say nothing about pods and policies. `waiting`: models whose
    requests wait for a pod, as those of all names then do; None: no requests do. `hosted`: providers."""
    app = bare_app(lifespan, _forwarding_hint, on_refused)

    @app.get("/livez")
    @app.get("/readyz")
    async def probe(request: Request) -> Response:
        return probe_response(request.url.path, is_ready=is_ready())

    _add_models(app, fleet, names or NamesInUse(), waiting, hosted)
    return app


def bare_app(
    lifespan: _Lifespan | None = None,
    hint: Callable[[str], str] = lambda _path: "",
    on_refused: OnRefused = lambda _error: None,
) -> FastAPI:
    """A FastAPI application without endpoints, whose errors have the shape of the API that was called. `hint` is added
    to the message about an unknown path."""
    app = FastAPI(title="warmroute", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_error_handlers(app, hint, on_refused)
    return app


def _add_models(
    app: FastAPI, fleet: Fleet, names: NamesInUse, waiting: Collection[str] | None, hosted: Collection[str]
) -> None:
    def card(request: Request, name: str) -> dict[str, Any] | None:
        """OpenAI's model card, if the tenant may use the model or adapter. `EdgeProtocol` sets the tenant."""
        served = fleet.served.get(name)
        if served is None and name not in (waiting or ()):
            return named_card(request, name)
        served = served or ((name, ""), None)
        if not request.state.tenant.may_use(*served[0]):
            return None
        (base_model, adapter), max_model_len = served
        found = {"id": name, "object": "model", "created": 0, "owned_by": "warmroute", "max_model_len": max_model_len}
        return found | {"parent": base_model if base_model != adapter else None} if adapter else found

    def is_served(target: str) -> bool:
        return waiting is not None or target in fleet.served or target in hosted

    def named_card(request: Request, name: str) -> dict[str, Any] | None:
        """That of a name, if the tenant may use it and a model that it may become. The shortest context counts."""
        entry, tenant = names.current.exact.get(name), request.state.tenant
        targets = filter(is_served, entry.all_targets if entry else ())
        found = [fleet.served.get(to, ((to, ""), None)) for to in targets]
        lengths = [length for served, length in found if tenant.may_use(*served)]
        if not lengths or not tenant.may_use(name, ""):
            return None
        shortest = min((length for length in lengths if length is not None), default=None)
        return {"id": name, "object": "model", "created": 0, "owned_by": "warmroute", "max_model_len": shortest}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        listed = list(dict.fromkeys((*fleet.served, *(waiting or ()), *names.current.exact)))
        cards = [found async for name in in_turns(listed) if (found := card(request, name)) is not None]
        body = msgspec.json.encode({"object": "list", "data": cards})
        return Response(body, media_type="application/json")

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if not name:
            raise UnknownEndpoint(f"There is no name after /v1/models/.{meant_hint('/v1/models')}")
        found = card(request, name)
        if found is None:
            raise UnknownModel(f"The model `{name}` does not exist.", param="model")
        return JSONResponse(found)


def _add_error_handlers(app: FastAPI, hint: Callable[[str], str], on_refused: OnRefused) -> None:
    def refuse(request: Request, error: RouterError) -> Response:
        on_refused(error)
        body = error_body(error, request.url.path)
        headers = {name.decode(): value.decode() for name, value in error_headers(error, body)}
        return Response(body, status_code=status_of(error), headers=headers)

    @app.exception_handler(RouterError)
    async def router_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RouterError)
        return refuse(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405:
            why = f"{shown(path)} does not support {request.method}."
            return refuse(request, MethodNotAllowed(why, _methods_of(request.scope)))
        if error.status_code == 404 and error.detail == "Not Found":
            return refuse(request, UnknownEndpoint(f"Unknown path {shown(path)!r}.{hint(path)}"))
        body = error_object(str(error.detail), "invalid_request_error")
        return Response(body, status_code=error.status_code, media_type="application/json")


def _methods_of(scope: Scope) -> set[str]:
    """The methods of a path, by all routes of the application that is called."""
    routes: list[BaseRoute] = scope["app"].routes
    found = {m for m in _METHODS if any(one.matches({**scope, "method": m})[0] is Match.FULL for one in routes)}
    return found | {"HEAD"} if "GET" in found else found


def _forwarding_hint(path: str) -> str:
    if path in ("/health", "/healthz", "/ready", "/ping"):
        return " Probes of the router: /livez and /readyz."
    if path.startswith(("/admin", "/metrics")):
        return " The endpoints for operators are on the admin listener (`admin` in router.yaml)."
    if path in LORA_PATHS:
        return " Adapters are loaded on all pods of a model through the admin listener (`admin` in router.yaml)."
    if meant := meant_hint(path):
        return meant
    key = "`edge.control_paths`, because it changes engines" if changes_engine(path) else "`edge.extra_paths`"
    try:
        added_path(path)
        can_add = f"can add this one under {key}"
    except ValueError as error:
        can_add = f"cannot add this one: it {error}"
    return f" The router forwards the OpenAI and Anthropic inference paths; its operator {can_add}."
