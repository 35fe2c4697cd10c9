"""The publisher's HTTP server, and what the doctor says of publishers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from router.cli import doctor
from router.cli.admin_client import AdminClient
from router.cli.doctor import PROBES, Finding, findings
from router.config.index_schema import StandardBackend
from router.wiring.publisher_process import PublisherProcess
from tests.index_verify import verify_index
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import SOURCE, TEMPLATE
from tests.stories.test_cluster import ClusterDeployment, cluster, found_on, question, redis

__all__ = ["cluster", "redis"]

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@asynccontextmanager
async def publisher_client(process: PublisherProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the publisher's HTTP server, without a socket."""
    transport = httpx.ASGITransport(app=process.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://publisher") as client:
        yield client


def event(number: int, **fields: Any) -> dict[str, Any]:
    """A standardised event of a tier called `shelf`: one stored block of 16 tokens."""
    return {
        "event_id": number,
        "event_type": "stored",
        "backend_id": "shelf",
        "medium": "cpu",
        "block_size": 16,
        "seq_hashes": [number],
        "base_block_idx": 0,
        "token_ids": list(range(number, number + 16)),
        **fields,
    }


async def test_readiness_and_metrics_of_a_publisher(cluster: ClusterDeployment) -> None:
    """Ready once all holders are in the index; its metrics list every holder."""
    async with publisher_client(cluster.processes[0]) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(ready)
        holders = (await client.get("/readyz")).json()["holders"]
        assert [holder["state"] for holder in holders] == ["publishing"] * 2
        assert (await client.get("/livez")).json() == {"status": "alive"}
        metrics = (await client.get("/metrics")).text
        assert 'model="demo",state="publishing"} 1.0' in metrics and 'model="demo",state="standby"} 0.0' in metrics
        assert "warmroute_publisher_written_blocks_total{" in metrics and "warmroute_requests" not in metrics


async def test_a_pod_that_is_gone_leaves_the_index_and_the_metrics(cluster: ClusterDeployment) -> None:
    """Its blocks cannot be read any more."""
    process = cluster.processes[0]
    stays, leaves = (status.pod for status in process.fleet.snapshot.pods)
    async with publisher_client(process) as client, Redis.from_url(cluster.redis.url) as connection:

        async def published() -> bool:
            return bool([key async for key in connection.scan_iter(f"*:holder:{leaves.id}")])

        async def removed() -> bool:
            return not await published()

        await until(published)
        process.fleet.sync([stays])
        assert [holder.id for holder in process.publisher.holders] == [stays.id]
        await until(removed)
        assert leaves.id not in (await client.get("/metrics")).text


async def test_a_revision_is_replaced_over_http(cluster: ClusterDeployment) -> None:
    """404 for a model that is not published."""
    async with publisher_client(cluster.processes[0]) as client:
        answer = await client.post("/revision", json={"model": "demo", "revision": "2"})
        assert answer.json() == {"model": "demo", "revision": "2"}
        assert all(holder.generation.revision == "2" for holder in cluster.processes[0].publisher.holders)
        refused = await client.post("/revision", json={"model": "other", "revision": "2"})
        assert refused.status_code == 404 and "demo" in refused.json()["error"]


async def test_any_tier_can_send_standardised_events(cluster: ClusterDeployment) -> None:
    """An object, a list or JSON lines. Repeated events are ignored, invalid ones rejected; a gap is recorded."""
    store = StandardBackend(kind="standard", backend="shelf", model="demo", readable_by="*")
    process = await cluster.publisher(stores=(store,))
    async with publisher_client(process) as client:
        lines = "\n".join(json.dumps(event(number)) for number in (1, 2))
        assert (await client.post("/kv-events", content=lines)).json() == {"applied": 2, "known": 0}
        assert (await client.post("/kv-events", content=lines)).json() == {"applied": 0, "known": 2}
        assert (await client.post("/kv-events", json=[event(5)])).json() == {"applied": 1, "known": 0}
        holder = next(each for each in process.publisher.holders if each.id.startswith("shelf"))
        assert not holder.complete
        for bad, field in ((event(6, backend_id="attic"), "backend_id"), (event(6, token_ids=[1]), "token_ids")):
            refused = await client.post("/kv-events", json=bad)
            assert (refused.status_code, refused.json()["field"]) == (422, field)
        assert (await client.post("/kv-events", content=b"{")).status_code == 422
        await until(lambda: holder.written_blocks >= 3)


async def test_the_doctor_lists_publishers_and_says_what_is_missing(
    cluster: ClusterDeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configuration of the routers: all well, without a publisher, without Redis."""
    monkeypatch.setattr(doctor, "load_tokenizer", loaded_tokenizer)
    router = await cluster.router()
    pod = (await router.chat(question("bees"))).headers["x-warmroute-pod"]
    await router.until(partial(found_on, router, question("bees"), pod))
    config = tmp_path / "router.yaml"
    model = {"name": "demo", "tokenizer": SOURCE.path, "chat_template": TEMPLATE}
    config.write_text(json.dumps({"models": [model], "index": {"redis": {"url": cluster.redis.url}}}))

    async def is_whole() -> bool:  # the last blocks may be on their way
        verified = await verify_index(config)
        return len(verified) == 2 and all(one.agrees and one.stale == 0 for one in verified)

    await router.until(is_whole)
    shown = await examined(cluster)
    levels = {each.about: each.level for each in shown}
    for engine in cluster.engines:
        (text,) = (each.text for each in shown if each.about == f"publisher of {engine.url}")
        assert "blocks of demo, last seen" in text
        assert "serves demo; matching events" in next(
            each.text for each in shown if engine.url.endswith(each.about[4:])
        )
    assert levels[f"Redis 127.0.0.1:{cluster.redis.port}"] == "ok"
    await cluster.stop_publisher()
    shown = await examined(cluster)
    assert "none is in Redis; run `warmroute publish` for each pod" in [each.text for each in shown]
    cluster.redis.kill()
    shown = await examined(cluster)
    assert next(each for each in shown if each.about.startswith("Redis")).level == "fail"
    assert all("Redis at 127.0.0.1" in each.text for each in shown if each.about.startswith("pod "))


async def examined(cluster: ClusterDeployment) -> list[Finding]:
    """In a loop of its own, which loading tokenizers blocks."""
    checked = partial(findings, cluster.config(), PROBES, AdminClient(), offline=False)
    return await asyncio.to_thread(lambda: asyncio.run(checked()))


async def until(holds: Any) -> None:
    """Poll; the story has a deadline."""
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)


async def test_an_invalid_revision_is_refused_without_its_values(cluster: ClusterDeployment) -> None:
    """The answer names the field and is short."""
    async with publisher_client(cluster.processes[0]) as client:
        answer = await client.post("/revision", json={"model": "demo", "revision": {"secret": "x" * 5000}})
        assert (answer.status_code, answer.json()["field"]) == (422, "revision")
        assert "secret" not in answer.text and len(answer.content) < 1000
        answer = await client.post("/revision", json={"model": "m" * 5000, "revision": "2"})
        assert answer.status_code == 404 and len(answer.content) < 1000
