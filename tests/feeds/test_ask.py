"""Questions to pods, and what may come of them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.feeds.ask import Unanswered, get, open_client, post
from router.types import Pod

pytestmark = pytest.mark.anyio
MakePod = Callable[..., Pod]
Network = Any


async def test_an_answer_is_its_body(network: Network, make_pod: MakePod) -> None:
    """Under the pod's own path prefix."""
    network["a"].answers["/prefix/metrics"] = b"up 1"
    pod = make_pod("a", url="http://a/prefix")
    assert await get(network.client, pod, "/metrics", 1.0) == b"up 1"


async def test_an_answer_is_gone_when_it_is_read(network: Network, make_pod: MakePod) -> None:
    """httpx makes a cycle of it, of forty objects: with a hundred pods, thousands a second to be searched for."""
    network["a"].answers["/metrics"] = b"up 1"
    gc.collect()
    gc.disable()
    try:
        await get(network.client, make_pod("a"), "/metrics", 1.0)
        assert not any(isinstance(one, httpx.Response) for one in gc.get_objects())
    finally:
        gc.enable()


async def test_a_post_is_json_for_the_pods_rank(network: Network, make_pod: MakePod) -> None:
    """Ranks that share a port are told apart by a header."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> bytes:
        seen.append(request)
        return b"done"

    network["a"].answers["/tokenize"] = answer
    assert await post(network.client, make_pod("a", dp_rank=1), "/tokenize", {"prompt": "é"}, 1.0) == b"done"
    assert json.loads(seen[0].content) == {"prompt": "é"}
    assert seen[0].headers["content-type"] == "application/json"
    assert seen[0].headers["x-data-parallel-rank"] == "1"


async def test_whatever_is_not_200_is_no_answer(network: Network, make_pod: MakePod) -> None:
    """The reason names path and status."""
    network["a"].statuses["/health"] = 503
    with pytest.raises(Unanswered, match="/health was answered with 503") as caught:
        await get(network.client, make_pod("a"), "/health", 1.0)
    assert not caught.value.refused


async def test_a_closed_port_is_a_refusal(network: Network, make_pod: MakePod) -> None:
    """Unlike an answer that is broken off."""
    network["a"].refuses = True
    with pytest.raises(Unanswered) as caught:
        await get(network.client, make_pod("a"), "/health", 1.0)
    assert caught.value.refused

    def broken(request: httpx.Request) -> bytes:
        raise httpx.RemoteProtocolError("cut", request=request)

    network["b"].answers["/health"] = broken
    with pytest.raises(Unanswered, match="cut") as caught:
        await get(network.client, make_pod("b"), "/health", 1.0)
    assert not caught.value.refused


async def test_the_whole_exchange_has_one_deadline(network: Network, make_pod: MakePod) -> None:
    """A pod that accepts and says nothing is given up."""
    network["a"].hangs.add("/health")
    with pytest.raises(Unanswered, match=r"within 0\.001 s") as caught:
        await get(network.client, make_pod("a"), "/health", 0.001)
    assert not caught.value.refused


async def test_the_shared_client_asks_for_plain_bytes_and_heeds_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods are inside; a proxy of the environment is not for them."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")
    async with open_client() as client:
        assert client.headers["accept-encoding"] == "identity"
        assert client.trust_env is False
