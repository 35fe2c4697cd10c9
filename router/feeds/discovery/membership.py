"""Decides which pods exist: merges the pod sets of all sources and applies the result to the fleet.

Admin calls are one more source and override the others: an added pod replaces a pod with the same URL, and a removed
pod is ignored until an admin call adds it again or all sources drop its URL. A pod is drained while its source or a
drain of operators (`fleet/drains.py`) drains it.

A new source is a class with the one method of `PodSource` in a file of its own, a key in `config/pod_schema.py`,
and a line in `wiring/pod_sources.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import structlog

from router.config.pod_schema import KvEvents, PodConfig
from router.engines.adapter import KvEventSource, PodFacts
from router.engines.engine_catalog import DEFAULT_HANDOFFS, DIALECTS
from router.errors import ConfigError
from router.feeds.supervise import STEP, Feeds, in_turns, loop_time_s
from router.fleet.drains import Drains
from router.fleet.fleet import UNREPORTED, Fleet, PodEvent
from router.types import Pod, PodId, PodSpeed, PodState, Role

ADMIN = "admin calls"
AS_CONFIGURED = (
    *("url", "socket", "engine", "role", "pool", "host", "rack", "zone"),
    *("handoff", "handoff_port", "handoff_hosts", "pulls"),
)
"""Fields that a `Pod` has from its definition as they are."""

log = structlog.get_logger()


class SourceStatus:
    """Whether the pods of a source are up to date. Each new error, and its end, is logged."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.error = ""
        """Why the pods may be outdated; empty if they are not."""
        self.resync_differences = 0
        """Pods that a watch had lost and a full list has corrected."""
        self._confirmed_s: float | None = None

    def read(self) -> None:
        """The pods were up to date at this moment; an error may last."""
        self._confirmed_s = loop_time_s()

    def confirm(self) -> None:
        self.read()
        if self.error:
            log.info("pod source available again", source=self.source)
            self.error = ""

    def fail(self, error: str) -> None:
        """The pods cannot be read. Those that were read before stay in use."""
        if error != self.error:
            log.error("pod source unavailable; its last pods stay in use", source=self.source, error=error)
            self.error = error

    @property
    def age_s(self) -> float:
        """Time since the pods were last up to date; 0 if they were never read."""
        return 0.0 if self._confirmed_s is None else loop_time_s() - self._confirmed_s


PriorOf: TypeAlias = Callable[[PodConfig, tuple[str, ...]], tuple[PodSpeed, int]]
"""Maps (pod, its models, empty if not reported yet) to speed and KV bytes per token. Raises `ConfigError`."""


@dataclass(frozen=True, slots=True)
class ListedPod:
    """A pod as a source lists it. Another `uid` at the same URL is another process, with an empty cache.
    `drain_reason`: why it gets no new requests; empty if it does."""

    config: PodConfig
    uid: str = ""
    drain_reason: str = ""


class PodSource(Protocol):
    def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        """Complete sets of pods: the current one first, then one after each change. After an error, `supervise`
        iterates again; meanwhile the last set stays in use."""


