"""Routers that share an index, over a real Redis: publishers beside the engines, several replicas, and what breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import httpx
import pytest

from router.config.policies import load_policies
from router.config.priors import load_priors
from router.config.schema import Feeds, Index, ModelConfig, PodConfig, Publish, RedisIndex, RouterConfig
from router.config.shipped import shipped
from router.prompt.tokenizer import Tokenizer
from router.sim.mock_engine import MockEngineConfig, MockFleet
from router.types import Generation
from router.wiring import Agent, Program
from tests.redis_process import RedisProcess, binaries, redis_process
from tests.stories.conftest import DEADLINE_S, SOURCE, SPEED, TEMPLATE, Chat, City, serving

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@pytest.fixture(params=sorted(binaries()))
def redis(request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    """One server, of each kind that is here."""
    with redis_process(request.param) as server:
        yield server


@dataclass(slots=True)
class Town:
    """Engines, a publisher for all of them, and as many routers as the story wants."""

    fleet: MockFleet
    redis: RedisProcess
    tokenizer: Tokenizer
    stack: AsyncExitStack
    reads: Literal["replica", "direct"] = "replica"
    agents: list[Agent] = field(default_factory=list)

    def config(self, **redis: Any) -> RouterConfig:
        return RouterConfig(
            models=(ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),),
            pods=tuple(PodConfig(url=each.url, speed=SPEED) for each in self.fleet.engines),
            feeds=Feeds(health_interval_s=0.1, load_interval_s=0.05, parity_retest_s=0.2),
            index=Index(redis=RedisIndex(url=self.redis.url, reads=self.reads, holder_lifetime_s=3.0, **redis)),
            publish=Publish(heartbeat_s=0.5, gather_ms=5, reload_spread_s=0.1),
        )

    async def router(self, **redis: Any) -> City:
        """One more replica, serving."""
        policies, priors = load_policies(shipped("policies")), load_priors(shipped("config") / "models")
        load = lambda source, *, fast: self.tokenizer  # noqa: E731
        program = Program(self.config(**redis), policies["cost_aware"], priors, load=load)
        url = await self.stack.enter_async_context(serving(program))
        client = await self.stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        return City(list(self.fleet.engines), program, client, url)

    async def publisher(self) -> Agent:
        """A publisher for all engines."""
        generation = Generation(model="demo", tokenizer=self.tokenizer.fingerprint)
        agent = Agent(self.config(), {"demo": generation})
        await self.stack.enter_async_context(_living(agent))
        self.agents.append(agent)
        return agent


@asynccontextmanager
async def _living(agent: Agent) -> AsyncIterator[None]:
    async with agent.app.router.lifespan_context(agent.app):
        yield


@pytest.fixture(params=["replica", "direct"])
async def town(
    request: pytest.FixtureRequest,
    redis: RedisProcess,
    tokenizer: Tokenizer,
    engine_config: Callable[..., MockEngineConfig],
) -> AsyncIterator[Town]:
    """Two engines and a publisher, for each way to read."""
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(MockFleet([engine_config()] * 2))
        town = Town(fleet, redis, tokenizer, stack, request.param)
        await town.publisher()
        yield town


def question(topic: str) -> Chat:
    """A chat of some hundred tokens about `topic`."""
    return [{"role": "user", "content": f"Tell me all about {topic}. " * 40}]


async def found_on(city: City, chat: Chat, pod: str) -> bool:
    """Does this router send the chat to that pod, for what is cached there?"""
    answer = await city.chat(chat)
    return answer.headers["x-warmroute-pod"] == pod and int(answer.headers["x-warmroute-cached-tokens"]) > 200


async def test_what_one_router_sent_another_finds(town: Town) -> None:
    """Routers hear of caches from the publishers, so that any replica sends a conversation where its blocks are."""
    first, second = await town.router(), await town.router()
    for topic in ("bees", "ants", "wasps", "moths"):
        sent = await first.chat(question(topic))
        pod = sent.headers["x-warmroute-pod"]

        await second.until(partial(found_on, second, question(topic), pod))
