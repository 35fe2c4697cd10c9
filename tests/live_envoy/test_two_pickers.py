"""Two pickers behind one Envoy, which share a Redis, decide nearly as well as one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
import redis

from tests.live_envoy.gateway import Gateway, chat, running_gateway, wait_for
from tests.redis_process import redis_process
from tests.redis_servers.server import binaries

pytestmark = pytest.mark.net
SESSIONS, TURNS, PODS = 24, 6, 4
SHARED = [f"You keep the book of harbour {number}. " + "Write down boats and cargo. " * 60 for number in range(4)]


async def cached_share(gateway: Gateway) -> float:
    """Sessions that grow, of four system prompts, eight at once. Returns the share of prompt tokens that were cached,
    as engines count them."""
    prompt = cached = 0
    places = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:

        async def session(number: int) -> None:
            nonlocal prompt, cached
            chance, messages = random.Random(number), [{"role": "system", "content": SHARED[number % len(SHARED)]}]
            for _ in range(TURNS):
                words = " ".join(str(chance.randrange(1000)) for _ in range(100))
                messages.append({"role": "user", "content": words})
                async with places:
                    answer = await client.post("/v1/chat/completions", json=chat() | {"messages": messages})
                assert answer.status_code == 200, answer.text
                body: dict[str, Any] = answer.json()
                prompt += body["usage"]["prompt_tokens"]
                cached += (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"] or "-"})

        await asyncio.gather(*map(session, range(SESSIONS)))
    return cached / prompt


def admins(gateway: Gateway) -> list[str]:
    """Where each picker answers operators."""
    pickers = [command for name, command in gateway.commands.items() if name.startswith("picker")]
    return [gateway.admin, *(f"http://127.0.0.1:{command[-1]}" for command in pickers if "--admin-port" in command)]


def decided(admin: str) -> int:
    """Requests that a picker has served."""
    lines = httpx.get(f"{admin}/metrics").text.splitlines()
    return sum(int(float(x.rpartition(" ")[2])) for x in lines if x.startswith("warmroute_requests_total{"))


def knows_all_caches(gateway: Gateway) -> bool:
    pods = [pod for admin in admins(gateway) for pod in httpx.get(f"{admin}/admin/pods").json()]
    return {pod["hits"] for pod in pods} == {"full, by events"}


def test_two_pickers_share_the_requests_and_find_the_same_hits() -> None:
    """A publisher writes the engines' KV events to the Redis that both read. Traffic begins as soon as Envoy knows that
    both are healthy: its workers must not use one alone for the time in which it collects changes."""
    shares: dict[int, float] = {}
    for pickers in (1, 2):
        with redis_process(sorted(binaries())[0]) as server:
            index = {"redis": {"url": server.url}}
            with running_gateway(engines=PODS, pickers=pickers, time_scale=1.0, publishes=True, index=index) as gateway:
                wait_for(lambda: knows_all_caches(gateway), "a picker has no KV events")
                shares[pickers] = asyncio.run(cached_share(gateway))
                requests = [decided(admin) for admin in admins(gateway)]
                assert len(requests) == pickers and sum(requests) == SESSIONS * TURNS
                assert min(requests) > SESSIONS * TURNS / pickers * 0.9, requests
                [key] = redis.Redis.from_url(server.url).keys("*routers*")
                assert redis.Redis.from_url(server.url).hlen(key) == pickers, "each writes its work in flight"
                wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)
    print(f"cached share of one picker {shares[1]:.1%}, of two {shares[2]:.1%}")
    assert shares[1] > 0.5
    assert shares[2] > shares[1] - 0.08, shares
