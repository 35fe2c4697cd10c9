"""Decides which pods exist: merges the pod sets of all sources and applies the result to the fleet.

Admin calls are one more source and override the others: an added pod replaces a pod with the same URL, and a removed
pod is ignored until an admin call adds it again or all sources drop its URL.

A new source is a class with the one method of `PodSource` in a file of its own, a key in `config/schema.py`, and a line
in `wiring/pod_sources.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

import structlog

from router.config.pod_schema import KvEvents, PodConfig
from router.engines.adapter import KvEventSource
from router.engines.engine_catalog import DIALECTS
from router.errors import ConfigError
from router.feeds.supervise import Feeds
from router.fleet.fleet import Fleet
from router.types import Pod, PodId, PodSpeed, Role

PriorOf: TypeAlias = Callable[[PodConfig, tuple[str, ...]], tuple[PodSpeed, int]]
"""Maps (pod, its models, empty if not reported yet) to speed and KV bytes per token. Raises `ConfigError`."""

ADMIN = "admin calls"

log = structlog.get_logger()


class PodSource(Protocol):
    """Finds pods."""

    def __aiter__(self) -> AsyncIterator[Sequence[PodConfig]]:
        """Complete sets of pods: the current one first, then one after each change. After an error, `supervise`
        iterates again; meanwhile the last set stays in use."""


class ConfiguredPods:
    """The pods of the configuration file: one set that never changes."""

    def __init__(self, pods: Sequence[PodConfig]) -> None:
        self._pods = pods

    async def __aiter__(self) -> AsyncIterator[Sequence[PodConfig]]:
        yield self._pods


class Membership:
    """The single owner of the set of pods. `sources` by name; of two pods with one URL the later source wins."""

    def __init__(self, fleet: Fleet, prior: PriorOf, sources: Mapping[str, PodSource]) -> None:
        self._fleet = fleet
        self._prior = prior
        self._sources = sources
        self._by_source: dict[str, dict[str, PodConfig]] = {name: {} for name in (*sources, ADMIN)}
        self._removed: frozenset[str] = frozenset()
        """URLs that an admin call removed and a source still lists."""
        self._configs: dict[str, PodConfig] = {}
        self.pods: tuple[Pod, ...] = ()
        """All pods with the speed of their cost prior."""

    @property
    def feeds(self) -> Feeds:
        return {f"pods of {name}": partial(self._follow, name, source) for name, source in self._sources.items()}

    def config_of(self, pod: Pod) -> PodConfig | None:
        """The definition of a pod; None if it is gone."""
        return self._configs.get(pod.url)

    def kv_events_of(self, pod: Pod, reported: KvEventSource | None) -> KvEventSource | None:
        """Where the pod publishes its KV events: as configured, else as `reported` by the engine."""
        config = self._configs.get(pod.url)
        if config is None or config.kv_events == "off":
            return None
        if isinstance(config.kv_events, KvEvents):
            return KvEventSource(config.kv_events.endpoint, config.kv_events.replay_endpoint)
        return reported

    def check(self, pods: Iterable[PodConfig]) -> None:
        """Raises `ConfigError` if these pods share an id or one has no prior."""
        self._pods_of({pod.url: pod for pod in pods})

    def replace(self, source: str, pods: Iterable[PodConfig]) -> None:
        """Replace the pod set of a source. Raises `ConfigError`; the old set stays then."""
        self._apply({**self._by_source, source: {pod.url: pod for pod in pods}}, self._removed)

    def add(self, pod: PodConfig) -> None:
        """An admin call adds a pod or replaces the one with its URL. Raises `ConfigError`, also for a credential file
        that no other source names: the pod would receive the content of any file."""
        listed = [known for name in self._sources for known in self._by_source[name].values()]
        if pod.auth is not None and pod.auth not in [known.auth for known in listed]:
            raise ConfigError("auth.bearer_file: admin calls can only name files that a pod of the configuration names")
        if pod.tls is not None and pod.tls not in [known.tls for known in listed]:
            raise ConfigError("tls: admin calls can only name files that a pod of the configuration names")
        added = {**self._by_source[ADMIN], pod.url: pod}
        self._apply({**self._by_source, ADMIN: added}, self._removed - {pod.url})

    def remove(self, pod_id: PodId) -> bool:
        """An admin call removes a pod, with all ranks of its URL. False if there is no such pod."""
        status = self._fleet.status(pod_id)
        if status is None or status.pod.url not in self._configs:
            return False
        url = status.pod.url
        added = {known: pod for known, pod in self._by_source[ADMIN].items() if known != url}
        self._apply({**self._by_source, ADMIN: added}, self._removed | {url})
        return True

    def refresh_prior(self, pod: Pod) -> None:
        """Use the prior of the model that the pod has reported."""
        config, status = self._configs.get(pod.url), self._fleet.status(pod.id)
        if config is None or status is None:
            return
        try:
            speed, kv_bytes = self._prior(config, status.pod.models)
            known = next(one for one in self.pods if one.id == pod.id)
            if (known.speed, known.kv_bytes_per_token) != (speed, kv_bytes):
                self._apply(self._by_source, self._removed)
        except ConfigError as error:
            log.error("cost prior not updated", pod=pod.id, error=str(error))

    async def _follow(self, name: str, source: PodSource) -> None:
        async for pods in source:
            try:
                self.replace(name, pods)
            except ConfigError as error:
                log.error("pod set rejected", source=name, error=str(error))

    def _apply(self, by_source: dict[str, dict[str, PodConfig]], removed: frozenset[str]) -> None:
        listed = {url: pod for pods in by_source.values() for url, pod in pods.items()}
        configs = {url: pod for url, pod in listed.items() if url not in removed}
        pods = self._pods_of(configs)
        self._by_source, self._removed, self._configs = by_source, removed & listed.keys(), configs
        if pods != self.pods:
            self.pods = pods
            self._fleet.sync(pods)

    def _pods_of(self, configs: Mapping[str, PodConfig]) -> tuple[Pod, ...]:
        models = {status.pod.url: status.pod.models for status in self._fleet.snapshot.pods}
        pods = tuple(
            pod
            for url, config in configs.items()
            for pod in configured_pods(config, *self._prior(config, models.get(url, ())))
        )
        duplicates = sorted(pod_id for pod_id, count in Counter(pod.id for pod in pods).items() if count > 1)
        if duplicates:
            raise ConfigError(f"pods: duplicate id {', '.join(duplicates)}; give each pod its own `id`")
        return pods


def configured_pods(config: PodConfig, speed: PodSpeed, kv_bytes_per_token: int = 0) -> tuple[Pod, ...]:
    """The pods of one definition: one per data-parallel rank, `id#rank` if there are several. The default id is host,
    port and path of the URL. 0 KV bytes: unknown."""
    parts = urlsplit(config.url)
    pod_id = config.id or parts.netloc + parts.path
    ranks = range(config.dp_size) if config.dp_size > 1 else (None,)
    return tuple(
        Pod(
            id=pod_id if rank is None else f"{pod_id}#{rank}",
            url=config.url,
            socket=config.socket,
            **config.credentials,
            engine=config.engine,
            speed=speed,
            role=config.role,
            kv_bytes_per_token=kv_bytes_per_token,
            hardware=_hardware(config),
            handoff=config.handoff,
            handoff_port=config.handoff_port,
            serves_alone=config.role is Role.BOTH or not config.handoff or DIALECTS[config.handoff].serves_alone,
            pulls=config.pulls,
            dp_rank=rank,
            host=config.host,
            rack=config.rack,
            zone=config.zone,
        )
        for rank in ranks
    )


def _hardware(config: PodConfig) -> str:
    """The class of pods that share a calibration. Pods with another configured speed form a class of their own."""
    own = config.speed
    return config.hardware if own is None else f"speed {own.c0_ms:g} {own.c1_ms_per_token:g} {own.c2_ms_per_token2:g}"
