"""Probes the health of each pod, and fetches the description of a new pod before it gets traffic.

Only the engine's health path counts: failures go to the breaker, a success admits the pod, or drains it as long as the
engine reports a fault or sleeps. /v1/models and /metrics do not count, because a busy engine answers them late.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import Any

from router.addresses import split_url, url_host
from router.engines.adapter import MODELS_PATH, PodFacts, parse_models
from router.engines.engine_catalog import DIALECTS, ENGINES
from router.engines.forwarded_paths import api_end
from router.engines.handoff.dialect import Dialect
from router.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout, shortened
from router.feeds.watch import Check, Fetch, Turn, check_of_missing
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.guards import OutOfBounds
from router.stores.logged_once import LoggedOnce
from router.types import Pod, PodId, PodState, PodStatus, Role

MAX_REASON_CHARACTERS = 400
_ALLOWED = " that `pods[].models` allows"
_CHECK = "check that the URL is an engine's and `engine` is right"
_DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
SLEEPS = "the engine sleeps"
JOINING_INTERVAL_S = 0.1
"""Interval for a pod that is not up yet, so that it gets traffic within a second of its start."""

ADAPTERS_INTERVAL_S = 10.0
"""Interval at which a READY pod is asked for its adapters, which others may load and unload."""


@dataclass(slots=True)
class _Seen:
    """State of one pod. `described_epoch` 0: not described yet. `reasons`: those logged since it was last READY."""

    described_epoch: int = 0
    refused: bool = False
    reasons: LoggedOnce = field(default_factory=LoggedOnce)
    reports_faults: bool = False
    may_sleep: bool = False
    fault: str = ""
    """Why it is drained."""
    listed_at_s: float = 0.0
    """When its adapters were last read."""


@dataclass(slots=True, eq=False)
class PodProbe:
    """Moves pods between JOINING, READY and EJECTED. `on_described(pod, facts)` is called before a pod becomes READY
    for the first time, and after each of its restarts."""

    fleet: Fleet
    breaker: Breaker
    fetch: Fetch
    on_described: Callable[[Pod, PodFacts], None]
    config: Probes
    _seen: dict[PodId, _Seen] = field(default_factory=dict)

    @property
    def check(self) -> Check:
        return Check(
            name="probe",
            run=self._probe,
            due=lambda status: self.breaker.may_probe(status.pod.id, time.monotonic()),
            every_s=self._every_s,
            forget=lambda pod_id: self._seen.pop(pod_id, None),
        )

    def _every_s(self, status: PodStatus) -> float:
        every_s = self.config.health_interval_s
        return min(every_s, JOINING_INTERVAL_S) if status.state is PodState.JOINING else every_s

    async def _probe(self, pod: Pod, _turn: Turn) -> None:
        seen, sent_s = self._seen.setdefault(pod.id, _Seen()), time.monotonic()
        try:
            await self.fetch(pod, ENGINES[pod.engine].health_path, self.config.health_timeout_s)
        except UpstreamError as error:
            seen.refused = seen.refused or (isinstance(error, ConnectFailed) and error.refused)
            if not (isinstance(error, ConnectFailed) and error.local):
                timed_out = isinstance(error, UpstreamTimeout) or isinstance(error.__cause__, TimeoutError)
                self.breaker.probe_failed(pod.id, time.monotonic(), sent_s if timed_out else inf)
            self._explain(pod, seen, error)
            return
        self.breaker.seen_alive(pod.id)
        if seen.refused and seen.described_epoch:
            # A port that accepts connections again belongs to a new process, with an empty cache.
            self.fleet.restarted(pod.id)
            seen.described_epoch = 0
        seen.refused = False
        await self._admit(pod.id, seen)

    async def _admit(self, pod_id: PodId, seen: _Seen) -> None:
        """Make a healthy pod READY once it has been described. A serving pod is not described again after a restart
        that another feed detected, because that feed has already reset its caches."""
        status = self.fleet.status(pod_id)
        if status is None:
            return
        serving = status.state is PodState.READY and seen.described_epoch > 0
        if not serving and seen.described_epoch != status.pod.epoch and not await self._describe(status.pod, seen):
            return
        fault = await self._fault(status.pod, seen)
        if await self._is_asleep(status.pod, seen):
            fault = fault or SLEEPS
        begins, ends = fault and status.state is not PodState.DRAINING, seen.fault and not fault
        if begins or ends:
            self.fleet.event(pod_id, PodEvent.DRAIN if fault else PodEvent.UNDRAIN, reason=fault)
            seen.fault = fault
        now_s = time.monotonic()
        if not self.breaker.may_probe(pod_id, now_s):  # it was ejected while it answered
            return
        if self.fleet.event(pod_id, PodEvent.PROBE_OK, now_s) is PodState.READY:
            seen.reasons.clear()
            await self._list_adapters(pod_id, seen)

    async def _fault(self, pod: Pod, seen: _Seen) -> str:
        """The fault that keeps a pod from serving although its health check succeeds."""
        if not seen.reports_faults:
            return ""
        adapter = ENGINES[pod.engine]
        try:
            return adapter.fault(await self.fetch(pod, adapter.faults_path, self.config.health_timeout_s), pod)
        except UpstreamError as error:
            seen.reports_faults = not (isinstance(error, UpstreamBroken) and error.status == HTTPStatus.NOT_FOUND)
            return seen.fault if seen.reports_faults else ""

    async def _is_asleep(self, pod: Pod, seen: _Seen) -> bool:
        """Whether the engine sleeps. When it falls asleep its cache is gone, as after a restart."""
        if not seen.may_sleep:
            return False
        adapter, is_asleep = ENGINES[pod.engine], pod.is_asleep
        try:
            is_asleep = adapter.is_asleep(await self.fetch(pod, adapter.sleep_path, self.config.health_timeout_s))
        except UpstreamError as error:
            seen.may_sleep = not (isinstance(error, UpstreamBroken) and error.status == HTTPStatus.NOT_FOUND)
        if is_asleep != pod.is_asleep and self.fleet.same_epoch(pod) is not None:
            if is_asleep:
                self.fleet.restarted(pod.id)
                seen.described_epoch = 0
            self.fleet.learn(pod.id, is_asleep=is_asleep)
        return is_asleep

    async def _list_adapters(self, pod_id: PodId, seen: _Seen) -> None:
        """Read the adapters of a described pod again after `ADAPTERS_INTERVAL_S`. The answer does not
        count if one was loaded or unloaded meanwhile."""
        now_s, status = time.monotonic(), self.fleet.status(pod_id)
        if status is None or now_s - seen.listed_at_s < ADAPTERS_INTERVAL_S:
            return
        pod, seen.listed_at_s = status.pod, now_s
        try:
            facts = parse_models(await self.fetch(pod, MODELS_PATH, self.config.health_timeout_s), pod.allowed_models)
        except (UpstreamError, OutOfBounds) as error:
            if reason := excess(error):
                self.breaker.exceeded(pod_id, reason, now_s)
            return
        now = self.fleet.same_epoch(pod)
        if facts is not None and now and now.pod.adapters == pod.adapters:
            self.fleet.learn(pod_id, adapters=facts.adapters)

    async def _describe(self, pod: Pod, seen: _Seen) -> bool:
        """Fetch what the pod serves and report it. False if it does not answer, or is another pod now."""
        try:
            facts = await fetch_facts(self.fetch, pod, self.config.health_timeout_s)
        except UpstreamError as error:
            self._explain(pod, seen, error)
            return False
        now = self.fleet.same_epoch(pod)
        if now is None:
            return False
        adapter, seen.described_epoch = ENGINES[pod.engine], pod.epoch
        seen.reports_faults, seen.may_sleep = bool(adapter.faults_path), bool(adapter.sleep_path)
        seen.listed_at_s = time.monotonic()
        self.on_described(now.pod, facts)
        return self.fleet.same_epoch(pod) is not None

    def _explain(self, pod: Pod, seen: _Seen, error: UpstreamError) -> None:
        """Record why the pod is not READY; log each reason, also of a READY one, once until a probe succeeds."""
        now = self.fleet.same_epoch(pod)
        if now is not None and now.state is PodState.READY and (kept := self.fleet.state_reason(pod.id)):
            seen.reasons.warn("pod fails its health checks", pod=pod.id, reason=kept)
        if now is None or now.state not in (PodState.JOINING, PodState.EJECTED):
            return
        reason = unusable_reason(pod, error)
        self.fleet.explain_state(pod.id, reason)
        seen.reasons.warn("pod cannot be used", pod=pod.id, reason=reason)


async def fetch_facts(fetch: Fetch, pod: Pod, timeout_s: float) -> PodFacts:
    """What the pod reports about itself. Raises `UpstreamError` if it does not list its models."""
    adapter = ENGINES[pod.engine]
    paths = adapter.describe_paths
    results = await asyncio.gather(*(fetch(pod, path, timeout_s) for path in paths), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, UpstreamError):
            raise result
    answers = {path: body for path, body in zip(paths, results, strict=True) if isinstance(body, bytes)}
    try:
        facts = adapter.describe(answers, pod)
    except OutOfBounds as error:
        raise UpstreamBroken(f"pod {pod.id}: {error}", pod=pod.id) from error
    if facts is not None:
        return facts
    if isinstance(results[0], UpstreamError):
        raise results[0]
    raise UpstreamBroken(f"{paths[0]} lists no models{_ALLOWED if pod.allowed_models else ''}; {_CHECK}")


def excess(error: Exception) -> str:
    """What the pod sent too much of; empty for errors of another cause."""
    return str(next((cause for cause in _causes(error) if isinstance(cause, OutOfBounds)), ""))


def unusable_reason(pod: Pod, error: UpstreamError) -> str:
    """What is wrong and what to do, for an error of a probe of the pod."""
    problem = _connect_problem(pod, error) or _status_problem(pod, error) or str(error)
    return shortened(problem.removeprefix(f"pod {pod.id}: "), MAX_REASON_CHARACTERS)


def _connect_problem(pod: Pod, error: UpstreamError) -> str:
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return f"unknown host name {url_host(pod.url)!r}; correct pods[].url or the DNS of this machine"
        if isinstance(cause, ssl.SSLError):
            return _tls_problem(pod, cause)
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {_address(pod)}; check that the engine runs and listens there"
    return ""


def _tls_problem(pod: Pod, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if "mismatch" in why:
            return f"TLS certificate is not for this host ({why}); correct the host in pods[].url"
        return f"TLS certificate not trusted ({why}); set pods[].tls.ca_file to the certificate of its authority"
    return f"TLS handshake failed ({error.reason}); check that {_address(pod)} serves https, or use http in pods[].url"


def _status_problem(pod: Pod, error: UpstreamError) -> str:
    if not isinstance(error, UpstreamBroken) or error.status not in (*_DENIED, HTTPStatus.NOT_FOUND):
        return ""
    if error.status == HTTPStatus.NOT_FOUND:
        path = split_url(pod.url).path
        unneeded = api_end(path)
        wrong = f"remove {unneeded}, which the router appends, from" if unneeded else f"check the path {path} of"
        return f"{error}; {wrong} pods[].url" if path else ""
    if source := pod.bearer_file or pod.bearer_env:
        return f"{error.status} {HTTPStatus(error.status).phrase}; the engine does not accept the key of {source}"
    return f"{error}; set pods[].auth.bearer_file, or bearer_env, to the engine's API key"


def _address(pod: Pod) -> str:
    return pod.socket or split_url(pod.url).netloc


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@dataclass(slots=True, eq=False)
class HandoffFacts:
    """Fetches the facts of a pod that some handoff dialects need, from its bootstrap server, once in each epoch: after
    a restart they are unknown until they are fetched again."""

    fleet: Fleet
    get_url: Callable[..., Awaitable[bytes]]
    timeout_s: float
    dialects: Mapping[str, Dialect] = field(default_factory=lambda: DIALECTS)
    retry_s: float = 1.0
    _known: dict[tuple[PodId, str], tuple[int, Mapping[str, Any]]] = field(default_factory=dict)

    def of(self, pod: Pod, dialect: str) -> Mapping[str, Any] | None:
        """The pod's facts for `Pair.facts`; None while they are unknown for its epoch."""
        if self.dialects[dialect].facts_url(pod) is None:
            return {}
        epoch, facts = self._known.get((pod.id, dialect), (None, None))
        return facts if epoch == pod.epoch else None

    @property
    def check(self) -> Check:
        return check_of_missing("handoff facts", self._fetch_missing, self._missing, self.retry_s, forget=self._forget)

    def _forget(self, pod_id: PodId) -> None:
        self._known = {key: known for key, known in self._known.items() if key[0] != pod_id}

    def _missing(self, pod: Pod) -> list[str]:
        """Dialects whose facts are unknown. A decode pod never sends KV and has no bootstrap server."""
        if pod.role is Role.DECODE:
            return []
        return [name for name in sorted({pod.handoff, pod.pulls} - {""}) if self.of(pod, name) is None]

    async def _fetch_missing(self, pod: Pod, _turn: Turn) -> None:
        for name in self._missing(pod):
            url = self.dialects[name].facts_url(pod)
            assert url is not None, "facts without a URL are known"
            try:
                is_safe = split_url(url).scheme == split_url(pod.url).scheme  # else credentials would leave TLS
                answer = await self.get_url(url, self.timeout_s, pod=pod if is_safe else None)
            except UpstreamError:
                continue
            facts = self.dialects[name].parse_facts(answer, pod)
            if facts is not None:
                self._known[pod.id, name] = (pod.epoch, facts)
