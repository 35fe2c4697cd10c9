"""Which pod fails the clients that other pods of its model serve?

A client that sends bad requests fails at every pod alike, and says nothing about one. A client that fails at one pod
and is served by others has one vote against it, however many requests it sends; one that the pod serves has a vote for
it. A client is a tenant, or an address where there are no keys: names that it makes up give it no more votes. Only the
votes of the last seconds count, and of few clients.
"""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

import msgspec

from router.types import PodId

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
    """Results of requests by pod and client."""

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
