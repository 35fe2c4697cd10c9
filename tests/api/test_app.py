"""The router's own endpoints for clients: health and models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from router.admission.names import ModelName, Names, NamesInUse
from router.admission.tenant import OPEN_TENANT
from router.config.schema import Edge, Limits
from router.errors import MethodNotAllowed, RouterError, UnknownEndpoint, UnknownModel
from router.fleet.fleet import Fleet
from router.frontends.http.app import public_app
from router.frontends.http.http_edge import HttpEdge
from tests.api.test_admin import POD, SMALL, error_of
from tests.kit.scenes import make_pod

pytestmark = pytest.mark.anyio


class PublicEndpoints:
    """The endpoints in front of two pods."""

    def __init__(self, **options: Any) -> None:
        self.fleet = Fleet()
        self.fleet.sync([POD, SMALL])
        self.is_ready = False
        self.refused: list[RouterError] = []
        self.names = NamesInUse()
        own = public_app(self.fleet, lambda: self.is_ready, self._lifespan, self.refused.append, self.names, **options)
        self.app = HttpEdge(Limits(), own)

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        yield

    async def _of_open_tenant(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application as `EdgeProtocol` calls it."""
        await self.app({**scope, "state": {"tenant": OPEN_TENANT}}, receive, send)

    async def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self._of_open_tenant))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.request(method, path, **more)


@pytest.fixture
def router() -> PublicEndpoints:
    return PublicEndpoints()


