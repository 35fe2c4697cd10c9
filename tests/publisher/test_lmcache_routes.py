"""The HTTP responses that LMCache servers expect of a coordinator."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from router.publisher.lmcache import SERVER_TIMEOUT_S, Coordinator, lmcache_routes
from tests.kit.sinks import RecordingSink

pytestmark = pytest.mark.anyio


SERVER = {"instance_id": "cache-0", "ip": "10.0.0.7", "http_port": 8080, "metadata": {}, "mq_port": 0}
BATCH = {"instance_id": "cache-0", "incarnation": 1, "seq": 1, "event_type": "config", "tier": "l1", "backend": "dram"}


def client(coordinator: Coordinator, now_s: float = 0.0) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(lmcache_routes(coordinator, lambda: now_s))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://coordinator")


async def test_responses_equal_those_of_lmcaches_own_coordinator() -> None:
    """Status codes and bodies of lmcache 0.5.6."""
    async with client(Coordinator("m", RecordingSink())) as http:
        beat = await http.put("/instances/cache-0/heartbeat")
        assert (beat.status_code, beat.json()) == (404, {"error": "unknown instance cache-0; re-register"})
        registered = await http.post("/instances", json=SERVER)
        assert (registered.status_code, registered.json()) == (
            200,
            {"instance_id": "cache-0", "re_registered": False},
        )
        beat = await http.put("/instances/cache-0/heartbeat")
        assert (beat.status_code, beat.json()) == (200, {"instance_id": "cache-0"})
        reported = await http.post("/events", json={"batches": [BATCH, BATCH]})
        assert (reported.status_code, reported.json()) == (200, {"applied": 1, "duplicates": 1, "stale": 0})
        assert [row["instance_id"] for row in (await http.get("/instances")).json()["instances"]] == ["cache-0"]
        left = await http.delete("/instances/cache-0")
        assert (left.status_code, left.content) == (204, b"")
        assert (await http.get("/instances")).json() == {"instances": []}


@pytest.mark.parametrize("path", ["/events", "/instances"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"batches": 1, "ip": 1}', b"\xff"])
async def test_invalid_bodies_are_422_with_the_reason(path: str, body: bytes) -> None:
    async with client(Coordinator("m", RecordingSink())) as http:
        answer = await http.post(path, content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"]


async def test_registrations_use_the_clock_of_the_routes() -> None:
    coordinator = Coordinator("m", RecordingSink())
    async with client(coordinator, now_s=100.0) as http:
        await http.post("/instances", json=SERVER)
    coordinator.expire(100.0 + SERVER_TIMEOUT_S)
    assert coordinator.instances()["instances"]
    coordinator.expire(100.0 + SERVER_TIMEOUT_S + 1)
    assert not coordinator.instances()["instances"]
