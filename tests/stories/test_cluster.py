"""Routers that share an index over a real Redis: publishers, several replicas, and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, running_engines
from router.config.index_schema import Index, Publish, RedisIndex
from router.config.load import shipped
from router.config.models import load_priors
from router.config.pod_schema import PodConfig
from router.config.schema import ModelConfig, Receipts, RouterConfig
from router.fleet.breaker import Probes
from router.prompt.tokenizer import Tokenizer
from router.types import Generation, Pod, PodState, PromptPrefix
from router.wiring.publisher_process import PublisherProcess
from router.wiring.router import build_router
from tests.kit import scenes
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.redis_process import RedisProcess, redis_process
from tests.stories.conftest import SOURCE, TEMPLATE, Chat, Deployment, serving

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@dataclass(slots=True)
class ClusterDeployment:
    """Engines, a publisher for all of them, and any number of routers."""

    engines: list[MockEngine]
    redis: RedisProcess
    tokenizer: Tokenizer
    stack: AsyncExitStack
    receipts: Receipts = field(default_factory=Receipts)
    tenants: str | None = None
    processes: list[PublisherProcess] = field(default_factory=list)
    lives: list[AsyncExitStack] = field(default_factory=list)

    def config(self, **redis: Any) -> RouterConfig:
        return RouterConfig(
            models=(ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),),
            pods=tuple(PodConfig(url=each.url, speed=LLAMA_8B) for each in self.engines),
            probes=Probes(health_interval_s=0.1, load_interval_s=0.05, self_test_interval_s=0.2),
            index=Index(redis=RedisIndex(url=SecretStr(self.redis.url), holder_ttl_s=3.0, **redis)),
            publish=Publish(heartbeat_s=0.5, flush_interval_ms=5, reload_jitter_s=0.1),
            receipts=self.receipts,
            tenants=self.tenants,
        )

    async def router(self, **redis: Any) -> Deployment:
        """Start another replica."""
        priors = load_priors(shipped("config") / "models")
        load = lambda source, *, fast: self.tokenizer  # noqa: E731
        program = build_router(self.config(**redis), shipped("policies"), priors, load=load)
        client, admin, url = await self.stack.enter_async_context(serving(program))
        return Deployment(self.engines, program, client, admin, url)

    async def publisher(self, **publish: Any) -> PublisherProcess:
        """Start a publisher for all engines."""
        generation = Generation(model="demo", tokenizer=self.tokenizer.fingerprint)
        config = self.config()
        given = config.model_copy(update={"publish": config.publish.model_copy(update=publish)})
        process = PublisherProcess(given, {"demo": generation})
        life = AsyncExitStack()
        await life.enter_async_context(process.app.router.lifespan_context(process.app))
        self.stack.push_async_exit(life)
        self.lives.append(life)
        self.processes.append(process)
        return process

    async def stop_publisher(self) -> None:
        """Stop as on SIGTERM."""
        await self.lives.pop().aclose()


@pytest.fixture
async def cluster(
    redis: RedisProcess,
    tokenizer: Tokenizer,
    engine_config: Callable[..., MockEngineConfig],
) -> AsyncIterator[ClusterDeployment]:
    """Two engines and a publisher."""
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running_engines([engine_config()] * 2))
        cluster = ClusterDeployment(engines, redis, tokenizer, stack)
        await cluster.publisher()
        yield cluster


async def test_the_cause_why_no_kv_events_arrive_is_known(cluster: ClusterDeployment) -> None:
    """A missing publisher, then a dead Redis: none of them is an engine without its flag."""
    router = await cluster.router()

    async def said(state: str, text: str) -> bool:
        pods = await router.pods()
        return all(pod["matching"] == state and text in pod["matching_reason"] for pod in pods)

    await router.until(lambda: said("events", ""))
    await cluster.stop_publisher()
    await router.until(lambda: said("no_events", "is in Redis: it is missing or has stopped; run `warmroute publish`"))
    cluster.redis.kill()
    await router.until(
        lambda: said("no_events", f"no KV events: Redis at 127.0.0.1:{cluster.redis.port} does not answer")
    )
    cluster.redis.start()
    await cluster.publisher()
    await router.until(lambda: said("events", ""))


def question(topic: str) -> Chat:
    """A chat of several hundred tokens about `topic`."""
    return [{"role": "user", "content": f"Explain all there is about {topic}. " * 40}]


async def found_on(deployment: Deployment, chat: Chat, pod: str) -> bool:
    """Whether this router sends the chat to that pod because of its cached blocks."""
    answer = await deployment.chat(chat)
    return answer.headers["x-warmroute-pod"] == pod and int(answer.headers["x-warmroute-cached-tokens"]) > 200


async def is_unknown(deployment: Deployment, chat: Chat) -> bool:
    """Whether this router finds no cached blocks of the chat."""
    reader = deployment.program.pods.prompts.readers["demo"]
    prefix = await reader.read(scenes.request("x", model="demo", body=b"", prompt={"messages": chat}))
    return isinstance(prefix, PromptPrefix) and not deployment.program.pods.state.store.match(prefix, 1e9).blocks


async def says_degraded(deployment: Deployment) -> bool:
    """Whether the router counts a degraded match."""
    await deployment.chat(question("bees"))
    text = (await deployment.admin.get("/metrics")).text
    return 'warmroute_degraded_matches_total{model="demo"}' in text


async def reset(cluster: ClusterDeployment) -> None:
    """Clear the engines' caches, as operators do when they replace weights."""
    async with httpx.AsyncClient() as client:
        for engine in cluster.engines:
            (await client.post(f"{engine.url}/reset_prefix_cache")).raise_for_status()