async def test_a_405_names_the_methods_of_the_path(router: PublicEndpoints) -> None:
    """RFC 9110 15.5.6. HEAD is GET without a body."""
    for path in ("/livez", "/v1/models", "/v1/models/m"):
        answer = await router.call("DELETE", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_a_running_router_is_alive(router: PublicEndpoints) -> None:
    answer = await router.call("GET", "/livez")
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/models", "/v1/models/lora"])
async def test_head_is_answered_like_get(router: PublicEndpoints, path: str) -> None:
    """Load balancers and uptime checks send it. The server omits the body."""
    router.is_ready = True
    head, got = await router.call("HEAD", path), await router.call("GET", path)
    assert (head.status_code, head.headers) == (200, got.headers)


async def test_readiness_says_no_more_than_ready_or_not(router: PublicEndpoints) -> None:
    """Pods and policies are none of a client's business."""
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})
    router.is_ready = True
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize("path", ["/health", "/metrics", "/admin/pods", "/admin/policies/reload", "/openapi.json"])
async def test_operators_have_no_endpoint_here(router: PublicEndpoints, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = await router.call(method, path)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")


async def test_models_are_merged_over_all_pods(router: PublicEndpoints) -> None:
    """`max_model_len` is the smallest; adapters name their parent."""
    listed = (await router.call("GET", "/v1/models")).json()
    assert {(card["object"], card["created"]) for card in listed["data"]} == {("model", 0)}
    assert listed["object"] == "list"
    cards = {card["id"]: card for card in listed["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {"m": 7, "lora": 9, "n": 7}
    assert cards["lora"]["parent"] == "m" and "parent" not in cards["m"]
    assert (await router.call("GET", "/v1/models/lora")).json() == cards["lora"]
    answer = await router.call("GET", "/v1/models/nobody")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    assert error_of(answer)["message"] == "The model `nobody` does not exist."


async def test_a_model_without_a_known_length_has_none(router: PublicEndpoints) -> None:
    """Until its engine was asked."""
    router.fleet.sync([make_pod("c", models=("m",))])
    assert (await router.call("GET", "/v1/models/m")).json()["max_model_len"] is None


async def test_unknown_paths_and_methods_have_openai_errors(router: PublicEndpoints) -> None:
    """404 and 405; a long path is cut."""
    answer = await router.call("GET", "/nowhere" + "x" * 5000)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert len(error_of(answer)["message"]) < 300
    answer = await router.call("POST", "/livez")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert error_of(answer)["message"] == "/livez does not support POST."


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
async def test_a_wrong_base_url_of_a_client_is_named(router: PublicEndpoints, path: str, meant: str) -> None:
    """With what the base URL should be."""
    answer = await router.call("GET", path)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert f" Did you mean {meant}? Base URLs of clients: http://ROUTER/v1 for OpenAI's" in error_of(answer)["message"]


@pytest.mark.parametrize("path", ["/x/", "/a%20b", "/caf%C3%A9", "/", "/ui", "/livez/x", "/v1/x/", "/tokenizer_info"])
async def test_a_404_never_advises_a_path_that_the_configuration_refuses(router: PublicEndpoints, path: str) -> None:
    """The rule that checks `edge` decides."""
    message = error_of(await router.call("POST", path))["message"]
    advised = re.search(r"can add this one under `edge\.(\w+)`", message)
    assert advised is not None or "cannot add this one: it " in message
    if advised:
        assert getattr(Edge.model_validate({advised[1]: (path,)}), advised[1]) == (path,)


@pytest.mark.parametrize("path", ["/health", "/healthz"])
async def test_a_probe_of_an_engine_is_told_those_of_the_router(router: PublicEndpoints, path: str) -> None:
    assert "/livez and /readyz" in error_of(await router.call("GET", path))["message"]


@pytest.mark.parametrize(
    ("path", "key"), [("/tokenizer_info", "edge.extra_paths"), ("/reset_prefix_cache", "edge.control_paths")]
)
async def test_an_unknown_path_names_the_key_that_adds_it(router: PublicEndpoints, path: str, key: str) -> None:
    """In OpenAI's format, with a bounded part of the path."""
    answer = await router.call("POST", path)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert path in error_of(answer)["message"] and key in error_of(answer)["message"]
    assert len((await router.call("GET", "/" + "a" * 10_000)).content) < 1000


async def test_realtime_sessions_are_not_routed(router: PublicEndpoints) -> None:
    """The message says where to connect."""
    for method in ("GET", "POST"):
        answer = await router.call(method, "/v1/realtime?model=m")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
        assert "websockets), which are not routed: connect to a pod" in error_of(answer)["message"]


async def test_loading_adapters_belongs_to_the_admin_listener(router: PublicEndpoints) -> None:
    """The message says so."""
    answer = await router.call("POST", "/v1/load_lora_adapter")
    assert answer.status_code == 404
    assert "admin listener" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", UnknownEndpoint),
        ("POST", "/livez", MethodNotAllowed),
        ("GET", "/v1/models/unknown", UnknownModel),
    ],
)
async def test_a_refused_request_is_reported(
    router: PublicEndpoints, method: str, path: str, expected: type[RouterError]
) -> None:
    """For its log line, with the code of the response. A probe of a router that is not ready is no such request."""
    assert (await router.call("GET", "/readyz")).status_code == 503
    answer = await router.call(method, path)
    assert [type(error) for error in router.refused] == [expected]
    assert error_of(answer)["code"] == expected.code


async def test_thousands_of_adapters_of_a_pod_do_not_block_requests(router: PublicEndpoints) -> None:
    """Others are served while their cards are made."""
    router.fleet.sync([make_pod("many", models=("base",), adapters=tuple(map(str, range(8000))))])
    listing, turns = asyncio.ensure_future(router.call("GET", "/v1/models")), 0
    while not listing.done():
        await asyncio.sleep(0)
        turns += 1
    cards = {card["id"]: card for card in listing.result().json()["data"]}
    assert (len(cards), cards["7999"]["parent"], "parent" in cards["base"]) == (8001, "base", False)
    assert turns > 100


# --- names ---


async def test_names_are_listed_with_the_shortest_context_that_they_may_become(router: PublicEndpoints) -> None:
    """Not those whose models no pod serves, and no beginnings."""
    cards = {card["id"]: card for card in (await router.call("GET", "/v1/models")).json()["data"]}
    lengths = [cards[name]["max_model_len"] for name in SMALL.models + POD.models]
    entry = ModelName("both", {**dict.fromkeys(SMALL.models + POD.models, 1.0), "gone": 1.0})
    router.names.current = Names({"both": entry, "gone": ModelName("gone", {"no": 1.0})}, (("x-", entry),))
    named = {card["id"]: card for card in (await router.call("GET", "/v1/models")).json()["data"]}
    assert named.keys() - cards.keys() == {"both"}
    assert named["both"]["max_model_len"] == min(length for length in lengths if length is not None)
    assert (await router.call("GET", "/v1/models/both")).json() == named["both"]
    assert (await router.call("GET", "/v1/models/gone")).status_code == 404


async def test_what_is_served_without_a_pod_is_listed_too() -> None:
    """Models and names whose requests wait for one, else names of which a provider is a fallback: clients that offer
    what is listed would never ask for the first pod."""
    names = Names({"paid": ModelName("paid", {"k": 1.0}, (), ("hosted",)), "gone": ModelName("gone", {"k": 1.0})})
    for options, listed in (
        ({}, []),
        ({"hosted": {"hosted"}}, ["paid"]),
        ({"waiting": frozenset({"k"})}, ["k", "paid", "gone"]),
    ):
        router = PublicEndpoints(**options)
        router.fleet.sync([])
        router.names.current = names
        cards = (await router.call("GET", "/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [(name, None) for name in listed]
        assert (await router.call("GET", "/v1/models/hosted")).status_code == 404
