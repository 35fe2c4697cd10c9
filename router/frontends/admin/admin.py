"""The endpoints of the admin listener. `admin_access.py` decides who may use them.

GET    /livez                       the process is alive; for everyone
GET    /readyz                      whether the router is ready; for callers with a token, with pods and policies
GET    /metrics                     for Prometheus; OpenMetrics, with exemplars, if `accept` names it
GET    /ui                          the operators' page; /ui/events is its data
GET    /admin/pods                  every pod with its state and load
POST   /admin/pods                  add a pod: an entry as under `pods` in router.yaml
DELETE /admin/pods/{id}             remove it
GET    /admin/drains                who began each drain, when and why, by its labels; also where no pod has them
POST   /admin/pods/{id}/drain       send it no new requests, or all with labels such as `rack=r12,zone=a`; `by`, `why`
POST   /admin/pods/{id}/undrain     let it join again, or all with these labels
GET    /admin/changes               the latest 200 changes: ejections, readmissions, restarts, policies, newest first
GET    /admin/policies              the active policies, and the error if the files are invalid
POST   /admin/policies/reload       read the files now: 200 with the changes, or 400 with file and line
GET    /admin/explain/{request_id}  a past decision with its costs and the outcome
POST   /admin/preview               the decision for a chat request that is not sent
POST   /v1/load_lora_adapter        load an adapter on all pods of a model; the body of vLLM's request, and `model`
POST   /v1/unload_lora_adapter      unload it
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from router.config.mistakes import explain_mistakes
from router.config.pod_schema import PodConfig
from router.errors import ConfigError, MalformedRequest, not_json, shortened
from router.feeds.discovery.membership import Membership
from router.feeds.policy_feed import PolicyFeed
from router.fleet.drains import Drain, Drains, selector_of, selects
from router.fleet.fleet import Fleet
from router.frontends.admin.lora_adapters import LoraAdapters, PodAnswer
from router.frontends.admin.page_snapshot import SnapshotStream, add_page_routes
from router.frontends.admin.views import describe_policies
from router.frontends.http.app import bare_app, probe_response
from router.guards import Bound, OutOfBounds
from router.observe.changes import Change
from router.observe.ended import RecordedDecision
from router.observe.fast_metrics import TextFormat, accepted_format
from router.observe.receipts import Explained, explained
from router.request.inbound import HeaderList, first_values
from router.types import Endpoint, InferenceRequest, PodId

_PATHS_HINT = (
    " This listener has /ui, /metrics, /livez, /readyz, /admin/pods, /admin/drains, /admin/changes, /admin/policies, "
    "/admin/preview, /admin/explain/ID and /v1/load_lora_adapter; requests of clients go to the other port "
    "(`listen` in router.yaml)."
)
ReadRequest = Callable[[Endpoint, Mapping[bytes, bytes], bytes, str], Awaitable[InferenceRequest]]


MAX_DRAIN_CHARACTERS = 100
COMMAND = Bound("command", 256 * 1024, 1000)
_DECODER = msgspec.json.Decoder(dict[str, Any])


async def _command(request: Request) -> dict[str, Any]:
    """The fields of a command. Raises `MalformedRequest`."""
    try:
        return COMMAND.json(await request.body(), _DECODER)
    except OutOfBounds as error:
        raise MalformedRequest(str(error)) from None
    except ValueError as error:
        raise not_json(error) from None


Command = Annotated[dict[str, Any], Depends(_command)]


@dataclass(frozen=True, slots=True)
class AdminRoutes:
    """The objects behind these endpoints. `share_drains` returns which routers know of drains, `readiness` whether the
    router is ready, and the details."""

    fleet: Fleet
    policies: PolicyFeed
    membership: Membership
    explain: ExplainRoutes
    describe_pods: Callable[[], list[dict[str, Any]]]
    share_drains: Callable[[], Awaitable[str]]
    changes: Callable[[], list[Change]]
    readiness: Callable[[], tuple[bool, dict[str, Any]]]
    render_metrics: Callable[[TextFormat], Awaitable[bytes]]
    page: SnapshotStream
    adapters: LoraAdapters
    has_tokens: bool = False
    """Whether callers need one; those without get the status of the router alone."""


def admin_app(routes: AdminRoutes) -> FastAPI:
    """The ASGI application with these endpoints. Serve it behind `AdminEdge`."""
    app = bare_app(hint=lambda _: _PATHS_HINT)

    @app.get("/livez")
    async def livez(request: Request) -> Response:
        return probe_response(request.url.path, is_ready=True)

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        ready, detail = routes.readiness()
        if routes.has_tokens and "authorization" not in request.headers:
            return probe_response(request.url.path, is_ready=ready)
        return JSONResponse(detail, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        text_format = accepted_format(request.headers.get("accept", ""))
        return Response(await routes.render_metrics(text_format), media_type=text_format.content_type)

    add_page_routes(app, routes.page)
    router = APIRouter(prefix="/admin")
    add_pod_routes(router, routes.membership, routes.describe_pods)
    add_drain_routes(router, routes.fleet, routes.membership.drains, routes.share_drains)
    add_policy_routes(router, routes.policies)

    @router.get("/changes")
    async def changes() -> Response:
        return Response(msgspec.json.encode(routes.changes()), media_type="application/json")

    routes.explain.add_to(router)
    app.include_router(router)
    add_adapter_routes(app, routes.adapters)
    return app


def add_adapter_routes(app: FastAPI, adapters: LoraAdapters) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(body: Command) -> Response:
        return _adapter_response(await adapters.change(body, load=True))

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: Command) -> Response:
        return _adapter_response(await adapters.change(body, load=False))


def _adapter_response(answers: Mapping[PodId, PodAnswer]) -> Response:
    """200 if all pods did it; else 502 with an error. Either names what became of each pod."""
    failed = [pod for pod, answer in answers.items() if not answer.done]
    body: dict[str, Any] = {"pods": {pod: answer.answer for pod, answer in answers.items()}}
    if failed:
        message = f"{len(failed)} of {len(answers)} pods failed: {', '.join(failed)}; repeat the request for these."
        body["error"] = {"message": message, "type": "upstream_error", "param": None, "code": "adapter_not_on_all_pods"}
    return JSONResponse(body, status_code=502 if failed else 200)


def add_pod_routes(router: APIRouter, membership: Membership, describe: Callable[[], list[dict[str, Any]]]) -> None:
    @router.get("/pods")
    async def pods() -> list[dict[str, Any]]:
        return describe()

    @router.post("/pods", status_code=201)
    async def add(body: Command) -> dict[str, str]:
        pod = _parsed_pod(body)
        try:
            membership.add(pod)
        except ConfigError as error:
            raise MalformedRequest(str(error)) from error
        return {"status": "joining", "url": pod.url}

    @router.delete("/pods/{pod_id:path}")
    async def remove(pod_id: str) -> dict[str, str]:
        if not membership.remove(pod_id):
            raise HTTPException(404, f"Unknown pod `{pod_id}`.")
        return {"status": "gone", "pod": pod_id}


def add_drain_routes(router: APIRouter, fleet: Fleet, drains: Drains, share: Callable[[], Awaitable[str]]) -> None:
    @router.get("/drains")
    async def in_force() -> dict[str, str]:
        return drains.reasons()

    @router.post("/pods/{pod:path}/drain")
    async def drain(pod: str, request: Request) -> dict[str, Any]:
        said = await _command(request) if await request.body() else {}
        by, why = (shortened(str(said.get(name) or ""), MAX_DRAIN_CHARACTERS) for name in ("by", "why"))
        return await change(pod, Drain(time.time(), by or "an admin call", why))

    @router.post("/pods/{pod:path}/undrain")
    async def undrain(pod: str) -> dict[str, Any]:
        return await change(pod, None)

    async def change(pod: str, drain: Drain | None) -> dict[str, Any]:
        if "=" not in pod and fleet.status(pod) is None:
            raise HTTPException(404, f"Unknown pod `{pod}`.")
        try:
            selector = selector_of(pod if "=" in pod else f"pod={pod}")
            if drain is None and "=" in pod and selector not in drains.current:
                raise HTTPException(404, f"No drain `{selector}`; in force: {', '.join(drains.current) or 'none'}.")
            drains.change(selector, drain)
        except ValueError as error:
            raise MalformedRequest(str(error), param="pod") from None
        known_to = await share()
        states = {one.pod.id: one.state.value for one in fleet.snapshot.pods if selects(selector, one.pod)}
        return {"status": states.get(pod, ""), "pod": pod, "pods": states, "known_to": known_to}


def _parsed_pod(body: dict[str, Any]) -> PodConfig:
    """Raises `MalformedRequest` with every wrong key, as for router.yaml, and without values."""
    try:
        return PodConfig.model_validate(body)
    except ValidationError as error:
        mistakes = explain_mistakes(error, PodConfig, body, lambda _: ("", 0), shows_values=False)
        raise MalformedRequest(mistakes, param=mistakes.partition(": ")[0]) from None


def add_policy_routes(router: APIRouter, feed: PolicyFeed) -> None:
    @router.get("/policies")
    async def policies() -> dict[str, Any]:
        return describe_policies(feed)

    @router.post("/policies/reload")
    async def reload() -> dict[str, Any]:
        done = await feed.reload()
        if done.error:
            raise MalformedRequest(done.error)
        return {"version": done.version, "changed": done.changed, "review": done.review}


PREVIEWED_TENANT = b"x-warmroute-tenant"
"""Header with the tenant of a preview, which the query parameter `tenant` sets."""


@dataclass(frozen=True, slots=True)
class ExplainRoutes:
    """The calls about decisions. `find` explains a request by its id, `read` parses a body, `preview` decides
    without sending."""

    find: Callable[[str], Explained | None]
    read: ReadRequest
    preview: Callable[[InferenceRequest, HeaderList], Awaitable[RecordedDecision]]

    def add_to(self, router: APIRouter) -> None:
        @router.get("/explain/{request_id:path}")
        async def explain(request_id: str) -> Response:
            found = self.find(request_id)
            if found is None:
                raise HTTPException(
                    404,
                    f"No decision about `{request_id}` is in memory: it is older than the last `receipts.keep`, or an "
                    "error answered it without one, as its line in the log and in `receipts.file` says.",
                )
            return Response(msgspec.json.encode(found), media_type="application/json")

        @router.post("/preview")
        async def preview(request: Request) -> Response:
            headers: HeaderList = list(request.scope["headers"])
            body = await request.body()
            named = dict(first_values(headers))
            if tenant := request.query_params.get("tenant"):
                named[PREVIEWED_TENANT] = tenant.encode("latin-1", "replace")
            parsed = await self.read(Endpoint.CHAT, named, body, f"preview-{uuid.uuid4().hex}")
            found = msgspec.json.encode(explained(await self.preview(parsed, headers)))
            return Response(found, media_type="application/json")