def pods_of(deployment: Deployment) -> list[Pod]:
    """The pods of this router."""
    return [status.pod for status in deployment.program.fleet.snapshot.pods]


def published(deployment: Deployment) -> list[bool]:
    """Whether a publisher writes its blocks, for each pod of this router."""
    store, now_s = deployment.program.pods.state.store, time.monotonic()
    return [store.is_published(pod.id, now_s) for pod in pods_of(deployment)]


async def test_a_router_finds_prompts_that_another_router_sent(cluster: ClusterDeployment) -> None:
    """Through the publishers' events."""
    first, second = await cluster.router(), await cluster.router()
    for topic in ("bees", "ants", "wasps", "moths"):
        sent = await first.chat(question(topic))
        pod = sent.headers["x-warmroute-pod"]

        await second.until(partial(found_on, second, question(topic), pod))


async def test_no_request_fails_without_redis(cluster: ClusterDeployment) -> None:
    """Matches are degraded until Redis returns, even if it returns empty."""
    router = await cluster.router()
    pod = (await router.chat(question("bees"))).headers["x-warmroute-pod"]
    await router.until(partial(found_on, router, question("bees"), pod))
    cluster.redis.kill()
    answers = [await router.chat(question(topic)) for topic in ("bees", "ants", "bees", "bees")]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[-1].headers["x-warmroute-pod"] == pod
    await router.until(partial(says_degraded, router))
    cluster.redis.start()
    other = await cluster.router()
    await other.until(partial(found_on, other, question("bees"), pod))


async def test_new_weights_do_not_match_blocks_of_the_old(cluster: ClusterDeployment) -> None:
    """Blocks of the new weights are found by every router."""
    first, second = await cluster.router(), await cluster.router()
    pod = (await first.chat(question("bees"))).headers["x-warmroute-pod"]
    await second.until(partial(found_on, second, question("bees"), pod))
    await reset(cluster)
    cluster.processes[0].publisher.replace_revision("demo", "2")
    await second.until(partial(is_unknown, second, question("bees")))
    pod = (await first.chat(question("bees"))).headers["x-warmroute-pod"]
    await second.until(partial(found_on, second, question("bees"), pod))


async def test_a_stopped_publisher_removes_its_holders(cluster: ClusterDeployment) -> None:
    """Requests are still served, and the next publisher adds them again."""
    router = await cluster.router()
    await router.chat(question("bees"))
    await cluster.stop_publisher()
    await router.until(lambda: not any(published(router)))
    assert (await router.chat(question("bees"))).status_code == 200
    await cluster.publisher()
    await router.until(lambda: all(published(router)))


async def test_a_restarted_engine_is_empty_for_all_routers(cluster: ClusterDeployment) -> None:
    first, second = await cluster.router(), await cluster.router()
    pod = (await first.chat(question("bees"))).headers["x-warmroute-pod"]
    await second.until(partial(found_on, second, question("bees"), pod))
    engine = next(each for each in cluster.engines if pod in each.url)
    engine.inject(Fault(kind=FaultKind.RESTART))
    await second.until(partial(is_unknown, second, question("bees")))


def draining(deployment: Deployment) -> set[str]:
    """The pods that this router drains."""
    fleet = deployment.program.fleet
    return {one.pod.id for one in fleet.snapshot.pods if one.state is PodState.DRAINING}


async def test_a_drain_is_of_all_routers_and_stays_without_redis(cluster: ClusterDeployment) -> None:
    """A router that starts later has it before it serves. What is drained or undrained while Redis is away is shared
    when it returns, even if it returns empty."""
    first, second = await cluster.router(), await cluster.router()
    one, other = sorted(pod.id for pod in pods_of(first))
    answer = await first.admin.post(f"/admin/pods/{one}/drain", json={"by": "ada", "why": "new power supply"})
    assert answer.json()["known_to"] == "all routers"
    await second.until(lambda: draining(second) == {one})
    assert "drained by ada" in second.program.fleet.state_reason(one)
    third = await cluster.router()
    assert draining(third) == {one}

    cluster.redis.kill()
    alone = (await second.admin.post(f"/admin/pods/{other}/drain")).json()["known_to"]
    assert alone.startswith("this router alone, until Redis answers")
    assert (await second.admin.post(f"/admin/pods/{one}/undrain")).status_code == 200
    assert (draining(first), draining(second), draining(third)) == ({one}, {other}, {one})
    cluster.redis.start()
    for router in (first, second, third):
        await router.until(lambda router=router: draining(router) == {other})
