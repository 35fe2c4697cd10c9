"""Decides when a failing pod is ejected and when it may be probed again.

    result of a request                                                    counts
    connect failure                                                        as a failure of the pod
    reset, timeout, garbage, 502, 503, 504, 401 to the router's key;       as a failure of the pod
    another pod then serves it
    the same, and no other pod serves it; 500; failed handoff; response    as a doubt: the request may be the cause
    cut off after its first byte to the client
    first token many times later than expected                             as lateness: the request may be the cause
    other 4xx but 429, other 5xx, and all failures above but connecting    against the pod, if others serve the client
    429, client gone, no file or port left in the router                   not at all
    status below 400                                                       resets failures and doubts

Doubts and lateness eject a pod only if several clients caused them, and only `doubt_window_s` after the first one
without a success in between: clients can make up names, so a burst of them is no proof. Lateness also requires that
most other pods are on time; if they are late too, the expectation is wrong. Requests do not eject a pod if too few
would stay ready: see `leaves_enough_ready`. Such a pod stays READY and is priced as before; each refusal is reported to
`on_refused`.

A pod that fails most of its requests, while other pods of its models serve the same clients, is ejected by the votes of
these clients: see `Outcomes`.

A pod that sends more than the router reads of one (`exceeded`) is ejected at once, but never the last ready pod of a
model.

Failures of probes are counted separately: a pod that answers /health while every request fails is ejected, and a pod
that is too busy for /health but sends first tokens is not. Probes that are refused or get an error eject every pod: a
503 at once is better than requests that wait for a dead pod. A probe that times out proves less: any part of an
answer, load or KV event that the pod has sent since then outweighs it, and such probes alone never eject the last ready
pod of a model. They count in full for a stream that has fallen silent: see `fails_probes`.

Each ejection without a served request in between doubles the backoff until the next probe. A late pod passes every
probe, so its backoff is longer and is reset only by a first token that is on time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Annotated, ClassVar, TypeAlias

import msgspec
import xxhash
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.fleet.retry_pause import retry_pause_s
from router.types import FleetSnapshot, Pod, PodId, PodState, PodStatus, Role

MIN_EXPECTED_MS = 500.0
"""Minimum expected time to first token in the lateness check: steps and networks vary."""
BACKOFF_S = (1.0, 30.0)
"""The pause after a first ejection, and the longest one."""
LONG_BACKOFF_FACTOR = 10.0
"""Backoff of a pod that passes every probe, because it is late, sends too much or fails alone, relative to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Health checks, load scrapes, self-tests and ejection of pods."""

    health_interval_s: PositiveFloat = 1.0
    health_timeout_s: PositiveFloat = 2.0
    failures_to_eject: PositiveInt = 3
    """Consecutive failures of requests or of health checks that eject a pod."""
    clients_to_eject: Annotated[int, Field(ge=1, le=16)] = 2
    """Clients (tenants, else addresses) that must cause failures which may be due to a request, such as a 500 or a slow
    TTFT, before these eject a pod. 1 where one trusted gateway hides all clients."""
    min_ready_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Requests eject no pod if fewer pods than this share, or none, would stay ready for one of its models or adapters,
    by role. Health checks that are refused or get an error always eject."""
    slow_ttft_factor: Annotated[float, Field(gt=1)] = 10.0
    """A TTFT is slow if it exceeds the expected one (at least 0.5 s) by this factor."""
    slow_ttfts_to_eject: NonNegativeInt = 8
    """Consecutive slow TTFTs that eject a pod while most other pods are not slow. 0: never."""
    doubt_window_s: NonNegativeFloat = 2.0
    """Failures that may be due to a request, and slow TTFTs, eject a pod only if no request succeeds on it for this
    long."""
    load_interval_s: PositiveFloat = 0.25
    """The shortest time between two scrapes of a pod. It grows with the fleet, up to 20 times, so that scrapes take at
    most a tenth of a core: first for idle pods."""
    load_timeout_s: PositiveFloat = 2.0
    self_test_interval_s: PositiveFloat = 30.0
    self_test: bool = True
    """When a pod joins, verify that its tokens and block hashes equal the router's. Off: trust every pod."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @property
    def max_load_age_s(self) -> float:
        """Age from which a load is unknown: twenty scrapes of an idle pod, and one that times out."""
        return 40 * self.load_interval_s + self.load_timeout_s


class Failures(msgspec.Struct, array_like=True, gc=False):
    """Failures of a pod in a row, and its ejections. `doubts`: failures or late first tokens that a request may have
    caused; `since_s`: time of the first one; `clients`: digests of the first few clients that sent such requests."""

    failures: int = 0
    doubts: int = 0
    since_s: float = 0.0
    clients: tuple[int, ...] = ()
    ejections: int = 0
    probe_at_s: float = 0.0

    def add_doubt(self, client: str, max_clients: int, now_s: float) -> None:
        self.since_s = self.since_s if self.doubts else now_s
        self.doubts += 1
        digest = xxhash.xxh3_64_intdigest(client.encode("utf-8", "surrogatepass"))
        if digest not in self.clients and len(self.clients) < max_clients:
            self.clients = (*self.clients, digest)

    def counted_doubts(self, rules: Probes, now_s: float) -> int:
        """The doubts; 0 unless several clients caused them over some time."""
        several = len(self.clients) >= rules.clients_to_eject
        return self.doubts if several and now_s - self.since_s >= rules.doubt_window_s else 0

    def restart(self) -> None:
        """Count from zero; ejections stay."""
        self.failures = self.doubts = 0
        self.clients = ()


class Breaker:
    """Counts consecutive failures of READY pods and ejects them from `fleet` at the limit.

    Failures of a pod in another state belong to requests sent earlier and do not count. `on_refused` is called with the
    id of each pod that was not ejected because too few pods would stay ready."""

    def __init__(
        self,
        fleet: Fleet,
        rules: Probes | None = None,
        ledger: Ledger | None = None,
        on_refused: Callable[[PodId], object] = lambda _pod: None,
        backoff_s: tuple[float, float] = BACKOFF_S,
    ) -> None:
        self._fleet = fleet
        self._rules = rules or Probes()
        self._ledger = ledger or Ledger()
        self._backoff_s = backoff_s
        self._failed: dict[PodId, Failures] = {}
        self._late: dict[PodId, Failures] = {}
        self._failing_alone: dict[PodId, Failures] = {}
        """Pods that the votes of clients ejected."""
        self._outcomes = Outcomes()
        self._failed_probes: dict[PodId, deque[float]] = {}
        """The last ones in a row, by pod: when each that timed out was sent; infinity for others."""
        self._on_refused = on_refused
        fleet.listen(self._remove_gone)

    def success(self, pod_id: PodId) -> None:
        """A request was served: reset all failures of the pod. A response with embeddings has no first token."""
        self._failed_probes.pop(pod_id, None)
        self._failed.pop(pod_id, None)

    def failure(self, pod_id: PodId, now_s: float) -> None:
        """A request failed because of the pod."""
        if self._ready(pod_id):
            record = self._record(pod_id)
            record.failures += 1
            self._eject_at_limit(pod_id, record, now_s)

    def doubt(self, pod_id: PodId, client: str, now_s: float) -> None:
        """A request of `client` failed because of the pod or of the request."""
        if self._ready(pod_id):
            record = self._record(pod_id)
            record.add_doubt(client, self._rules.clients_to_eject, now_s)
            self._eject_at_limit(pod_id, record, now_s)

    def counts_success(self, now_s: float) -> bool:
        """Whether `ended` needs to be called for requests that are served."""
        return self._outcomes.is_watching(now_s)

    def ended(self, pod_id: PodId, client: str, now_s: float, *, is_served: bool) -> None:
        """A request of `client` to the pod was served, or failed for any reason."""
        status = self._ready(pod_id)
        if status is None:
            return
        self._outcomes.ended(pod_id, models := status.pod.models, client, now_s, is_served=is_served)
        if not is_served and self._outcomes.fails_alone(pod_id, models):
            self._outcomes.forget(pod_id)
            record = self._failing_alone.setdefault(pod_id, Failures())
            reason = "most requests failed, and other pods served the same clients"
            self._eject(pod_id, record, now_s, reason, self._rules.min_ready_share, LONG_BACKOFF_FACTOR)

    def first_token(self, pod_id: PodId, client: str, expected_ms: float, actual_ms: float, now_s: float) -> None:
        rules = self._rules
        if actual_ms <= rules.slow_ttft_factor * max(expected_ms, MIN_EXPECTED_MS):
            self._late.pop(pod_id, None)
        elif self._ready(pod_id):
            late = self._late.setdefault(pod_id, Failures())
            late.add_doubt(client, rules.clients_to_eject, now_s)
            if late.counted_doubts(rules, now_s) >= rules.slow_ttfts_to_eject > 0 and self._most_others_on_time(pod_id):
                reason = f"{late.doubts} first tokens in a row were late"
                self._eject(pod_id, late, now_s, reason, rules.min_ready_share, LONG_BACKOFF_FACTOR)

    def seen_alive(self, pod_id: PodId) -> None:
        """The pod passed its health check or sent a first token. Failures of requests stay counted."""
        self._failed_probes.pop(pod_id, None)

    def probe_failed(self, pod_id: PodId, now_s: float, sent_s: float = inf) -> None:
        """The pod's health check failed, or timed out if it is known when it was sent. Records why the pod stays."""
        if not self._ready(pod_id):
            return
        sent = self._failed_probes.setdefault(pod_id, deque(maxlen=self._rules.failures_to_eject))
        sent.append(sent_s)
        reason, fails = f"{len(sent)} health checks in a row failed", self.fails_probes(pod_id)
        is_alive = max(self._fleet.received_at_s(pod_id), self._ledger.received_at_s(pod_id)) > min(sent)
        if fails and not is_alive:
            self._eject(pod_id, self._record(pod_id), now_s, reason, None if inf in sent else 0.0)
        if self._ready(pod_id):
            kept = "it sends other things" if is_alive else "it is the last ready pod of a model"
            self._fleet.explain_state(pod_id, f"{reason}, but {kept}" if fails else "")

    def fails_probes(self, pod_id: PodId) -> bool:
        """Whether a ready pod has failed as many health checks in a row as eject one, even if it is alive."""
        return len(self._failed_probes.get(pod_id, ())) >= self._rules.failures_to_eject

    def exceeded(self, pod_id: PodId, reason: str, now_s: float) -> None:
        """The pod sent more than the router reads of one."""
        if self._ready(pod_id):
            self._eject(pod_id, self._record(pod_id), now_s, reason, 0.0, LONG_BACKOFF_FACTOR)

    def may_probe(self, pod_id: PodId, now_s: float) -> bool:
        """False during an ejected pod's backoff."""
        tables = (self._failed, self._late, self._failing_alone)
        found = (rows[pod_id].probe_at_s for rows in tables if pod_id in rows)
        return self._ready(pod_id) is not None or now_s >= max(found, default=0.0)

    def _most_others_on_time(self, pod_id: PodId) -> bool:
        """Whether most other pods of the same models are on time. O(pods); called only for a late pod."""
        own, pods = self._fleet.status(pod_id), self._fleet.snapshot.pods
        others = [status for status in pods if own and status is not own and status.pod.models == own.pod.models]
        on_time = sum(other.state is PodState.READY and other.pod.id not in self._late for other in others)
        return on_time * 2 > len(others)

    def _eject_at_limit(self, pod_id: PodId, record: Failures, now_s: float) -> None:
        failures = record.failures + record.counted_doubts(self._rules, now_s)
        if failures >= self._rules.failures_to_eject:
            self._eject(pod_id, record, now_s, f"{failures} requests in a row failed", self._rules.min_ready_share)

    def _eject(
        self, pod_id: PodId, record: Failures, now_s: float, reason: str, min_share: float | None, factor: float = 1.0
    ) -> None:
        """Eject the pod, or only count from zero if fewer ready pods than `min_share` would be left; None: in any case.
        The backoff doubles each time, up to the maximum."""
        status = self._ready(pod_id)
        record.restart()
        if min_share is not None and status and not leaves_enough_ready(self._fleet.snapshot, status.pod, min_share):
            self._on_refused(pod_id)
            return
        self._failed_probes.pop(pod_id, None)
        record.ejections += 1
        record.probe_at_s = now_s + factor * retry_pause_s(record.ejections, *self._backoff_s)
        self._fleet.event(pod_id, PodEvent.EJECT, reason=reason)

    def _ready(self, pod_id: PodId) -> PodStatus | None:
        status = self._fleet.status(pod_id)
        return status if status is not None and status.state is PodState.READY else None

    def _record(self, pod_id: PodId) -> Failures:
        return self._failed.setdefault(pod_id, Failures())

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self._outcomes.forget(pod.id)
            for rows in (self._failed, self._late, self._failing_alone, self._failed_probes):
                rows.pop(pod.id, None)


