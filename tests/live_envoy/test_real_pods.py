"""The openai and anthropic SDKs, Envoy, the picker and two real vLLM pods: predictions equal the engines' counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import free_port
from tests.live import test_messages, test_vllm
from tests.live.engines import HOME, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS, LiveFleet, check_sessions, take_turns
from tests.live.router_process import await_conversions
from tests.live_envoy.gateway import DUPLEX, running_gateway, wait_for

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]
SESSIONS, TURNS = 5, 5
MODES: dict[str, tuple[Any, ...]] = {"documented": (), "duplex": (DUPLEX,)}


@pytest.fixture(scope="module")
def pods() -> Iterator[list[Any]]:
    if not Path(test_vllm.MODEL).is_dir():
        pytest.skip(f"no vLLM in {HOME}: tests/live/install.sh")
    start = partial(start_vllm, model_dir=test_vllm.MODEL, extra_args=AGENT_FLAGS)
    starts = [lambda n=n: start(f"envoy-{n}", free_port(), kv_port=free_port()) for n in range(2)]
    with started_together(starts) as running:
        yield running


@pytest.fixture(scope="module", params=MODES)
def fleet(request: pytest.FixtureRequest, pods: list[Any]) -> Iterator[LiveFleet]:
    """The picker has proven how the pods convert messages."""
    config: dict[str, Any] = {
        "models": [{"name": "tiny", "tokenizer": str(test_vllm.MODEL)}],
        "pods": [{"url": pod.url, "engine": "vllm"} for pod in pods],
        "probes": {},
    }
    ports = [int(pod.url.rpartition(":")[2]) for pod in pods]
    with running_gateway(*MODES[request.param], other_pods=ports, **config) as gateway:
        trusted = f"{gateway.admin}/admin/pods"
        wait_for(lambda: all(pod["trust"] == "trusted" for pod in httpx.get(trusted).json()), "pods are not trusted")
        await_conversions(gateway.admin, "/v1/messages")
        yield LiveFleet(pods, gateway.url, gateway.admin)
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_predictions_equal_the_engines_counts_through_the_openai_sdk(
    fleet: LiveFleet, stream: bool, request: pytest.FixtureRequest
) -> None:
    sessions = [test_vllm.ChatSession(f"{request.node.name} {n}") for n in range(SESSIONS)]
    async with fleet.openai_sdk() as client:
        check_sessions(await take_turns(sessions, TURNS, partial(test_vllm.ask, client, stream=stream)))


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_predictions_equal_the_engines_counts_through_the_anthropic_sdk(
    fleet: LiveFleet, stream: bool, request: pytest.FixtureRequest
) -> None:
    sessions = [test_messages.MessagesSession(f"{request.node.name} {n}", None) for n in range(SESSIONS)]
    async with fleet.anthropic_sdk() as client:
        check_sessions(await take_turns(sessions, TURNS, partial(test_messages.ask, client, stream=stream)))
