"""What requests used: clients read what an engine would write, bills and metrics have what engines counted."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.types import Endpoint
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- bills and metrics ---


TEXT = "A long document about stamps. " * 30


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """Two tenants that share prefixes."""
    file = tmp_path / "tenants.yaml"
    rows = [f"- {{name: {name}, share: all, keys: [{sha256(name.encode()).hexdigest()}]}}" for name in ("acme", "zeta")]
    file.write_text("tenants:\n" + "\n".join(rows) + "\n")
    return file


async def engine_counters(deployment: Deployment) -> Counter[str]:
    """Tokens that the engines have counted: of prompts, from caches, and generated."""
    found: Counter[str] = Counter()
    names = {"prompt_tokens": "prompt", "prefix_cache_hits": "cached", "generation_tokens": "output"}
    async with httpx.AsyncClient() as client:
        for engine in deployment.engines:
            text = (await client.get(f"{engine.url}/metrics")).text
            for name, kind in names.items():
                value = re.search(rf"^vllm:{name}_total{{.*}} ([0-9.]+)$", text, re.MULTILINE)
                assert value is not None
                found[kind] += int(float(value[1]))
    return found


async def send(deployment: Deployment, tenant: str, path: str, text: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {tenant}"}
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 7, **fields}
    return await deployment.client.post(path, json=body, headers=headers)


async def leave(deployment: Deployment, text: str, events: int) -> None:
    """Begin a stream and leave it after about `events` tokens."""
    headers = {"authorization": "Bearer zeta"}
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4000, "stream": True}
    async with deployment.client.stream("POST", Endpoint.CHAT.value, json=body, headers=headers) as answer:
        async for _ in answer.aiter_lines():
            events -= 1
            if not events:
                return


class UsageLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the file."""

    id: str
    request_id: str
    at_s: float
    tenant: str
    model: str
    endpoint: str
    status: int
    result: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    adapter: str = ""
    name: str = ""
    ttft_ms: float | None = None
    estimated: tuple[str, ...] = ()


def lines(file: Path) -> list[UsageLine]:
    return [msgspec.json.decode(line, type=UsageLine) for line in file.read_bytes().splitlines()]


def totals(used: list[UsageLine]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in used:
        assert one.prompt_tokens == one.cached_tokens + one.computed_tokens
        found += Counter(prompt=one.prompt_tokens, cached=one.cached_tokens, output=one.output_tokens)
    return found


async def metric_totals(deployment: Deployment) -> Counter[str]:
    text = (await deployment.admin.get("/metrics")).text
    found: Counter[str] = Counter()
    for kind, value in re.findall(r'^warmroute_usage_tokens_total{kind="(\w+)".*} ([0-9.]+)$', text, re.MULTILINE):
        found[kind] += int(float(value))
    del found["computed"]
    return found


async def counters_after_tests(deployment: Deployment) -> Counter[str]:
    """The engines' counters once the router has sent them its own prompts, which test their hits."""
    store, fleet = deployment.program.pods.state.store, deployment.program.fleet
    await deployment.until(
        lambda: all("by events" not in store.cache_of(one.pod.id).hits for one in fleet.snapshot.pods)
    )
    return await engine_counters(deployment)


async def test_the_engines_have_counted_what_the_router_has(deploy: Deploy, tenants: Path, tmp_path: Path) -> None:
    """For both APIs, with and without streams, hits, retries on another pod, errors and unknown models."""
    file, usage = tmp_path / "usage.jsonl", {"stream": True, "stream_options": {"include_usage": True}}
    async with deploy(2, tenants=tenants, usage=file) as deployment:
        before = await counters_after_tests(deployment)
        for number in range(12):
            tenant, text = ("acme", "zeta")[number % 2], f"{TEXT} {number // 3}"
            await send(deployment, tenant, Endpoint.CHAT.value, text)
            await send(deployment, tenant, Endpoint.CHAT.value, text, **usage)
            await send(deployment, tenant, Endpoint.MESSAGES.value, text)
            await send(deployment, tenant, Endpoint.MESSAGES.value, text, stream=True)
        assert (await send(deployment, "acme", Endpoint.CHAT.value, TEXT, model="none")).status_code == 404
        pod = (await send(deployment, "acme", Endpoint.CHAT.value, TEXT)).headers["x-warmroute-pod"]
        engine = next(each for each in deployment.engines if each.url.endswith(pod))
        engine.inject(Fault(kind=FaultKind.RESET))
        engine.inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.BAD_REQUEST))
        statuses = [(await send(deployment, "acme", Endpoint.CHAT.value, TEXT)).status_code for _ in range(8)]
        assert statuses.count(400) == 1 and statuses.count(200) == 7 and not engine.faults.armed
        engines = await engine_counters(deployment) - before
        counted = await metric_totals(deployment)
    found = lines(file)
    assert totals(found) == counted == engines
    assert not any(one.estimated for one in found if one.status == 200)
    assert len({one.id for one in found}) == len(found) and {one.tenant for one in found} == {"acme", "zeta"}
    assert [(one.status, one.prompt_tokens) for one in found if one.status != 200] == [(404, 0), (400, 0)]
    assert sum(one.ttft_ms is not None for one in found) == 24


