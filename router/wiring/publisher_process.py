"""Builds the publisher (`warmroute publish`).

It discovers and probes pods as a router does, follows their KV events and writes their blocks to the cluster index.
Stores and other cache tiers are added through sources.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import structlog
from fastapi import FastAPI

from router.config.index_schema import LmcacheServers, MooncakeStore, StoreConfig
from router.config.load import ENGINE_TOKENIZER
from router.config.pod_schema import PodConfig, default_id
from router.config.schema import ModelConfig, RouterConfig
from router.config.tokenizer_files import load_tokenizer
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import OWNERS
from router.errors import ConfigError
from router.feeds.discovery.membership import Membership
from router.feeds.kv_zmq import KvStreams
from router.feeds.pod_log import log_changes
from router.feeds.probe import PodProbe
from router.feeds.supervise import running
from router.feeds.watch import Watch
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.frontends.http.upstream import UpstreamPools
from router.frontends.prompts import source_of
from router.index.holders import ALL_PODS, HolderFacts
from router.publisher.lmcache import Coordinator, expire_servers, lmcache_routes
from router.publisher.mooncake_source import Listing, MooncakeSource
from router.publisher.publisher import Publisher, StoreSink
from router.publisher.publisher_app import PublisherMetrics, publisher_app
from router.publisher.standard_events import StandardIntake
from router.stores.redis_connection import connect
from router.stores.redis_schema import Keys
from router.types import Generation, Pod, PodSpeed, PodState
from router.wiring.pod_sources import pod_sources

log = structlog.get_logger()

_NO_SPEED = PodSpeed(0.0, 0.0, 0.0)
"""A publisher prices no plans."""


class PublisherProcess:
    """The publisher process. `app` is its HTTP application, whose lifespan starts and stops everything else."""

    def __init__(self, config: RouterConfig, generations: Mapping[str, Generation]) -> None:
        if config.index.redis is None:
            raise ConfigError("index.redis: required by `warmroute publish`")
        self._config = config
        redis = config.index.redis
        self._connection = connect(redis)
        keys, ttl_s = Keys(redis.namespace), redis.holder_ttl_s
        self.publisher = Publisher(
            self._connection, keys, dict(generations), self._facts, config.publish, holder_ttl_s=ttl_s
        )
        self.metrics = PublisherMetrics()
        self.fleet = Fleet()
        self.fleet.listen(log_changes(self.fleet))  # first, so that lines are in the order of the changes
        self._breaker = Breaker(self.fleet, config.probes)
        self._pools = UpstreamPools(config.limits)
        self._streams = KvStreams(self.fleet, self.publisher, self.metrics.kv, self._breaker.exceeded)
        published = config.model_copy(update={"pods": tuple(_with_router_id(pod) for pod in config.pods)})
        self._membership = Membership(self.fleet, lambda *_: (_NO_SPEED, 0), pod_sources(published).by_name)
        self._membership.check(published.pods)
        self.fleet.listen(self._remove_gone)
        self.standard = StandardIntake()
        self._feeds: dict[str, Callable[[], Awaitable[None]]] = {"idle connections": self._pools.expire_idle}
        render = partial(self.metrics.render, self.publisher, self.fleet)
        self.app = publisher_app(self.publisher, render, self.standard, self._life)
        for store in config.publish.stores:
            self._add_store(store)

    @asynccontextmanager
    async def _life(self, _app: FastAPI) -> AsyncIterator[None]:
        probe = PodProbe(self.fleet, self._breaker, self._pools.fetch, self._on_described, self._config.probes)
        feeds = {**self._feeds, "checks of pods": Watch(self.fleet, [[probe.check]]).run, **self._membership.feeds}
        log.info("publishing", pods=[pod.url for pod in self._config.pods], models=sorted(self.publisher.generations))
        try:
            async with running(feeds):
                yield
        finally:
            began_s, holders = time.monotonic(), self.publisher.holders
            written_blocks = sum(holder.written_blocks for holder in holders)
            await self._streams.stop()
            await self.publisher.stop()
            stop_s = round(time.monotonic() - began_s, 3)
            log.info("stopped", holders=len(holders), written_blocks=written_blocks, stop_s=stop_s)
            self._pools.close()
            await self._connection.close()

    # --- stores ---

    def _add_store(self, store: StoreConfig) -> None:
        if store.model not in self.publisher.generations:
            known = ", ".join(sorted(self.publisher.generations))
            raise ConfigError(f"publish.stores: model {store.model!r} is not configured under models; known: {known}")
        if isinstance(store, MooncakeStore):
            self._add_mooncake(store)
        elif isinstance(store, LmcacheServers):
            self._add_lmcache(store)
        else:
            facts = HolderFacts(url=store.url or "", reach=store.readable_by, source="standard")
            self.standard.add(store.backend, StoreSink(self.publisher, store.model, lambda _holder: facts))

    def _add_mooncake(self, store: MooncakeStore) -> None:
        facts = HolderFacts(reach=store.readable_by, source="mooncake")
        source = MooncakeSource(
            store.id,
            store.url,
            Listing(store.key_prefix or store.model, store.group),
            StoreSink(self.publisher, store.model, lambda _holder: facts),
            self._pools.get_url,
            store.poll_interval_s,
        )
        self._feeds[f"mooncake {store.id}"] = source.run

    def _add_lmcache(self, store: LmcacheServers) -> None:
        """Pods of a server's host can read the tiers of that server; all pods can read shared tiers."""

        def facts_of(holder: str) -> HolderFacts:
            return HolderFacts(reach=coordinator.host_of(holder) or ALL_PODS, source="lmcache")

        sink = StoreSink(self.publisher, store.model, facts_of)
        coordinator = Coordinator(store.engine_model_name or store.model, sink, store.group)
        self.app.include_router(lmcache_routes(coordinator))
        self._feeds[f"lmcache {store.model}"] = partial(expire_servers, coordinator)

    # --- pods ---

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._streams.leave(pod.id)
            self._pools.remove(pod.id)
            self.publisher.end(pod.id)

    def _on_described(self, pod: Pod, facts: PodFacts) -> None:
        if self._membership.report(pod, OWNERS.get(facts.owner, ""), facts.dp_size):
            return
        self._membership.describe(pod, facts)
        model = next((name for name in facts.models if name in self.publisher.generations), None)
        if model is None:
            log.warning("pod serves no configured model", pod=pod.id, models=facts.models)
            return
        source = self._membership.kv_events_of(pod, facts.kv_events)
        if source is None:
            log.warning("pod publishes no KV events", pod=pod.id, reason=facts.no_events)
            return
        described = self.fleet.status(pod.id)
        self._streams.follow(described.pod if described else pod, self.publisher.generations[model], source)

    def _facts(self, pod: Pod) -> HolderFacts:
        config = self._membership.config_of(pod)
        return HolderFacts(
            url=(config.advertised_url if config else None) or pod.url,
            rank=-1 if pod.dp_rank is None else pod.dp_rank,
            source=pod.engine,
        )


def _with_router_id(pod: PodConfig) -> PodConfig:
    """The pod with the id that routers derive from its advertised URL. All sidecars have the same local URL."""
    if pod.id or pod.advertised_url is None:
        return pod
    return pod.model_copy(update={"id": default_id(pod.advertised_url)})


def generation_of(model: ModelConfig) -> Generation:
    """The generation that routers with the same configuration use. Loads the tokenizer for its fingerprint."""
    if model.tokenizer in (None, ENGINE_TOKENIZER):
        return model.generation()
    return model.generation(load_tokenizer(source_of(model), fast=False).fingerprint)
