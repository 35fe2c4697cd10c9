"""A fleet that KEDA stops and starts: requests wait for its first pod, of which none is lost."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.live_k8s.api_server import CORE, ApiServer, checked
from tests.live_k8s.fake_keda import PROMETHEUS, Prometheus, define, keda, prometheus
from tests.live_k8s.release import NAME, Release, release, values
from tests.live_k8s.traffic import any_router

pytestmark = [
    pytest.mark.net,
    pytest.mark.anyio,
    pytest.mark.skipif(not PROMETHEUS.exists(), reason="prometheus is missing: make promtool"),
]
START_S = 20
"""How long a mock engine takes to start."""
HOLD_S, READ_TIMEOUT_S, KEEP_ALIVE_S = 120, 15.0, 5
TENANTS = {"acme": 120, "beta": 20, "corp": 20, "dune": 20, "echo": 20}
"""Requests of each; acme sends its own first."""
ALIAS = "gpt-4o"


def key_of(tenant: str) -> str:
    return f"sk-wr-{hashlib.sha256(tenant.encode()).hexdigest()[:40]}"


def chart_values() -> dict[str, Any]:
    config = values()["config"] | {"edge": {"keep_alive_s": KEEP_ALIVE_S}}
    config["limits"] = config["limits"] | {"hold_s": HOLD_S}
    pool = {"name": "chat", "engine": "mock", "servedModelName": "demo", "autoscaled": True}
    scaled = {"target": {"name": f"{NAME}-warmroute-chat"}, "models": ["demo"], "pool": "chat"}
    return values(
        config=config,
        names=[{"name": ALIAS, "to": "demo"}],
        tenants={"existingSecret": "tenants"},
        engineScaling=[scaled | {"minReplicas": 0, "maxReplicas": 1, "cooldownSeconds": 5}],
    ) | {"engines": {"pools": [pool | {"args": [f"--start-delay={START_S}"]}]}}


def create_tenants(server: ApiServer, namespace: str) -> None:
    digests = {name: hashlib.sha256(key_of(name).encode()).hexdigest() for name in TENANTS}
    lines = [f'- {{name: {name}, keys: ["{digest}"]}}\n' for name, digest in digests.items()]
    secret = {"metadata": {"name": "tenants"}, "stringData": {"tenants.yaml": "tenants:\n" + "".join(lines)}}
    with server.client() as client:
        checked(client.post(f"{CORE}/namespaces/{namespace}/secrets", json=secret))


@dataclass
class Zero:
    """A release without pods. `source`: what scrapes its routers."""

    release: Release
    source: Prometheus
    first_tokens: list[str]
    """Tenants in the order of their requests' first tokens."""

    async def stopped(self) -> None:
        await self.release.eventually(lambda: not self.release.node.pods("engine"), 180)

        async def unknown() -> bool:
            return all([not await self.release.known_pods(one) for one in self.release.routers])

        await self.release.eventually(unknown)

    async def ask(self, client: httpx.AsyncClient, tenant: str, number: int, *, stream: bool = True) -> str:
        """The answer, or why there is none."""
        text = f"{tenant} {number}: " + "The quick brown fox jumps over the lazy dog. " * 60
        body = {"model": ALIAS, "stream": stream, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        url, headers = await any_router(self.release), {"authorization": f"Bearer {key_of(tenant)}"}
        answer, is_first = "", True
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            async for part in response.aiter_text():
                if is_first and '"content":"' in part.replace('"content":""', ""):
                    self.first_tokens.append(tenant)
                    is_first = False
                answer += part
        is_whole = answer.rstrip().endswith("[DONE]") if stream else '"usage"' in answer
        return "ok" if response.status_code == 200 and is_whole else answer[-300:]


@pytest.fixture(scope="module")
async def zero(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Zero]:
    """Two routers, with a pool of engines that KEDA has stopped."""
    folder = tmp_path_factory.mktemp("zero")
    await define(api_server)
    async with release(api_server, "from-zero", folder) as found:
        create_tenants(api_server, found.namespace)
        await found.helm("install", NAME, found.chart(), "--server-side=false", values=chart_values())
        await found.eventually(lambda: len(found.routers) == 2)
        async with prometheus(found, folder) as source, keda(found, source):
            yield Zero(found, source, [])


async def test_200_requests_of_five_tenants_wait_for_the_first_pod(
    zero: Zero, record_property: Callable[[str, object], None]
) -> None:
    """None is lost, their order is fair, and clients that give up after 15 s of silence stay."""
    await zero.stopped()
    memory = 'max(process_resident_memory_bytes{container="router"})'
    before, began_s = await zero.source.ask(memory), asyncio.get_running_loop().time()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=READ_TIMEOUT_S, limits=limits) as client:
        asked = [(tenant, number) for tenant, count in TENANTS.items() for number in range(count)]
        answers = await asyncio.gather(*(zero.ask(client, *one) for one in asked), return_exceptions=True)
    took_s = asyncio.get_running_loop().time() - began_s
    assert Counter(map(repr, answers)) == {"'ok'": 200}
    waited = await zero.source.ask("max_over_time(sum(warmroute_requests_waiting_for_pods)[5m:1s])")
    after = await zero.source.ask("max_over_time(" + memory + "[5m:1s])")
    assert before is not None and after is not None
    early = Counter(zero.first_tokens[:60])
    record_property("seconds until all were served", round(took_s, 1))
    record_property("most that waited at once", waited)
    record_property("tenants of the first 60 answers", dict(early))
    record_property("MiB of the larger router before, and most", (round(before / 2**20), round(after / 2**20)))
    assert START_S < took_s < HOLD_S
    assert waited == 200
    assert {tenant: count / 60 for tenant, count in early.items()} == pytest.approx(
        dict.fromkeys(TENANTS, 0.2), abs=0.05
    )
    assert after - before < 100 * 2**20


async def test_a_request_that_comes_while_the_last_pod_stops_waits_for_the_next_one(zero: Zero) -> None:
    """An unstreamed one."""

    async def draining() -> bool:
        known = [await zero.release.known_pods(one) for one in zero.release.routers]
        return all("draining" in states.values() and "ready" not in states.values() for states in known)

    async with httpx.AsyncClient(trust_env=False, timeout=HOLD_S) as client:
        assert await zero.ask(client, "beta", 1000) == "ok"
        [last] = zero.release.engines
        await zero.release.node.delete(last)
        await zero.release.eventually(draining)
        assert await zero.ask(client, "corp", 1001, stream=False) == "ok"