class ConfiguredPods:
    """The pods of the configuration file: one set that never changes."""

    def __init__(self, pods: Sequence[PodConfig]) -> None:
        self._pods = [ListedPod(pod) for pod in pods]

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        yield self._pods


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSets:
    """What decides which pods exist, all by URL. `by_source`: what each source lists, of which a later one wins;
    `reported`: (uid, engine, ranks) as pods have reported them; `removed`: pods that an admin call removed, and that a
    source still lists."""

    by_source: Mapping[str, Mapping[str, ListedPod]]
    reported: Mapping[str, tuple[str, str, int]] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def with_pods(self, source: str, pods: Iterable[ListedPod]) -> PodSets:
        """The same with these pods of a source."""
        return replace(self, by_source={**self.by_source, source: {pod.config.url: pod for pod in pods}})

    def current(self) -> PodSets:
        """The same without what is known of pods that no source lists any more."""
        known = set[str]().union(*self.by_source.values())
        reported = {url: facts for url, facts in self.reported.items() if url in known}
        return replace(self, reported=reported, removed=self.removed & known)

    def listed(self) -> dict[str, ListedPod]:
        """The pods that exist."""
        known = {url: pod for pods in self.by_source.values() for url, pod in pods.items()}
        return {url: self.completed(pod) for url, pod in known.items() if url not in self.removed}

    def completed(self, listed: ListedPod) -> ListedPod:
        """The definition with what the pod has reported, where the definition is silent."""
        uid, engine, dp_size = self.reported.get(listed.config.url, ("", "", 1))
        if uid != listed.uid:
            return listed
        config, given = listed.config, listed.config.model_fields_set
        facts: dict[str, Any] = {}
        if engine and engine != config.engine and "engine" not in given:
            facts["engine"] = engine
            if config.handoff and config.handoff == DEFAULT_HANDOFFS.get(config.engine):
                facts["handoff"] = DEFAULT_HANDOFFS.get(engine, config.handoff)
        if dp_size != config.dp_size and "dp_size" not in given:
            facts["dp_size"] = dp_size
        return replace(listed, config=config.model_copy(update=facts)) if facts else listed