async def test_a_stream_that_its_client_leaves_is_counted_until_then(
    deploy: Deploy, tenants: Path, tmp_path: Path
) -> None:
    """The prompt exactly; of the output, tokens that were on their way are missing."""
    file = tmp_path / "usage.jsonl"
    async with deploy(1, tenants=tenants, usage=file, engine={"time_scale": 0.2}) as deployment:
        before = await counters_after_tests(deployment)
        for number in range(6):
            await leave(deployment, f"{TEXT} {number}", 20 + 10 * number)
        await deployment.until(lambda: all(engine.load.running == 0 for engine in deployment.engines))
        await deployment.until(lambda: deployment.program.metrics.in_flight.value == 0)
        engines = await engine_counters(deployment) - before
    found = lines(file)
    assert [one.result for one in found] == ["client_gone"] * 6
    assert all("output_tokens" in one.estimated and one.output_tokens >= 5 for one in found)
    ours = totals(found)
    assert (ours["prompt"], ours["cached"]) == (engines["prompt"], engines["cached"])
    assert engines["output"] - 6 * 20 <= ours["output"] <= engines["output"]


# --- what a client of a stream sees ---


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"model": "demo", "prompt": "Hello", "max_tokens": 6, "temperature": 0}
OPTIONS = [None, {"include_usage": False}, {"include_usage": True}, {"continuous_usage_stats": True}]


def masked(stream: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*"|"created":\d+|"\w*cached?_tokens":\d+|"system_fingerprint":"[^"]*"', b"x", stream)


async def test_a_client_that_reads_the_choice_of_each_chunk_goes_on_to_the_end(deploy: Deploy) -> None:
    """As examples do, and many programs. The router still has the counts of the engine."""
    async with deploy(1) as deployment:
        url = f"{deployment.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: Any = {**CHAT, "stream": True}
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert all(chunk.choices[0] is not None and chunk.usage is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].system_fingerprint
        page = (await deployment.admin.get("/metrics")).text
        assert re.search(r"^warmroute_reported_prompt_tokens_total\{.*\} [1-9]", page, re.MULTILINE)
        assert re.search(r"^warmroute_time_per_output_token_seconds_count\{.*\} 1\.0$", page, re.MULTILINE)


async def test_bytes_are_those_of_an_engine_without_a_router(deploy: Deploy) -> None:
    """Whether the engine is forced to send usage or not."""
    async with deploy(1) as plain, deploy(1, engine={"forces_usage": True}) as forced, httpx.AsyncClient() as client:
        for (path, body), options in product((("chat/completions", CHAT), ("completions", COMPLETION)), OPTIONS):
            asked = {**body, "stream": True} | ({"stream_options": options} if options else {})
            direct = await client.post(f"{plain.engines[0].url}/v1/{path}", json=asked)
            routed = [await each.client.post(f"/v1/{path}", json=asked) for each in (plain, forced)]
            assert direct.status_code == 200
            assert [masked(answer.content) for answer in routed] == [masked(direct.content)] * 2