def leaves_enough_ready(fleet: FleetSnapshot, pod: Pod, min_share: float) -> bool:
    """Whether enough pods stay ready if this ready pod is ejected.

    At least one pod, and `min_share` of those that are ready or ejected, must stay ready for each of its models and
    adapters, and for prefill and decode if it can do both. O(pods), and O(adapters) for each different set of them."""
    return all(
        ready - 1 >= max(1, min_share * (ready + ejected))
        for role in ((Role.PREFILL, Role.DECODE) if pod.role is Role.BOTH else (pod.role,))
        for ready, ejected in _ready_and_ejected(fleet, role, {*pod.models, *pod.adapters})
    )


def _ready_and_ejected(fleet: FleetSnapshot, role: Role, names: set[str]) -> Iterable[tuple[int, int]]:
    """Numbers of ready and of ejected pods that can do `role`, for each model or adapter in `names`."""
    alike = Counter(
        (peer.state, peer.pod.models, peer.pod.adapters) for peer in fleet.pods if peer.pod.role in (role, Role.BOTH)
    )
    pods: Counter[tuple[PodState, str]] = Counter()
    for (state, models, adapters), count in alike.items():
        for name in names.intersection((*models, *adapters)):
            pods[state, name] += count
    return [(pods[PodState.READY, name], pods[PodState.EJECTED, name]) for name in names]


