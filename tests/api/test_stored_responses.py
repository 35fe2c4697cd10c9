"""Requests that name a stored response in their path, on their way through the edge."""

from __future__ import annotations

import json
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import pytest

from router.admission.names import ModelName, Names
from router.frontends.http.exchange import Exchange
from router.index.stored_responses import StoredResponse
from router.request.context import RequestContext
from router.types import Endpoint
from tests.api.test_openai_edge import make_edge
from tests.api.test_protocol import connected, read_answer, whole
from tests.kit.cores import CoreOfPods
from tests.request.test_reading import POD

pytestmark = [pytest.mark.anyio, pytest.mark.net]


async def ask(
    method: str, path: str, sent: bytes = b"", names: Names | None = None
) -> tuple[list[RequestContext], bytes, bytes]:
    """(what was forwarded, head, body). There are two models on two pods; `b` stores a response."""
    forwarded: list[RequestContext] = []

    async def forward(context: RequestContext, client: Exchange) -> None:
        forwarded.append(context)
        await whole(b"{}")(client)

    pods = [replace(POD, id=name, models=(f"model-{name}",)) for name in ("a", "b")]
    core = CoreOfPods([])
    core.state.stored.learn(StoredResponse("resp_1", "b", "model-b", monotonic()), monotonic())
    edge = cast(Any, make_edge(*pods, forward=forward, core=core, names=names))
    edge.connections = set()
    async with connected(edge) as (reader, writer):
        head = f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}"
        writer.write(f"{head}\r\n\r\n".encode() + sent)
        return forwarded, *await read_answer(reader)


@pytest.mark.parametrize(
    ("method", "action"),
    [
        ("GET", ""),
        ("GET", "?stream=true&starting_after=3"),
        ("POST", "/cancel"),
        ("DELETE", ""),
        ("GET", "/input_items"),
    ],
)
async def test_a_stored_response_needs_no_model(method: str, action: str) -> None:
    """The model is that of the response, also where the router serves several."""
    (context,), head, _ = await ask(method, f"/v1/responses/resp_1{action}")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (context.stored_pod, context.request.model) == ("b", "model-b")
    assert context.request.endpoint is Endpoint.OTHER


async def test_a_name_goes_on_with_the_model_of_the_stored_response() -> None:
    """Not with the one that a new conversation would have."""
    names = Names({"chat": ModelName("chat", {"model-a": 1e9, "model-b": 1.0})})
    sent = {"model": "chat", "input": "and?"}
    for more, expected in (({}, "model-a"), ({"previous_response_id": "resp_1"}, "model-b")):
        (context,), _, _ = await ask("POST", "/v1/responses", json.dumps({**sent, **more}).encode(), names)
        assert (context.request.name, context.request.model) == ("chat", expected)
        assert json.loads(context.request.body)["model"] == expected


async def test_an_unknown_response_is_a_404_that_says_why() -> None:
    """In the shape of OpenAI's errors; nothing is forwarded."""
    forwarded, head, body = await ask("GET", "/v1/responses/resp_2")
    assert head.startswith(b"HTTP/1.1 404 ") and not forwarded
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == (
        *("invalid_request_error", "response_id"),
        "response_not_found",
    )
    assert "was never stored" in error["message"]
