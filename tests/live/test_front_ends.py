"""One vLLM with its front end in Python and one with that in Rust, behind one router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.live_fleet import DEADLINE_S, LiveFleet, live_fleet

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
AT_ONCE = 4
HELLO = [{"role": "user", "content": "Hello"}]
LACKING: dict[str, tuple[int, str, dict[str, Any]]] = {
    "messages": (100, "/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    "responses": (100, "/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    "n = 2": (20, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "n": 2}),
    "prompts": (20, "/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 2}),
}
"""What the front end in Rust has not got: how many, path and body."""


def _start(name: str, port: int, *, kv_port: int) -> EngineProcess:
    environment = {"VLLM_USE_RUST_FRONTEND": "1"} if name.endswith("1") else {}
    return start_vllm(name, port, MODEL, kv_port=kv_port, installed="vllm33", environment=environment)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_fleet("front-end", tmp_path_factory.mktemp("router"), MODEL, _start) as running:
        yield running


async def _pods(fleet: LiveFleet) -> dict[str, dict[str, Any]]:
    """By front end."""
    async with httpx.AsyncClient() as client:
        pods = (await client.get(f"{fleet.admin_url}/admin/pods")).json()
    return {pod["front_end"]: pod for pod in pods}


async def test_each_request_goes_to_a_pod_that_serves_it(fleet: LiveFleet) -> None:
    """None fails, none is sent to the pod that cannot once that is known, and nothing is ejected; chats go to both."""
    async with asyncio.timeout(DEADLINE_S):
        while len((rust := (await _pods(fleet))["rust"])["lacks"]) < 8:
            await asyncio.sleep(0.1)
    gate, statuses, served_by = asyncio.Semaphore(AT_ONCE), Counter[tuple[str, int]](), Counter[tuple[str, str]]()

    async def send(client: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]) -> None:
        async with gate:
            answer = await client.post(path, json={"model": "tiny", **body})
        statuses[kind, answer.status_code] += 1
        served_by[kind, answer.headers["x-warmroute-pod"]] += 1

    async with httpx.AsyncClient(base_url=fleet.url, timeout=DEADLINE_S) as client, asyncio.TaskGroup() as sending:
        for kind, (count, path, body) in LACKING.items():
            for _ in range(count):
                sending.create_task(send(client, kind, path, body))
        for number in range(40):
            chat = {"messages": [{"role": "user", "content": f"{number} Hello"}], "max_tokens": 2}
            sending.create_task(send(client, "chats", "/v1/chat/completions", chat))
    assert statuses == {**{(kind, 200): count for kind, (count, _, _) in LACKING.items()}, ("chats", 200): 40}
    assert {kind for kind, pod in served_by if pod == rust["id"]} == {"chats"}
    pods = await _pods(fleet)
    assert {pod["state"] for pod in pods.values()} == {"ready"}
    assert (pods[""]["lacks"], pods[""]["version"], rust["version"]) == ([], "0.33.0", "0.33.0")


async def test_the_block_size_of_the_front_end_in_rust_comes_from_its_events(fleet: LiveFleet) -> None:
    """Its metrics have none, nor a capacity."""
    async with asyncio.timeout(DEADLINE_S):
        while (pod := (await _pods(fleet))["rust"])["block_size_tokens"] is None:
            await asyncio.sleep(0.1)
    assert (pod["block_size_tokens"], pod["capacity_tokens"], pod["matching"]) == (32, None, "events")