# --- votes of clients ---

WINDOW_S = 30.0
"""Results are counted anew after this time."""
MIN_RESULTS = 3
"""Results of one client at one pod before it has a vote, and its requests at others."""
KEPT_OF_CLIENT, KEPT_OF_POD = 7 / 8, 15 / 16
"""What each result leaves of the earlier ones: 9 failures in a row outweigh all successes of a client, 18 of a pod."""
MAX_CLIENTS = 32
"""More clients of one pod in one window have no vote, and the latest windows of this number of pods are compared."""
Models: TypeAlias = tuple[str, ...]


class _Results(msgspec.Struct, gc=False):
    """Faded numbers of requests that were served and that failed."""

    served: float = 0.0
    failed: float = 0.0
    results: int = 0

    def add(self, kept: float, *, is_served: bool) -> None:
        self.results += 1
        self.served = self.served * kept + is_served
        self.failed = self.failed * kept + (not is_served)

    @property
    def is_failing(self) -> bool:
        return self.results >= MIN_RESULTS and self.failed > 2 * self.served


class _Window(msgspec.Struct):
    """The results of one pod since `since_s`, by client."""

    since_s: float
    total: _Results
    clients: dict[int, _Results] = {}


class Outcomes:
    """Results of requests by pod and client: which pod fails the clients that other pods of its model serve?

    A client that sends bad requests fails at every pod alike, and says nothing about one. A client that fails at one
    pod and is served by others has one vote against it, however many requests it sends; one that the pod serves has a
    vote for it. A client is a tenant, or an address where there are no keys: names that it makes up give it no more
    votes. Only the votes of the last seconds count, and of few clients."""

    def __init__(self) -> None:
        self._windows: dict[Models, dict[PodId, _Window]] = {}
        self._until_s = 0.0

    def is_watching(self, now_s: float) -> bool:
        """Whether successes need counting: after a failure, at any pod."""
        return now_s < self._until_s

    def ended(self, pod_id: PodId, models: Models, client: str, now_s: float, *, is_served: bool) -> None:
        """A request of `client` to the pod was served, or failed."""
        if not is_served:
            self._until_s = now_s + WINDOW_S
        window = self._windows.get(models, {}).get(pod_id)
        if window is None or now_s - window.since_s > WINDOW_S:
            self.forget(pod_id)  # also with other models
            window = self._windows.setdefault(models, {})[pod_id] = _Window(now_s, _Results())
        key = hash(client)
        results = window.clients.get(key)
        if results is None:
            results = _Results()
            if len(window.clients) < MAX_CLIENTS:
                window.clients[key] = results
        results.add(KEPT_OF_CLIENT, is_served=is_served)
        window.total.add(KEPT_OF_POD, is_served=is_served)

    def fails_alone(self, pod_id: PodId, models: Models) -> bool:
        """Whether most requests to the pod fail, and most clients that have a vote are served by others of its
        models."""
        windows = self._windows.get(models, {})
        window = windows.get(pod_id)
        if window is None or not window.total.is_failing:
            return False
        compared = [one.clients for one in islice(reversed(windows.values()), MAX_CLIENTS) if one is not window]
        against = sum(one.is_failing and _serve(compared, client) for client, one in window.clients.items())
        return against > sum(one.served > one.failed for one in window.clients.values())

    def forget(self, pod_id: PodId) -> None:
        """Count the pod's results from zero."""
        for models, windows in list(self._windows.items()):
            windows.pop(pod_id, None)
            if not windows:
                del self._windows[models]


def _serve(pods: list[dict[int, _Results]], client: int) -> bool:
    """Whether these pods together serve most requests of the client."""
    found = [pod[client] for pod in pods if client in pod]
    served = sum(one.served for one in found)
    return sum(one.results for one in found) >= MIN_RESULTS and served > sum(one.failed for one in found)
