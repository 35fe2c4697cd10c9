"""One vLLM with its front end in Python and one with that in Rust, behind one router."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.live_fleet import AGENT_FLAGS, DEADLINE_S, TEXT, Answer, LiveFleet, answer_of, live_fleet, take_turns
from tests.live.router_process import router

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
AT_ONCE = 4
CHATS, TURNS = 200, 4
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
    return start_vllm(
        name,
        port,
        MODEL,
        kv_port=kv_port,
        # Without a parser of reasoning: answers are texts at both. Either has space for all chats.
        extra_args=[*AGENT_FLAGS[:3], "--num-gpu-blocks-override", "8192"],
        installed="vllm33",
        environment=environment,
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_fleet("front-end", tmp_path_factory.mktemp("router"), MODEL, _start) as running:
        yield running


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def _tool(name: str, least: float) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "number", "minimum": least, "maximum": 2**64}}}
    return {"type": "function", "function": {"name": name, "description": f"{name}. {TEXT}", "parameters": schema}}


class MixedChat:
    """A chat of an agent that grows: each has what one front end reads otherwise than the other."""

    def __init__(self, number: int) -> None:
        self.name = f"chat-{number}"
        self._number = number
        about = f"Chat {number}. {TEXT * (1 + number % 5)}"
        billing = "x-anthropic-billing-header: cc_version=2.1; cch=a1;\n"
        openings: list[list[dict[str, Any]]] = [
            [{"role": "system", "content": _parts(about, TEXT)}],
            [{"role": "developer", "content": about}],
            [{"role": "system", "content": billing + about}],
            [{"role": "developer", "content": about, "tools": [_tool("count", 1e-7)]}],
            [{"role": "system", "content": about, "name": "ann"}, {"role": "developer", "content": _parts("a", "b")}],
        ]
        self._messages = openings[number % len(openings)]
        self._fields = {"tools": [_tool("look", 1.5e-7), _tool("rest", 0.00001)]} if number % 2 else {}

    def asked(self, turn: int) -> dict[str, Any]:
        texts = (f"Question {turn} of {self._number}.", TEXT)
        self._messages.append({"role": "user", "content": _parts(*texts) if turn % 2 else " ".join(texts)})
        return {"model": "tiny", "max_tokens": 4, "messages": self._messages, **self._fields}

    def answered(self, turn: int, body: dict[str, Any]) -> None:
        said = body["choices"][0]["message"].get("content") or "Well."
        if turn % 2:
            self._messages.append({"role": "assistant", "content": said, "reasoning": "" if turn == 1 else "Hm."})
            return
        arguments = json.dumps({"x": 1e-7 * (turn + 1), "big": 2**64 + turn, "far": [1e16, -0.0], "text": said})
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        self._messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{turn}", "content": _parts("21.5 C", TEXT)},
        ]


async def _pods(admin_url: str) -> dict[str, dict[str, Any]]:
    """By front end."""
    async with httpx.AsyncClient() as client:
        pods = (await client.get(f"{admin_url}/admin/pods")).json()
    return {pod["front_end"]: pod for pod in pods}


async def test_each_request_goes_to_a_pod_that_serves_it(fleet: LiveFleet) -> None:
    """None fails, none is sent to the pod that cannot once that is known, and nothing is ejected; chats go to both."""
    async with asyncio.timeout(DEADLINE_S):
        while len((rust := (await _pods(fleet.admin_url))["rust"])["lacks"]) < 8:
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
    pods = await _pods(fleet.admin_url)
    assert {pod["state"] for pod in pods.values()} == {"ready"}
    assert (pods[""]["lacks"], pods[""]["version"], rust["version"]) == ([], "0.33.0", "0.33.0")


async def _with_block_size(admin_url: str) -> dict[str, Any]:
    """The pod with the front end in Rust, once the router knows its block size."""
    async with asyncio.timeout(DEADLINE_S):
        while (pod := (await _pods(admin_url))["rust"])["block_size_tokens"] is None:
            await asyncio.sleep(0.1)
    return pod


async def test_the_block_size_of_the_front_end_in_rust_comes_from_its_events(fleet: LiveFleet) -> None:
    """Its metrics have none, nor a capacity."""
    pod = await _with_block_size(fleet.admin_url)
    assert (pod["block_size_tokens"], pod["capacity_tokens"], pod["matching"]) == (32, None, "events")


async def test_each_front_end_caches_what_was_predicted_of_its_chats(fleet: LiveFleet, tmp_path: Path) -> None:
    """In every request, at both pods: also by a router that has seen none of them, and has only the pods' events."""
    chats = [MixedChat(number) for number in range(CHATS)]
    front_ends = {pod["id"]: name or "python" for name, pod in (await _pods(fleet.admin_url)).items()}
    last: dict[str, dict[str, Any]] = {}
    results: Counter[str] = Counter()
    wrong: list[tuple[Any, ...]] = []

    async def send(client: httpx.AsyncClient, body: dict[str, Any], run: str) -> Answer:
        raw = await client.post("/v1/chat/completions", json=body)
        assert raw.status_code == 200, (raw.text, body)
        answer = answer_of(raw.headers, raw.json())
        kind = f"{run}, {front_ends[answer.pod]}"
        results[f"{kind}: requests"] += 1
        results[f"{kind}: tokens"] += answer.prompt
        results[f"{kind}: cached"] += answer.reported
        if answer.predicted != answer.reported:
            wrong.append((kind, answer.predicted, answer.reported, answer.prompt, body["messages"][0]))
        return answer

    async with httpx.AsyncClient(base_url=fleet.url, timeout=DEADLINE_S) as client:

        async def ask(body: dict[str, Any]) -> Answer:
            answer = await send(client, body, "turns")
            name = f"{answer.pod} {body['messages'][0]}"
            last[name] = {**body, "messages": list(body["messages"])}
            return answer

        await take_turns(chats, TURNS, ask)
        assert {(pod["state"], *pod["misreads"]) for pod in (await _pods(fleet.admin_url)).values()} == {("ready",)}
    options = {
        "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
        "pods": [{"url": pod.url, "engine": "vllm"} for pod in fleet.pods],
    }
    with router(tmp_path, options) as urls:
        await _with_block_size(urls.admin)
        async with httpx.AsyncClient(base_url=urls.public, timeout=DEADLINE_S) as client:
            for body in [*last.values()][-CHATS:]:
                await send(client, body, "again, by events alone")
    print(dict(results))
    assert wrong == []
    for name in front_ends.values():
        assert results[f"turns, {name}: requests"] > CHATS / 4 and results[f"turns, {name}: cached"]
        assert (
            results[f"again, by events alone, {name}: cached"] > results[f"again, by events alone, {name}: tokens"] / 2
        )