class Membership:
    """The single owner of the set of pods. `sources` by name; of two pods with one URL the later source wins."""

    def __init__(self, fleet: Fleet, prior: PriorOf, sources: Mapping[str, PodSource]) -> None:
        self._fleet = fleet
        self._prior = prior
        self._sources = sources
        self._sets = PodSets(by_source={name: {} for name in (*sources, ADMIN)})
        self._refused: dict[str, set[tuple[str, str]]] = {}
        """(URL, error) of the pods of a source that are not used, as logged."""
        self._listed: Mapping[str, ListedPod] = {}
        self._built: dict[str, tuple[ListedPod, tuple[Pod, ...]]] = {}
        """By URL: a listed pod, and the pods that follow from it and from the models that it has reported."""
        self.drains = Drains()
        self._drained: set[PodId] = set()
        self.pods: tuple[Pod, ...] = ()
        """All pods with the speed of their cost prior."""
        fleet.listen(self._keep_drained)

    @property
    def feeds(self) -> Feeds:
        return {f"pods of {name}": partial(self._follow, name, source) for name, source in self._sources.items()}

    def config_of(self, pod: Pod) -> PodConfig | None:
        """The definition of a pod; None if it is gone."""
        listed = self._listed.get(pod.url)
        return listed.config if listed else None

    def kv_events_of(self, pod: Pod, reported: KvEventSource | None) -> KvEventSource | None:
        """Where the pod publishes its KV events: as configured, else as `reported` by the engine."""
        config = self.config_of(pod)
        if config is None or config.kv_events == "off":
            return None
        if isinstance(config.kv_events, KvEvents):
            return KvEventSource(config.kv_events.endpoint, config.kv_events.replay_endpoint)
        return reported

    def check(self, pods: Iterable[PodConfig]) -> None:
        """Raises `ConfigError` if these pods share an id or one has no prior."""
        self._pods_of({pod.url: ListedPod(pod) for pod in pods})

    def replace(self, source: str, pods: Iterable[ListedPod]) -> None:
        """Replace the pod set of a source. Raises `ConfigError`; the old set stays then."""
        self._apply(self._sets.with_pods(source, pods))

    def add(self, pod: PodConfig) -> None:
        """An admin call adds a pod or replaces the one with its URL. Raises `ConfigError`, also for a credential file
        that no other source names: the pod would receive the content of any file."""
        listed = [known.config for name in self._sources for known in self._sets.by_source[name].values()]
        if pod.auth is not None and pod.auth not in [known.auth for known in listed]:
            raise ConfigError("auth.bearer_file: admin calls can only name files that a pod of the configuration names")
        if pod.tls is not None and pod.tls not in [known.tls for known in listed]:
            raise ConfigError("tls: admin calls can only name files that a pod of the configuration names")
        added = {**self._sets.by_source[ADMIN], pod.url: ListedPod(pod)}.values()
        self._apply(replace(self._sets, removed=self._sets.removed - {pod.url}).with_pods(ADMIN, added))

    def remove(self, pod_id: PodId) -> bool:
        """An admin call removes a pod, with all ranks of its URL. False if there is no such pod."""
        status = self._fleet.status(pod_id)
        if status is None or status.pod.url not in self._listed:
            return False
        url = status.pod.url
        added = [pod for known, pod in self._sets.by_source[ADMIN].items() if known != url]
        self._apply(replace(self._sets, removed=self._sets.removed | {url}).with_pods(ADMIN, added))
        return True

    def report(self, pod: Pod, engine: str, dp_size: int) -> bool:
        """Use the engine, if it is not empty, and the number of ranks that a pod reports, where its definition names
        none. Returns whether the pod is another now, which must be probed and described again."""
        listed = self._listed.get(pod.url)
        if listed is None:
            return False
        facts = listed.uid, engine or pod.engine, dp_size
        sets = replace(self._sets, reported={**self._sets.reported, pod.url: facts})
        if facts[1:] == (listed.config.engine, listed.config.dp_size):
            self._sets = sets
            return self._fleet.same_epoch(pod) is None
        try:
            self._apply(sets)
        except ConfigError as error:
            log.error("facts that a pod reports cannot be used", pod=pod.id, error=str(error))
        return self._fleet.same_epoch(pod) is None

    def describe(self, pod: Pod, facts: PodFacts) -> None:
        reported, config = {name: getattr(facts, name) for name in UNREPORTED}, self.config_of(pod)
        if facts.capacity_tokens is None and config is not None:
            reported["capacity_tokens"] = config.capacity_tokens
        self._fleet.describe(pod.id, **reported)

    def refresh_prior(self, pod: Pod) -> None:
        listed, status = self._listed.get(pod.url), self._fleet.status(pod.id)
        if listed is None or status is None:
            return
        try:
            speed, kv_bytes = self._prior(listed.config, status.pod.models)
            known = next(one for one in self.pods if one.id == pod.id)
            if (known.speed, known.kv_bytes_per_token) != (speed, kv_bytes):
                self._built.pop(pod.url)
                self._apply(self._sets)
        except ConfigError as error:
            log.error("cost prior not updated", pod=pod.id, error=str(error))

    async def _follow(self, name: str, source: PodSource) -> None:
        async with aclosing(aiter(source)) as sets:
            async for pods in sets:
                for step in sets_between(self._sets.by_source[name], pods):
                    try:
                        self.replace(name, self._usable(name, step))
                    except ConfigError as error:
                        log.error("pod set rejected", source=name, error=str(error))
                    if len(step) < len(pods):
                        await asyncio.sleep(0)

    def _usable(self, source: str, pods: Iterable[ListedPod]) -> list[ListedPod]:
        """The pods without a mistake: one wrong pod does not hide the others. Each mistake is logged once."""
        others = [known for name, known in self._sets.by_source.items() if name != source]
        taken = {pod_id: url for known in others for url, listed in known.items() for pod_id in listed.config.ids}
        usable, mistakes = [], set[tuple[str, str]]()
        for listed in pods:
            url = listed.config.url
            try:
                for pod in self._build(self._sets.completed(listed)):
                    if taken.setdefault(pod.id, url) != url:
                        raise ConfigError(f"pods: duplicate id {pod.id}; give each pod its own `id`")
                usable.append(listed)
            except ConfigError as error:
                mistakes.add((url, str(error)))
        for url, why in mistakes - self._refused.get(source, set()):
            log.error("pod rejected", source=source, url=url, error=why)
        self._refused[source] = mistakes
        return usable

    def _apply(self, sets: PodSets) -> None:
        """Use these sets. Raises `ConfigError`; the old ones stay then."""
        listed = sets.listed()
        pods = self._pods_of(listed)
        self._sets, self._listed = sets.current(), listed
        self._built = {url: built for url, built in self._built.items() if url in listed}
        if pods != self.pods:
            self.pods = pods
            self._fleet.sync(pods)
        for pod in pods:
            self._follow_drain(pod)

    def _pods_of(self, listed: Mapping[str, ListedPod]) -> tuple[Pod, ...]:
        pods = tuple(pod for one in listed.values() for pod in self._build(one))
        duplicates = sorted(pod_id for pod_id, count in Counter(pod.id for pod in pods).items() if count > 1)
        if duplicates:
            raise ConfigError(f"pods: duplicate id {', '.join(duplicates)}; give each pod its own `id`")
        return pods

    def _build(self, listed: ListedPod) -> tuple[Pod, ...]:
        """The pods of one definition with the prior of the models that they have reported. Raises `ConfigError`."""
        url = listed.config.url
        known = self._built.get(url)
        if known is None or known[0] != listed:
            statuses = [self._fleet.status(pod_id) for pod_id in listed.config.ids]
            models = next((status.pod.models for status in statuses if status and status.pod.url == url), ())
            pods = configured_pods(listed.config, *self._prior(listed.config, models), uid=listed.uid)
            known = self._built[url] = listed, pods
        return known[1]

    # --- drains ---

    async def follow_drains(self) -> None:
        """Apply the drains in force to all pods. It goes on if the caller is cancelled."""
        await asyncio.shield(asyncio.ensure_future(self._follow_drains()))

    async def _follow_drains(self) -> None:
        pods = self.pods
        async for pod in in_turns(pods):
            if self.pods is not pods:  # their drains are applied with the new pods
                return
            self._follow_drain(pod)

    def _follow_drain(self, pod: Pod) -> None:
        listed = self._listed.get(pod.url)
        if listed and (reason := listed.drain_reason or self.drains.reason(pod)):
            self._drained.add(pod.id)
            self._fleet.event(pod.id, PodEvent.DRAIN, reason=reason)
            self._fleet.explain_state(pod.id, reason)
        elif pod.id in self._drained:
            self._drained.discard(pod.id)
            self._fleet.event(pod.id, PodEvent.UNDRAIN)

    def _keep_drained(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.JOINING:
            self._follow_drain(pod)
        elif new is PodState.GONE:
            self._drained.discard(pod.id)
            if pod.url not in self._sets.removed:  # else other routers still have it
                self.drains.forget(pod.id)


def configured_pods(
    config: PodConfig, speed: PodSpeed, kv_bytes_per_token: int = 0, *, uid: str = ""
) -> tuple[Pod, ...]:
    """The pods of one definition, one per data-parallel rank. 0 KV bytes: unknown."""
    own = config.speed  # pods with another configured speed share no calibration
    facts: dict[str, Any] = {name: getattr(config, name) for name in AS_CONFIGURED} | {
        **config.credentials,
        "allowed_models": config.models,
        "hardware": f"speed {own.c0_ms:g} {own.c1_ms_per_token:g} {own.c2_ms_per_token2:g}" if own else config.hardware,
        "serves_alone": config.role is Role.BOTH or not config.handoff or DIALECTS[config.handoff].serves_alone,
    }
    return tuple(
        Pod(
            id=pod_id,
            uid=uid,
            speed=speed,
            kv_bytes_per_token=kv_bytes_per_token,
            dp_rank=rank if config.dp_size > 1 else None,
            **facts,
        )
        for rank, pod_id in enumerate(config.ids)
    )


def sets_between(known: Mapping[str, ListedPod], wanted: Sequence[ListedPod]) -> Iterator[list[ListedPod]]:
    """Complete sets that lead from the `known` pods, by URL, to `wanted`, the last one. Each has at most `STEP` more
    pods that are new or changed; the first one has lost all pods that are not wanted."""
    changed = [number for number, pod in enumerate(wanted) if known.get(pod.config.url) != pod]
    for end in range(STEP, len(changed), STEP):
        later = set(changed[end:])
        found = (_known_at_url(known, pod) if number in later else pod for number, pod in enumerate(wanted))
        yield [pod for pod in found if pod is not None]
    yield list(wanted)


def _known_at_url(known: Mapping[str, ListedPod], pod: ListedPod) -> ListedPod | None:
    """What is known at the URL of a pod; None under another id, which another pod may have now."""
    before = known.get(pod.config.url)
    return before if before is not None and before.config.ids == pod.config.ids else None
